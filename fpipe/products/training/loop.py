# SPDX-License-Identifier: Apache-2.0
"""``fpipe.Loop``: train, log, checkpoint, resume. A loop of your own can do the same with ``save``
and ``load``.

A run is a function of the parameters that it began with and of ``batch(step)``; checkpoints hold
what it has become. This module must not know how checkpoints are written.
"""

from __future__ import annotations

import os
import signal
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from hashlib import blake2b
from math import inf
from numbers import Integral
from pathlib import Path
from typing import Any, NamedTuple, Protocol, TypeAlias, runtime_checkable

import torch
from torch import Tensor

from ... import Pipeline, Transform, apply_updates, value_and_grad
from ...errors import (
    BatchError,
    CheckpointError,
    FpipeError,
    PeerError,
    StageError,
    TransformError,
    UnsupportedError,
    checked,
)
from ...saving import Saving, groups_of, load, save
from ...transforms import LossScaleState
from ...tree import Tree, flatten, tree_map, unflatten
from .elastic import Elastic, Members
from .records import Record, figures, log_to, part_of
from .run_folder import RunFolder

#: The arguments of a step, ``(x, *targets)``, or these and side inputs by name.
Batch: TypeAlias = Sequence[Tree] | tuple[Sequence[Tree], dict[str, Tree]]
#: The batch of a step by its number, from 0.
Batches: TypeAlias = Callable[[int], Batch]
Log: TypeAlias = Callable[[Record], object]


@runtime_checkable
class Stateful(Protocol):
    """Data with a position that is saved: numbers, text, tensors, and dicts, lists and tuples of
    them.
    """

    def state_dict(self) -> Tree:
        """The position, after the batches that were taken."""

    def load_state_dict(self, state: Tree) -> object:
        """Go to a position."""


class Trained(NamedTuple):
    """The result of a run: parameters, state of the transform, and the number of steps.

    If stages carry state, ``state`` is ``(state of the transform, states of the stages)``.
    """

    params: Sequence[Tree]
    state: Tree
    step: int


