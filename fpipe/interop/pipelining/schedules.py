# SPDX-License-Identifier: Apache-2.0
"""The schedule classes of ``torch.distributed.pipelining``: their constructors, ``step`` and
``eval``.

A class is a name of fpipe's catalogue and torch's way to pass arguments. A ``StepRunner`` runs the
steps.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import wraps
from os import PathLike
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.pipelining.microbatch import TensorChunkSpec, merge_chunks

from ... import make_schedule, schedule_names
from ...errors import ScheduleError
from ...schedule import Schedule
from ...tree import Tree
from . import orders
from .batches import batch_of
from .orders import Format, Order
from .runner import StepRunner
from .stage import PipelineStage


class _PipelineSchedule:
    """What all schedules have in common; ``name`` is that of the catalogue, "" where the order
    comes from elsewhere.

    ``use_full_backward``, ``backward_requires_autograd`` and ``defer_pp_recv`` have no effect: the
    schedule decides how a backward is split, and fpipe plans receives.
    """

    name = ""

    def __init__(
        self,
        stages: Sequence[PipelineStage],
        n_microbatches: int,
        loss_fn: Callable[..., Tensor] | None = None,
        args_chunk_spec: tuple[TensorChunkSpec, ...] | None = None,
        kwargs_chunk_spec: dict[str, TensorChunkSpec] | None = None,
        output_merge_spec: Tree = None,
        scale_grads: bool = True,
        *,
        use_full_backward: object = None,
        backward_requires_autograd: object = None,
        defer_pp_recv: object = None,
    ):
        if not stages:
            raise ValueError("a schedule needs the stages of this process, one at least")
        first = stages[0]
        self._stages = list(stages)
        self._n_microbatches = n_microbatches
        self._loss_fn = loss_fn
        self._chunk_specs = args_chunk_spec, kwargs_chunk_spec
        self._output_merge_spec = output_merge_spec
        self.scale_grads = scale_grads
        self._reduces = True
        self._num_stages = first.num_stages
        self._has_backward = loss_fn is not None
        self.pp_group_size = first.group_size
        self.rank = first.group_rank
        self._runner: StepRunner | None = None
        self._schedule: Schedule | None = None
        self.pipeline_order: Order = {}
        if self.name:
            sizes = self.pp_group_size, n_microbatches, self._num_stages
            self.take_schedule(make_schedule(self.name, *sizes))

    # ---- the order ----
    def take_schedule(self, schedule: Schedule, reduces: bool = True) -> None:
        """Use a schedule, and tell the stages which ranks have them.

        Gradients are scaled if the order ``reduces`` them, as torch calls it.
        """
        has = schedule.ranks, schedule.stages, schedule.microbatches
        wanted = self.pp_group_size, self._num_stages, self._n_microbatches
        if has != wanted:
            raise ScheduleError(
                "the schedule is for {} ranks, {} stages and {} microbatches; there are {}, {} and "
                "{}".format(*has, *wanted)
            )
        self._schedule = schedule
        self._reduces = reduces
        self.pipeline_order = orders.order_of(schedule)
        self.stage_index_to_group_rank = {
            stage: schedule.placement.rank_of(stage) for stage in range(schedule.stages)
        }
        for stage in self._stages:
            stage.stage_index_to_group_rank = self.stage_index_to_group_rank

    def _checked(self) -> Schedule:
        """Return the schedule, whose stages on this rank are those that were passed."""
        if self._schedule is None:
            if not self.pipeline_order:
                raise ScheduleError(
                    "there is no order yet; load one with _load_csv, or set pipeline_order"
                )
            self.take_schedule(orders.schedule_of(self.pipeline_order))
        schedule = self._schedule
        assert schedule is not None
        placement = schedule.placement
        placed = list(placement.stages_of(self.rank))
        passed = sorted(stage.stage_index for stage in self._stages)
        if placed != passed:
            raise ScheduleError(
                f"rank {self.rank} has stages {placed} in this schedule ({placement}), and got "
                f"{passed}"
            )
        return schedule

    def _validate_and_set_stage_mapping(self, actions: Order) -> None:
        """Take an order as it is in memory, by rank; subclasses of users call it."""
        self.take_schedule(orders.schedule_of(actions))

    # ---- steps ----
    def step(
        self,
        *args: Tree,
        target: Tree = None,
        losses: list[Tensor] | None = None,
        return_outputs: bool = True,
        loss_kwargs: dict[str, Tree] | None = None,
        arg_mbs: list[Tree] | None = None,
        kwarg_mbs: list[Tree] | None = None,
        target_mbs: list[Tree] | None = None,
        finalize_gradients: bool = True,
        **kwargs: Tree,
    ) -> Tree:
        """One step with a whole batch, or one that is split already (``arg_mbs``, ``kwarg_mbs``,
        ``target_mbs``).

        Args:
            args: of the first stage; other ranks need not pass them.
            target: for the loss, on the rank of the last stage.
            losses: a list that is filled with the loss of each microbatch, on that rank.
            return_outputs: whether the outputs are kept and merged.
            loss_kwargs: keyword arguments of the loss, the same for all microbatches.
            arg_mbs, kwarg_mbs, target_mbs: in place of ``args``, ``kwargs`` and ``target``.
            finalize_gradients: taken as torch takes it; gradients are final after every step, and
                those of several steps add up.
            kwargs: of the stages of this rank.

        Returns:
            the merged outputs on the rank of the last stage, else None.

        Raises:
            RuntimeError: under ``torch.no_grad``, if there is a backward.
            FpipeError: of fpipe's own, if ranks disagree or a stage fails.
        """
        if self._has_backward and not torch.is_grad_enabled():
            raise RuntimeError(
                "step() requires gradients to be enabled for backward computation; it should not "
                "be used under "
                "torch.no_grad() context. Please call eval() instead."
            )
        schedule = self._checked()
        if self._runner is None:
            mean = self.scale_grads and self._reduces
            self._runner = StepRunner(self._stages, self._loss_fn, mean)
        last = next((stage for stage in self._stages if stage.is_last), None)
        try:
            if losses is not None and not isinstance(losses, list):
                raise TypeError(f"losses must be a list but got a {type(losses)}")
            batch = batch_of(
                (args, kwargs, target),
                (arg_mbs, kwarg_mbs, target_mbs),
                self._n_microbatches,
                self._chunk_specs,
            )
            if self._loss_fn is not None and (last or batch.target is not None):
                batch = batch.with_loss_kwargs(loss_kwargs or {})
        except Exception as error:
            self._runner.refuse(schedule, error)
            raise
        for stage in self._stages:
            stage.output_chunks.clear()
        results = self._runner.run(schedule, batch, self._has_backward)
        if losses is not None and last and self._loss_fn is not None:
            losses[:] = [loss for _, loss in results if loss is not None]
        if not last or not return_outputs:
            return None
        last.output_chunks.extend(y for y, _ in results)
        return merge_chunks(last.output_chunks, self._output_merge_spec)

    @wraps(step, assigned=())
    def eval(self, *args: Tree, **options: Tree) -> Tree:
        """Run the forwards of a step alone; the arguments are those of :meth:`step`."""
        training = self._has_backward
        self._has_backward = False
        try:
            return self.step(*args, **options)
        finally:
            self._has_backward = training


class PipelineScheduleSingle(_PipelineSchedule):
    """A schedule with one stage per rank; the arguments are those of torch's class."""

    def __init__(self, stage: PipelineStage, n_microbatches: int, *args: Any, **kwargs: Any):
        super().__init__([stage], n_microbatches, *args, **kwargs)


