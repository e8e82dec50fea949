# SPDX-License-Identifier: Apache-2.0
"""The arguments of one call: checked, flattened, cut into microbatches, and abstracted to a
signature.

Two calls with one signature run the same plans. Knows configurations and batches; no plan and no
register.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, TypeAlias

import torch

from .. import tree
from ..actions.product import feature
from ..generators.forward import forwards_first, forwards_of
from ..programs.internals import ambient
from ..tree import AbstractTree, Structure, Tree
from . import mistakes, side_inputs
from .config import Config
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
        if has_aux or each is not None or loss_scale is not None:
            mistakes.check_call(config.loss is not None, has_aux, each, loss_scale)
        side = dict(side)
        state = side_inputs.states(config, side.pop("state", None)) if config.stateful else None
        if config.loss is None and targets:
            raise mistakes.no_loss_for(targets)
        m = count([x, *targets, *side.values()], config.microbatches)
        k = config.slices
        batch = Parts(x, m, "x", slices=k)
        parts = tuple(Parts(target, m, f"target {i}", slices=k) for i, target in enumerate(targets))
        if k > 1 and not batch.absent:
            mistakes.check_sliced(batch.leaves, k)
        sides = side_inputs.cut(config, side, m) if side else {}
        if any(part.absent for part in (batch, *parts, *sides.values())):
            feature("elsewhere.arguments").check(config, batch, parts, sides)
        if seed is not None:
            mistakes.check_seed(seed)
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

    def abstract(self, part: Parts, m: int, grad: bool = False) -> AbstractTree:
        """A microbatch of an argument, as another process described it where it is elsewhere."""
        if part.absent and part.name in self.offers:
            trees = self.offers[part.name]
            found = trees[m if len(trees) > 1 else 0]
            return found.with_avals(lambda aval: aval._replace(grad=grad and aval.differentiable))
        return AbstractTree.flat(part.specs[m], part.rows[m], grad)

    # ---- its parts ----
    @cached_property
    def side_leaves(self) -> dict[tuple[int, int], list[Any]]:
        """The leaves of the side inputs by stage and microbatch."""
        if not self.sides:
            return {}
        return side_inputs.leaves(self.config.sides, self.sides, self.number)

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
        reduction = config.reduction
        scale = self.loss_scale
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
                    return mistakes.misplaced(name, leaf, group, [*devices.values()])
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
            params = (leaf for leaves, _ in self.leaves.values() for leaf in leaves)
            raise mistakes.without_strides([*params, *self.batch_leaves]) from error

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
        config = self.config
        training = self.mode != "forward"
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
            schedule = forwards_of(schedule, config.schedule)
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
        x = self.abstract(self.x, m, dx)
        targets = tuple(self.abstract(target, m) for target in self.targets)
        takers = range(self.config.stages + 1)
        if not self.sides:
            return x, targets, tuple(AbstractTree.of({}) for _ in takers)
        names = self.config.sides
        abstract = side_inputs.abstract
        sides = tuple(abstract(names[s], self.sides, m, self.offers) for s in takers)
        return x, targets, sides


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
