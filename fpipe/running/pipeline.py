"""``fpipe.pipeline``: stages, a schedule and a loss as one function, and the transforms of it.

A call abstracts its arguments, finds (or makes) the plans for that signature, lays the values into registers, drives
the ranks that live here, and gathers what stands in the registers at the end.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import copy
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import torch

from .. import tree
from ..collectives.group import Group
from ..collectives.setup import init
from ..errors import StageError
from ..generators import make_schedule
from ..plans.expected import expected
from ..plans.sharding import Copies, Shares
from ..plans.weaving.weave import Overlap
from ..programs.functorch import functional
from ..programs.losses import loss_sides
from ..schedule import Schedule
from ..schedules.costs import Costs
from ..stage import Engine, Stage, as_stage, with_defaults, without_unsafe_compilers
from .calls import RESERVED, Call
from .derived import nested
from .feed import Feeder, Weighted, weighted
from .handshake import agree
from .loop import Check
from .microbatches import Microbatches
from .prepare import Config, Resolved

Outputs = Literal["zeros", "everywhere", "last"]
Reduction = Any  # "mean", "sum" or a Weighted


class Pipeline:
    """A pipeline: a function of (params, x, *targets). Made by ``fpipe.pipeline``."""

    def __init__(
        self, stages: Sequence[Callable[..., Any] | Stage], schedule: Any, *, loss: Callable[..., Any] | None,
        microbatches: int | None, group: Group, reduction: Reduction, seed: int | None, frozen: Sequence[str],
        tied: Sequence[Sequence[str]], outputs: Outputs, accumulate: torch.dtype | None, engine: Engine,
        compile: str | None, overlap: Any, copies: Copies | None,
    ):  # fmt: skip
        self.overlap = Overlap.of(overlap)
        self.copies, self.shares, self._met = copies, None if copies is None else Shares(copies), False
        self.loss = loss if loss is None or engine == "trace" else with_defaults(as_stage(loss), engine)
        self.microbatches, self.group = microbatches, group
        self.reduction, self.seed, self.outputs, self.accumulate = reduction, seed, outputs, accumulate
        made = [as_stage(stage) for stage in stages]
        self.functions = without_unsafe_compilers(
            [with_defaults(stage, engine, compile) for stage in made], map(group.device, group.here), stacklevel=3
        )
        self.stages = len(made)
        self.frozen = (*frozen, *(f"{s}.{p}" for s, stage in enumerate(made) for p in stage.frozen))
        self.tied = _ties(made, tied)
        self._schedule, self._schedules = schedule, dict[int, Schedule]()
        if isinstance(schedule, Schedule) and microbatches is None:
            self.microbatches = microbatches = schedule.microbatches
        self._phases: dict[int, Schedule] = {}
        self.cache: dict[Any, Resolved] = {}
        self.debugging = False
        self.placement = self.schedule(2 * group.size if microbatches is None else microbatches).placement
        for name in {name for names in self.sides for name in names} & RESERVED:
            raise StageError(f"{name!r} cannot be a side input, since a call has an argument of that name; rename it")
        self.here = tuple(s for s in range(self.stages) if any(r in group.here for r in self.placement.ranks_of(s)))

    # ---- questions ----------------------------------------------------------------------------------------------
    def schedule(self, microbatches: int) -> Schedule:
        """The checked schedule for a number of microbatches."""
        found = self._schedules.get(microbatches)
        if found is None:
            found = self._schedules[microbatches] = _fitting(self._schedule, self, microbatches)
        return found

    def phased(self, microbatches: int) -> Schedule:
        """The same schedule with every rank's forwards before its backwards."""
        found = self._phases.get(microbatches)
        if found is None:
            base = self.schedule(microbatches)
            first, rest = base.only("F"), base.only("BIW")
            rows = tuple((*f, *b) for f, b in zip(first, rest, strict=True))
            found = self._phases[microbatches] = Schedule(rows, base.placement, base.microbatches, base.name)
        return found

    def under(self, schedule: Schedule) -> Pipeline:
        """The same pipeline by another schedule that has the stages on the same ranks; this one stays as it is."""
        if repr(schedule.placement) != repr(self.placement):
            raise StageError(
                f"the schedule has stages on other ranks ({schedule.placement}) than the pipeline ({self.placement}); "
                "make a pipeline with it, and place the parameters anew"
            )
        other = copy(self)
        other._schedule, other._schedules, other._phases, other.cache = schedule, {}, {}, {}
        return other

    def feeders(self, resolved: Resolved) -> dict[int, Feeder]:
        """Where fed values come from, by rank."""
        bound = resolved.bound.items()
        return resolved.memo("feeders", lambda: {r: Feeder(b.plan, resolved, self.group.device(r)) for r, b in bound})

    @property
    def output_rank(self) -> int:
        """The rank that holds the last stage (its first home, where it has several)."""
        return self.placement.rank_of(self.stages - 1)

    def recipe(self, has_aux: bool, check: Check | None = None) -> Config:
        """What the cold path needs."""
        return Config(self.functions, self.loss, has_aux, self.group, self.tied, self.accumulate, self.frozen, check,
                      self.overlap, self.copies, str(self.reduction), self.seed)  # fmt: skip

    def meet(self) -> None:
        """Before the first step of all, copies of the pipeline compare what they are."""
        if self.copies is not None and not self._met:
            self._met = True
            agree(self.copies.group, {
                "schedule": repr(self), "copies": self.copies.told, "tied parameters": str(self.tied),
                "the dtype of accumulation": str(self.accumulate), "the stages here": str(self.here),
            })  # fmt: skip

    @cached_property
    def sides(self) -> tuple[tuple[str, ...], ...]:
        """The side inputs of every stage, and of the loss at the end."""
        return (*(stage.sides for stage in self.functions), loss_sides(self.loss))

    def all_sum(self, tensor: torch.Tensor) -> torch.Tensor:
        """The sum of a tensor over the pipeline's processes; where they hold parts of stages, over its copies too."""
        total = self.group.all_reduce(tensor)
        return total if self.parts is None else self.parts.all_reduce(total)

    @property
    def parts(self) -> Group | None:
        """The group whose processes hold parts of the same leaves; None where leaves are whole."""
        return self.copies.group if self.copies is not None and self.copies.cut else None

    def gather(self, obj: object) -> list[Any]:
        """What every process of the pipeline passed, by rank."""
        return self.group.gather_objects(obj)

    # ---- use ----------------------------------------------------------------------------------------------------
    def place(self, params: Sequence[Any]) -> list[Any]:
        """The parameters of the stages that live here, on their rank's device; ``None`` for the others."""
        self.check_params(params)
        out: list[Any] = [None] * self.stages
        for stage in self.here:
            rank = next(r for r in self.placement.ranks_of(stage) if r in self.group.here)
            device = self.group.device(rank)
            move = lambda leaf, device=device: (
                leaf.to(device) if isinstance(leaf, torch.Tensor) and not leaf.is_meta else leaf
            )
            out[stage] = tree.tree_map(move, params[stage])
        return out

    def shard(self, params: Sequence[Any]) -> list[Any]:
        """This process's part of whole parameters, placed: what a pipeline with ``zero=`` takes and gives gradients of.

        The trees keep their form; a leaf becomes one axis with the elements that fall to this copy, perhaps none, on
        which anything works that works element by element. Without ``zero=`` it is ``place``. The pipeline learns the
        shapes of whole leaves here: where parts come from a checkpoint, call it with tensors on the device "meta".
        """
        self.check_params(params)
        if self.shares is None or self.parts is None:
            return self.place(params)
        out: list[Any] = [None] * self.stages
        for stage in self.here:
            out[stage] = self.shares.cut(stage, params[stage], self.frozen)
        return self.place(out)

    def unshard(self, parts: Sequence[Any]) -> list[Any]:
        """The inverse of ``shard``, for a checkpoint: whole trees of the stages here. Every process must call it.

        It takes any tree of the parameters' form, such as the moments of an optimizer.
        """
        self.check_params(parts)
        shares = self.shares if self.parts is not None else None
        return [
            part if shares is None or part is None else shares.join(stage, part) for stage, part in enumerate(parts)
        ]

    def check_params(self, params: Any) -> None:
        """Raise StageError where params is not one entry per stage."""
        if not isinstance(params, (list, tuple)) or len(params) != self.stages:
            got = f"{len(params)} entries" if isinstance(params, (list, tuple)) else f"a {type(params).__name__}"
            raise StageError(
                f"params must be a list with one pytree for each of the {self.stages} stages, in stage order; got {got}"
            )

    def __call__(
        self, params: Any, x: Any, *targets: Any, seed: int | None = None, has_aux: bool = False,
        each: Callable[[int, Any], Any] | None = None, **side: Any,
    ) -> Any:  # fmt: skip
        """Forward only: the loss, or without one the outputs. No graph, nothing saved.

        ``each(number, output)`` is called with a microbatch's output as soon as that is there, on the rank that holds
        the last stage. What it returns comes back in place of the outputs, as a list in microbatch order (``None``
        on other ranks, unless ``outputs="everywhere"``), and the outputs are let go of.
        """
        if functional((params, x, targets, side)):
            return Call(self, params, x, targets, side, mode="forward", has_aux=has_aux, each=each).plainly()
        made = Call(self, params, x, targets, side, mode="forward", seed=seed, has_aux=has_aux, each=each)
        return made.forward()

    def plan(self, params: Any, x: Any, *targets: Any, **side: Any) -> Plans:
        """What each rank here will run for these arguments, and its peak memory; print it."""
        mode = "grad" if self.loss is not None else "vjp"
        return Plans(Call(self, params, x, targets, side, mode=mode).resolved())

    def __repr__(self) -> str:
        name = self._schedule if isinstance(self._schedule, str) else getattr(self._schedule, "name", "custom")
        return f"<fpipe pipeline: {self.stages} stages, schedule {name}, {self.group!r}>"