class PipelineScheduleMulti(_PipelineSchedule):
    """A schedule with several stages per rank; its order comes from ``_load_csv`` or from a
    subclass.
    """

    def _load_csv(self, filename: str | PathLike[str], format: Format = "compute_only") -> None:
        """Read the order from a CSV file; messages in it are planned anew."""
        text = Path(filename).read_text(encoding="utf-8")
        self.take_schedule(Schedule.from_csv(filename).check(), orders.reduces(text, format))

    def _dump_csv(self, filename: str | PathLike[str], format: Format = "compute_only") -> None:
        """Write the order as a CSV file."""
        orders.dump(self._checked(), filename, format)


class _PipelineScheduleRuntime(PipelineScheduleMulti):
    """A schedule whose order is loaded or set in memory."""

    def _prepare_schedule_with_comms(self, actions: Order, format: Format = "compute_only") -> None:
        """Take an order as it is in memory."""
        self.take_schedule(orders.schedule_of(actions), orders.reduces(str(actions), format))

    @property
    def pipeline_order_with_comms(self) -> Order:
        """The order with the sends and receives that torch's own runtime would add; fpipe plans
        others. An order that is set is taken without them.
        """
        return orders.with_messages(self._checked())

    @pipeline_order_with_comms.setter
    def pipeline_order_with_comms(self, order: Order) -> None:
        self._prepare_schedule_with_comms(order, "compute_comms")

    def _dump_csv(self, filename: str | PathLike[str], format: Format = "compute_comms") -> None:
        """Write the order as a CSV file, by default with messages."""
        orders.dump(self._checked(), filename, format)


