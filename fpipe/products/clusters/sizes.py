# SPDX-License-Identifier: Apache-2.0
"""What a layer, the head and the embedding take on one rank: bytes of activations, and seconds of
F, I and W.

Activations are those of Korthikanti et al. 2022, "Reducing Activation Recomputation in Large
Transformer Models", term by term, with the widths of the model in place of multiples of its hidden
size. Times are operations over the share of a GPU's figures that large programs reach
(``hardware.py``). Knows no schedule.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

from .hardware import ATTENTION, KERNEL, LATENCY, LINK, MEMORY
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


def total(*parts: Work) -> Work:
    """Several parts together.

    >>> total(Work(F=1, saved=2), Work(F=3)).F
    4
    """
    return Work(*map(sum, zip(*parts, strict=True)))


@lru_cache(maxsize=4096)
def layer_work(job: Job, layout: Layout) -> Work:
    """A layer on one rank, for a microbatch."""
    model, t, tokens = job.model, layout.tp, job.sequence * layout.microbatch
    h, q, k = model.hidden, model.queries, model.keys
    gate = (model.matrices - 1) * model.inner
    shapes = ((h, (q + 2 * k) / t), (q / t, h), (h, gate / t), (model.inner / t, h))
    # matrices of experts that other tokens use are read as well
    idle = model.layer_matrices - model.active_matrices
    products = sum(_product(job, tokens, *shape) for shape in shapes)
    products += _memory(job, idle * job.precision.parameters / t)
    attended = _attention(job, tokens, t)
    passed = _elementwise(job, layout, tokens)
    moved = 2 * _all_reduce(job, t, tokens * h * job.precision.parameters)
    forward = products + attended + passed + moved
    cheap = (
        attended + _scores(job, tokens, t)
        if job.attention == "scores"
        else _elementwise(job, layout, tokens) / 2
    )
    again = {"none": 0.0, "selective": cheap, "full": forward}[layout.recompute]
    back = 2.5 if job.attention == "flash" else 2.0
    return Work(
        F=forward,
        I=products + back * attended + 2 * passed + moved + again,
        W=products,
        saved=tokens * _saved(job, layout),
        kept=tokens * _kept(job, layout),
        products=3 * products + (1 + back) * attended,
        collectives=2 * moved,
        again=again,
    )


def _saved(job: Job, layout: Layout) -> float:
    """Bytes of a token in a layer from F on."""
    model, t, size = job.model, layout.tp, job.precision.parameters
    h, q, k, flash = model.hidden, model.queries, model.keys, job.attention == "flash"
    # inputs of both norms and what these return; masks of residuals
    whole = (4 * size + (2 if model.dropout else 0)) * h
    # the inputs of the activation function, and what it returns
    inner = size * model.inner * (4 if model.gated else 2)
    attention = size * (2 * q + 2 * k)  # queries, keys, values, and what attention returns
    if flash:
        scores = 4.0 * model.heads  # the logarithm of each row's sum
        norms = 1 if model.experts else 2  # what routers read is kept
        cheap = norms * size * h / layout.split + size * model.inner * (2 if model.gated else 1) / t
    else:
        scores = float((2 * size + 1 if model.dropout else size) * model.heads * job.sequence)
        cheap = scores / t
    # the whole sequence, for the router
    gathered = size * h * (1 - 1 / layout.split) if model.experts else 0.0
    everything = whole / layout.split + gathered + (attention + inner + scores) / t + _routed(job)
    # flash attention has draws, and is not computed again
    drawn = (size * q + scores) / t if flash else 0.0
    full = size * h / layout.split + drawn
    return {"none": everything, "selective": everything - cheap, "full": full}[layout.recompute]


def _routed(job: Job) -> float:
    """Bytes of a token for each expert that it uses, before and after: every tensor-parallel rank
    has all.
    """
    model = job.model
    return 2 * job.precision.parameters * model.active * model.hidden if model.experts else 0.0


def _kept(job: Job, layout: Layout) -> float:
    """Bytes of a token from I to W: inputs of products, and gradients of their results.

    Gradients of parts of the sequence were gathered for I, and so were the inputs of whole layers
    that are computed again, and of routers. What an activation function returns is computed again
    in W from what it read.
    """
    model, t, size = job.model, layout.tp, job.precision.parameters
    full = layout.recompute == "full"
    h, split = model.hidden, 1 if full else layout.split
    again = (full and not model.experts) or (
        layout.recompute == "selective" and job.attention == "flash"
    )
    inner = model.inner * (3 if again and model.gated else 1)
    inputs = h / split + (h if model.experts else h / split) + (model.queries + inner) / t
    gradients = h * (1 if model.experts else 2) + (model.queries + 2 * model.keys) / t
    gradients += (model.matrices - 1) * model.inner / t
    return size * (inputs + gradients) + _routed(job)


@lru_cache(maxsize=4096)
def head_work(job: Job, layout: Layout) -> Work:
    """The last norm, the head and the loss."""
    model, t, size = job.model, layout.tp, job.precision.parameters
    tokens = job.sequence * layout.microbatch
    logits = tokens * model.vocabulary / t
    inputs = tokens * 2 * size * model.hidden / layout.split
    product = _product(job, tokens, model.hidden, model.vocabulary / t)
    moved = _all_reduce(job, t, tokens * model.hidden * size) / 2
    return Work(
        F=product + _memory(job, 14 * logits) + moved,
        I=product + _memory(job, 8 * logits) + moved,
        W=product,
        saved=inputs + 4 * logits,
        kept=inputs / 2 + size * logits,
        products=3 * product,
        collectives=2 * moved,
    )


def logits_bytes(job: Job, layout: Layout) -> float:
    """What the backward of the head has for a moment: gradients of logits, in two precisions."""
    logits = job.sequence * layout.microbatch * job.model.vocabulary / layout.tp
    return (4 + job.precision.parameters) * logits


def embedding_bytes(job: Job, layout: Layout) -> float:
    """What the embedding keeps of a microbatch: tokens, and a mask."""
    mask = job.model.hidden / layout.split if job.model.dropout else 0
    return job.sequence * layout.microbatch * (8 + mask)


def operations(job: Job) -> float:
    """Floating-point operations of the model for a token, forward and backward, nothing computed
    again.
    """
    model = job.model
    attended = (2 if job.attention == "flash" else 4) * job.sequence * model.queries
    return 3 * (
        model.layers * (2 * model.active_matrices + attended) + 2 * model.vocabulary * model.hidden
    )


def state_bytes(job: Job, layout: Layout, elements: float, stages: int = 1) -> float:
    """Bytes of parameters, gradients and optimizer on one rank that holds ``elements`` parameters
    in its stages.

    With ZeRO, a rank has whole parameters and gradients of its stages while it runs, and beside
    them its part of the parameters; with ``zero=3`` the whole parameters of two stages alone.
    """
    each, parts = job.precision, layout.dp if layout.zero else 1
    whole = min(2 / max(stages, 1), 1.0) if layout.zero == 3 else 1.0
    parameters = each.parameters * (whole + (1 / parts if parts > 1 else 0))
    return elements / layout.tp * (parameters + each.gradients + each.optimizer / parts)


# ---- inside ----
def _product(job: Job, rows: float, inner: float, columns: float) -> float:
    """The seconds of a matrix product."""
    moved = job.precision.parameters * (rows * inner + inner * columns + rows * columns)
    return (
        2 * rows * inner * columns / (job.gpu.flops * job.gpu.matmul)
        + moved / job.gpu.bandwidth / 2
        + KERNEL
    )


def _attention(job: Job, tokens: float, tp: int) -> float:
    """The seconds of the products of attention; those of its scores too, where it keeps none."""
    each = 2 if job.attention == "flash" else 4  # flash attention skips the scores of later tokens
    return each * tokens * job.sequence * job.model.queries / tp / (job.gpu.flops * ATTENTION)


def _scores(job: Job, tokens: float, tp: int) -> float:
    """The seconds of softmax and dropout of scores that are kept."""
    if job.attention == "flash":
        return 0.0
    touched = 9 if job.model.dropout else 4
    return _memory(job, touched * tokens * job.sequence * job.model.heads / tp)


def _elementwise(job: Job, layout: Layout, tokens: float) -> float:
    """The seconds of norms, residuals, rotations and the activation function."""
    model, size = job.model, job.precision.parameters
    residual = (10 * size + (2 if model.dropout else 0)) * model.hidden
    inner = size * model.inner * model.matrices + size * 2 * (model.queries + model.keys)
    split = residual / layout.split + inner / layout.tp + 2 * _routed(job)
    return _memory(job, tokens * split) + _scores(job, tokens, layout.tp)


def _memory(job: Job, nbytes: float) -> float:
    return nbytes / (job.gpu.bandwidth * MEMORY)


def _all_reduce(job: Job, ranks: int, nbytes: float) -> float:
    """The seconds of an all-reduce, or of a reduce-scatter with an all-gather, within a machine."""
    return (
        2 * (ranks - 1) / ranks * nbytes / (job.gpu.link * LINK) + 2 * LATENCY if ranks > 1 else 0.0
    )
