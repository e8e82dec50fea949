# SPDX-License-Identifier: Apache-2.0
"""The value graph: which stage computes each value that crosses stages, and which stages read it.

An ``Interface`` is what other ranks must know of a stage: its outputs and input gradients, and
which of them are only passed on. A leaf that a stage passes on unchanged is not relayed: the rank
that computes it sends it to those that use it, and its gradient is sent from user to user. This
module knows names, and no rank, tensor or action order.

As readers of values, stage -1 is the caller, who receives the gradient of x, and stage S, one past
the last, is the loss or, without one, the caller, who receives the outputs.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple, TypeAlias

from ..programs.program import Programs
from ..tree import AbstractTree, Aval, Spec, arriving
from .keys import (
    BatchLeaf,
    Grad,
    Key,
    OutputCotangent,
    Param,
    ReducedGrad,
    Seed,
    Side,
    Source,
    State,
    Target,
    Value,
    WholeParam,
)

#: How a leaf leaves a stage: computed, by name and aval; passed on, by the index of the input; or
#: not at all.
Leaf: TypeAlias = tuple[str, Aval] | int | None


def spec_of(aval: Aval) -> Spec:
    """The spec of a value in a message."""
    return Spec(aval.shape, arriving(aval.shape, aval.stride), aval.dtype)


@dataclass(frozen=True)
class Interface:
    """A stage as others see it.

    ``ys[j]`` is ``(name, aval)`` of an output that the stage computes, the index of the input it
    passes on, or ``None`` for a leaf that is no tensor. ``dxs[i]`` is ``(name, aval)`` of an input
    gradient, the index of the cotangent it passes on, or ``None``. ``dys`` says which outputs have
    a cotangent, ``takes_x`` and ``takes_dy`` which leaves its programs read.
    """

    y: AbstractTree
    ys: tuple[Leaf, ...]
    dxs: tuple[Leaf, ...]
    dys: tuple[bool, ...]
    takes_x: tuple[bool, ...]
    takes_dy: tuple[bool, ...]
    aux: Aval | None = None
    leaves: tuple[str, ...] = ()  # the paths of the parameters
    state: AbstractTree | None = None

    @classmethod
    def of(
        cls,
        programs: Programs,
        leaves: tuple[str, ...] = (),
        inner: int = 0,
        y: AbstractTree | None = None,
    ) -> Interface:
        """The interface of programs; ``leaves`` are the paths of the stage's parameters.

        The last ``inner`` leaves of the input, and what is not in ``y``, stay on their rank and are
        no part of it.
        """
        y = programs.outputs.y if y is None else y
        xs = len(programs.dxs) - inner
        count = len(y.leaves)
        read = {
            name
            for program in (programs.f, programs.b, programs.i, programs.w)
            for name in program.inputs
        }
        read |= {name for name in programs.dps if name is not None}
        x_index = {name: i for name, (role, i) in programs.roles.items() if role == "x"}
        dy_index = {name: j for j, name in enumerate(programs.dys) if name is not None}
        ys: Iterator[Leaf] = (
            None if name is None or aval is None else x_index.get(name, (name, aval))
            for name, aval in zip(programs.ys[:count], y.tensors, strict=True)
        )
        dxs: Iterator[Leaf] = (
            None
            if name is None
            else dy_index[name]
            if name in dy_index
            else (name, programs.grad_avals[name])
            for name in programs.dxs[:xs]
        )
        takes_x = tuple(name in read or name in programs.saved for name in x_index)[:xs]
        takes_dy = tuple(name is not None and name in read for name in programs.dys[:count])
        outputs = programs.outputs
        dys = tuple(name is not None for name in programs.dys[:count])
        return cls(
            y, tuple(ys), tuple(dxs), dys, takes_x, takes_dy, outputs.aux, leaves, outputs.state
        )


class Out(NamedTuple):
    """A value that a stage sends to others, its spec, and the stages that read it."""

    source: Source
    spec: Spec
    readers: tuple[int, ...]


@dataclass(frozen=True)
class ValueGraph:
    """The value graph of one kind of microbatch: one interface per stage, and which leaves enter
    and leave.

    The sources that its methods return hold for every microbatch of the kind.
    """

    interfaces: tuple[Interface, ...]
    sink_dxs: tuple[Leaf, ...]  # cotangents of the last outputs, as the loss names them
    sink_takes: tuple[bool, ...]
    batch: tuple[Aval | None, ...]  # of the leaves of x
    has_loss: bool = True  # without one the caller passes the cotangents of the last outputs

    @property
    def stages(self) -> int:
        """The number of stages."""
        return len(self.interfaces)

    # ---- sources ----
    def forward(self, stage: int, leaf: int) -> Source:
        """The source of output ``leaf`` of ``stage`` (stage -1: the batch)."""
        while stage >= 0:
            source = self.interfaces[stage].ys[leaf]
            if not isinstance(source, int):
                assert source is not None, "a leaf that is no tensor has no source"
                return Value(stage, source[0])
            stage = stage - 1
            leaf = source
        return BatchLeaf(leaf)

    def cotangent(self, stage: int, leaf: int) -> Source | None:
        """The source of the gradient of output ``leaf`` of ``stage``; ``None``: it has none.

        Where the loss passes its cotangent on, that is the seed of the loss, which every rank is
        fed.
        """
        while stage < self.stages:
            above = self.sink_dxs if stage == self.stages - 1 else self.interfaces[stage + 1].dxs
            source = above[leaf] if leaf < len(above) else None
            if not isinstance(source, int):
                return None if source is None else self._gradient(stage + 1, leaf, source[0])
            stage = stage + 1
            leaf = source
        return Seed(stage)

    def _gradient(self, stage: int, leaf: int, name: str) -> Source:
        """The gradient of input ``leaf`` of a stage that computes it under a name."""
        return Value(stage, name) if stage < self.stages or self.has_loss else OutputCotangent(leaf)

    def unused(self, stage: int) -> frozenset[int]:
        """The outputs of a stage that have no cotangent."""
        return frozenset(
            j for j in self.interfaces[stage].y.wanted if self.cotangent(stage, j) is None
        )

    def lacking(self) -> bool:
        """Whether the programs of some stage have a cotangent for an output that has none."""
        return any(
            interface.dys[j] for s, interface in enumerate(self.interfaces) for j in self.unused(s)
        )

    def outputs(self) -> tuple[Source, ...]:
        """The sources of the last stage's outputs that are tensors."""
        return tuple(
            self.forward(self.stages - 1, j)
            for j, y in enumerate(self.interfaces[-1].ys)
            if y is not None
        )

    def input_gradients(self) -> tuple[Source, ...]:
        """The sources of the gradients of x that are not zero."""
        sources = (self.cotangent(-1, i) for i in range(len(self.interfaces[0].dxs)))
        return tuple(source for source in sources if source is not None)

    def source(self, programs: Programs, stage: int, name: str) -> Source:
        """The source of a value by its name in a stage's programs; stage S is the loss."""
        role, leaf = programs.roles.get(name, ("computed", 0))
        if role == "computed":
            return Value(stage, name)
        if role == "x":
            beyond = leaf - len(self.interfaces[-1].ys) if stage == self.stages else -1
            return self.forward(stage - 1, leaf) if beyond < 0 else Target(beyond)
        if role == "cotangent" and stage < self.stages:
            cotangent = self.cotangent(stage, leaf)
            assert cotangent is not None, (
                "programs have no cotangent for an output that nothing uses"
            )
            return cotangent
        if role == "cotangent" or role == "aux cotangent":
            return Seed(stage)
        return {"param": Param, "side": Side, "state": State, "grad": Grad}[role](stage, leaf)

    # ---- messages ----
    @cached_property
    def users(self) -> Mapping[tuple[str, int], tuple[Out, ...]]:
        """The values that leave a stage after F ("F") or after I or B ("I"), by (fact, stage).

        Leaves of the batch leave with F of stage 0.
        """
        forward = {("F", stage): _merged(self._forward(stage)) for stage in range(self.stages)}
        return forward | {
            ("I", stage): _merged(self._backward(stage)) for stage in range(self.stages + 1)
        }

    def _forward(self, stage: int) -> Iterator[Out]:
        if stage == 0:
            for i, aval in enumerate(self.batch):
                readers = tuple(s for s in self._readers(-1, i) if s != 0)
                if aval is not None and readers:
                    yield Out(BatchLeaf(i), spec_of(aval), readers)
        for j, y in enumerate(self.interfaces[stage].ys):
            if isinstance(y, tuple):
                yield Out(Value(stage, y[0]), spec_of(y[1]), tuple(self._readers(stage, j)))

    def _readers(self, stage: int, leaf: int) -> Iterator[int]:
        above = stage + 1
        if above == self.stages:
            if leaf >= len(self.sink_takes) or self.sink_takes[leaf]:
                yield above
            return
        interface = self.interfaces[above]
        if interface.takes_x[leaf]:
            yield above
        for k, source in enumerate(interface.ys):
            if isinstance(source, int) and source == leaf:
                yield from self._readers(above, k)

    def _backward(self, stage: int) -> Iterator[Out]:
        dxs = self.sink_dxs if stage == self.stages else self.interfaces[stage].dxs
        for i, dx in enumerate(dxs):
            if isinstance(dx, tuple):
                yield Out(
                    self._gradient(stage, i, dx[0]),
                    spec_of(dx[1]),
                    tuple(self._takers(stage - 1, i)),
                )

    def _takers(self, stage: int, leaf: int) -> Iterator[int]:
        if stage < 0:
            yield -1
            return
        interface = self.interfaces[stage]
        if leaf < len(interface.takes_dy) and interface.takes_dy[leaf]:
            yield stage
        for i, source in enumerate(interface.dxs):
            if isinstance(source, int) and source == leaf:
                yield from self._takers(stage - 1, i)


def _merged(outs: Iterable[Out]) -> tuple[Out, ...]:
    """Each source once, with all its readers."""
    merged: dict[Source, Out] = {}
    for out in outs:
        known = merged.get(out.source)
        merged[out.source] = (
            out if known is None else out._replace(readers=known.readers + out.readers)
        )
    return tuple(merged.values())


def grad(stage: int, leaf: int) -> Key:
    """The key of a parameter's gradient on this rank."""
    return (Grad(stage, leaf), None)


def reduced_grad(stage: int, leaf: int) -> Key:
    """The key of a parameter's gradient reduced over the copies."""
    return (ReducedGrad(stage, leaf), None)


def param(stage: int, leaf: int) -> Key:
    """The key of a parameter as the caller passes it."""
    return (Param(stage, leaf), None)


def whole_param(stage: int, leaf: int) -> Key:
    """The key of a gathered parameter."""
    return (WholeParam(stage, leaf), None)
