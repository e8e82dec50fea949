# SPDX-License-Identifier: Apache-2.0
"""The arguments of one call: checked, flattened, cut into microbatches, and abstracted to a
signature.

Two calls with one signature run the same plans. Knows configurations and batches; no plan and no
register.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, TypeAlias

import torch

from .. import tree
from ..actions.product import feature
from ..errors import BatchError, StageError
from ..generators.forward import forwards_first
from ..programs.internals import ambient
from ..tree import AbstractTree, Structure, Tree
from .config import Config, check_seed
from .execute import DEBUGGING
from .parts import Parts, Weights, count
from .request import Kind, Mode, Request

#: A function of a microbatch's number, its output and, where there is a loss, what that returned.
Each: TypeAlias = Callable[..., Any]
LossScale: TypeAlias = float | torch.Tensor | None
#: By stage, the leaves of a tree and its structure.
Flat: TypeAlias = Mapping[int, tuple[list[Any], Structure]]


#: By argument that is elsewhere on some rank: its microbatches in abstract form, or one for all of
#: a whole batch.
Offers: TypeAlias = Mapping[str, tuple[AbstractTree, ...]]


@dataclass(frozen=True)
class Call:
    """One call of a pipeline.

    ``wanted`` are the arguments that are differentiated: 0 for params, 1 for x. ``number`` counts
    the microbatches or, where these have slices, the slices of all of them: here, slices are meant
    where microbatches are written. ``leaves`` and ``state_leaves`` are the parameters and the
    states of the stages of this process. ``offers`` are what other processes said of arguments that
    are elsewhere.
    """

    config: Config
    mode: Mode
    params: Sequence[Tree]
    state: Sequence[Tree] | None
    leaves: Flat
    state_leaves: Flat
    number: int
    x: Parts
    targets: tuple[Parts, ...]
    sides: Mapping[str, Parts]
    seed: int | None = None
    wanted: tuple[int, ...] = (0,)
    has_aux: bool = False
    each: Each | None = None
    loss_scale: LossScale = None
    offers: Offers = field(default_factory=dict)

    @classmethod
    def of(
        cls,
        config: Config,
        mode: Mode,
        params: Sequence[Tree],
        x: Tree,
        targets: Sequence[Tree],
        side: Mapping[str, Tree],
        *,
        seed: int | None = None,
        wanted: tuple[int, ...] = (0,),
        has_aux: bool = False,
        each: Each | None = None,
        loss_scale: LossScale = None,
    ) -> Call:
        """Check the arguments of a call and cut its batch."""
        config.check_params(params)
        _check_options(config, has_aux, each, loss_scale)
        side = dict(side)
        state = _state(config, side.pop("state", None)) if config.stateful else None
        if config.loss is None and targets:
            raise BatchError(
                f"{len(targets)} targets were given, but the pipeline has no loss; say "
                "pipeline(..., loss=)"
            )
        m = count([x, *targets, *side.values()], config.microbatches)
        k = config.slices
        batch = Parts(x, m, "x", slices=k)
        parts = tuple(Parts(target, m, f"target {i}", slices=k) for i, target in enumerate(targets))
        _check_sliced(batch, k)
        _check_sides(config, side)
        sides = {
            name: Parts(value, m, f"side input {name!r}", True, k) for name, value in side.items()
        }
        if any(part.absent for part in (batch, *parts, *sides.values())):
            feature("elsewhere.arguments").check(config, batch, parts, sides)
        check_seed(seed)
        seed = config.seed if seed is None else seed
        leaves = {s: tree.flatten(params[s]) for s in config.here}
        state_leaves = {} if state is None else {s: tree.flatten(state[s]) for s in config.here}
        return cls(
            config,
            mode,
            params,
            state,
            leaves,
            state_leaves,
            m * k,
            batch,
            parts,
            sides,
            seed,
            wanted,
            has_aux,
            each,
            loss_scale,
        )

    @property
    def microbatches(self) -> int:
        """The number of whole microbatches."""
        return self.number // self.config.slices

    @property
    def wants_outputs(self) -> bool:
        """Whether more is wanted than the loss and the gradients of parameters."""
        plain = self.wanted == (0,) and not self.has_aux and self.each is None
        return not plain or self.state is not None or self.config.loss is None

    # ---- what other processes have ----
    @property
    def batch_parts(self) -> tuple[Parts, ...]:
        """The batch, the targets and the side inputs."""
        return (self.x, *self.targets, *self.sides.values())

    @property
    def absent(self) -> list[str]:
        """The arguments that are elsewhere."""
        return [part.name for part in self.batch_parts if part.absent]

    def _abstract(self, part: Parts, m: int, grad: bool = False) -> AbstractTree:
        """A microbatch of an argument, as another process described it where it is elsewhere."""
        if part.absent and part.name in self.offers:
            trees = self.offers[part.name]
            found = trees[m if len(trees) > 1 else 0]
            return found.with_avals(lambda aval: aval._replace(grad=grad and aval.differentiable))
        return AbstractTree.flat(part.specs[m], part.rows[m], grad)

    # ---- its parts ----
    def side_inputs(self, stage: int, mb: int) -> dict[str, Tree]:
        """The side inputs of a stage, or of the loss (one past the last stage), for one
        microbatch.
        """
        return {
            name: self.sides[name].tree(mb)
            for name in self.config.sides[stage]
            if name in self.sides
        }

    @cached_property
    def side_leaves(self) -> dict[tuple[int, int], list[Any]]:
        """The leaves of the side inputs by stage and microbatch."""
        if not self.sides:
            return {}
        takers = [stage for stage, names in enumerate(self.config.sides) if names]
        return {
            (s, m): tree.leaves(self.side_inputs(s, m)) for s in takers for m in range(self.number)
        }

    @property
    def batch_leaves(self) -> list[Any]:
        """The leaves of the batch, the targets, the side inputs and the states."""
        states = [leaf for leaves, _ in self.state_leaves.values() for leaf in leaves]
        return [*states, *(leaf for part in self.batch_parts for leaf in part.leaves)]

    def weights(self) -> Weights | None:
        """The weights of the microbatches' losses; None without a loss, or where only other ranks
        need them.

        Copies of the pipeline communicate here.
        """
        config = self.config
        if config.loss is None or any(part.absent for part in self._weighted):
            return None
        reduction, scale = config.reduction, self.loss_scale
        if isinstance(reduction, str):
            return Weights(1.0 / self.number if reduction == "mean" else 1.0, (), scale)
        weights_of = feature("weighting").weights_of
        each = weights_of(reduction, self.targets, self.sides, self.number, config.copies)
        return Weights(None, each, scale)

    @property
    def _weighted(self) -> list[Parts]:
        """The arguments that the weights of microbatches are computed from."""
        names = getattr(self.config.reduction, "sides", None)
        return (
            []
            if names is None
            else [*self.targets, *(self.sides[name] for name in names if name in self.sides)]
        )

    def misplaced(self) -> str | None:
        """What to say where a value is on a device of no rank here, such as meta, where tensors
        hold no numbers.
        """
        group = self.config.group
        named = [
            (f"the parameters of stage {stage}", leaves)
            for stage, (leaves, _) in self.leaves.items()
        ]
        named += [(p.name, row) for p in self.batch_parts if not p.absent for row in p.rows]
        devices = {group.device(rank).type: group.device(rank) for rank in group.here}
        if "meta" in devices:
            return None
        for name, leaves in named:
            for leaf in filter(tree.is_tensor, leaves):
                if leaf.device.type not in ("cpu", *devices):
                    return (
                        f"a tensor of {name} is on {leaf.device} and rank {group.here[0]} is on "
                        f"{' and '.join(map(str, devices.values()))}; give tensors with numbers "
                        "in them, on the CPU or "
                        "where the rank is"
                    )
        return None

    @property
    def scale(self) -> float | None:
        """The loss scale as a number that ranks can compare; 0 for a tensor on an accelerator."""
        scale = self.loss_scale
        if isinstance(scale, torch.Tensor):
            return scale.item() if scale.device.type == "cpu" else 0.0
        return scale

    # ---- its signature ----
    def signature(self) -> tuple[Any, ...]:
        """Everything that plans depend on, as a key: cheap, since each call computes it."""
        try:
            return self._signature()
        except RuntimeError as error:  # torch has no strides for these
            every = [
                *(leaf for leaves, _ in self.leaves.values() for leaf in leaves),
                *self.batch_leaves,
            ]
            layouts = {str(leaf.layout) for leaf in every if tree.is_tensor(leaf)} - {
                "torch.strided"
            }
            raise BatchError(
                f"an argument has the layout {', '.join(sorted(layouts))}, and a tensor without "
                "strides cannot be an "
                "argument of a stage; give its parts (crow_indices, col_indices and values, "
                "say), or to_dense() of it"
            ) from error

    def _signature(self) -> tuple[Any, ...]:
        structures: list[Any] = []
        every: list[Any] = []
        for leaves, spec in (*self.leaves.values(), *self.state_leaves.values()):
            structures.append(spec)
            every += leaves
        for part in self.batch_parts:
            structures.append(part.structure)
            every += part.leaves
        return (
            self.mode,
            self.wanted,
            self.has_aux,
            self.each is None,
            self.number,
            DEBUGGING.get(),
            ambient(),
            tuple(self.sides),
            tuple(structures),
            tuple(tree.cache_keys(every)),
        )

    def request(self, shares: Any) -> Request:
        """The same in full, for preparing the plans."""
        config, training = self.config, self.mode != "forward"
        params: list[AbstractTree | None] = [None] * config.stages
        states: list[AbstractTree | None] = [None] * config.stages
        layouts: dict[int, Any] = {}
        for stage, (leaves, spec) in self.leaves.items():
            wanted = training and 0 in self.wanted
            trained = config.trained(stage, self.params[stage]) if wanted else [False] * len(leaves)
            if shares is not None:
                leaves, layouts[stage] = shares.seen(
                    stage, self.params[stage], leaves, config.frozen
                )
            params[stage] = AbstractTree.flat(spec, leaves, trained)
        for stage, (leaves, spec) in self.state_leaves.items():
            states[stage] = AbstractTree.flat(spec, leaves)
        dx = training and 1 in self.wanted
        several = any(len(trees) > 1 for trees in self.offers.values())
        uniform = not several and all(part.uniform for part in self.batch_parts)
        schedule = config.schedule_for(self.microbatches)
        chain = schedule.slices if config.carries else 1
        kinds, kind_of = _kinds(
            [self._kind(m, dx) for m in range(chain if uniform else self.number)], chain
        )
        if not training:
            schedule = config.forwards_for(self.microbatches)
        elif self.mode == "vjp":
            schedule = forwards_first(schedule)
        return Request(
            self.mode,
            schedule,
            tuple(params),
            tuple(states),
            tuple(kinds),
            tuple(kind_of * (self.number // chain if uniform else 1)),
            dx,
            layouts,
            self.each is not None,
            self.has_aux,
            DEBUGGING.get(),
            config.identity,
            chain,
        )

    def _kind(self, m: int, dx: bool) -> Kind:
        x = self._abstract(self.x, m, dx)
        targets = tuple(self._abstract(target, m) for target in self.targets)
        return x, targets, tuple(self._abstract_sides(s, m) for s in range(self.config.stages + 1))

    def _abstract_sides(self, stage: int, m: int) -> AbstractTree:
        """The side inputs of a stage, or of the loss, for one microbatch."""
        sides = self.side_inputs(stage, m)
        for name in sides:
            part = self.sides[name]
            if part.absent and part.name in self.offers:
                found = self._abstract(part, m)
                empty = (
                    torch.empty_strided(a.shape, a.stride, dtype=a.dtype, device="meta")
                    for a in found.avals.values()
                )
                sides[name] = found.fill(empty)
        return AbstractTree.of(sides)


# ---- checks ----
def _check_options(config: Config, has_aux: bool, each: Each | None, scale: LossScale) -> None:
    if has_aux and config.loss is None:
        raise BatchError(
            "has_aux=True, but the pipeline has no loss to return it; say pipeline(..., loss=)"
        )
    if each is not None and not callable(each):
        loss = "" if config.loss is None else ", what the loss returned"
        raise BatchError(
            f"each={each!r}; give a function of (the microbatch's number, its output{loss})"
        )
    if scale is None or (isinstance(scale, torch.Tensor) and scale.shape == ()):
        return
    if isinstance(scale, (torch.Tensor, bool)) or not 0 < scale < float("inf"):
        raise BatchError(f"loss_scale={scale!r}; give one number above 0, or a tensor without axes")


def _check_sliced(x: Parts, slices: int) -> None:
    """Raise BatchError where nothing of x is cut: each slice would be the whole."""
    tensors = [leaf for leaf in x.leaves if isinstance(leaf, torch.Tensor)]
    if slices > 1 and not x.absent and all(leaf.dim() < 2 for leaf in tensors):
        raise BatchError(
            f"slices={slices}, but no tensor of x has a second axis, that of the sequence; give "
            "it one, or leave out "
            "slices="
        )


def _state(config: Config, state: Sequence[Tree] | None) -> Sequence[Tree]:
    if state is None:
        return [stage.initial_state for stage in config.functions]
    if not isinstance(state, (list, tuple)) or len(state) != config.stages:
        raise StageError(
            f"state must be a list with one entry for each of the {config.stages} stages, None "
            "where none"
        )
    return state


def _check_sides(config: Config, side: Mapping[str, Tree]) -> None:
    if not side:
        return
    known = {
        name for names in (*config.sides, getattr(config.reduction, "sides", ())) for name in names
    }
    for name in side:
        if name not in known:
            near = difflib.get_close_matches(name, known, 1)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            raise BatchError(
                f"no stage and no loss names a keyword-only argument {name!r}{hint} (they name "
                f"{', '.join(sorted(known)) or 'none'})"
            )


def _kinds(found: Sequence[Kind], chain: int) -> tuple[list[Kind], list[int]]:
    """The kinds of microbatches, and that of each. With a chain, the slices of a microbatch have
    kinds in a row.
    """
    places: dict[tuple[Kind, ...], int] = {}
    kind_of = []
    for first in range(0, len(found), chain):
        group = tuple(found[first : first + chain])
        start = places.setdefault(group, len(places) * chain)
        kind_of += range(start, start + chain)
    return [kind for group in places for kind in group], kind_of