@checked
@dataclass(frozen=True)
class Loop:
    """Train with checkpoints from which an interrupted run continues with the same bits.

    After a failure, start the program again, as ``torchrun --max-restarts`` does: ``run`` continues
    from the last complete checkpoint. Where a process is lost whose stages have copies on other
    ranks, the others repeat the step without it, as with ``pipe.rerouted``. At SIGTERM all
    processes finish their step, write a checkpoint, and the signal ends them. With ``seed=`` of the
    pipeline, each step draws other numbers, by seed and step.

    Args:
        pipe: a pipeline with a loss.
        tx: the gradient transform, or a function of the pipeline that returns it: for those with
            ``over=pipe``, where ranks may be lost.
        path: the folder of the run, which all processes share: one folder per checkpoint, and
            ``log.jsonl``; without it nothing is written.
        every: steps from a checkpoint to the next one. They are written behind the next steps.
        keep: how many checkpoints stay.
        keep_every: checkpoints of multiples of this step stay too; 0: none.
        log: called with a record of each step, on the first process; by default records are lines
            of ``log.jsonl``. A record has ``step`` (from 1), ``loss`` and ``seconds``, ``rate`` if
            the transform has one learning rate, and ``norm``, that of the gradients before
            clipping, if it clips by it.
        elastic: ``fpipe.elastic()`` where several copies of the pipeline train together and some
            may be lost: the others go on with the mean of their gradients, and a copy that was
            started again takes over their state. Each record has the ``copies`` that took part.
            Which data a copy trains on is up to ``batch``.
        donate: each step writes the parameters into the memory of those before it, as
            ``tx.step(..., donate=True)``: faster, and there is one set of them less. Those that
            ``run`` is given are copied first. ``tx`` must not keep parameters in its state without
            a copy.

    >>> import tempfile, fpipe
    >>> pipe = fpipe.pipeline(
    ...     [fpipe.Stage(lambda p, x: x * p, name=name) for name in ("first", "last")],
    ...     loss=lambda y, t: (y - t).square().mean(), microbatches=2, group=fpipe.local(2),
    ... )
    >>> loop = fpipe.Loop(pipe, fpipe.sgd(0.1), path=tempfile.mkdtemp(), every=2)
    >>> batch = lambda step: (torch.ones(2), torch.full((2,), 4.0))
    >>> params, state, step = loop.run([torch.ones(1), torch.ones(1)], batch, steps=3)
    >>> loop.run([torch.ones(1), torch.ones(1)], batch, steps=4).step, loop.checkpoints()
    (4, (2, 3, 4))
    """

    pipe: Pipeline
    tx: Transform | Callable[[Pipeline], Transform]
    path: str | os.PathLike[str] | None = None
    every: int = 100
    keep: int = 3
    keep_every: int = 0
    log: Log | None = None
    elastic: Elastic | None = None
    donate: bool = False

    def __post_init__(self) -> None:
        if not isinstance(self.pipe, Pipeline):
            raise StageError(
                f"Loop takes what fpipe.pipeline returns, not {type(self.pipe).__name__}"
            )
        if not isinstance(self._tx, Transform):
            raise TransformError(
                f"tx= is of type {type(self._tx).__name__}; give a transform such as "
                "fpipe.adamw(3e-4)"
            )
        if not isinstance(self.path, str | os.PathLike | None):
            raise CheckpointError(
                f"path={self.path!r}; give the folder of the run, or leave it out"
            )
        if self.pipe.config.loss is None:
            raise StageError("the pipeline has no loss; give one with a loss")
        if self.elastic is not None and len(groups_of(self.pipe)) > 1:
            raise UnsupportedError(
                "Loop takes dp= and tp= of the pipeline or elastic=, not both; leave one of them "
                "out"
            )
        if not isinstance(self.elastic, Elastic | None) or not (
            self.log is None or callable(self.log)
        ):
            raise CheckpointError(
                f"log={self.log!r:.200}, elastic={self.elastic!r:.200}; log= is a function of a "
                "record, such as print, and elastic= what fpipe.elastic() returns"
            )
        counts = (self.every, 1), (self.keep, 1), (self.keep_every, 0)
        if any(type(count) is not int or count < least for count, least in counts):
            raise CheckpointError(
                f"every={self.every!r}, keep={self.keep!r}, keep_every={self.keep_every!r}; give "
                "whole numbers: a loop writes a checkpoint every step at most, and keeps one at "
                "least"
            )

    @property
    def _tx(self) -> Transform:
        """The transform."""
        if isinstance(self.tx, Transform) or not callable(self.tx):
            return self.tx
        return self.tx(self.pipe)

    # ---- checkpoints ----
    @property
    def _folder(self) -> RunFolder:
        return RunFolder(self.path, self.pipe)

    def checkpoints(self) -> tuple[int, ...]:
        """The steps that have a complete checkpoint.

        Returns:
            Numbers of steps, ascending.

        >>> import fpipe, tempfile
        >>> pipe = fpipe.pipeline([torch.mul] * 2, loss=torch.sum, microbatches=1,
        ...     group=fpipe.local(2))
        >>> loop = Loop(pipe, fpipe.sgd(0.1), path=tempfile.mkdtemp(), every=2, log=None)
        >>> loop.checkpoints()
        ()
        """
        return self._folder.complete()

    def folder(self, step: int) -> Path:
        """Where the checkpoint of a step is.

        Args:
            step: the number of a step.

        Returns:
            A path, whether or not the folder exists.

        >>> import fpipe, tempfile
        >>> pipe = fpipe.pipeline([torch.mul] * 2, loss=torch.sum, microbatches=1,
        ...     group=fpipe.local(2))
        >>> loop = Loop(pipe, fpipe.sgd(0.1), path=tempfile.mkdtemp(), every=2, log=None)
        >>> loop.folder(4).name
        'step-000000004'
        """
        return self._folder.of(step)

    @property
    def _first(self) -> bool:
        """Whether this process is the first of its copy, which writes the log."""
        return all(0 in group.here for group in groups_of(self.pipe))

    def _save(self, now: Trained, batch: object, last: Saving | None) -> Saving | None:
        """Wait for the last checkpoint, and begin the next one."""
        self._finish(last)
        if self.path is None:
            return None
        position = batch.state_dict() if isinstance(batch, Stateful) else None
        copies = self.pipe.copies
        every = [position] if copies is None else copies.group.gather_objects(position)
        return save(
            self.folder(now.step),
            self.pipe,
            params=now.params,
            wait=False,
            state=now.state,
            step=now.step,
            seed=self.pipe.config.seed,
            data={str(copy): position for copy, position in enumerate(every)},
        )

    def _finish(self, saving: Saving | None) -> None:
        """Wait for a checkpoint, and remove older ones."""
        if saving is not None:
            saving.wait()
            if self._first:
                self._folder.remove_old(self.keep, self.keep_every)

    def _load(self, params: Sequence[Tree], batch: object) -> Trained:
        """The last complete checkpoint, or the beginning."""
        step = self._folder.latest()
        if step is None:
            return self._initial(params)
        names = "params", "state", "step", "seed", "data"
        params, state, step, seed, data = load(
            self.folder(step), self.pipe, *names, like=list(params)
        )
        if seed != self.pipe.config.seed:
            raise CheckpointError(
                f"the run in {self.path} has seed={seed}, and the pipeline "
                f"seed={self.pipe.config.seed}; build the pipeline with the same seed, or begin a "
                "run in another folder"
            )
        if isinstance(batch, Stateful):
            copies = self.pipe.copies
            copy, count = (0, 1) if copies is None else (copies.part, copies.group.size)
            if len(data) != count or data[str(copy)] is None:
                raise CheckpointError(
                    f"the run in {self.path} has positions in the data of {len(data)} copies of "
                    f"the pipeline, and there are {count}; continue with as many, or with data "
                    "that depend on the step alone"
                )
            batch.load_state_dict(data[str(copy)])
        return Trained(params, state, step)

    # ---- training ----
    @checked
    def run(self, params: Sequence[Tree], batch: Batches, steps: int) -> Trained:
        """Train until ``steps`` steps are done, in this run and those that it continues; every
        process calls it.

        Args:
            params: what the first run begins with, placed: ``pipe.place(params)``, or
                ``pipe.shard`` with ``zero=``.
            batch: the arguments of a step by its number, from 0: ``(x, *targets)``, or this and a
                dict of side inputs. If it has ``state_dict`` and ``load_state_dict``, its position
                is saved too, for each copy of the pipeline.
            steps: in all.

        Returns:
            ``(params, state, step)``; if stages carry state, ``state`` is
            ``(state of the transform, states of the stages)``.

        Raises:
            BatchError: if ``batch`` is no function, such as a loader, or returns no batch; if
                ``steps`` is no number.
            CheckpointError: if the last checkpoint is of another model, or damaged.
            UnsupportedError: if ``batch`` has a position of its own, with ``elastic=``.

        >>> import fpipe, tempfile
        >>> pipe = fpipe.pipeline([torch.mul] * 2, loss=torch.sum, microbatches=1,
        ...     group=fpipe.local(2))
        >>> loop = Loop(pipe, fpipe.sgd(0.1), path=tempfile.mkdtemp(), every=2, log=None)
        >>> params, state, step = loop.run([torch.ones(1), torch.ones(1)],
        ...     lambda step: (torch.ones(1),), steps=2)
        >>> step, params
        (2, [tensor([0.8100]), tensor([0.8100])])
        """
        if not callable(batch):
            raise BatchError(
                f"batch is a {type(batch).__name__}; it must be a function of the step that "
                "returns (x, *targets). For a loader, give a function that takes the batch of that "
                "step from it (docs: A training run, Data)"
            )
        if self.elastic is not None and isinstance(batch, Stateful):
            raise UnsupportedError(
                "with elastic=, data must depend on the step and the copy alone; give a function"
            )
        if not (isinstance(steps, Integral) or steps == inf) or steps < 0:
            raise BatchError(f"steps={steps!r}; give the number of steps in all, 0 or more")
        with _signalled() as signals:
            now = self._load(params, batch)
            members = None
            if self.elastic is not None and now.step < steps:
                members = Members(self.elastic, self.pipe.group)
            try:
                now = self._train(now, batch, steps, signals, members)
            finally:
                if members is not None:
                    members.leave()
        if signals:
            signal.raise_signal(signals[0])
        return now

    def _train(
        self,
        now: Trained,
        batch: Batches,
        steps: int,
        signals: Sequence[int],
        members: Members | None,
    ) -> Trained:
        """Do the steps that are left, or those until a signal."""
        saving: Saving | None = None
        log: Log | None = None
        last: Record = {}
        step_of = value_and_grad(self.pipe)
        stop = False
        while not stop:
            if members is not None:  # after the last step too: a copy may have missed its mean
                own = now.params, now.state
                state, step = members.join(own, now.step)
                if state is not own:  # that of another copy
                    params, state = state
                    now = Trained(params, state, step)
                    last = {}
            leads = members is None or members.leads
            if not leads:
                log = None
            elif log is None:
                log = self._logger(now.step, last)
            if now.step >= steps:
                break
            began = time.perf_counter()
            of_step = figures(self._tx, self._of_tx(now))
            try:
                done = self._step(step_of, now, batch, signals, members)
            except PeerError as error:
                rest = self._without_lost(error, now.step, saving)
                return rest._train(now, batch, steps, signals, members)
            if done is None:
                continue
            loss, now, stop = done
            if log is not None or members:
                seconds = round(time.perf_counter() - began, 6)
                last = {"step": now.step, "loss": loss.item(), "seconds": seconds}
                last |= of_step(self._of_tx(now))
                if members:
                    last["copies"] = list(members.copies)
            if log is not None:
                log(last)
            if leads and (now.step % self.every == 0 or now.step == steps or stop):
                saving = self._save(now, batch, saving)
        self._finish(saving)
        return now

    def _without_lost(self, error: PeerError, step: int, saving: Saving | None) -> Loop:
        """The loop without the rank that was lost; raises the error if training cannot go on."""
        lost = self.pipe.group.lost()
        if lost is None or self.elastic is not None:
            raise error
        try:
            rest = replace(self, pipe=self.pipe.rerouted(without=[lost]))
        except StageError as refusal:
            raise error from refusal
        with suppress(FpipeError):  # a checkpoint that waits for a part of the lost rank
            self._finish(saving)
        name = self.pipe.group.global_rank(lost)
        warnings.warn(
            f"rank {name} is lost in step {step + 1}; training goes on without it", stacklevel=2
        )
        return rest

    def _initial(self, params: Sequence[Tree]) -> Trained:
        """Before the first step."""
        if self.donate:
            params = tree_map(torch.clone, list(params))
        state = self._tx.init(params)
        if self.pipe.config.stateful:
            stages = enumerate(self.pipe.config.functions)
            here = self.pipe.here
            state = state, [stage.initial_state if i in here else None for i, stage in stages]
        return Trained(list(params), state, 0)

    def _of_tx(self, now: Trained) -> Tree:
        """The state of the transform."""
        return now.state[0] if self.pipe.config.stateful else now.state

    def _step(
        self,
        step_of: Callable[..., Any],
        now: Trained,
        batch: Batches,
        signals: Sequence[int],
        members: Members | None,
    ) -> tuple[Tensor, Trained, bool] | None:
        """The loss, what follows a step, and whether to stop; ``None`` if a copy was lost in it."""
        args, sides = _arguments(self.pipe, batch(now.step), now.step)
        copy = 0 if self.elastic is None else self.elastic.copy
        state = self._of_tx(now)
        config = self.pipe.config
        stateful = config.stateful
        scaled = part_of(state, LossScaleState)
        options = {"state": now.state[1]} if stateful else {}
        loss, grads = step_of(
            now.params,
            *args,
            loss_scale=None if scaled is None else scaled.scale,
            seed=seed_of(config.seed, now.step, copy),
            **options,
            **sides,
        )
        loss, states = loss if stateful else (loss, None)
        flag = torch.tensor([float(bool(signals))], device=config.device)
        for group in groups_of(self.pipe):
            flag = group.all_reduce(flag, "max")
        # This waits until all ranks have their gradients; none changes its parameters before.
        stop = bool(flag.item())
        if members is not None:
            leaves, spec = flatten((loss, grads))
            means = members.mean(leaves)
            if means is None:
                return None
            loss, grads = unflatten(spec, means)
        tx = self._tx
        if self.donate:
            params, state = tx.step(grads, state, now.params, donate=True)
        else:
            updates, state = tx.update(grads, state, now.params)
            params = apply_updates(now.params, updates)
        state = (state, states) if stateful else state
        return loss, Trained(params, state, now.step + 1), stop

    def _logger(self, step: int, last: Record) -> Log | None:
        """Where records go, on the first process. ``last`` is this copy's: if it is of this step,
        the copy that led may have been lost before it wrote its own.
        """
        if not self._first:
            return None
        missed = last.get("step") == step
        log = self.log
        if log is None and self.path is not None:
            log = log_to(Path(self.path) / "log.jsonl", step - missed)
        if log is not None and missed:
            log(last)
        return log


