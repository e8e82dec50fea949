# SPDX-License-Identifier: Apache-2.0
"""``fpipe.pipeline``: stages, a schedule and a loss as one function, and the transforms of it.

A ``Pipeline`` is a frozen ``Config`` with a cache of plans. Calls are in ``calls``; nothing here knows plans' insides.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Literal

import torch

from .. import tree
from ..collectives.group import Group
from ..collectives.setup import init
from ..errors import StageError
from ..generators import Source
from ..plans.plan import Plan
from ..plans.sharding import Copies, Shares
from ..plans.weaving.segments import microseconds
from ..plans.weaving.weave import Overlap
from ..schedule import Schedule
from ..schedules.costs import Costs
from ..stage import Engine, Stage, as_stage, with_defaults, without_unsafe_compilers
from ..tree import Tree
from . import calls
from .arguments import Call, Each
from .auto import Auto, chosen_by
from .config import Config, Loss, Outputs, ties
from .derived import nested
from .descriptions import described
from .plan_cache import Cache
from .prepare import Prepared
from .reduction import Reduction
from .request import Mode


class Pipeline:
    """A function of (params, x, *targets), returned by ``fpipe.pipeline``."""

    def __init__(self, config: Config, cache: Cache | None = None):
        shares = None if config.copies is None else Shares(config.copies)
        self.config, self.cache = config, cache or Cache(shares)
        self.group, self.copies, self.tied = config.group, config.copies, config.tied
        self.placement, self.stages, self.here = config.placement, config.stages, config.here
        self.output_rank = self.placement.rank_of(self.stages - 1)  # of the last stage, or its first replica

    def __repr__(self) -> str:
        return repr(self.config)

    # ---- questions ----------------------------------------------------------------------------------------------
    def schedule(self, microbatches: int) -> Schedule:
        """The checked schedule for a number of microbatches."""
        return self.config.schedule_for(microbatches)

    def under(self, schedule: Schedule) -> Pipeline:
        """The same pipeline with another schedule that places the stages on the same ranks; this one is unchanged."""
        if repr(schedule.placement) != repr(self.placement):
            raise StageError(
                f"the schedule has stages on other ranks ({schedule.placement}) than the pipeline ({self.placement}); "
                "make a pipeline with it, and place the parameters anew"
            )
        return Pipeline(replace(self.config, schedule=schedule), Cache(self.cache.shares, self.cache.agreed))

    def train(self, training: bool = True) -> Pipeline:
        """The same pipeline with its modules in training, whatever mode they were cut in; this one is unchanged.

        Stages that are functions have no modes. A norm whose running statistics are constants, since it was cut in
        evaluation, cannot be trained.
        """
        return Pipeline(*self.cache.in_mode(self.config, training))

    def eval(self) -> Pipeline:
        """The same pipeline with its modules in evaluation, as ``module.eval()``; see :meth:`train`."""
        return self.train(False)

    def call(
        self, mode: Mode, params: Sequence[Tree], x: Tree, targets: Sequence[Tree], side: dict[str, Tree],
        **options: Any,
    ) -> Call:  # fmt: skip
        """The checked arguments of a call that follows; where they are refused, the other ranks learn it."""
        try:
            call = Call.of(self.config, mode, params, x, targets, side, **options)
        except Exception as error:
            calls.refuse(self.config, error)
            raise
        auto = self.config.schedule
        if isinstance(auto, Auto) and mode == "grad" and call.number not in auto.chosen:
            self._choose(auto, call, params, x, targets, side)
        return call

    def _choose(
        self, auto: Auto, call: Call, params: Sequence[Tree], x: Tree, targets: Sequence[Tree], side: dict[str, Tree]
    ) -> None:  # fmt: skip
        """Choose the schedule for a number of microbatches, by plans of another one with the same placement."""
        run = self.schedule(call.number)
        plans = self.under(run).plan(params, x, *targets, **side)
        auto.estimated(call.number, plans.figures, plans.peak, run, self.config.device.type)

    @property
    def why(self) -> str:
        """What ``schedule="auto"`` chose and why; print it."""
        auto = self.config.schedule
        if not isinstance(auto, Auto):
            return f"{self.config!r}: the schedule was given"
        if not auto.chosen:
            return f"the first call that computes gradients chooses; stages are on ranks as {self.placement}"
        return "\n\n".join(f"{number} microbatches\n{why}" for number, (_, why) in sorted(auto.chosen.items()))

    @property
    def parts(self) -> Group | None:
        """The group whose processes hold parts of the same leaves; None where leaves are whole."""
        return self.copies.group if self.copies is not None and self.copies.cut else None

    def all_sum(self, tensor: torch.Tensor) -> torch.Tensor:
        """The sum of a tensor over the pipeline's processes; where they hold parts of stages, over its copies too."""
        total = self.group.all_reduce(tensor)
        return total if self.parts is None else self.parts.all_reduce(total)

    def gather(self, obj: object) -> list[Any]:
        """What every process of the pipeline passed, by rank: numbers, text, plain tensors, and containers of them."""
        return self.group.gather_objects(obj)

    # ---- parameters ---------------------------------------------------------------------------------------------
    def place(self, params: Sequence[Tree]) -> list[Tree]:
        """The parameters of the stages of this process, on their rank's device; ``None`` for the others."""
        self.config.check_params(params)
        out: list[Tree] = [None] * self.stages
        for stage in self.here:
            device = self.group.device(self.config.rank_here(stage))
            move = lambda leaf, device=device: (
                leaf.to(device) if isinstance(leaf, torch.Tensor) and not leaf.is_meta else leaf
            )
            out[stage] = tree.tree_map(move, params[stage])
        return out

    def shard(self, params: Sequence[Tree]) -> list[Tree]:
        """This process's part of whole parameters, placed. With ``zero=`` calls take such parts.

        The trees keep their structure; a leaf becomes one axis with the elements of this copy, perhaps none, and any
        elementwise operation can be applied to it. Without ``zero=`` it is ``place``. The pipeline records the shapes
        of whole leaves here: where parts are read from a checkpoint, call it with tensors on the device "meta".
        """
        self.config.check_params(params)
        shares = self.cache.shares
        if shares is None or self.parts is None:
            return self.place(params)
        cut = {stage: shares.cut(stage, params[stage], self.config.frozen) for stage in self.here}
        return self.place([cut.get(stage) for stage in range(self.stages)])

    def unshard(self, parts: Sequence[Tree]) -> list[Tree]:
        """The inverse of ``shard``, for a checkpoint: whole trees of the stages of this process.

        Every process must call it. It takes any tree of the parameters' structure, such as the moments of an optimizer.
        """
        self.config.check_params(parts)
        shares = self.cache.shares if self.parts is not None else None
        return [
            part if shares is None or part is None else shares.join(stage, part) for stage, part in enumerate(parts)
        ]

    # ---- use ----------------------------------------------------------------------------------------------------
    def __call__(
        self, params: Sequence[Tree], x: Tree, *targets: Tree, seed: int | None = None, has_aux: bool = False,
        each: Each | None = None, **side: Tree,
    ) -> Tree:  # fmt: skip
        """Forward only: the loss, or without one the outputs. No graph, nothing saved.

        ``each(number, output)`` is called with a microbatch's output as soon as it is computed, on the rank of the last
        stage. The results of ``each`` are returned in place of the outputs, as a list in microbatch order (``None`` on
        other ranks, unless ``outputs="everywhere"``), and the outputs are freed. With a loss it is called as that of
        ``value_and_grad``, and ``(loss, results)`` is returned.
        """
        call = self.call("forward", params, x, targets, side, seed=seed, has_aux=has_aux, each=each)
        return nested.forward(call) if calls.surrounded() else calls.forward(call, self.cache)

    def plan(self, params: Sequence[Tree], x: Tree, *targets: Tree, **side: Tree) -> Plans:
        """What each rank of this process will run for these arguments, and its peak memory; print it."""
        call = Call.of(self.config, "vjp" if self.config.loss is None else "grad", params, x, targets, side)
        with self.config.claim:
            return Plans(self.cache.plans_for(call).prepared)