class _ScheduleForwardOnly(PipelineScheduleSingle):
    """Forwards alone."""

    name = "GPipe"

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self._has_backward = False


class ScheduleGPipe(PipelineScheduleSingle):
    """All forwards, then all backwards."""

    name = "GPipe"


class Schedule1F1B(PipelineScheduleSingle):
    """One forward, one backward in the steady state."""

    name = "1F1B"


class ScheduleLoopedBFS(_PipelineScheduleRuntime):
    """All forwards of a stage, stage by stage, then all backwards."""

    name = "LoopedBFS"


class ScheduleInterleaved1F1B(_PipelineScheduleRuntime):
    """1F1B with several stages per rank."""

    name = "Interleaved1F1B"


class ScheduleInterleavedZeroBubble(_PipelineScheduleRuntime):
    """Interleaved 1F1B with the backward in two parts."""

    name = "InterleavedZeroBubble"


class ScheduleZBVZeroBubble(_PipelineScheduleRuntime):
    """Two stages per rank in a V, the backward in two parts."""

    name = "ZBVZeroBubble"


class ScheduleDualPipeV(_PipelineScheduleRuntime):
    """Two stages per rank in a V, forwards and backwards overlapped."""

    name = "DualPipeV"


_CLASSES = {
    cls.name or cls.__name__: cls
    for cls in (
        PipelineScheduleSingle,
        PipelineScheduleMulti,
        ScheduleGPipe,
        Schedule1F1B,
        ScheduleLoopedBFS,
        ScheduleInterleaved1F1B,
        ScheduleInterleavedZeroBubble,
        ScheduleZBVZeroBubble,
        ScheduleDualPipeV,
    )
}


def get_schedule_class(schedule_name: str) -> type[_PipelineSchedule]:
    """Return the class of a schedule by its name in torch or in fpipe's catalogue; case does not
    matter.

    Classes of names that torch does not have take a list of stages, as ``PipelineScheduleMulti``
    does.

    Raises:
        ValueError: if nobody knows the name.

    >>> get_schedule_class("zbvzerobubble").__name__, get_schedule_class("ZBH2").__name__
    ('ScheduleZBVZeroBubble', 'ScheduleZBH2')
    """
    name = schedule_name.lower()
    classes = {name.lower(): cls for name, cls in _CLASSES.items()}
    catalogue = {name.lower(): name for name in (*schedule_names(), "ZBV")}
    if name in classes:
        return classes[name]
    if name not in catalogue:
        raise ValueError(
            f"Unknown schedule name '{schedule_name}'. The valid options are "
            f"{[*_CLASSES, *catalogue.values()]}"
        )
    name = catalogue[name]
    return type(
        f"Schedule{name}",
        (_PipelineScheduleRuntime,),
        {"name": name, "__doc__": f"{name} of the catalogue."},
    )