class Plans:
    """The plans of the ranks that live here, by rank; ``peak`` gives each one's most bytes."""

    def __init__(self, resolved: Resolved):
        self.by_rank = resolved.plans
        self.peak = {rank: plan.peak for rank, plan in self.by_rank.items()}
        self._jobs = resolved.job

    @property
    def costs(self) -> Costs:
        """What is expected, for ``schedule.simulate``: programs by shapes, woven actions by their weaves."""
        return expected(self._jobs, self.by_rank)

    def __getitem__(self, rank: int) -> Any:
        return self.by_rank[rank]

    def __str__(self) -> str:
        head = ["rank  instructions  slots  peak bytes"]
        head += [
            f"{r:4d}  {len(p.instructions):12d}  {p.slots:5d}  {p.peak:10,d}" for r, p in sorted(self.by_rank.items())
        ]
        return "\n".join([*head, "", *(str(p) for _, p in sorted(self.by_rank.items()))])

    __repr__ = __str__


def pipeline(
    stages: Sequence[Callable[..., Any] | Stage], schedule: Any = "1F1B", *, loss: Callable[..., Any] | None = None,
    microbatches: int | None = None, group: Group | None = None, reduction: Reduction = "mean",
    seed: int | None = None, frozen: Sequence[str] = (), tied: Sequence[Sequence[str]] = (),
    outputs: Outputs = "zeros", accumulate: torch.dtype | None = None, engine: Engine = "trace",
    compile: str | None = None, overlap: Any = "weave",
    dp: Group | None = None, zero: int = 0, reduce_dtype: torch.dtype | None = None, bucket_bytes: int = 1 << 25,
    unsharded: int = 2, own: Sequence[str] = (),
) -> Pipeline:  # fmt: skip
    """Make a function of (params, x, *targets) out of stages, a schedule and a loss.

    ``schedule`` is a name, a Schedule, a path to a CSV, or a function (ranks, microbatches) -> Schedule. ``overlap``
    says how fused actions run: ``"weave"``, ``"sequential"``, a function that gets both parts and returns both results,
    or a weave as data, a list of (which program, which segment).

    ``dp`` is the group of the copies of this pipeline, as in ``fpipe.init(dp=2).dp``; each gets its own part of the
    batch. Loss and gradients are those of all copies together: means of theirs, or sums with ``reduction="sum"`` or
    ``fpipe.weighted``, which counts over all. A stage's gradients leave after its last W, in buckets of
    ``bucket_bytes``, in ``reduce_dtype``. With ``zero=`` 1, 2 or 3 the pipeline takes parts and gives gradients of
    parts: ``shards = pipe.shard(params)``, and optimizer, update and the next call all work on those. 1 adds up whole
    gradients and keeps a part, 2 keeps no whole one, 3 holds at most ``unsharded`` stages' parameters whole at once.
    ``own`` names leaves of which each copy has its own, as experts are that exchange their rows inside the stages.

    >>> from fpipe import local
    >>> def layer(p, x): return torch.tanh(x @ p)
    >>> def loss(y, t): return (y - t).square().mean()
    >>> pipe = pipeline([layer, layer], "1F1B", loss=loss, microbatches=2, group=local(2))
    >>> params, x = [torch.eye(3), torch.eye(3)], torch.zeros(4, 3)
    >>> value, grads = value_and_grad(pipe)(params, x, x)
    >>> float(value), len(grads)
    (0.0, 2)
    """
    if not isinstance(stages, (list, tuple)) or not stages:
        raise StageError("stages must be a list of functions fn(params, x), one at least")
    if reduction not in ("mean", "sum") and not isinstance(reduction, Weighted):
        raise StageError(f"reduction={reduction!r}; give 'mean', 'sum' or fpipe.weighted(fn)")
    if outputs not in ("zeros", "everywhere", "last"):
        raise StageError(f"outputs={outputs!r}; give 'zeros', 'everywhere' or 'last'")
    return Pipeline(
        stages, schedule, loss=loss, microbatches=microbatches, group=group or init(), reduction=reduction,
        seed=seed, frozen=frozen, tied=tied, outputs=outputs, accumulate=accumulate, engine=engine, compile=compile,
        overlap=overlap,
        copies=Copies.of(dp, zero, reduce_dtype, bucket_bytes, unsharded, reduction == "mean", tuple(own)),
    )  # fmt: skip