def _arguments(pipe: Pipeline, batch: Any, step: int) -> tuple[Sequence[Tree], dict[str, Tree]]:
    """The positional arguments and the side inputs of a step.

    Of ``(list, dict)`` the dict may be a target: it has side inputs where it is empty, or a stage
    or the loss names one of its keys.
    """
    if not isinstance(batch, (tuple, list)) or not batch:
        given = repr(batch) if batch is None or batch == () else f"a {type(batch).__name__}"
        raise BatchError(
            f"batch({step}) is {given}; return (x, *targets), or this and a dict of side inputs"
        )
    first = batch[0]
    last = batch[-1]
    if len(batch) == 2 and isinstance(first, (tuple, list)) and isinstance(last, dict):
        config = pipe.config
        names = set(getattr(config.reduction, "sides", ())).union(*config.sides)
        if not last or names.intersection(last):
            return first, last
    return batch, {}


def seed_of(seed: int | None, step: int, copy: int = 0) -> int | None:
    """The seed of a step, for one of several copies.

    >>> seed_of(None, 3) is None, seed_of(1, 3) == seed_of(1, 3), seed_of(1, 3) == seed_of(1, 4)
    (True, True, False)
    """
    if seed is None:
        return None
    text = f"{seed}/{step}/{copy}" if copy else f"{seed}/{step}"
    return int.from_bytes(blake2b(text.encode(), digest_size=7).digest(), "big")


@contextmanager
def _signalled() -> Iterator[list[int]]:
    """Collects SIGTERM, if this is the main thread; the handler that was there is back when the
    context ends.
    """
    found: list[int] = []
    if threading.current_thread() is not threading.main_thread():
        yield found
        return
    before = signal.signal(signal.SIGTERM, lambda number, frame: found.append(number))
    try:
        yield found
    finally:
        signal.signal(signal.SIGTERM, before)
