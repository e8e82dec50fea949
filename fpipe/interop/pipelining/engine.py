# SPDX-License-Identifier: Apache-2.0
"""One step of the stages of this process: pipelines over their modules, built when the first step
shows what is needed.

Knows modules and pipelines; nothing of the classes whose arguments it serves.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel

from ... import tree
from ...collectives.c10d import C10dGroup
from ...engine.absent import elsewhere
from ...engine.building import pipeline
from ...engine.calls import refuse
from ...engine.gradients import value_and_grad
from ...engine.handshake import UNPREPARED
from ...engine.microbatches import Microbatches
from ...engine.pipeline import Pipeline
from ...errors import FpipeError, TraceError, UnsupportedError
from ...schedule import Schedule
from ...stage import Stage
from .._pure import running
from .._replaced import compiled
from ..binding import Bound, ModuleCall, stage_of, with_ties
from .stage import PipelineStage, group_of


class Packed(ModuleCall):
    """A module with all keyword arguments of ``step`` as one side input; several outputs are
    several arguments.
    """

    def __init__(self, module: nn.Module, state: Sequence[str]):
        super().__init__(module, state, ["kwargs"])

    def call(self, tensors: dict[str, Tensor], x: tuple[Any, ...], side: Mapping[str, Any]) -> Any:
        """Run the module."""
        x = tuple(x[0]) if len(x) == 1 and isinstance(x[0], list) else x
        return super().call(tensors, x, side.get("kwargs") or {})


@dataclass(frozen=True)
class PackedLoss:
    """A loss of an output and a target, which come with its keyword arguments; ``plain`` are its
    numbers and flags.
    """

    fn: Callable[..., Tensor]
    plain: tuple[Any, ...] = ()

    @property
    def __wrapped__(self) -> Callable[..., Tensor]:
        """The loss itself, which ranks compare."""
        return self.fn

    def __call__(self, y: Any, packed: dict[str, Any]) -> Tensor:
        return self.fn(y, packed["target"], **packed["kwargs"])


class Ran(NamedTuple):
    """Losses and outputs by microbatch, on the process of the last stage; elsewhere empty."""

    losses: list[Tensor]
    outputs: list[Any]


@dataclass(frozen=True)
class Wishes:
    """What a process found out that its stages need: autograd instead of traces, all buffers as
    state.
    """

    eager: bool = False
    state: bool = False
    eager_loss: bool = False

    def after(self, error: FpipeError) -> Wishes:
        """With what an error while stages were traced asks for."""
        text = str(error)
        if not isinstance(error, TraceError):
            return self
        if text.startswith("the loss"):
            return replace(self, eager_loss=True)
        if "writes into a parameter" in text and not self.state:
            return replace(self, state=True)
        return replace(self, eager=True)


class Engine:
    """The stages of this process, and the pipelines over all stages that were built so far."""

    def __init__(
        self,
        stages: Sequence[PipelineStage],
        loss: Callable[..., Tensor] | None,
        mean: bool,
        overlap: Any,
    ):
        self.stages = {stage.stage_index: stage for stage in stages}
        self.count, self.loss, self.mean, self.overlap = stages[0].num_stages, loss, mean, overlap
        if any(isinstance(part, FSDPModule) for stage in stages for part in stage.submod.modules()):
            raise UnsupportedError(
                "modules under fully_shard are not supported here; use zero= of fpipe.pipeline, "
                "or from_fsdp of "
                "fpipe.interop.fsdp, or DistributedDataParallel"
            )
        self.group: C10dGroup = group_of(stages[0].group, stages[0].device)
        self._modules = {s: _unwrapped(stage.submod) for s, stage in self.stages.items()}
        self._parts = [part for module in self._modules.values() for part in module.modules()]
        self._wishes = Wishes()
        self._functions: Sequence[Stage] = ()  # of all stages, once they are described
        self._built: dict[Any, tuple[Bound, dict[Any, Pipeline]]] = {}

    # ---- pipelines ----
    def _bound(self) -> tuple[Bound, dict[Any, Pipeline]]:
        """The modules in their present modes, and the pipelines over them by schedule."""
        key = (self._wishes, *[part.training for part in self._parts])
        found = self._built.get(key)
        if found is not None and not found[0].unfrozen():
            return found
        functions = [
            self._functions[s] if self._functions else Stage.elsewhere() for s in range(self.count)
        ]
        names: list[list[str]] = [[] for _ in functions]
        for s, module in self._modules.items():
            functions[s], names[s] = self._stage(module)
        modules = [self._modules.get(s) for s in range(self.count)]
        bound = Bound(modules, with_ties(modules, functions), names)
        self._built[key] = bound, {}
        return self._built[key]

    def _stage(self, module: nn.Module) -> tuple[Stage, list[str]]:
        """A module as a stage, and the names of its leaves."""
        buffers = dict(module.named_buffers())
        state = list(buffers) if self._wishes.state else running(module, always=True)
        leaves = [name for name, _ in module.named_parameters()]
        trained = {name for name, parameter in module.named_parameters() if parameter.requires_grad}
        leaves += [name for name in buffers if name not in state]
        eager = self._wishes.eager
        call = Packed(module, state)
        stage = stage_of(call, [name for name in leaves if name not in trained])
        backend = "inductor" if compiled(call.replacements) and not eager else None
        return replace(stage, engine="eager" if eager else None, compile=backend), leaves

    def _pipe(self, schedule: Schedule) -> tuple[Bound, Pipeline]:
        """The modules and the pipeline of a schedule over them; the first call of a process is one
        of all.
        """
        bound, pipes = self._bound()
        key = schedule, _plain(self.loss)
        if key not in pipes:
            loss = None if self.loss is None else PackedLoss(self.loss, key[1])
            copies = {_copies(stage.submod) for stage in self.stages.values()} - {None}
            device = self.group.device(self.group.rank)
            pipe = pipes[key] = pipeline(
                bound.stages,
                schedule,
                microbatches=schedule.microbatches,
                group=self.group,
                outputs="last",
                loss=Stage(loss, engine="eager")
                if loss is not None and self._wishes.eager_loss
                else loss,
                reduction="mean" if self.mean else "sum",
                overlap=self.overlap,
                dp=next((group_of(pg, device, "dp") for pg in copies), None),
                dp_reduction="mean" if copies else None,
            )
            self._functions = pipe.config.functions
        return bound, pipes[key]

    # ---- one step ----
    @contextmanager
    def reporting(self, schedule: Schedule) -> Iterator[None]:
        """Around checks of this process's arguments: the other processes learn of an error, and do
        not wait.
        """
        pipe = self._pipe(schedule)[1]
        try:
            yield
        except Exception as error:
            refuse(pipe.config, error)
            raise

    def run(
        self, schedule: Schedule, x: Any, kwargs: Any, targets: Any, training: bool, keep: bool
    ) -> Ran:
        """Run the microbatches, and with ``training`` add gradients to ``.grad``; ``keep`` the
        outputs.
        """
        for _ in range(4):
            try:
                return self._run(schedule, x, kwargs, targets, training, keep)
            except FpipeError as error:
                if not isinstance(error, TraceError) and UNPREPARED not in str(error):
                    raise
                wishes = self._wishes.after(error)
                found = self.group.gather_objects((wishes != self._wishes, wishes.eager_loss))
                if not any(changed for changed, _ in found):
                    raise
                self._wishes = replace(wishes, eager_loss=any(loss for _, loss in found))
                self._functions = ()  # which the processes describe anew
                self._built.clear()
        raise AssertionError("every process has three wishes")

    def _run(
        self, schedule: Schedule, x: Any, kwargs: Any, targets: Any, training: bool, keep: bool
    ) -> Ran:
        bound, pipe = self._pipe(schedule)
        here = set(self.stages)
        wanted = (
            [] if self.loss is None else [targets if self.count - 1 in here else _away(targets)]
        )
        losses: dict[int, Tensor] = {}
        outputs: dict[int, Any] = {}

        def each(mb: int, y: Any, loss: Any = None) -> None:
            if loss is not None:
                losses[mb] = loss
            if keep:
                outputs[mb] = y

        arguments = (bound.tensors, x if 0 in here else _away(x), *wanted)
        more: dict[str, Any] = {"kwargs": kwargs} if kwargs else {}
        more |= {"state": bound.state} if pipe.config.stateful else {}
        if training:
            value, grads = value_and_grad(pipe, each=each)(*arguments, **more)
            bound.add_grads(grads)
        else:
            value = pipe(*arguments, each=each, **more)
        if pipe.config.stateful:
            bound.write_state(value[-1])
        return Ran([losses[mb] for mb in sorted(losses)], [outputs[mb] for mb in sorted(outputs)])


def _plain(loss: object) -> tuple[Any, ...]:
    """The numbers and flags of a loss that is an object, and of those that it wraps: a trace
    depends on them.
    """
    found: list[Any] = []
    while hasattr(loss, "__dict__"):
        found += [
            (name, value)
            for name, value in vars(loss).items()
            if isinstance(value, (bool, int, float, str))
        ]
        loss = vars(loss).get("__wrapped__")
    return tuple(found)


def _away(value: Any) -> Any:
    """What stands for an argument that other processes read: with shapes where this one was passed
    it too.
    """
    if isinstance(value, Microbatches):
        return Microbatches(map(_away, value))
    if not any(map(tree.is_tensor, tree.leaves(value))):
        return elsewhere()
    return tree.tree_map(
        lambda leaf: elsewhere(leaf.shape, leaf.dtype) if tree.is_tensor(leaf) else leaf, value
    )


def _unwrapped(module: nn.Module) -> nn.Module:
    return module.module if isinstance(module, DistributedDataParallel) else module


def _copies(module: nn.Module) -> Any:
    """The process group of the copies of a module, if it is wrapped in one of torch's."""
    return module.process_group if isinstance(module, DistributedDataParallel) else None