class Plans:
    """The plans of the ranks of this process, by rank; ``peak`` is the peak memory of each in bytes."""

    def __init__(self, prepared: Prepared):
        self.by_rank = prepared.plans
        self.peak = {rank: plan.peak for rank, plan in self.by_rank.items()}
        self._inputs = prepared.inputs

    @property
    def figures(self) -> dict[str, dict[int, float]]:
        """What is expected of the programs of the stages of this process, by shapes: microseconds, and bytes."""
        figures: dict[str, dict[int, float]] = {name: {} for name in ("F", "B", "I", "W", "saved", "kept")}
        for source in self._inputs.values():
            for stage, programs in source.kinds[0].programs.items():
                times = map(microseconds, (programs.f, programs.b, programs.i, programs.w))
                held = programs.saved_bytes, programs.kept_bytes
                for known, figure in zip(figures.values(), (*times, *held), strict=True):
                    known[stage] = figure
        return figures

    @property
    def costs(self) -> Costs:
        """What is expected, for ``schedule.simulate``: programs by shapes, woven actions by their weaves.

        The mean over the stages of this process stands for the others.
        """
        figures = self.figures
        stages = next(iter(self._inputs.values())).stages
        mean = {name: sum(known.values()) / max(len(known), 1) for name, known in figures.items()}
        spread = {name: tuple(known.get(s, mean[name]) for s in range(stages)) for name, known in figures.items()}
        woven = {
            name: weave for plan in self.by_rank.values() for name, weave in plan.weaves.items() if not weave.reason
        }
        overlap = lambda action: woven[str(action)].beside() if str(action) in woven else None
        return Costs(**spread, overlap=overlap, unit="us")

    def __getitem__(self, rank: int) -> Plan:
        return self.by_rank[rank]

    def __str__(self) -> str:
        plans = [plan for _, plan in sorted(self.by_rank.items())]
        rows = [f"{p.rank:4d}  {len(p.instructions):12d}  {p.slots:5d}  {p.peak:10,d}" for p in plans]
        return "\n".join(["rank  instructions  slots  peak bytes", *rows, "", *map(str, plans)])

    __repr__ = __str__


