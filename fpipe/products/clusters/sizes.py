# SPDX-License-Identifier: Apache-2.0
"""What a layer, the head and the embedding take on one rank: bytes of activations, and seconds of
F, I and W.

Activations are those of Korthikanti et al. 2022, "Reducing Activation Recomputation in Large
Transformer Models", term by term, with the widths of the model in place of multiples of its hidden
size, and with flash attention, which keeps no scores. Times are operations over the share of a
GPU's figures that large programs reach (``hardware.py``). Knows no schedule.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

from .hardware import ATTENTION, GRADIENT, KERNEL, LATENCY, MEMORY, OPTIMIZER, PARAMETER
from .layout import Job, Layout


class Work(NamedTuple):
    """What a microbatch takes of one rank: seconds of F, I and W, and bytes of activations.

    ``saved`` bytes are held from F on, and ``kept`` from I to W. Of all seconds, ``products`` are
    spent in matrix products and attention, ``collectives`` in those of tensor-parallel ranks, and
    ``again`` to compute again, within I, what was not saved.
    """

    F: float = 0.0
    I: float = 0.0  # noqa: E741
    W: float = 0.0
    saved: float = 0.0
    kept: float = 0.0
    products: float = 0.0
    collectives: float = 0.0
    again: float = 0.0

    @property
    def seconds(self) -> float:
        """F, I and W together."""
        return self.F + self.I + self.W

    def times(self, count: int) -> Work:
        """The sum of ``count`` such parts."""
        return Work(*(count * value for value in self))


def total(*parts: Work) -> Work:
    """The sum of several parts.

    >>> total(Work(F=1, saved=2), Work(F=3)).F
    4
    """
    return Work(*map(sum, zip(*parts, strict=True)))


@lru_cache(maxsize=4096)
def layer_work(job: Job, layout: Layout) -> Work:
    """A layer on one rank, for a microbatch."""
    model = job.model
    tp = layout.tp
    tokens = job.sequence * layout.microbatch
    hidden = model.hidden
    queries = model.queries
    qkv = queries + 2 * model.keys
    up = (model.matrices - 1) * model.inner
    products = (
        _product(job, tokens, hidden, qkv / tp)
        + _product(job, tokens, queries / tp, hidden)
        + _product(job, tokens, hidden, up / tp)
        + _product(job, tokens, model.inner / tp, hidden)
    )
    # matrices of experts that other tokens use are read as well
    idle = model.layer_matrices - model.active_matrices
    products += _memory(job, idle * PARAMETER / tp)
    # attention skips the scores of later tokens
    scores = 2 * tokens * job.sequence * queries / tp
    attention = scores / (job.gpu.flops * ATTENTION)
    elementwise = _elementwise(job, layout, tokens)
    collectives = 2 * _all_reduce(job, tp, tokens * hidden * PARAMETER)
    forward = products + attention + elementwise + collectives
    again = {"none": 0.0, "selective": elementwise / 2, "full": forward}[layout.recompute]
    return Work(
        F=forward,
        I=products + 2.5 * attention + 2 * elementwise + collectives + again,
        W=products,
        saved=tokens * _saved(job, layout),
        kept=tokens * _kept(job, layout),
        products=3 * products + 3.5 * attention,
        collectives=2 * collectives,
        again=again,
    )


def _saved(job: Job, layout: Layout) -> float:
    """Bytes of a token in a layer from F on."""
    model = job.model
    tp = layout.tp
    hidden = PARAMETER * model.hidden
    queries = PARAMETER * model.queries
    inner = PARAMETER * model.inner
    sums = 4.0 * model.heads  # the logarithm of the sum of each row of scores
    if layout.recompute == "full":
        return hidden / tp
    # inputs of both norms and what these return; masks of residuals
    whole = 4 * hidden + (2 * model.hidden if model.dropout else 0)
    # queries, keys, values, and what attention returns
    attention = 2 * queries + 2 * PARAMETER * model.keys + sums
    # the inputs of the activation function, and what it returns
    activations = inner * (4 if model.gated else 2)
    # the whole sequence, for the router
    gathered = hidden * (1 - 1 / tp) if model.experts else 0.0
    everything = (whole + attention + activations) / tp + gathered + _routed(job)
    if layout.recompute == "none":
        return everything
    norms = 1 if model.experts else 2  # what routers read is kept
    products = inner * (2 if model.gated else 1)
    return everything - (norms * hidden + products) / tp


def _routed(job: Job) -> float:
    """Bytes of a token for each expert that it uses, before and after: every tensor-parallel rank
    has all.
    """
    model = job.model
    return 2 * PARAMETER * model.active * model.hidden if model.experts else 0.0


def _kept(job: Job, layout: Layout) -> float:
    """Bytes of a token from I to W: inputs of products, and gradients of their results.

    Gradients of parts of the sequence were gathered for I, and so were the inputs of whole layers
    that are computed again, and of routers. What an activation function returns is computed again
    in W from what it read.
    """
    model = job.model
    tp = layout.tp
    hidden = model.hidden
    full = layout.recompute == "full"
    again = layout.recompute == "selective" or (full and not model.experts)
    inner = model.inner * (3 if again and model.gated else 1)
    part = hidden if full else hidden / tp
    inputs = part + (hidden if model.experts else part)
    inputs += (model.queries + inner) / tp
    gradients = hidden * (1 if model.experts else 2)
    gradients += (model.queries + 2 * model.keys) / tp
    gradients += (model.matrices - 1) * model.inner / tp
    return PARAMETER * (inputs + gradients) + _routed(job)


def head_work(job: Job, layout: Layout) -> Work:
    """The last norm, the head and the loss."""
    hidden = job.model.hidden
    tp = layout.tp
    columns = job.model.vocabulary / tp
    tokens = job.sequence * layout.microbatch
    logits = tokens * columns
    inputs = tokens * 2 * PARAMETER * hidden / tp
    product = _product(job, tokens, hidden, columns)
    moved = _all_reduce(job, tp, tokens * hidden * PARAMETER) / 2
    return Work(
        F=product + _memory(job, 14 * logits) + moved,
        I=product + _memory(job, 8 * logits) + moved,
        W=product,
        saved=inputs + 4 * logits,
        kept=inputs / 2 + PARAMETER * logits,
        products=3 * product,
        collectives=2 * moved,
    )


def logits_bytes(job: Job, layout: Layout) -> float:
    """What the backward of the head has for a moment: gradients of logits, in two precisions."""
    logits = job.sequence * layout.microbatch * job.model.vocabulary / layout.tp
    return (4 + PARAMETER) * logits


def embedding_bytes(job: Job, layout: Layout) -> float:
    """What the embedding keeps of a microbatch: tokens, and a mask."""
    mask = job.model.hidden / layout.tp if job.model.dropout else 0
    return job.sequence * layout.microbatch * (8 + mask)


def operations(job: Job) -> float:
    """Floating-point operations of the model for a token, forward and backward, nothing computed
    again.
    """
    model = job.model
    attention = 2 * job.sequence * model.queries
    layer = 2 * model.active_matrices + attention
    return 3 * (model.layers * layer + 2 * model.vocabulary * model.hidden)


def state_bytes(layout: Layout, elements: float) -> float:
    """Bytes of parameters, gradients and optimizer on one rank that holds ``elements`` parameters
    in its stages.

    With ZeRO, a rank has whole parameters and gradients of its stages while it runs, and beside
    them its part of the parameters; with ``zero=3`` the whole parameters of two stages alone.
    """
    parts = layout.dp if layout.zero else 1
    copies = 1.0
    if layout.zero == 3:
        copies = min(2 / layout.per_rank, 1.0)
    if parts > 1:
        copies += 1 / parts
    nbytes = PARAMETER * copies + GRADIENT + OPTIMIZER / parts
    return elements / layout.tp * nbytes


# ---- inside ----
def _product(job: Job, rows: float, inner: float, columns: float) -> float:
    """The seconds of a matrix product."""
    gpu = job.gpu
    moved = PARAMETER * (rows * inner + inner * columns + rows * columns)
    computed = 2 * rows * inner * columns
    return computed / (gpu.flops * gpu.matmul) + moved / gpu.bandwidth / 2 + KERNEL


def _elementwise(job: Job, layout: Layout, tokens: float) -> float:
    """The seconds of norms, residuals, rotations and the activation function."""
    model = job.model
    residual = (10 * PARAMETER + (2 if model.dropout else 0)) * model.hidden
    inner = model.inner * model.matrices + 2 * (model.queries + model.keys)
    nbytes = (residual + PARAMETER * inner) / layout.tp + 2 * _routed(job)
    return _memory(job, tokens * nbytes)


def _memory(job: Job, nbytes: float) -> float:
    return nbytes / (job.gpu.bandwidth * MEMORY)


def _all_reduce(job: Job, ranks: int, nbytes: float) -> float:
    """The seconds of an all-reduce, or of a reduce-scatter with an all-gather, within a machine."""
    if ranks == 1:
        return 0.0
    moved = 2 * (ranks - 1) / ranks * nbytes
    return moved / job.gpu.width(ranks) + 2 * LATENCY
