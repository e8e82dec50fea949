# SPDX-License-Identifier: Apache-2.0
"""Programs for all sizes of a signature, from one trace with symbols for the sizes that differ.

A ``Family`` is such a trace with the conditions under which it holds. For other sizes its numbers
are computed and put in place of those of the trace: nothing is traced, no Python is compiled. Sizes
for which a condition does not hold get a trace of their own, as everything does that cannot be
traced with symbols. Knows signatures, no schedules or ranks.
"""

from __future__ import annotations

import warnings
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple, TypeAlias

from ... import tree
from ...programs.cache import timed
from ...programs.program import Programs
from ...programs.signature import Signature
from ...programs.tracing import traced
from ...stage import Stage
from ...tree import AbstractTree, Aval, arriving
from ..explain import first_line, where, where_in
from .formulas import Formulas, Numbers, Recorder, at, programs_at
from .symbols import Symbols, products_in_python

#: How many symbolic traces of one function and signature are kept, under different conditions.
KEPT = 8
#: How many earlier sizes decide which sizes differ, and which are equal.
SEEN = 4
#: A stage that cannot be traced with symbols at a smaller size may be at others: one token less may
#: be one token.
SMALL = 4


class Axis(NamedTuple):
    """An axis of an input with a symbol for its size, or for its stride where the memory has
    gaps.
    """

    argument: int
    leaf: int
    axis: int
    stride: bool = False


#: Axes whose size is one symbol.
Axes: TypeAlias = tuple[Axis, ...]


@dataclass(frozen=True, eq=False)
class Family:
    """One trace for many sizes. ``signature`` has the numbers of the trace; ``axes`` are those of
    each symbol.
    """

    signature: Signature
    axes: tuple[Axes, ...]
    formulas: Formulas
    traced: Programs

    def numbers(self, signature: Signature) -> Numbers | None:
        """The numbers of the trace for a signature, if it holds for it."""
        sizes = [{_size(signature, place) for place in axes} for axes in self.axes]
        if any(len(found) != 1 for found in sizes):
            return None
        numbers = self.formulas.at([found.pop() for found in sizes])
        if numbers is None:
            return None
        for mine, given in zip(self.signature[1:], signature[1:], strict=True):
            for leaf, aval in mine.avals.items():
                expected = at(aval, numbers)
                found = given.avals[leaf]
                if expected.shape != found.shape or expected.stride != found.stride:
                    return None
        return numbers


@dataclass(frozen=True)
class Families:
    """The symbolic traces of one function for signatures that differ in sizes alone.

    ``seen`` are the latest signatures, the last of them of an ``occasion``. ``fault`` says why
    there is no symbolic trace, where one was tried.
    """

    families: tuple[Family, ...] = ()
    seen: tuple[Signature, ...] = ()
    occasion: object = None
    fault: str = ""

    def programs(self, label: str, signature: Signature) -> Programs | None:
        """The programs for a signature from a trace that is here."""
        for family in self.families:
            if (numbers := family.numbers(signature)) is not None:
                return programs_at(family.traced, numbers, f"{label} {signature}")
        return None

    def extended(
        self, stage: Stage, signature: Signature, unused: frozenset[int], occasion: object
    ) -> Families:
        """With a symbolic trace that serves a signature, or with the signature among those that get
        their own trace.

        Two sizes of one ``occasion``, such as those of an uneven batch, are not worth a symbolic
        trace.
        """
        saw = replace(self, seen=(*self.seen[1 - SEEN :], signature), occasion=occasion)
        once = len(self.seen) == 1 and occasion is not None and occasion is self.occasion
        if self.fault or (not stage.dynamic and (not self.seen or once)):
            return saw
        varied = _varied(signature, self.seen)
        if any(_size(signature, axes[0]) < 2 for axes in varied):
            return saw
        others = _others(signature, _named_axes(stage, signature), varied)
        faults: list[str] = []
        for axes in dict.fromkeys([(*varied, *others), tuple(varied)]):
            try:
                family = _traced(stage, signature, unused, axes, len(varied)) if axes else None
            # of torch's symbolic shapes, or of the function: a plain trace raises it again
            except Exception as error:
                faults.append(f"{first_line(error.__cause__ or error)}{where(error)}")
            else:
                return (
                    saw
                    if family is None
                    else replace(saw, families=(*self.families[1 - KEPT :], family))
                )
        small = any(_size(signature, axes[0]) < SMALL for axes in varied)
        return saw if small else replace(saw, fault=faults[0])

    def warn(self, stage: Stage) -> None:
        """Warn that every size is traced."""
        warnings.warn(
            f"stage {stage.label} is traced for every new size, since one trace for all sizes is "
            "not possible: "
            f"{self.fault}. Pad its inputs to few sizes (fpipe.pad), or accept it with "
            "fpipe.Stage(fn, dynamic=False)",
            stacklevel=2,
        )


