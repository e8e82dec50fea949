"""What goes into the registers before a run: parameters, microbatches, weights, cotangents."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import chain
from typing import Any

import torch

from .. import tree
from ..collectives.group import Group
from ..errors import BatchError
from ..plans.keys import BatchLeaf, OutputCotangent, Param, Seed, Side, State, Target
from ..plans.plan import Plan
from ..plans.sharding import Copies
from ..stage import keyword_only
from .microbatches import Parts
from .prepare import Resolved
from .registers import Registers


class Weighted:
    """A reduction that weighs each microbatch's loss; see ``weighted``."""

    def __init__(self, fn: Callable[..., Any]):
        self.fn, self.sides = fn, keyword_only(fn)

    def __repr__(self) -> str:
        return "fpipe.weighted(...)"


def weighted(fn: Callable[..., Any]) -> Weighted:
    """Weigh each microbatch's mean loss by ``fn(*targets)`` over the sum of all, known before the first backward.

    With copies of the pipeline (``dp=``) the sum is that of all copies. Keyword-only arguments are side inputs.

    >>> weighted(lambda target: (target >= 0).sum()).fn(torch.tensor([1, -1]))
    tensor(1)
    """
    return Weighted(fn)


@dataclass(frozen=True)
class Weights:
    """The weight of each microbatch's loss: one number for all, or a tensor each; gradients are ``scaled`` besides."""

    number: float | None
    each: Sequence[torch.Tensor] = ()
    scaled: float | torch.Tensor | None = None

    def scale(self, mb: int, like: torch.Tensor) -> Any:
        """What to multiply a microbatch's loss with."""
        return self.number if self.number is not None else self.each[mb].to(like.dtype)

    def seed(self, mb: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """The cotangent of a microbatch's loss."""
        weight = self.number if self.number is not None else self.each[mb]
        weight = weight if self.scaled is None else weight * self.scaled
        return weight.to(device, dtype) if isinstance(weight, torch.Tensor) else _constant(weight, dtype, device)


@lru_cache(maxsize=256)
def _constant(number: float, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    return torch.tensor(number, dtype=dtype, device=device)


def weights(
    reduction: Any, targets: Sequence[Parts], number: int, copies: Copies | None = None,
    sides: Mapping[str, Parts] | None = None,
) -> Weights:  # fmt: skip
    """Weights by a reduction: known before the first backward, so the cut of the batch does not matter.

    Where there are copies of the pipeline, a mean over them follows by itself; the weights of all count in the total.
    """
    if reduction == "mean":
        return Weights(1.0 / number)
    if reduction == "sum":
        return Weights(1.0)
    named = {name: part for name, part in (sides or {}).items() if name in reduction.sides}
    counts = [
        torch.as_tensor(reduction.fn(*(t.tree(m) for t in targets), **{n: part.tree(m) for n, part in named.items()}))
        for m in range(number)
    ]
    for m, value in enumerate(counts):
        if value.numel() != 1:
            raise BatchError(
                f"fpipe.weighted's function gave a tensor of shape {list(value.shape)} for microbatch {m}; "
                "it must give one number a microbatch, such as its count of tokens"
            )
    exact = [value.detach().reshape(()).to(torch.float64) for value in counts]
    total = torch.stack(exact).sum()
    if copies is not None:
        total = copies.total(total)
    total = torch.where(total == 0, torch.ones_like(total), total)
    return Weights(None, [value / total for value in exact])


@dataclass(frozen=True)
class Values:
    """Flat leaves of everything that a call was given."""

    params: Mapping[int, Sequence[Any]]
    states: Mapping[int, Sequence[Any]]
    x: Parts
    targets: Sequence[Parts]
    sides: Mapping[tuple[int, int], Sequence[Any]]  # by stage and microbatch
    weights: Weights | None


def check_devices(group: Group, values: Values, sides: Iterable[Parts]) -> bool:
    """Raise where values are on a device of none of the ranks here, such as meta, where there are no numbers."""
    given = [(f"the parameters of stage {stage}", leaves) for stage, leaves in values.params.items()]
    given += [(part.name, row) for part in (values.x, *values.targets, *sides) for row in part.rows]
    devices = {group.device(rank).type: group.device(rank) for rank in group.here}
    for name, leaves in given:
        for leaf in filter(tree.is_tensor, leaves):
            if leaf.device.type not in ("cpu", *devices) and "meta" not in devices:
                there = " and ".join(map(str, devices.values()))
                raise BatchError(
                    f"a tensor of {name} is on {leaf.device} and rank {group.here[0]} is on {there}; give tensors with "
                    "numbers in them, on the CPU or where the rank is"
                )
    return True


class Feeder:
    """Where each fed value of a plan comes from, read off its keys once."""

    def __init__(self, plan: Plan, resolved: Resolved, device: torch.device):
        self.device = device
        self.move = device.type != "cpu"
        self.params: list[tuple[int, int, int]] = []
        self.states: list[tuple[int, int, int]] = []
        self.x: list[tuple[int, int, int]] = []
        self.targets: dict[int, list[tuple[int, int, int]]] = {}
        self.sides: list[tuple[int, int, int, int]] = []
        self.seeds: dict[torch.dtype, list[tuple[int, int]]] = {}
        self.cotangents: list[tuple[int, int, int]] = []
        for key, slot in plan.feeds.items():
            match key:
                case (Param(stage, leaf), None):
                    self.params.append((slot, stage, leaf))
                case (State(stage, leaf), None):
                    self.states.append((slot, stage, leaf))
                case (Side(stage, leaf), int(mb)):
                    self.sides.append((slot, stage, mb, leaf))
                case (BatchLeaf(leaf), int(mb)):
                    self.x.append((slot, mb, leaf))
                case (Target(leaf), int(mb)):
                    which, place = _target(resolved, mb, leaf)
                    self.targets.setdefault(which, []).append((slot, mb, place))
                case (OutputCotangent(leaf), int(mb)):
                    self.cotangents.append((slot, mb, leaf))
                case (Seed(stage), int(mb)):
                    self.seeds.setdefault(_seed_dtype(resolved, stage, mb), []).append((slot, mb))
                case _:
                    raise AssertionError(f"no value is fed under {key}")

    def fill(self, r: Registers, values: Values) -> None:
        """Lay a call's values into the registers."""
        slots = r.slots
        for slot, stage, index in self.params:
            slots[slot] = values.params[stage][index].detach()
        for slot, stage, index in self.states:
            slots[slot] = values.states[stage][index]
        if self.x:
            rows = values.x.rows
            for slot, mb, index in self.x:
                slots[slot] = rows[mb][index]
        for which, places in self.targets.items():
            rows = values.targets[which].rows
            for slot, mb, index in places:
                slots[slot] = rows[mb][index]
        for slot, stage, mb, index in self.sides:
            slots[slot] = values.sides[stage, mb][index]
        if values.weights is not None:
            self._seed(slots, values.weights)
        if self.move:
            fed = (self.params, self.states, self.x, *self.targets.values(), self.sides)
            for slot, *_ in chain.from_iterable(fed):
                if isinstance(slots[slot], torch.Tensor):
                    slots[slot] = slots[slot].to(self.device, non_blocking=True)

    def _seed(self, slots: list[Any], weights: Weights) -> None:
        """The cotangents of the losses: one for all where one number weighs them all."""
        for dtype, places in self.seeds.items():
            common = None if weights.number is None else weights.seed(0, dtype, self.device)
            for slot, mb in places:
                slots[slot] = weights.seed(mb, dtype, self.device) if common is None else common

    def fill_cotangents(self, r: Registers, cotangents: Sequence[Sequence[Any]]) -> None:
        """Lay the outputs' cotangents into the registers."""
        for slot, mb, index in self.cotangents:
            r.slots[slot] = cotangents[mb][index].detach().to(self.device)


def _target(resolved: Resolved, mb: int, index: int) -> tuple[int, int]:
    """The target that a leaf of all targets belongs to, for a microbatch, and its place in that target."""
    kind = resolved.request.kind_of[mb]
    for which, target in enumerate(resolved.request.kinds[kind][1]):
        if index < len(target.leaves):
            return which, index
        index -= len(target.leaves)
    raise AssertionError("the loss reads a leaf that no target has")


def _seed_dtype(resolved: Resolved, stage: int, mb: int) -> torch.dtype:
    kind = resolved.request.kind_of[mb]
    if stage == resolved.request.schedule.stages:
        loss = resolved.loss[kind]
        assert loss is not None and loss.y_avals[0] is not None
        return loss.y_avals[0].dtype
    rank = next(iter(r for r in resolved.job if stage in resolved.job[r].kinds[kind].programs))
    aux = resolved.job[rank].kinds[kind].programs[stage].daux
    assert aux is not None
    return aux.dtype
