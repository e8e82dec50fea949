# SPDX-License-Identifier: Apache-2.0
"""``Costs``: what actions take in time and memory, and messages in time and bytes. It knows no
schedule.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, fields, replace
from functools import partial
from math import inf, nan
from typing import Any, Literal, NamedTuple, SupportsFloat, TypeAlias

from ..errors import ScheduleError, checked
from .action import AnyAction
from .action_kinds import KINDS

#: One number for all stages, or one for each.
PerStage: TypeAlias = float | Sequence[float] | Mapping[int, float]
#: whose costs a number is
Per: TypeAlias = Literal["stage", "rank"]


class Beside(NamedTuple):
    """What a woven action is expected to take: its time, and what the link carries from its start
    on.
    """

    time: float
    carried: tuple[tuple[float, float, str], ...] = ()  # (start, end, what)


#: From an action, fused or plain, to its time, or None for the time that it would take otherwise.
Predict: TypeAlias = Callable[[AnyAction], "Beside | float | None"]

_OF_STAGE = ("F", "I", "W", "B", "overlap", "saved", "kept")
_OF_BOUNDARY = ("comm", "boundary", "bandwidth", "send", "receive")
#: The costs by name, and for each what there may be one number per.
_ONE_PER = {
    **dict.fromkeys(_OF_STAGE, "stages"),
    **dict.fromkeys(_OF_BOUNDARY, "boundaries between stages"),
    **dict.fromkeys(("load", "size"), "microbatches"),
}
#: Numbers other than 0: sums and quotients of smaller and larger ones are not finite.
_LEAST = 1e-100
_MOST = 1e100
_refuse = partial(ScheduleError, rule="costs")


@checked
@dataclass(frozen=True)
class Costs:
    """What actions cost in time and memory: each cost is one number, or one per stage (a sequence,
    or a mapping from stage to number).

    The simulator, pictures, the solver and ``fpipe plan`` use these costs. ``fpipe.profile`` and
    ``pipe.plan`` return them.

    * **Time.** An action of kind F, I, W or B takes the time of that name.
    * **Messages.** A message between two ranks takes ``comm + boundary / bandwidth``.
    * **Memory.** F stores ``saved``. I frees all of it but ``kept``, and W frees the rest. B frees
      all at once.
    * **Microbatches.** ``load`` and ``size`` give each microbatch a factor. A slice of a microbatch
      has an equal share of its costs.

    Args:
        F: the time of a forward.
        I: the time of the backward that computes the gradient of the stage's input.
        W: the time of the backward that computes the gradients of the stage's parameters.
        B: the time of a backward that computes both; by default I + W.
        overlap: the time of a fused action, by the stage of its first part, or a function of an
            action, as ``pipe.plan(...).costs`` has; by default the sum of its parts.
        comm: the latency of a message. Costs of messages (``comm``, ``boundary``, ``bandwidth``,
            ``send``, ``receive``) are one number, or one for each boundary between two stages.
        boundary: the bytes of a message.
        bandwidth: how many bytes of a message a link carries in a unit of time.
        send: how long a message keeps the sending rank busy, after the action.
        receive: how long a message keeps the receiving rank busy, before the action that needs it.
        saved: the memory that F stores for the backward, in bytes, or in any other unit: the
            default 1.0 counts microbatches.
        kept: the part of ``saved`` that W still needs after I, in the same unit; by default all.
        load: a factor of the times of each microbatch, or of each slice of every microbatch: later
            slices of causal attention take longer.
        size: such factors of the bytes that a microbatch saves, keeps and sends.
        unit: of times, for texts and pictures, such as ``"ms"``.

    Raises:
        ScheduleError: if a cost is not a number, or is negative.

    >>> Costs(F=1, I=[1, 2], W=0.5)
    Costs(F=1.0, I=(1.0, 2.0), W=0.5)
    """

    F: PerStage = 1.0
    I: PerStage = 1.0  # noqa: E741
    W: PerStage = 1.0
    B: PerStage | None = None
    overlap: PerStage | Predict | None = None
    comm: PerStage = 0.0
    boundary: PerStage = 0.0
    bandwidth: PerStage = inf
    send: PerStage = 0.0
    receive: PerStage = 0.0
    saved: PerStage = 1.0
    kept: PerStage | None = None
    load: float | Sequence[float] = 1.0
    size: float | Sequence[float] = 1.0
    unit: str = ""  #: of time, for people

    def __post_init__(self) -> None:
        for name in _ONE_PER:
            object.__setattr__(self, name, _numbers(name, getattr(self, name)))
        if not isinstance(self.unit, str):
            raise _refuse(f"unit={self.unit!r} must be a word, such as 'ms'")

    def __repr__(self) -> str:
        """F, I, W and what differs from its default."""
        values = {f.name: (getattr(self, f.name), f.default) for f in fields(self)}
        shown = (
            f"{name}={value!r}"
            for name, (value, default) in values.items()
            if name in "FIW" or value != default
        )
        return f"Costs({', '.join(shown)})"

    def __str__(self) -> str:
        """As ``repr``, with four digits of each number.

        >>> print(Costs(F=(1 / 3, 2), I=0.5, W=1e-5 / 3))
        Costs(F=(0.3333, 2), I=0.5, W=3.333e-06)
        """
        return re.sub(r"\d+\.\d+(e[+-]\d+)?", lambda found: f"{float(found[0]):.4g}", repr(self))

    # ---- text ----
    @classmethod
    def parse(cls, text: str) -> Costs:
        """From ``name=number`` with commas between; ``name=1:2:1`` gives one number per stage.

        Args:
            text: names of the arguments of ``Costs``, and their values.

        Returns:
            The costs; what is not named has its default.

        Raises:
            ScheduleError: if a name or a number cannot be read.

        >>> Costs.parse("F=1, B=2:3, comm=0.1")
        Costs(F=1.0, I=1.0, W=1.0, B=(2.0, 3.0), comm=0.1)
        """
        values: dict[str, Any] = {}
        for item in filter(None, map(str.strip, text.split(","))):
            name, _, value = (word.strip() for word in item.partition("="))
            if not value or name not in _ONE_PER or name in values:
                why = f"the names are {', '.join(_ONE_PER)}"
                if name in values:
                    why = f"{name} occurs twice"
                raise _refuse(f"{item[:60]!r} is not name=number: {why}")
            try:
                first, *more = map(float, value.split(":"))
            except ValueError:
                raise _refuse(
                    f"{name}={value[:60]} is not a number, nor numbers with ':' between"
                ) from None
            values[name] = (first, *more) if more else first
        return cls(**values)

    def to_json(self) -> str:
        """These costs as JSON, defaults left out.

        Returns:
            The text, which ``from_json`` and the command line read.

        Raises:
            ScheduleError: if ``overlap`` is a function, which has no text.

        >>> Costs(F=2, I=[1, 3]).to_json()
        '{"F": 2.0, "I": [1.0, 3.0]}'
        """
        if callable(self.overlap):
            raise _refuse(
                "costs whose overlap is a function cannot be written as JSON; give overlap as "
                "numbers"
            )
        return json.dumps(
            {f.name: v for f in fields(self) if (v := getattr(self, f.name)) != f.default}
        )

    @classmethod
    def from_json(cls, text: str) -> Costs:
        """The costs that :meth:`to_json` wrote as ``text``.

        Raises:
            ScheduleError: if the text is not such JSON.

        >>> Costs.from_json('{"F": 2, "I": [1, 3]}')
        Costs(F=2.0, I=(1.0, 3.0), W=1.0)
        """
        try:
            values = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise _refuse(f"these costs are not JSON: {error}") from None
        names = (*_ONE_PER, "unit")
        others = [values] if not isinstance(values, dict) else [n for n in values if n not in names]
        if others:
            raise _refuse(
                f"{others[0]!r:.60} is no name of a cost; costs in JSON are an object with some of "
                f"the names {', '.join(names)}"
            )
        return cls(**values)

    # ---- other costs ----
    @property
    def counts(self) -> set[int]:
        """For how many stages there are numbers; empty where all costs are one number.

        >>> Costs(F=[1, 2], saved=3).counts
        {2}
        """
        values = (getattr(self, name) for name in _OF_STAGE)
        return {len(value) for value in values if isinstance(value, tuple)}

    def scaled(self, share: float) -> Costs:
        """The costs of a stage with this share of the work and of the memory; messages as they are.

        Costs with one number per stage are those of stages, and stay as they are.

        Args:
            share: a number, such as a half where these costs are those of two stages.

        >>> Costs(F=2, comm=0.5).scaled(0.5)
        Costs(F=1.0, I=0.5, W=0.5, comm=0.5, saved=0.5)
        >>> Costs(F=[1, 2]).scaled(0.5)
        Costs(F=(1.0, 2.0), I=1.0, W=1.0)
        """
        if self.counts:
            return self
        values = {name: getattr(self, name) for name in _OF_STAGE}
        numbers = {name: n * share for name, n in values.items() if isinstance(n, float)}
        return replace(self, **numbers)

    # ---- by stage ----
    def times(self, stages: int) -> dict[str, tuple[float, ...]]:
        """The times of each kind of action, one for each of ``stages`` stages; those of fused
        actions, ``"overlap"``, only if they are numbers.

        Raises:
            ScheduleError: if a cost is a sequence of another length.

        >>> Costs(I=2).times(2)["B"]
        (3.0, 3.0)
        """
        values = {name: getattr(self, name) for name in (*KINDS, "overlap")}
        times = {
            name: self.spread(name, stages)
            for name, value in values.items()
            if value is not None and not callable(value)
        }
        if "B" not in times:
            times["B"] = tuple(map(sum, zip(times["I"], times["W"], strict=True)))
        return times

    def memory(self, stages: int) -> dict[str, tuple[float, ...]]:
        """The bytes that each kind of action adds to its rank, one number for each of ``stages``
        stages; what it frees is negative.

        Raises:
            ScheduleError: if a cost is a sequence of another length.

        >>> Costs(saved=10, kept=4).memory(1)
        {'F': (10.0,), 'B': (-10.0,), 'I': (-6.0,), 'W': (-4.0,)}
        """
        saved = self.spread("saved", stages)
        kept = saved if self.kept is None else self.spread("kept", stages)
        return {
            op: tuple(kind.saved * s + kind.kept * k for s, k in zip(saved, kept, strict=True))
            for op, kind in KINDS.items()
        }

    def links(self, stages: int, size: float = 1.0) -> tuple[float, ...]:
        """For each boundary, the time from the end of the sending of a message to its arrival, if
        the two stages are on different ranks. ``size`` is the factor of its microbatch.

        >>> Costs(comm=0.5, boundary=[10, 20], bandwidth=10).links(3)
        (1.5, 2.5)
        """
        numbers = (self.spread(name, stages - 1) for name in ("comm", "boundary", "bandwidth"))
        return tuple(
            latency + size * (nbytes / speed)
            for latency, nbytes, speed in zip(*numbers, strict=True)
        )

    def of_units(self, name: str, count: int, slices: int) -> tuple[float, ...]:
        """The factor ``name`` for each of ``count`` microbatches, or slices of microbatches.

        >>> Costs(load=[1, 3]).of_units("load", 4,
        ...     slices=2), Costs(load=[1, 3, 1, 3]).of_units("load", 4, slices=2)
        ((0.5, 0.5, 1.5, 1.5), (0.5, 1.5, 0.5, 1.5))
        """
        value = getattr(self, name)
        whole = slices > 1 and isinstance(value, tuple) and len(value) != count
        factors = self.spread(name, count // slices if whole else count)
        repeats = slices if whole else 1
        return tuple(factor / slices for factor in factors for _ in range(repeats))

    def spread(self, name: str, count: int) -> tuple[float, ...]:
        """The cost ``name`` for each of ``count`` stages, boundaries between stages, or
        microbatches.
        """
        value = getattr(self, name)
        if not isinstance(value, tuple):
            return (value,) * count
        if len(value) != count:
            what = f"{name} has {len(value)} numbers, but there are {count} {_ONE_PER[name]}"
            raise _refuse(f"{what}; give one number, or {count}")
        return value


def _numbers(name: str, value: Any) -> Any:
    """One float or a tuple of them; None only where that is the default; a function for ``overlap``
    as it is.
    """
    if name == "overlap" and callable(value):
        return value
    if value is None and name in ("B", "overlap", "kept"):
        return None
    if isinstance(value, Mapping):
        try:
            value = [value[stage] for stage in range(len(value))]
        except KeyError:
            raise _refuse(
                f"{name} has {list(value)!r:.60}, and must name every stage from 0 on, without "
                "gaps; give one number, or one per stage"
            ) from None
    value = getattr(value, "tolist", lambda: value)()  # an array or a tensor
    if isinstance(value, Sequence) and not isinstance(value, str):
        return tuple(number(name, item) for item in value)
    return number(name, value)


def number(name: str, value: object) -> float:
    """``value`` as a float, or an error that names the cost."""
    result = nan
    if isinstance(value, SupportsFloat):
        with suppress(TypeError, ValueError, OverflowError):
            result = float(value)
    if name == "bandwidth":
        valid = result >= _LEAST
    else:
        valid = result == 0 or _LEAST <= result <= _MOST
    if not valid:
        kind = "above 0" if name == "bandwidth" else "from 0 up"
        if 0 < result < inf:
            kind = f"of at least {_LEAST:g} and at most {_MOST:g}"
        raise _refuse(
            f"{name}: {str(value)[:60]!r} must be a number {kind}; give one number, or one per "
            "stage"
        )
    return result


def as_costs(costs: object, per: Per = "stage", share: float = 1.0) -> Costs:
    """Costs of a stage, the default where there are none, or ScheduleError for another value. With
    ``per="rank"`` they are given for all stages of a rank, of which a stage has this share.

    >>> as_costs(None).F, as_costs(Costs(F=2)).F, as_costs(Costs(F=2), "rank", 0.5).F
    (1.0, 2.0, 1.0)
    """
    if per not in ("stage", "rank"):
        raise _refuse(f"per={per!r}; say whose costs these are: 'stage' or 'rank'")
    if costs is None or isinstance(costs, Costs):
        costs = costs or Costs()
        return costs if per == "stage" else costs.scaled(share)
    raise _refuse(
        f"costs={costs!r:.80}; give fpipe.Costs(F=..., I=..., W=...), with one number or one per "
        "stage"
    )
