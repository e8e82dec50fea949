# SPDX-License-Identifier: Apache-2.0
"""The value graph: which stage computes each value that crosses stages, and which stages read it.

An ``Interface`` describes a stage to other ranks: its outputs, its input gradients, and which of
them it only passes on. A leaf that a stage passes on unchanged is not relayed: the rank that
computes it sends it to all readers. This module knows names, and no rank, tensor or action order.

Two readers are not stages. Stage -1 is the caller, who receives the gradient of x. Stage S, one
past the last, is the loss. Without a loss it is the caller, who receives the outputs.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
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
    Target,
    Value,
    WholeParam,
)

#: A leaf that a stage returns. A pair is the name and aval of a computed value, a number is the
#: index of the input that is passed on, ``None`` is no tensor or no gradient.
Leaf: TypeAlias = tuple[str, Aval] | int | None


def spec_of(aval: Aval) -> Spec:
    """The spec of a value in a message."""
    return Spec(aval.shape, arriving(aval.shape, aval.stride), aval.dtype)


@dataclass(frozen=True)
class Interface:
    """A stage as other ranks see it.

    ``ys`` are its outputs and ``dxs`` its input gradients. A number in ``ys`` is the index of an
    input, a number in ``dxs`` that of a cotangent. ``dys`` says which outputs have a cotangent.
    ``reads_x`` and ``reads_dy`` say which inputs and cotangents its programs read.
    """

    y: AbstractTree
    ys: tuple[Leaf, ...]
    dxs: tuple[Leaf, ...]
    dys: tuple[bool, ...]
    reads_x: tuple[bool, ...]
    reads_dy: tuple[bool, ...]
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

        It leaves out the last ``inner`` leaves of the input, and the outputs that are not in ``y``:
        they stay on their rank.
        """
        y = programs.outputs.y if y is None else y
        inputs = len(programs.dxs) - inner
        outputs = len(y.leaves)
        cotangents = programs.dys[:outputs]
        x_index = {name: i for name, (role, i) in programs.roles.items() if role == "x"}
        dy_index = {name: j for j, name in enumerate(programs.dys) if name is not None}
        read = set(filter(None, programs.dps))
        for program in (programs.f, programs.b, programs.i, programs.w):
            read.update(program.inputs)

        def y_leaf(name: str | None, aval: Aval | None) -> Leaf:
            return None if name is None or aval is None else x_index.get(name, (name, aval))

        def dx_leaf(name: str | None) -> Leaf:
            if name is None:
                return None
            return dy_index[name] if name in dy_index else (name, programs.grad_avals[name])

        reads_x = tuple(name in read or name in programs.saved for name in x_index)
        return cls(
            y,
            tuple(map(y_leaf, programs.ys[:outputs], y.tensors)),
            tuple(map(dx_leaf, programs.dxs[:inputs])),
            dys=tuple(name is not None for name in cotangents),
            reads_x=reads_x[:inputs],
            reads_dy=tuple(name in read for name in cotangents),
            aux=programs.outputs.aux,
            leaves=leaves,
            state=programs.outputs.state,
        )


class Out(NamedTuple):
    """A value that leaves a stage, its spec, and the stages that read it."""

    source: Source
    spec: Spec
    readers: tuple[int, ...]