def programs_of(
    store: dict[Hashable, Families],
    key: Hashable,
    first: tuple[Signature, object],
    stage: Stage,
    signature: Signature,
    unused: frozenset[int],
    occasion: object,
) -> Programs:
    """The programs for a signature, of a trace for many sizes where that is possible.

    Args:
        store: the families of a function, by what signatures of equal sizes have in common.
        key: that of this signature.
        first: the first signature with this key, and its occasion.
        stage, signature, unused: see ``tracing.traced``.
        occasion: the same for all signatures of one call.
    """
    seen = () if first[0] is signature else first[:1]
    known = store.get(key, Families(seen=seen, occasion=first[1] if seen else None))
    programs = known.programs(stage.label, signature)
    if programs is not None:
        return programs
    families = store[key] = known.extended(stage, signature, unused, occasion)
    programs = families.programs(stage.label, signature)
    if programs is None:
        with timed("tracing"):
            programs = traced(stage, signature, unused)
    if families.fault and not known.fault:
        families.warn(stage)
    return programs


def _traced(
    stage: Stage, signature: Signature, unused: frozenset[int], axes: Sequence[Axes], varied: int
) -> Family:
    """A trace with a symbol for each group of axes; RuntimeError where it holds for one size of the
    first ones.
    """
    symbols = Symbols()
    given = _with_symbols(signature, axes, symbols)
    sizes = Recorder(symbols)
    with timed("tracing"), products_in_python():
        programs = traced(stage, given, unused, sizes, shown=str(signature))
    family = Family(
        Signature(*(t.with_avals(sizes.aval) for t in given)),
        tuple(axes),
        sizes.formulas(),
        programs,
    )
    place = symbols.fixed(varied)
    if place is not None:
        raise RuntimeError(f"a size is used as a Python number{where_in(place)}")
    if family.numbers(signature) is None:
        raise RuntimeError("its conditions do not hold for the sizes that it was traced with")
    return family


# ---- which sizes are symbols ----
def _size(signature: Signature, place: Axis) -> int:
    aval = signature[place.argument].avals[place.leaf]
    return (aval.stride if place.stride else aval.shape)[place.axis]


def _places(signature: Signature, strides: bool = False) -> list[Axis]:
    """The axes of the input, the side inputs and the state; with ``strides`` also those of tensors
    with gaps.
    """
    leaves = [
        (argument, leaf, aval)
        for argument in (1, 2, 3)
        for leaf, aval in signature[argument].avals.items()
    ]
    places = [
        Axis(argument, leaf, axis)
        for argument, leaf, aval in leaves
        for axis in range(len(aval.shape))
    ]
    gaps = [leaf for leaf in leaves if strides and _has_gaps(leaf[2])]
    return places + [
        Axis(argument, leaf, n, True)
        for argument, leaf, aval in gaps
        for n in range(len(aval.shape))
    ]


def _has_gaps(aval: Aval) -> bool:
    return tuple(aval.stride) != arriving(aval.shape, aval.stride)