def pipeline(
    stages: Sequence[Callable[..., Any] | Stage], schedule: Source = "1F1B", *, loss: Loss | None = None,
    microbatches: int | None = None, group: Group | None = None, reduction: Reduction = "mean",
    seed: int | None = None, frozen: Sequence[str] = (), tied: Sequence[Sequence[str]] = (),
    outputs: Outputs = "zeros", accumulate: torch.dtype | None = None, engine: Engine = "trace",
    compile: str | None = None, overlap: Any = "weave",
    dp: Group | None = None, zero: int = 0, reduce_dtype: torch.dtype | None = None, bucket_bytes: int = 1 << 25,
    unsharded: int = 2, own: Sequence[str] = (), dp_reduction: Literal["mean", "sum"] | None = None,
    memory: float | str | None = None, costs: Costs | None = None,
) -> Pipeline:  # fmt: skip
    """A function of (params, x, *targets) from stages, a schedule and a loss.

    ``schedule`` is a name, a Schedule, a path to a CSV, or a function (ranks, microbatches) -> Schedule. With "auto"
    it is chosen for ``memory`` of a rank, such as "60GB", and ``costs``, as from ``fpipe.measure_costs``, or estimates
    in the first call; ``pipe.why`` says what was chosen. ``overlap``
    defines how fused actions run: ``"weave"``, ``"sequential"``, a function of both parts that returns both results,
    or a weave as data, a list of (which program, which segment).

    With ``seed`` each draw is a function of the seed, the stage and the microbatch alone, whatever the schedule and the
    number of ranks; the loss has a stream of its own. The same model cut into other stages draws other numbers.

    ``dp`` is the group of the copies of this pipeline, as in ``fpipe.init(dp=2).dp``; each copy gets a different part
    of the batch. Loss and gradients are averaged over the copies, or summed with ``reduction="sum"`` or
    ``fpipe.weighted``, whose weights are counted over all copies. ``dp_reduction`` says otherwise: with
    ``reduction="sum", dp_reduction="mean"`` the microbatches of a copy are added, and copies averaged; the weights of
    ``fpipe.weighted`` are then counted in each copy. The gradients of a stage are reduced after its last W, in buckets
    of ``bucket_bytes``, in ``reduce_dtype``.

    With ``zero=`` 1, 2 or 3 the pipeline takes shards of the parameters, ``shards = pipe.shard(params)``, and returns
    gradients of the shards; the optimizer, the update and the next call use the shards too. 1: full gradients are
    summed, then sharded; 2: no full gradient is kept; 3: in addition, the full parameters of at most ``unsharded``
    stages are in memory at once. ``own`` names leaves that are not replicated, such as experts: each copy has
    different ones.

    >>> from fpipe import local
    >>> def layer(p, x): return torch.tanh(x @ p)
    >>> def loss(y, t): return (y - t).square().mean()
    >>> pipe = pipeline([layer, layer], "1F1B", loss=loss, microbatches=2, group=local(2))
    >>> params, x = [torch.eye(3), torch.eye(3)], torch.zeros(4, 3)
    >>> float(value_and_grad(pipe)(params, x, x)[0])
    0.0
    """
    if not isinstance(stages, (list, tuple)) or not stages:
        raise StageError("stages must be a list of functions fn(params, x), one at least")
    group = group or init()
    if isinstance(schedule, Schedule) and microbatches is None:
        microbatches = schedule.microbatches
    schedule = chosen_by(schedule, group, len(stages), memory, costs, microbatches)
    parts = described(Config(tuple(map(as_stage, stages)), schedule, group, microbatches=microbatches))
    devices = map(group.device, group.here)
    return Pipeline(Config(
        without_unsafe_compilers([with_defaults(stage, engine, compile) for stage in parts], devices, stacklevel=2),
        schedule, group,
        loss=loss if loss is None or engine == "trace" else with_defaults(as_stage(loss), engine),
        microbatches=microbatches, reduction=reduction, seed=seed,
        frozen=(*frozen, *(f"{s}.{name}" for s, stage in enumerate(parts) for name in stage.frozen)),
        tied=ties(parts, tied), outputs=outputs, accumulate=accumulate, overlap=Overlap.of(overlap),
        copies=Copies.of(dp, zero, reduce_dtype, bucket_bytes, unsharded, _mean(reduction, dp_reduction), tuple(own)),
    ))  # fmt: skip