def _ties(stages: Sequence[Stage], tied: Sequence[Sequence[str]]) -> tuple[tuple[str, ...], ...]:
    """Groups of tied leaves, by hand and as the stages carry them."""
    carried: dict[str, list[str]] = {}
    for index, stage in enumerate(stages):
        for leaf, group in stage.ties:
            carried.setdefault(group, []).append(f"{index}.{leaf}")
    groups = [tuple(group) for group in tied] + [tuple(g) for g in carried.values() if len(g) > 1]
    for group in groups:
        for name in group:
            head = name.partition(".")[0]
            if not head.isdigit() or int(head) >= len(stages):
                raise StageError(f"tied={group!r}: {name!r} should read 'stage.leaf', with a stage below {len(stages)}")
    return tuple(groups)


def _fitting(source: Any, pipe: Pipeline, microbatches: int) -> Schedule:
    """The schedule that a user named, made and checked for this pipeline."""
    ranks, stages = pipe.group.size, pipe.stages
    if isinstance(source, Path) or (isinstance(source, str) and source.lower().endswith(".csv")):
        source = Schedule.from_csv(source)
    made: Any
    if isinstance(source, str):
        made = make_schedule(source, ranks, microbatches, stages=stages)
    elif isinstance(source, Schedule):
        made = source
    elif callable(source):
        made = source(ranks, microbatches)
    else:
        raise StageError(
            f"schedule={source!r}; give a name, a Schedule, a path to a CSV or a function (ranks, microbatches)"
        )
    if not isinstance(made, Schedule):
        raise StageError(f"the schedule function returned a {type(made).__name__}; it must return an fpipe.Schedule")
    schedule = made
    if schedule.ranks != ranks:
        raise StageError(f"the schedule is for {schedule.ranks} ranks, the group has {ranks}; make both agree")
    if schedule.stages != stages:
        raise StageError(
            f"the schedule runs {schedule.stages} stages, the pipeline has {stages}; give as many stages as it runs, "
            "or make_schedule(..., stages=)"
        )
    if schedule.microbatches != microbatches and not isinstance(source, Schedule):
        raise StageError(f"the schedule function made {schedule.microbatches} microbatches where {microbatches} run")
    if schedule.microbatches != microbatches and pipe.microbatches is not None:
        raise StageError(
            f"the schedule is for {schedule.microbatches} microbatches, but {microbatches} are run; "
            "say microbatches= as the schedule does, or give a name or a function"
        )
    return schedule.check()