def _varied(signature: Signature, seen: Sequence[Signature]) -> list[Axes]:
    """The axes whose size is not what it was; those that were always of one size together."""
    found: dict[tuple[int, ...], list[Axis]] = {}
    for place in _places(signature, strides=True) if seen else ():
        alike = [
            each
            for each in seen
            if not place.stride or _has_gaps(each[place.argument].avals[place.leaf])
        ]
        sizes = tuple(_size(each, place) for each in (*alike, signature))
        if len(set(sizes)) > 1:
            found.setdefault((place.stride, *sizes), []).append(place)
    return list(map(tuple, found.values()))


def _others(signature: Signature, named: Sequence[Axis], varied: Sequence[Axes]) -> list[Axes]:
    """Further axes that may vary: those that the stage names, else the first two of the input,
    and those of side inputs that are of the same size."""
    known = {place for axes in varied for place in axes}
    first = [place for place in _places(signature) if place.argument < 3 and place.axis < 2]
    of_input = {(place.axis, _size(signature, place)) for place in first if place.argument == 1}
    default = [place for place in first if (place.axis, _size(signature, place)) in of_input]
    found: dict[tuple[int, int], list[Axis]] = {}
    for place in named or default:
        if place not in known and _size(signature, place) > 1:
            found.setdefault((place.axis, _size(signature, place)), []).append(place)
    return list(map(tuple, found.values()))


def _named_axes(stage: Stage, signature: Signature) -> list[Axis]:
    """The axes that ``dynamic=`` of a stage names."""
    if not stage.dynamic:
        return []
    first = {1: ("x",), 2: ()}
    paths = {
        g: [".".join(map(str, (*first[g], *path))) for path in signature[g].spec.paths()]
        for g in first
    }
    if isinstance(stage.dynamic, Mapping):
        wanted = list(stage.dynamic.items())
    else:
        wanted = [("*", (0, 1) if stage.dynamic is True else stage.dynamic)]

    def fits(place, pattern):
        return tree.matches(paths[place.argument][place.leaf], [pattern])

    places = [place for place in _places(signature) if place.argument in paths]
    return [
        p for p in places if any(p.axis in axes and fits(p, pattern) for pattern, axes in wanted)
    ]


def _with_symbols(signature: Signature, axes: Sequence[Axes], symbols: Symbols) -> Signature:
    """The signature with a symbol as the size of each group of axes."""
    numbers: dict[Axis, int] = {}
    for group in axes:
        numbers |= dict.fromkeys(group, symbols.new(_size(signature, group[0])))

    def given(argument: int) -> AbstractTree:
        following = iter(signature[argument].avals)
        return signature[argument].with_avals(
            lambda aval: _sized(aval, argument, next(following), numbers)
        )

    return Signature(signature.params, given(1), given(2), given(3))


def _sized(aval: Aval, argument: int, leaf: int, numbers: Mapping[Axis, int]) -> Aval:
    shape = tuple(
        numbers.get(Axis(argument, leaf, axis), size) for axis, size in enumerate(aval.shape)
    )
    if _has_gaps(aval):
        strides = (
            numbers.get(Axis(argument, leaf, n, True), step) for n, step in enumerate(aval.stride)
        )
        return aval._replace(shape=shape, stride=tuple(strides))
    if all(new is old for new, old in zip(shape, aval.shape, strict=True)):
        return aval
    return aval._replace(shape=shape, stride=_strides(aval, shape))


def _strides(aval: Aval, shape: Sequence[int]) -> tuple[int, ...]:
    """The strides of a tensor without gaps, as products of sizes."""
    strides, step = list(aval.stride), 1
    order = sorted(
        range(len(shape)), key=lambda axis: (aval.stride[axis], aval.shape[axis] > 1, -axis)
    )
    for axis in order:
        if aval.stride[axis]:
            strides[axis] = step
            step *= shape[axis]
    return tuple(strides)
