# SPDX-License-Identifier: Apache-2.0
"""Programs for all sizes of a signature, from one trace with symbols for the sizes that differ.

A ``Family`` is such a trace with the conditions under which it holds. For other sizes its numbers
are computed and put in place of those of the trace: nothing is traced, no Python is compiled. Sizes
for which a condition does not hold get a trace of their own, as everything does that cannot be
traced with symbols. Knows signatures, no schedules or ranks.
"""

from __future__ import annotations

import warnings
from collections import defaultdict
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple, TypeAlias

from ... import tree
from ...programs.cache import timed
from ...programs.program import Programs
from ...programs.signature import Signature
from ...programs.tracing import InexactError, traced
from ...stage import Stage
from ...tree import AbstractTree, Aval, arriving
from ..explain import first_line, where, where_in
from .formulas import Formulas, Numbers, SymbolicSizes, at, operations_of, programs_at
from .symbols import Symbols, products_in_python, seen_as_numbers

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
        symbols = []
        for axes in self.axes:
            size, *others = {_size(signature, place) for place in axes}
            if others:
                return None
            symbols.append(size)
        numbers = self.formulas.at(symbols)
        if numbers is None:
            return None
        for symbolic, given in zip(self.signature[1:], signature[1:], strict=True):
            for leaf, aval in given.avals.items():
                expected = at(symbolic.avals[leaf], numbers)
                if expected.shape != aval.shape or expected.stride != aval.stride:
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

    def programs(self, signature: Signature) -> Programs | None:
        """The programs for a signature from a trace that is here."""
        for family in self.families:
            if (numbers := family.numbers(signature)) is not None:
                return programs_at(family.traced, numbers, signature)
        return None

    def extended(
        self,
        stage: Stage,
        signature: Signature,
        unused: frozenset[int],
        occasion: object,
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
        others = _others(stage, signature, varied)
        faults: list[str] = []
        for axes in dict.fromkeys([(*varied, *others), tuple(varied)]):
            if not axes:
                return saw
            try:
                family = _traced(stage, signature, unused, axes, len(varied))
            # of torch's symbolic shapes, or of the function: a plain trace raises it again
            except Exception as error:
                faults.append(f"{first_line(error.__cause__ or error)}{where(error)}")
                if isinstance(error, InexactError):  # other sizes may not show it
                    return replace(saw, fault=faults[-1])
            else:
                return replace(saw, families=(*self.families[1 - KEPT :], family))
        if any(_size(signature, axes[0]) < SMALL for axes in varied):
            return saw
        return replace(saw, fault=faults[0])

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
    before = Families()
    if first[0] is not signature:
        before = Families(seen=first[:1], occasion=first[1])
    before = store.get(key, before)
    programs = before.programs(signature)
    if programs is not None:
        return programs
    families = store[key] = before.extended(stage, signature, unused, occasion)
    programs = families.programs(signature)
    if programs is None:
        with timed("tracing"):
            programs = traced(stage, signature, unused)
    if families.fault and not before.fault:
        families.warn(stage)
    return programs


def _traced(
    stage: Stage,
    signature: Signature,
    unused: frozenset[int],
    axes: Sequence[Axes],
    varied: int,
) -> Family:
    """A trace with a symbol for each group of axes; RuntimeError where it holds for one size of the
    first ones, and InexactError where its operations are not those of a trace of this size.
    """
    symbols = Symbols()
    given = _with_symbols(signature, axes, symbols)
    sizes = SymbolicSizes(symbols)
    with timed("tracing"), products_in_python(), seen_as_numbers():
        programs = traced(stage, given, unused, sizes, shown=str(signature))
    numbered = Signature(*(t.with_avals(sizes.aval) for t in given))
    family = Family(numbered, tuple(axes), sizes.formulas(), programs)
    place = symbols.fixed(varied)
    if place is not None:
        raise RuntimeError(f"a size is used as a Python number{where_in(place)}")
    numbers = family.numbers(signature)
    if numbers is None:
        raise RuntimeError("its conditions do not hold for the sizes that it was traced with")
    with timed("tracing"):
        plain = traced(stage, signature, unused)
    if operations_of(programs_at(programs, numbers, signature)) != operations_of(plain):
        raise InexactError(
            "it computes something else where sizes are symbols; it may ask for the type of a "
            "size, as isinstance(n, int) does"
        )
    return family


# ---- which sizes are symbols ----
def _size(signature: Signature, place: Axis) -> int:
    aval = signature[place.argument].avals[place.leaf]
    numbers = aval.stride if place.stride else aval.shape
    return numbers[place.axis]


def _places(signature: Signature, strides: bool = False) -> list[Axis]:
    """The axes of the input, the side inputs and the state; with ``strides`` also those of tensors
    with gaps.
    """
    places = []
    for argument in (1, 2, 3):
        for leaf, aval in signature[argument].avals.items():
            kinds = (False, True) if strides and _has_gaps(aval) else (False,)
            for stride in kinds:
                places += [Axis(argument, leaf, n, stride) for n in range(len(aval.shape))]
    return places


def _has_gaps(aval: Aval) -> bool:
    return tuple(aval.stride) != arriving(aval.shape, aval.stride)


def _varied(signature: Signature, seen: Sequence[Signature]) -> list[Axes]:
    """The axes whose size is not what it was; those that were always of one size together."""
    groups = defaultdict[tuple[int, ...], list[Axis]](list)
    for place in _places(signature, strides=True) if seen else ():
        before = seen
        if place.stride:
            before = [each for each in seen if _has_gaps(each[place.argument].avals[place.leaf])]
        sizes = tuple(_size(each, place) for each in (*before, signature))
        if len(set(sizes)) > 1:
            groups[place.stride, *sizes].append(place)
    return list(map(tuple, groups.values()))


def _others(stage: Stage, signature: Signature, varied: Sequence[Axes]) -> list[Axes]:
    """Further axes that may vary: those that the stage names, else the first two of the input,
    and those of side inputs that are of the same size."""
    places = [place for place in _places(signature) if place.argument < 3]
    sizes = {place: (place.axis, _size(signature, place)) for place in places}
    chosen = _named(stage, signature, places)
    if not chosen:
        of_input = {sizes[place] for place in places if place.argument == 1 and place.axis < 2}
        chosen = [place for place in places if sizes[place] in of_input]
    rest = set(chosen).difference(*varied)
    groups = defaultdict[tuple[int, int], list[Axis]](list)
    for place in chosen:
        if place in rest and sizes[place][1] > 1:
            groups[sizes[place]].append(place)
    return list(map(tuple, groups.values()))


def _named(stage: Stage, signature: Signature, places: Sequence[Axis]) -> list[Axis]:
    """The axes that ``dynamic=`` of a stage names."""
    axes = (0, 1) if stage.dynamic is True else stage.dynamic or ()
    patterns = axes if isinstance(axes, Mapping) else {"*": axes}
    paths = {
        1: [("x", *path) for path in signature.x.structure.paths()],
        2: signature.side.structure.paths(),
    }
    named = []
    for place in places:
        path = ".".join(map(str, paths[place.argument][place.leaf]))
        fitting = [axes for pattern, axes in patterns.items() if tree.matches(path, [pattern])]
        if any(place.axis in axes for axes in fitting):
            named.append(place)
    return named


def _with_symbols(signature: Signature, axes: Sequence[Axes], symbols: Symbols) -> Signature:
    """The signature with a symbol as the size of each group of axes."""
    numbers: dict[Axis, int] = {}
    for group in axes:
        numbers |= dict.fromkeys(group, symbols.new(_size(signature, group[0])))

    def given(argument: int) -> AbstractTree:
        leaves = iter(signature[argument].avals)

        def sized(aval: Aval) -> Aval:
            first = Axis(argument, next(leaves), 0)
            shape = [numbers.get(first._replace(axis=n), size) for n, size in enumerate(aval.shape)]
            if _has_gaps(aval):
                steps = [first._replace(axis=n, stride=True) for n in range(len(shape))]
                stride = list(map(numbers.get, steps, aval.stride))
            elif all(new is old for new, old in zip(shape, aval.shape, strict=True)):
                return aval
            else:
                stride = _strides(aval, shape)
            return aval._replace(shape=tuple(shape), stride=tuple(stride))

        return signature[argument].with_avals(sized)

    return Signature(signature.params, given(1), given(2), given(3))


def _strides(aval: Aval, shape: Sequence[int]) -> list[int]:
    """The strides of a tensor without gaps, as products of sizes."""
    strides = list(aval.stride)
    inner_first = sorted(
        range(len(shape)), key=lambda axis: (aval.stride[axis], aval.shape[axis] > 1, -axis)
    )
    step = 1
    for axis in inner_first:
        if aval.stride[axis]:
            strides[axis] = step
            step *= shape[axis]
    return strides
