# SPDX-License-Identifier: Apache-2.0
"""``fpipe.pipeline``, and the ``Pipeline`` that it returns: stages, a schedule and a loss as one
function.

The docstring of ``pipeline`` explains every option. ``option_checks`` checks their values,
``calls`` runs a call, and ``gradients`` returns derivatives. Knows no plan.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Literal, Unpack, overload

import torch

from ..actions.product import load_pass, load_product
from ..collectives.group import Group, as_group
from ..collectives.setup import init
from ..errors import StageError
from ..generators import ScheduleSource, is_path, read_schedule
from ..schedule import Schedule
from ..stage import OF_MODULES, Elsewhere, Engine, Stage, as_stage, patterns, with_defaults
from ..tree import Tree
from . import calls, option_checks
from .arguments import Call, Each
from .config import Config, Loss, Outputs
from .copies import Copies, copies
from .microbatches import Reduction
from .options import Choice, Options, Overlap, options_of
from .pipeline_base import PipelineBase, R, Y
from .plan_cache import Cache
from .request import Mode
from .signatures import Stages


class Pipeline(PipelineBase[Y, R]):
    """A function of ``(params, x, *targets)``, returned by ``fpipe.pipeline``, which is the only
    way to create one.

    A call runs forwards alone. ``fpipe.value_and_grad``, ``fpipe.grad`` and ``fpipe.vjp`` return
    its derivatives. A pipeline is not changed by its methods. Its attributes:

    * ``group``: the ranks that run it
    * ``stages``: how many stages it has
    * ``here``: the stages of this process, a tuple of numbers
    * ``placement``: which rank holds which stage
    * ``output_rank``: the rank of the last stage, which has the outputs

    >>> from fpipe import local, pipeline
    >>> pipe = pipeline([torch.mul, torch.add], "1F1B", microbatches=2, group=local(2))
    >>> pipe([torch.tensor(2.0), torch.tensor(1.0)], torch.arange(4.0))
    tensor([1., 3., 5., 7.])
    >>> pipe.stages, pipe.here, pipe.output_rank
    (2, (0, 1), 1)
    """

    def __init__(self, config: Config, cache: Cache | None = None):
        if cache is None:
            shares = None
            if config.copies is not None:
                shares = load_pass("copies.sharding").Shares(config.copies)
            cache = Cache(shares)
        self.config = config
        self.cache = cache
        self.group = config.group
        self.copies = config.copies
        self.tied = config.tied
        self.placement = config.placement
        self.stages = config.stages
        self.here = config.here
        # Of several replicas of the last stage, the first.
        self.output_rank = self.placement.rank_of(self.stages - 1)

    def call(
        self,
        mode: Mode,
        params: Sequence[Tree],
        x: Tree,
        targets: Sequence[Tree],
        side: dict[str, Tree],
        **options: Any,
    ) -> Call:
        """Check the arguments of a call. An error is reported to the other ranks.

        With ``schedule="auto"`` the first call that needs gradients chooses the schedule.
        """
        try:
            call = Call.of(self.config, mode, params, x, targets, side, **options)
        except Exception as error:
            self.refuse(error)
            raise
        choice = self.config.choice
        if choice is not None and mode == "grad" and call.units not in choice.chosen:
            # by the plans of other schedules with the same placement
            def plans_of(schedule):
                return self.under(schedule).plan(params, x, *targets, **side)

            rates = load_pass("weaving.estimates").rates_of(self.config.device.type)
            run = self.schedule(call.units)
            choice.estimated(call.units, plans_of, run, rates.latency / 1000)
        return call

    def stepper(
        self, argnums: tuple[int, ...], single: bool, has_aux: bool, each: Each | None
    ) -> Callable[..., Any]:
        """The function that ``fpipe.value_and_grad`` returns.

        With ``single`` it returns the only gradient itself, not a tuple of one.
        """
        prepare = partial(self.call, "grad", argnums=argnums, has_aux=has_aux, each=each)

        def step(
            params: Sequence[Tree],
            x: Tree,
            /,
            *targets: Tree,
            seed: int | None = None,
            loss_scale: Any = None,
            _value: bool = True,  # False: fpipe.grad, which returns no value
            **side: Tree,
        ) -> Any:
            arguments = (params, x, targets, side)
            call = prepare(*arguments, seed=seed, loss_scale=loss_scale)
            if calls.surrounded():
                value, grads = load_pass("derived.nested").value_and_grad(call, x)
            elif self.config.capture and not calls.observed():
                prepare_again = partial(prepare, seed=seed)
                steps = load_pass("capture.steps")
                value, grads = steps.captured(call, self.cache, prepare_again, arguments, _value)
            else:
                value, grads = calls.value_and_grad(call, self.cache, _value)
            return value, grads[0] if single else grads

        return step


@overload
def pipeline(
    stages: Stages[Y],
    schedule: ScheduleSource | Choice = "1F1B",
    *,
    loss: None = None,
    outputs: Literal["zeros", "everywhere"] = ...,
    **options: Unpack[Options],
) -> Pipeline[Y, None]: ...


@overload
def pipeline(
    stages: Stages[Y],
    schedule: ScheduleSource | Choice = "1F1B",
    *,
    loss: None = None,
    outputs: Literal["last"],
    **options: Unpack[Options],
) -> Pipeline[Y | None, None]: ...


@overload
def pipeline(
    stages: Stages[Y],
    schedule: ScheduleSource | Choice = "1F1B",
    *,
    loss: Callable[..., R],
    outputs: Outputs = ...,
    **options: Unpack[Options],
) -> Pipeline[Y, R]: ...


@overload
def pipeline(
    stages: Stages[Any],
    schedule: ScheduleSource | Choice = "1F1B",
    *,
    loss: Loss | None,
    outputs: Outputs = ...,
    **options: Unpack[Options],
) -> Pipeline[Any, Any]: ...


def pipeline(
    stages: Sequence[Callable[..., Any] | Stage],
    schedule: ScheduleSource | Choice = "1F1B",
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
    overlap: Overlap = "weave",
    dp: Copies | Group | None = None,
    slices: int | None = None,
    **more: object,
) -> Pipeline[Any, Any]:
    """A function of ``(params, x, *targets)`` from stages, a schedule and a loss.

    Nothing runs and nothing is traced until the first call. On several processes each one calls it
    with the same arguments.

    Args:
        stages: one function ``fn(params, x, *, side)`` for each stage, or an ``fpipe.Stage`` of
            one. Parameters, input and result are pytrees; the result is the input of the next
            stage. Keyword-only arguments are side inputs, which the call takes by name.
        schedule: a name of ``fpipe.schedule_names()``, an ``fpipe.Schedule``, the path of a CSV
            file, or a function ``(ranks, microbatches) -> Schedule``. ``"auto"``, or
            ``fpipe.auto(memory=, costs=)``, chooses one; ``pipe.why`` says which and why.
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
            the sum of their gradients, so equal copies stay equal; the first call checks that they
            are.
        outputs: what ranks without the last stage return where there is no loss: ``"zeros"`` of the
            true shapes, ``"everywhere"`` the outputs themselves, which are sent to them, ``"last"``
            None.
        accumulate: the dtype in which gradients of microbatches are added and returned, such as
            ``torch.float32`` for bfloat16 parameters. None: that of the parameter.
        engine: ``"trace"`` turns each stage into programs, once for each structure of its
            arguments. ``"eager"`` runs it on autograd, for Python that depends on values of
            tensors. ``Stage(engine=)`` overrides it.
        compile: ``"addmm"``, by which weight gradients are added by the products themselves; or a
            backend of ``torch.compile``, such as ``"inductor"``. Both can round differently. None:
            programs run as traced.
        overlap: how fused actions, as of DualPipeV, run: ``"weave"`` computes one part while the
            other communicates, ``"sequential"`` runs one after the other.
        dp: ``fpipe.copies(group, zero=1, ...)``, or the group alone: copies of this pipeline, each
            of which gets a different part of the batch. Loss and gradients are averaged over the
            copies, or summed with ``reduction="sum"`` and ``fpipe.weighted``, whose weights are
            counted over all copies. The gradients of a stage are reduced after its last W.
        slices: into how many equal slices the second axis of every microbatch, that of the
            sequence, is cut; a stage with ``carry=True`` passes something from each slice to the
            next. A named schedule is made with as many. None: the number of the schedule, or one.
        order: ``"row"``, the default: a rank runs its actions in the order of its row. ``"ready"``:
            of its next actions it runs one whose inputs are there, of ``("ready", n)`` one of the
            next n. Gradients are added in the order of the row, so the bits are the same.
        more: other options of passes, by name.

    Raises:
        StageError: if stages or an option are wrong.
        ScheduleError: if the schedule breaks a rule, or does not fit stages, ranks and
            microbatches.
        GroupError: if there is no process group to take.
        MismatchError: if processes describe different stages.

    >>> from fpipe import local, value_and_grad
    >>> def layer(p, x): return torch.tanh(x @ p)
    >>> def loss(y, t): return (y - t).square().mean()
    >>> pipe = pipeline(
    ...     [layer, layer], "1F1B",
    ...     loss=loss, microbatches=2, group=local(2)
    ... )
    >>> params = [torch.eye(3), torch.eye(3)]
    >>> x, target = torch.ones(4, 3), torch.zeros(4, 3)
    >>> value, grads = value_and_grad(pipe)(params, x, target)
    >>> round(value.item(), 4), [tuple(g.shape) for g in grads]
    (0.4122, [(3, 3), (3, 3)])
    """
    if not isinstance(stages, (list, tuple)) or not stages:
        hint = f"; {OF_MODULES}" if isinstance(stages, torch.nn.Module) else ""
        raise StageError(f"stages must be a list of functions fn(params, x), one at least{hint}")
    if group is None:
        group = init()
    if not isinstance(group, Group):
        as_group("group", group)  # raises
    if is_path(schedule):
        schedule = read_schedule(schedule)
    if isinstance(schedule, Schedule) and microbatches is None:
        microbatches = schedule.microbatches
    if schedule == "auto" or isinstance(schedule, Choice):
        if slices not in (None, 1):
            raise StageError(
                f'slices={slices} with schedule="auto", which has none; give the name of a schedule'
            )
        choice: Choice = (
            schedule if isinstance(schedule, Choice) else load_product("search.auto").auto()
        )
        schedule = choice.bound_to(group, len(stages), microbatches)
    given = tuple(map(as_stage, stages))
    if any(isinstance(stage.fn, Elsewhere) for stage in given):
        incomplete = Config(
            given, schedule, group, microbatches=microbatches, requested_slices=slices
        )
        given = load_pass("elsewhere.stages").described(incomplete)
    functions = [with_defaults(stage, engine, compile) for stage in given]
    if loss is not None and (engine != "trace" or compile):
        loss = with_defaults(as_stage(loss), engine, compile)
    frozen_leaves = [*patterns("frozen", frozen)]
    for number, stage in enumerate(given):
        frozen_leaves += [f"{number}.{name}" for name in stage.frozen]
    tied_leaves = ()
    if tied != () or any(stage.ties for stage in given):
        tied_leaves = load_pass("ties").ties(given, tied)
    config = Config(
        tuple(functions),
        schedule,
        group,
        loss=loss,
        microbatches=microbatches,
        reduction=reduction,
        seed=seed,
        frozen=tuple(frozen_leaves),
        tied=tied_leaves,
        outputs=outputs,
        accumulate=accumulate,
        overlap=overlap,
        copies=_copies(dp, reduction),
        requested_slices=slices,
        more=options_of(more) if more else (),
    )
    if not config.needs_no_check:
        option_checks.check(config)
    return Pipeline(config)


def _copies(dp: Copies | Group | None, reduction: Reduction) -> Copies | None:
    """The value of ``dp=``, with the reduction of the pipeline where it has none."""
    if dp is None:
        return None
    value = dp if isinstance(dp, Copies) else copies(dp)
    if value.reduction is not None:
        return value
    return replace(value, reduction="mean" if reduction == "mean" else "sum")