def _mean(reduction: Reduction, dp_reduction: str | None) -> bool:
    """Whether copies are averaged, not summed."""
    if dp_reduction not in (None, "mean", "sum"):
        raise StageError(f"dp_reduction={dp_reduction!r}; give 'mean' or 'sum', or leave it out")
    return (dp_reduction or reduction) == "mean"


# ---- transforms -----------------------------------------------------------------------------------------------------
def value_and_grad(
    pipe: Pipeline, argnums: int | tuple[int, ...] = 0, *, has_aux: bool = False, each: Each | None = None
) -> Callable[..., Any]:
    """A function that runs the schedule and returns ``(loss, grads)``.

    ``argnums=(0, 1)`` returns the gradient of the input too; ``has_aux=True`` makes the value ``(loss, [aux, ...])``;
    a pipeline whose stages carry state, passed as ``state=[...]``, adds the new state to the value. The function takes
    ``loss_scale=``: gradients, not the value, are multiplied by it, for an optimizer that divides them in a wider
    dtype, as ``fpipe.dynamic_loss_scale`` does.

    ``each(number, output, loss)`` is called once the loss of a microbatch is computed, on the rank of the last stage
    alone, outside of traces: with the microbatch's number, the output of the last stage, which it must not change, and
    the unweighted loss, or with ``has_aux=True`` all that the loss function returned, ``(scalar, aux)``. It may return
    anything. The value is then ``(loss, results)``, with the results in microbatch order on that rank and ``None`` on
    others (``outputs="everywhere"`` sends them to all). A loss with ``engine="eager"`` may return anything as ``aux``:
    metrics that are plain numbers and differ in every step, for example. Either all ranks pass ``each=``, or none.

    >>> from fpipe import local
    >>> pipe = pipeline([torch.mul] * 2, loss=torch.sum, microbatches=2, group=local(2))
    >>> step = value_and_grad(pipe, each=lambda number, y, loss: f"{number}: {y.max():.0f}, {loss:.0f}")
    >>> step([torch.tensor(2.0), torch.tensor(3.0)], torch.arange(4.0))[0]
    (tensor(18.), ['0: 6, 6', '1: 18, 30'])
    """
    wanted = _wanted(pipe, argnums)

    def call(params: Sequence[Tree], x: Tree, *targets: Tree, seed: int | None = None, loss_scale: Any = None,
             _value: bool = True, **side: Tree) -> Any:  # fmt: skip
        call = pipe.call(
            "grad", params, x, targets, side, seed=seed, wanted=wanted, has_aux=has_aux, each=each,
            loss_scale=loss_scale,
        )  # fmt: skip
        if calls.surrounded():
            value, grads = nested.value_and_grad(call, x)
        else:
            value, grads = calls.value_and_grad(call, pipe.cache, _value)
        return value, grads[0] if isinstance(argnums, int) else grads

    return call