# ---- transforms -----------------------------------------------------------------------------------------------------


def value_and_grad(pipe: Pipeline, argnums: int | tuple[int, ...] = 0, *, has_aux: bool = False) -> Callable[..., Any]:
    """A function that runs the schedule and returns ``(loss, grads)``.

    ``argnums=(0, 1)`` returns the gradient of the input too; ``has_aux=True`` makes the value ``(loss, [aux, ...])``;
    a pipeline whose stages carry state, given as ``state=[...]``, adds the new state to the value. The function takes
    ``loss_scale=``: gradients, not the value, come multiplied by it, for an optimizer that divides them in a wider
    dtype, as ``fpipe.dynamic_loss_scale`` does.
    """
    if not isinstance(pipe, Pipeline):
        raise StageError(f"value_and_grad takes what fpipe.pipeline returns, not {type(pipe).__name__}")
    if pipe.loss is None:
        raise StageError("this pipeline has no loss to differentiate; say pipeline(..., loss=) or use fpipe.vjp")
    wanted = (argnums,) if isinstance(argnums, int) else tuple(argnums)
    if not wanted or any(n not in (0, 1) for n in wanted):
        raise StageError(f"argnums={argnums!r}; 0 is the parameters and 1 the input, nothing else is differentiated")

    def call(params: Any, x: Any, *targets: Any, seed: int | None = None, loss_scale: Any = None, _value: bool = True,
             **side: Any) -> Any:  # fmt: skip
        how = {"wanted": wanted, "has_aux": has_aux, "loss_scale": loss_scale}
        if functional((params, x, targets, side)):
            value, grads = nested.value_and_grad(pipe, params, x, targets, side, **how)
        else:
            value, grads = Call(pipe, params, x, targets, side, mode="grad", seed=seed, **how).value_and_grad(_value)
        return value, grads[0] if isinstance(argnums, int) else grads

    return call


