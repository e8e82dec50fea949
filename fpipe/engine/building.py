# SPDX-License-Identifier: Apache-2.0
"""``fpipe.pipeline``: checks its arguments and returns a ``Pipeline``.

Every option is explained here, and validated where it is stored (``config``, ``stage``, ``plans``).
Knows no plan and no call.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Literal, Unpack, overload

import torch

from ..actions.product import feature, product
from ..collectives.group import Group, as_group
from ..collectives.setup import init
from ..errors import StageError
from ..generators import Source
from ..schedule import Schedule
from ..stage import (
    OF_MODULES,
    Elsewhere,
    Engine,
    Stage,
    as_stage,
    patterns,
    with_defaults,
    without_unsafe_compilers,
)
from .config import Choice, Config, Loss, Outputs
from .copies import Copies, copies
from .pipeline import Pipeline
from .request import Reduction
from .signatures import Options, R, Stages, Y


@overload
def pipeline(
    stages: Stages[Y],
    schedule: Source | Choice = "1F1B",
    *,
    loss: None = None,
    outputs: Literal["zeros", "everywhere"] = ...,
    **options: Unpack[Options],
) -> Pipeline[Y, None]: ...
@overload
def pipeline(
    stages: Stages[Y],
    schedule: Source | Choice = "1F1B",
    *,
    loss: None = None,
    outputs: Literal["last"],
    **options: Unpack[Options],
) -> Pipeline[Y | None, None]: ...
@overload
def pipeline(
    stages: Stages[Y],
    schedule: Source | Choice = "1F1B",
    *,
    loss: Callable[..., R],
    outputs: Outputs = ...,
    **options: Unpack[Options],
) -> Pipeline[Y, R]: ...
@overload
def pipeline(
    stages: Stages[Any],
    schedule: Source | Choice = "1F1B",
    *,
    loss: Loss | None,
    outputs: Outputs = ...,
    **options: Unpack[Options],
) -> Pipeline[Any, Any]: ...
def pipeline(
    stages: Sequence[Callable[..., Any] | Stage],
    schedule: Source | Choice = "1F1B",
    *,
    loss: Loss | None = None,
    microbatches: int | None = None,
    group: Group | None = None,
    reduction: Reduction = "mean",
    seed: int | None = None,
    frozen: Sequence[str] = (),
    tied: Sequence[Sequence[str]] = (),
    outputs: Outputs = "zeros",
    accumulate: torch.dtype | None = None,
    engine: Engine = "trace",
    compile: str | None = None,
    overlap: Any = "weave",
    dp: Copies | Group | None = None,
    slices: int | None = None,
) -> Pipeline[Any, Any]:
    """A function of ``(params, x, *targets)`` from stages, a schedule and a loss.

    Nothing runs and nothing is traced until the first call. On several processes each one calls it
    with the same arguments.

    Args:
        stages: one function ``fn(params, x, *, side)`` for each stage, or an ``fpipe.Stage`` of
            one. Parameters, input and result are pytrees; the result is the input of the next
            stage. Keyword-only arguments are side inputs, which the call takes by name.
        schedule: a name of ``fpipe.schedule_names()``, an ``fpipe.Schedule``, the path of a CSV
            file, a function ``(ranks, microbatches) -> Schedule``, or ``"auto"``, or
            ``fpipe.auto(memory=, costs=)``: it is then chosen, and ``pipe.why`` says what and why.
        loss: a function ``loss(y, *targets, side)`` of one microbatch that returns a scalar, or
            ``(scalar, aux)`` for calls with ``has_aux=True``. It runs on the rank of the last
            stage. None: calls return outputs, and ``fpipe.vjp`` differentiates them.
        microbatches: into how many equal parts the batch is split along the first axis. None: the
            number of the schedule, or of the ``fpipe.Microbatches`` in each call.
        group: the ranks. None: ``fpipe.init()``, one rank for each process that torchrun started.
            ``fpipe.local(n)``: n ranks in this process. ``fpipe.adopt(...)``: a group of another
            program.
        reduction: how the losses of microbatches become one: ``"mean"``, ``"sum"``, or
            ``fpipe.weighted(fn)`` for weights such as numbers of tokens. Gradients are those of the
            reduced loss.
        seed: makes every random draw a function of the seed, the stage and the microbatch (and
            slice) alone, whatever the schedule and the number of ranks; the loss has a stream of
            its own. A call may replace it: ``seed=step``. None: draws come from the generators of
            the process. The same model cut into other stages draws other numbers.
        frozen: patterns of leaves that get no gradient, as ``"stage.path"``: ``"0.*"`` is the whole
            first stage, ``"*.norm"`` a leaf of every stage. Their gradients are None, and no time
            is spent on them.
        tied: groups of leaves that are one parameter, as ``[("0.wte", "7.wte")]``. Each copy gets
            the sum of their gradients, so equal copies stay equal.
        outputs: what ranks without the last stage return where there is no loss: ``"zeros"`` of the
            true shapes, ``"everywhere"`` the outputs themselves, which are sent to them, ``"last"``
            None.
        accumulate: the dtype in which gradients of microbatches are added and returned, such as
            ``torch.float32`` for bfloat16 parameters. None: that of the parameter.
        engine: ``"trace"`` turns each stage into programs, once for each structure of its
            arguments. ``"eager"`` runs it on autograd, for Python that depends on values of
            tensors. ``Stage(engine=)`` overrides it.
        compile: a backend of ``torch.compile`` for the programs, such as ``"inductor"``. None: they
            run as traced.
        overlap: how fused actions, as of DualPipeV, run: ``"weave"``, ``"sequential"``, a function
            of both parts that returns both results, or a weave as data, a list of (which program,
            which segment).
        dp: ``fpipe.copies(group, zero=1, ...)``, or the group alone: copies of this pipeline, each
            of which gets a different part of the batch. Loss and gradients are averaged over the
            copies, or summed with ``reduction="sum"`` and ``fpipe.weighted``, whose weights are
            counted over all copies. The gradients of a stage are reduced after its last W.
        slices: into how many equal slices the second axis of every microbatch, that of the
            sequence, is cut; a stage with ``carry=True`` passes something from each slice to the
            next. A named schedule is made with as many. None: the number of the schedule, or one.

    Returns:
        A ``Pipeline``.

    Raises:
        StageError: if stages or an option are wrong.
        ScheduleError: if the schedule breaks a rule, or does not fit stages, ranks and
        microbatches. GroupError: if there is no process group to take.
        MismatchError: if processes describe different stages.

    >>> from fpipe import local, value_and_grad
    >>> def layer(p, x): return torch.tanh(x @ p)
    >>> def loss(y, t): return (y - t).square().mean()
    >>> pipe = pipeline([layer, layer], "1F1B", loss=loss, microbatches=2, group=local(2))
    >>> params, x = [torch.eye(3), torch.eye(3)], torch.zeros(4, 3)
    >>> float(value_and_grad(pipe)(params, x, x)[0])
    0.0
    """
    if not isinstance(stages, (list, tuple)) or not stages:
        module = f"; {OF_MODULES}" if isinstance(stages, torch.nn.Module) else ""
        raise StageError(f"stages must be a list of functions fn(params, x), one at least{module}")
    group = init() if group is None else as_group("group", group)
    if isinstance(schedule, Schedule) and microbatches is None:
        microbatches = schedule.microbatches
    if schedule == "auto" or isinstance(schedule, Choice):
        if slices not in (None, 1):
            raise StageError(
                f'slices={slices} with schedule="auto", which has none; give the name of a schedule'
            )
        choice: Choice = schedule if isinstance(schedule, Choice) else product("search.auto").auto()
        schedule = choice.bound_to(group, len(stages), microbatches)
    given = Config(
        tuple(map(as_stage, stages)), schedule, group, microbatches=microbatches, sliced=slices
    )
    parts = given.functions
    if any(isinstance(stage.fn, Elsewhere) for stage in parts):
        parts = feature("elsewhere.stages").described(given)
    devices = map(group.device, group.here)
    return Pipeline(
        Config(
            without_unsafe_compilers(
                [with_defaults(stage, engine, compile) for stage in parts], devices, stacklevel=2
            ),
            schedule,
            group,
            loss=loss
            if loss is None or engine == "trace"
            else with_defaults(as_stage(loss), engine),
            microbatches=microbatches,
            reduction=reduction,
            seed=seed,
            frozen=(
                *patterns("frozen", frozen),
                *(f"{s}.{name}" for s, part in enumerate(parts) for name in part.frozen),
            ),
            tied=feature("ties").ties(parts, tied)
            if tied != () or any(stage.ties for stage in parts)
            else (),
            outputs=outputs,
            accumulate=accumulate,
            overlap=_overlap(overlap),
            copies=_copies(dp, reduction),
            sliced=slices,
        )
    )


def _overlap(option: Any) -> Any:
    """How fused actions run: "weave", "sequential", or the value of another option."""
    named = isinstance(option, str) and option in ("weave", "sequential")
    return option if named else feature("weaving.weave").Overlap.of(option)


def _copies(dp: Copies | Group | None, reduction: Reduction) -> Copies | None:
    if dp is None:
        return None
    given = dp if isinstance(dp, Copies) else copies(dp)
    own = "mean" if reduction == "mean" else "sum"
    return given if given.reduction is not None else replace(given, reduction=own)


__all__ = ["pipeline"]