def _wanted(pipe: Pipeline, argnums: int | tuple[int, ...]) -> tuple[int, ...]:
    """The arguments that are differentiated."""
    if not isinstance(pipe, Pipeline):
        raise StageError(f"value_and_grad takes what fpipe.pipeline returns, not {type(pipe).__name__}")
    if pipe.config.loss is None:
        raise StageError("this pipeline has no loss to differentiate; say pipeline(..., loss=) or use fpipe.vjp")
    wanted = (argnums,) if isinstance(argnums, int) else tuple(argnums)
    if not wanted or any(n not in (0, 1) for n in wanted):
        raise StageError(f"argnums={argnums!r}; 0 is the parameters and 1 the input, nothing else is differentiated")
    return wanted


def grad(pipe: Pipeline, argnums: int | tuple[int, ...] = 0, *, has_aux: bool = False) -> Callable[..., Any]:
    """The gradient alone, without waiting for the loss; with ``has_aux=True``, ``(grads, aux)``."""
    both = value_and_grad(pipe, argnums, has_aux=has_aux)

    def call(params: Sequence[Tree], x: Tree, *targets: Tree, **keywords: Any) -> Any:
        value, grads = both(params, x, *targets, _value=has_aux, **keywords)
        return (grads, value[1]) if has_aux else grads

    return call


def vjp(
    pipe: Pipeline, params: Sequence[Tree], x: Tree, *, seed: int | None = None, **side: Tree
) -> tuple[Tree, calls.Pullback]:
    """Outputs of the whole batch, and a pullback from their cotangents to ``(dparams, dx)``.

    The forwards of the schedule run now, the backwards when the pullback is called, so that a loss over the whole
    batch can be computed in between. The cotangents have the outputs' structure, shapes and dtypes, or ``None`` for a
    leaf that has none. The pullback frees what it used: it can be called once, or several times with ``retain=True``.
    Where parameters, the batch or outputs that it needs were changed in place, it raises an error.
    """
    if pipe.config.loss is not None:
        raise StageError("vjp takes a pipeline without a loss; leave loss= out, or use value_and_grad")
    scalar = next((stage.label for stage in pipe.config.functions if stage.aux_loss), None)
    if scalar is not None:
        raise StageError(f"stage {scalar} has aux_loss=True, and without a loss there is no total that it could join")
    return calls.vjp(pipe.call("vjp", params, x, (), side, seed=seed, wanted=(0, 1)), pipe.cache)


__all__ = ["Pipeline", "grad", "pipeline", "value_and_grad", "vjp"]
