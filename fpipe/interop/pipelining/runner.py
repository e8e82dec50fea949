# SPDX-License-Identifier: Apache-2.0
"""Steps of the stages of this process: pipelines over their modules, built by the first step.

Knows modules and pipelines; nothing of the classes whose arguments it serves.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, TypeAlias

from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel

from ... import Microbatches, Pipeline, copies, elsewhere, pipeline, tree, value_and_grad
from ...errors import MismatchError, TraceError, UnsupportedError
from ...schedule import Schedule
from ...stage import Stage
from ...tree import Tree
from ..binding import Bound, BoundFunction, bound_to
from ..module_function import changing_buffers
from ..replacements import has_compiled, replacements
from .batches import Batch
from .stage import PipelineStage, group_of

Loss: TypeAlias = Callable[..., Tensor]
#: Output and loss of a microbatch.
Result: TypeAlias = tuple[Tree, Tensor | None]


class _StepFunction(BoundFunction):
    """A module with all keyword arguments of ``step`` as one side input.

    Several outputs of the module before it are several arguments.
    """

    def call(self, tensors: dict[str, Tensor], x: Tree, side: dict[str, Tree]) -> Tree:
        """Run the module."""
        x = x[0] if isinstance(x, tuple) and len(x) == 1 else x
        x = tuple(x) if isinstance(x, list) else x
        return super().call(tensors, x, side.get("kwargs") or {})


@dataclass(frozen=True)
class _StepLoss:
    """A loss of an output and a target that comes with keyword arguments of the loss.

    ``plain`` are its numbers and flags, which a trace depends on.
    """

    fn: Loss
    plain: tuple[Hashable, ...]

    @property
    def __wrapped__(self) -> Loss:
        """The loss itself, which ranks compare."""
        return self.fn

    def __call__(self, y: Tree, target: dict[str, Any]) -> Tensor:
        return self.fn(y, target["target"], **target["kwargs"])


class Fallbacks(NamedTuple):
    """What stages of this process need since they could not be traced.

    ``eager``: autograd; ``state``: all buffers as state; ``eager_loss``: autograd for the loss.
    """

    eager: bool = False
    state: bool = False
    eager_loss: bool = False

    def after(self, error: Exception) -> Fallbacks:
        """With what an error of a trace asks for."""
        text = str(error)
        if not isinstance(error, TraceError):
            return self
        if text.startswith("the loss"):
            return self._replace(eager_loss=True)
        if "writes into a parameter" in text and not self.state:
            return self._replace(state=True)
        return self._replace(eager=True)


class StepRunner:
    """The stages of this process, and the pipelines over all stages that were built so far.

    Args:
        stages: of this process.
        loss: of the schedule, if it has one.
        mean: whether the total is a mean over microbatches.
    """

    def __init__(self, stages: Sequence[PipelineStage], loss: Loss | None, mean: bool):
        if any(isinstance(part, FSDPModule) for stage in stages for part in stage.submod.modules()):
            raise UnsupportedError(
                "modules under fully_shard are not supported; use DistributedDataParallel, or "
                "fpipe.copies(zero=) of fpipe.pipeline"
            )
        self.loss = loss
        self.mean = mean
        self.count = stages[0].num_stages
        self.device = stages[0].device
        self.group = group_of(stages[0].group, self.device)
        self.modules = dict[int, nn.Module]()
        self.copies = None  # of modules under torch's wrapper
        for stage in stages:
            module = stage.submod
            if isinstance(module, DistributedDataParallel):
                self.copies = copies(group_of(module.process_group, self.device), reduction="mean")
                module = module.module
            self.modules[stage.stage_index] = module
        self.fallbacks = Fallbacks()
        self.described: Sequence[Stage] = ()  # all stages, once a pipeline was built
        self.built = dict[Hashable, tuple[Bound, dict[Hashable, Pipeline]]]()

    def _state(self, module: nn.Module | None) -> list[str]:
        if module is None:
            return []
        if self.fallbacks.state:
            return [name for name, _ in module.named_buffers(remove_duplicate=False)]
        return changing_buffers(module, always=True)

    def _pipe(self, schedule: Schedule) -> tuple[Bound, Pipeline]:
        """Return the modules in their present modes, and the pipeline of a schedule over them.

        The first call of a process is one of all.
        """
        modes = [part.training for module in self.modules.values() for part in module.modules()]
        key = (self.fallbacks, *modes)
        if key not in self.built or self.built[key][0].unfrozen():
            modules = [self.modules.get(stage) for stage in range(self.count)]
            states = [self._state(module) for module in modules]
            compiled = any(has_compiled(replacements(m)) for m in self.modules.values())
            options = {"compile": "inductor"} if compiled else {}
            if self.fallbacks.eager:
                options = {"engine": "eager"}
            build = partial(_StepFunction, side=["kwargs"])
            self.built[key] = bound_to(modules, states, build, self.described, **options), {}
        bound, pipes = self.built[key]
        plain = _plain_values(self.loss)
        if (schedule, plain) not in pipes:
            loss: Tree = None if self.loss is None else _StepLoss(self.loss, plain)
            if loss is not None and self.fallbacks.eager_loss:
                loss = Stage(loss, engine="eager")
            pipe = pipes[schedule, plain] = pipeline(
                bound.stages,
                schedule,
                microbatches=schedule.microbatches,
                group=self.group,
                outputs="last",
                loss=loss,
                reduction="mean" if self.mean else "sum",
                dp=self.copies,
            )
            self.described = pipe.config.functions
        return bound, pipes[schedule, plain]

    def refuse(self, schedule: Schedule, error: Exception) -> None:
        """Tell the other processes of an error in the arguments of a step."""
        self._pipe(schedule)[1].refuse(error)

    def run(self, schedule: Schedule, batch: Batch, training: bool) -> list[Result]:
        """Run the microbatches, and with ``training`` add gradients to ``.grad``.

        Returns:
            Output and loss of each microbatch on the process of the last stage; elsewhere nothing.
        """
        while True:
            try:
                return self._run(schedule, batch, training)
            except (TraceError, MismatchError) as error:
                # all processes get one of both, where one could not prepare the step
                fallbacks = self.fallbacks.after(error)
                changes = self.group.gather_objects(
                    (fallbacks != self.fallbacks, fallbacks.eager_loss)
                )
                if not any(changed for changed, _ in changes):
                    raise
                self.fallbacks = fallbacks._replace(eager_loss=any(loss for _, loss in changes))
                self.described = ()  # the processes describe stages anew
                self.built.clear()

    def _run(self, schedule: Schedule, batch: Batch, training: bool) -> list[Result]:
        bound, pipe = self._pipe(schedule)
        results = dict[int, Result]()

        def keep(number: int, y: Tree, loss: Tensor | None = None) -> None:
            results[number] = y, loss

        arguments: list[Tree] = [bound.params, _argument(batch.x, 0 in self.modules)]
        if self.loss is not None:
            arguments.append(_argument(batch.target, self.count - 1 in self.modules))
        keywords: dict[str, Tree] = {} if batch.kwargs is None else {"kwargs": batch.kwargs}
        if pipe.config.stateful:
            keywords["state"] = bound.state
        if training:
            value, grads = value_and_grad(pipe, each=keep)(*arguments, **keywords)
            bound.add_grads(grads)
        else:
            value = pipe(*arguments, each=keep, **keywords)
        if pipe.config.stateful:
            bound.write_state(value[-1])
        return [results[number] for number in sorted(results)]


def _plain_values(loss: object) -> tuple[Hashable, ...]:
    """Return the numbers and flags of a loss that is an object, and of those that it wraps."""
    values = list[Hashable]()
    while hasattr(loss, "__dict__"):
        held = vars(loss)
        for name, value in held.items():
            if isinstance(value, int | float | str):
                values.append((name, repr(value)))  # 1 == 1.0 == True
        loss = held.get("__wrapped__")
    return tuple(values)


def _argument(rows: Microbatches | None, is_read: bool) -> Tree:
    """Return an argument, or what stands for one that other processes read.

    That has shapes where this process was passed the argument too.
    """
    if rows is None:
        return () if is_read else elsewhere()
    if is_read:
        return rows
    return Microbatches(
        tree.tree_map(
            lambda leaf: elsewhere(leaf.shape, leaf.dtype) if tree.is_tensor(leaf) else leaf, row
        )
        for row in rows
    )
