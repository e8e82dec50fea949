"""Where values come from and where they go: the graph that stages make of each other's outputs.

An ``Interface`` is what other ranks must know of a stage: its outputs and input gradients, and which of them are only
passed on. A leaf that a stage passes on unchanged is not relayed: it goes from the rank that made it to those that use
it, and its gradient goes from user to user. This module knows names and ranks, and no program, tensor or action order.

A value's key is ``(stage, microbatch, name)``; stage -1 is the batch, stage S (one past the last) the loss or, where
there is none, the caller.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeAlias

from ..programs.stage_programs import Programs
from ..tree import Aval, Spec

Key: TypeAlias = tuple[int, int, str]


@dataclass(frozen=True)
class Interface:
    """A stage as others see it.

    ``ys[j]`` is ``(name, aval)`` of an output the stage makes, the index of the input it passes on, or ``None`` for a
    leaf that is no tensor (its value is in ``y_static``). ``dxs[i]`` is ``(name, aval)`` of an input gradient, the
    index of the cotangent it passes on, or ``None``. ``takes_x`` and ``takes_dy`` say which leaves its programs read.
    """

    y_spec: Spec
    y_static: tuple[tuple[int, Any], ...]
    ys: tuple[tuple[str, Aval] | int | None, ...]
    dxs: tuple[tuple[str, Aval] | int | None, ...]
    y_avals: tuple[Aval | None, ...]
    takes_x: tuple[bool, ...]
    takes_dy: tuple[bool, ...]
    aux: Aval | None = None
    leaves: tuple[str, ...] = ()  # the paths of the parameters
    state: tuple[Spec | None, tuple[Aval, ...]] = (None, ())

    @classmethod
    def of(cls, programs: Programs, leaves: tuple[str, ...] = ()) -> Interface:
        """The face of programs; ``leaves`` are the paths of the stage's parameters."""
        inputs = {name for program in (programs.f, programs.b, programs.i, programs.w) for name in program.inputs}
        inputs |= {name for name in programs.dps if name is not None}
        x_index = {f"x{i}": i for i in range(programs.counts[1])}
        dy_index = {name: j for j, name in enumerate(programs.dys) if name is not None}
        ys: list[tuple[str, Aval] | int | None] = []
        for name, aval in zip(programs.ys, programs.y_avals, strict=True):
            ys.append(None if name is None or aval is None else x_index.get(name, (name, aval)))
        dxs: list[tuple[str, Aval] | int | None] = []
        for name in programs.dxs:
            dxs.append(
                None if name is None else dy_index[name] if name in dy_index else (name, programs.dx_avals[name])
            )
        takes_x = tuple(f"x{i}" in inputs or f"x{i}" in programs.saved for i in range(programs.counts[1]))
        takes_dy = tuple(name is not None and name in inputs for name in programs.dys)
        static = tuple(sorted(programs.y_static.items()))
        return cls(programs.y_spec, static, tuple(ys), tuple(dxs), programs.y_avals, takes_x, takes_dy,
                   programs.aux_aval, leaves, (programs.state_spec, programs.state_avals))  # fmt: skip


class Out(NamedTuple):
    """A value that a stage gives to others: its key but for the microbatch, its aval, and the stages that read it."""

    stage: int
    name: str
    aval: Aval
    readers: tuple[int, ...]


@dataclass(frozen=True)
class ValueGraph:
    """The value graph of one kind of microbatch: one face per stage, and how many leaves enter and leave."""

    interfaces: tuple[Interface, ...]
    sink_dxs: tuple[tuple[str, Aval] | int | None, ...]  # cotangents of the last outputs, as the sink names them
    sink_takes: tuple[bool, ...]
    batch: tuple[Aval | None, ...]  # of the leaves of x
    _to: dict[tuple[str, int], tuple[Out, ...]] = field(default_factory=dict, compare=False, repr=False)

    @property
    def stages(self) -> int:
        """How many there are."""
        return len(self.interfaces)

    # ---- keys ---------------------------------------------------------------------------------------------------
    def forward(self, stage: int, leaf: int, mb: int) -> Key:
        """Who made output ``leaf`` of ``stage`` (stage -1: the batch)."""
        while stage >= 0:
            source = self.interfaces[stage].ys[leaf]
            if not isinstance(source, int):
                assert source is not None, "a leaf that is no tensor has no key"
                return (stage, mb, source[0])
            stage, leaf = stage - 1, source
        return (-1, mb, f"x{leaf}")

    def cotangent(self, stage: int, leaf: int, mb: int) -> Key | None:
        """Who makes the gradient of output ``leaf`` of ``stage``; ``None``: nobody, it is zero.

        Where the loss passes on what it was given, that is the loss's own cotangent, which every rank is fed.
        """
        while stage < self.stages:
            above = self.sink_dxs if stage == self.stages - 1 else self.interfaces[stage + 1].dxs
            source = above[leaf] if leaf < len(above) else None
            if not isinstance(source, int):
                return None if source is None else (stage + 1, mb, source[0])
            stage, leaf = stage + 1, source
        return (stage, mb, f"dy{leaf}")

    # ---- messages -----------------------------------------------------------------------------------------------
    def users(self, stage: int, fact: str) -> tuple[Out, ...]:
        """What leaves ``stage`` after F ("F") or after I or B ("I").

        What the batch holds leaves with F of stage 0, under the key it has there.
        """
        found = self._to.get((fact, stage))
        if found is None:
            made = self._forward(stage) if fact == "F" else self._backward(stage)
            merged: dict[tuple[int, str], Out] = {}
            for out in made:
                old = merged.get(out[:2])
                merged[out[:2]] = out if old is None else out._replace(readers=old.readers + out.readers)
            found = self._to[fact, stage] = tuple(merged.values())
        return found

    def _forward(self, stage: int) -> Iterator[Out]:
        if stage == 0:
            for i, aval in enumerate(self.batch):
                readers = tuple(s for s in self._readers(-1, i) if s != 0)
                if aval is not None and readers:
                    yield Out(-1, f"x{i}", aval, readers)
        for j, made in enumerate(self.interfaces[stage].ys):
            if isinstance(made, tuple):
                yield Out(stage, *made, tuple(self._readers(stage, j)))

    def _readers(self, stage: int, leaf: int) -> Iterator[int]:
        above = stage + 1
        if above == self.stages:
            if leaf >= len(self.sink_takes) or self.sink_takes[leaf]:
                yield above
            return
        face = self.interfaces[above]
        if face.takes_x[leaf]:
            yield above
        for k, source in enumerate(face.ys):
            if isinstance(source, int) and source == leaf:
                yield from self._readers(above, k)

    def _backward(self, stage: int) -> Iterator[Out]:
        dxs = self.sink_dxs if stage == self.stages else self.interfaces[stage].dxs
        for i, made in enumerate(dxs):
            if isinstance(made, tuple):
                yield Out(stage, *made, tuple(self._takers(stage - 1, i)))

    def _takers(self, stage: int, leaf: int) -> Iterator[int]:
        if stage < 0:
            yield -1
            return
        face = self.interfaces[stage]
        if leaf < len(face.takes_dy) and face.takes_dy[leaf]:
            yield stage
        for i, source in enumerate(face.dxs):
            if isinstance(source, int) and source == leaf:
                yield from self._takers(stage - 1, i)