@dataclass(frozen=True)
class ValueGraph:
    """The value graph of one kind of microbatch. Its sources hold for every such microbatch.

    The sink is the loss or, without one, the caller, who passes the cotangents of the last outputs.
    """

    interfaces: tuple[Interface, ...]  # of the stages
    sink_dxs: tuple[Leaf, ...]  # cotangents of the last outputs, as the sink names them
    sink_reads: tuple[bool, ...]  # which of the last outputs the sink reads
    batch: tuple[Aval | None, ...]  # of the leaves of x
    has_loss: bool = True

    @property
    def stages(self) -> int:
        """The number of stages."""
        return len(self.interfaces)

    # ---- sources ----
    def forward(self, stage: int, leaf: int) -> Source:
        """The source of output ``leaf`` of ``stage``. Outputs of stage -1 are the batch."""
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

        If the loss passes its own cotangent on, the source is the seed of the loss, which every
        rank has.
        """
        while stage < self.stages:
            stage = stage + 1
            source = self._input_gradients(stage)[leaf]
            if source is None:
                return None
            if not isinstance(source, int):
                return self._gradient(stage, leaf, source[0])
            leaf = source
        return Seed(stage)

    def _input_gradients(self, stage: int) -> tuple[Leaf, ...]:
        """The input gradients of a stage, or of the sink."""
        return self.sink_dxs if stage == self.stages else self.interfaces[stage].dxs

    def _gradient(self, stage: int, leaf: int, name: str) -> Source:
        """The source of the gradient of input ``leaf``, which a stage or the sink computes."""
        if stage == self.stages and not self.has_loss:
            return OutputCotangent(leaf)
        return Value(stage, name)

    def unused(self, stage: int) -> frozenset[int]:
        """The outputs of a stage that have no cotangent."""
        return frozenset(
            j for j in self.interfaces[stage].y.wanted if self.cotangent(stage, j) is None
        )

    def lacks_cotangents(self) -> bool:
        """Whether the programs of a stage read the cotangent of an output that has none."""
        return any(
            interface.dys[output]
            for stage, interface in enumerate(self.interfaces)
            for output in self.unused(stage)
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
            outputs = len(self.interfaces[-1].ys)
            if stage == self.stages and leaf >= outputs:
                return Target(leaf - outputs)
            return self.forward(stage - 1, leaf)
        if role == "cotangent" and stage < self.stages:
            cotangent = self.cotangent(stage, leaf)
            assert cotangent is not None, "programs read no cotangent of an unused output"
            return cotangent
        if role == "cotangent" or role == "aux cotangent":
            return Seed(stage)
        assert role == "side", "the builder has the keys of parameters, gradients and state"
        return Side(stage, leaf)

    # ---- messages ----
    @cached_property
    def leaving(self) -> Mapping[tuple[str, int], tuple[Out, ...]]:
        """The values that leave a stage after F ("F") or after I or B ("I"), by (fact, stage).

        Leaves of the batch leave with F of stage 0.
        """
        leaving: dict[tuple[str, int], tuple[Out, ...]] = {}
        for stage in range(self.stages + 1):
            if stage < self.stages:
                leaving["F", stage] = _merged(self._forward(stage))
            leaving["I", stage] = _merged(self._backward(stage))
        return leaving

    def _forward(self, stage: int) -> Iterator[Out]:
        if stage == 0:
            for i, aval in enumerate(self.batch):
                readers = tuple(s for s in self._readers(-1, i) if s != 0)
                if aval is not None and readers:
                    yield Out(BatchLeaf(i), spec_of(aval), readers)
        for j, y in enumerate(self.interfaces[stage].ys):
            if isinstance(y, tuple):
                name, aval = y
                yield Out(Value(stage, name), spec_of(aval), tuple(self._readers(stage, j)))

    def _readers(self, stage: int, leaf: int) -> Iterator[int]:
        """The stages that read output ``leaf`` of a stage, also through those that pass it on."""
        above = stage + 1
        if above == self.stages:
            if self.sink_reads[leaf]:
                yield above
            return
        interface = self.interfaces[above]
        if interface.reads_x[leaf]:
            yield above
        for output in _passed_on(interface.ys, leaf):
            yield from self._readers(above, output)

    def _backward(self, stage: int) -> Iterator[Out]:
        for i, dx in enumerate(self._input_gradients(stage)):
            if isinstance(dx, tuple):
                name, aval = dx
                source = self._gradient(stage, i, name)
                yield Out(source, spec_of(aval), tuple(self._gradient_readers(stage - 1, i)))

    def _gradient_readers(self, stage: int, leaf: int) -> Iterator[int]:
        """The stages that read the cotangent of output ``leaf`` of a stage, also through others."""
        if stage < 0:
            yield -1
            return
        interface = self.interfaces[stage]
        if interface.reads_dy[leaf]:
            yield stage
        for source in _passed_on(interface.dxs, leaf):
            yield from self._gradient_readers(stage - 1, source)


def _passed_on(leaves: Sequence[Leaf], index: int) -> list[int]:
    """The places of the leaves that are input ``index``, passed on."""
    return [place for place, leaf in enumerate(leaves) if leaf == index]


def _merged(outs: Iterable[Out]) -> tuple[Out, ...]:
    """Each source once, with all its readers."""
    merged: dict[Source, Out] = {}
    for out in outs:
        earlier = merged.get(out.source)
        if earlier is not None:
            out = out._replace(readers=earlier.readers + out.readers)
        merged[out.source] = out
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