def grad(pipe: Pipeline, argnums: int | tuple[int, ...] = 0, *, has_aux: bool = False) -> Callable[..., Any]:
    """The gradient alone, without waiting for the loss; with ``has_aux=True``, ``(grads, aux)``."""
    both = value_and_grad(pipe, argnums, has_aux=has_aux)

    def call(params: Any, x: Any, *targets: Any, **keywords: Any) -> Any:
        value, grads = both(params, x, *targets, _value=has_aux, **keywords)
        return (grads, value[1]) if has_aux else grads

    return call


def vjp(pipe: Pipeline, params: Any, x: Any, *, seed: int | None = None, **side: Any) -> tuple[Any, Any]:
    """Outputs of the whole batch, and a pullback from their cotangents to ``(dparams, dx)``.

    The forwards of the schedule run now, the backwards when the pullback is called: any loss over the whole batch fits
    in between. The pullback frees as it goes and can be called once, or more often with ``retain=True``.
    """
    if pipe.loss is not None:
        raise StageError("vjp takes a pipeline without a loss; leave loss= out, or use value_and_grad")
    scalar = next((stage.label for stage in pipe.functions if stage.aux_loss), None)
    if scalar is not None:
        raise StageError(f"stage {scalar} has aux_loss=True, and without a loss there is no total that it could join")
    return Call(pipe, params, x, (), side, mode="vjp", seed=seed, wanted=(0, 1)).vjp()


__all__ = ["Microbatches", "Pipeline", "grad", "pipeline", "value_and_grad", "vjp", "weighted"]
