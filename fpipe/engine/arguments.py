# SPDX-License-Identifier: Apache-2.0
"""The arguments of one call: checked, flattened, cut into microbatches, and abstracted to a
signature.

Two calls with one signature run the same plans. Knows configurations and batches; no plan and no
register.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, TypeAlias

from .. import tree
from ..actions.product import load_pass
from ..errors import BatchError
from ..generators.forward import forwards_first, forwards_of
from ..programs.internals import surroundings
from ..tree import AbstractTree, Structure, Tree
from . import mistakes, side_inputs
from .config import Config
from .execute import DEBUGGING
from .parts import Parts, Weights, count
from .request import MicrobatchKind, Mode, Request
from .signatures import LossScale

#: A function of a microbatch's number, its output and, where there is a loss, what that returned.
Each: TypeAlias = Callable[..., Any]
#: A tree for each stage: its leaves and its structure.
Flat: TypeAlias = Mapping[int, tuple[list[Any], Structure]]


@dataclass(frozen=True)
class Call:
    """One call of a pipeline: its arguments, checked.

    ``argnums`` are the arguments that are differentiated: 0 for params, 1 for x. ``units`` counts
    the microbatches, or all their slices where they have some; "microbatch" then means a slice in
    this class. ``leaves`` and ``state_leaves`` are the parameters and the states of the stages of
    this process.
    """

    config: Config
    mode: Mode
    params: Sequence[Tree]
    state: Sequence[Tree] | None
    leaves: Flat
    state_leaves: Flat
    units: int
    x: Parts
    targets: tuple[Parts, ...]
    sides: Mapping[str, Parts]
    seed: int | None
    argnums: tuple[int, ...]
    has_aux: bool
    each: Each | None
    loss_scale: LossScale

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
        argnums: tuple[int, ...] = (0,),
        has_aux: bool = False,
        each: Each | None = None,
        loss_scale: LossScale = None,
    ) -> Call:
        """Check the arguments of a call, and cut its batch into microbatches."""
        config.check_params(params)
        if has_aux or each is not None or loss_scale is not None:
            mistakes.check_call(config.loss is not None, has_aux, each, loss_scale)
        side = dict(side)
        state = side_inputs.states(config, side.pop("state", None)) if config.stateful else None
        if config.loss is None and targets:
            raise BatchError(
                f"{len(targets)} targets were given, but the pipeline has no loss; say "
                "pipeline(..., loss=)"
            )
        microbatches = count([x, *targets, *side.values()], config.microbatches)
        slices = config.slices
        x_parts = Parts(x, microbatches, "x", slices=slices)
        target_parts = [
            Parts(target, microbatches, f"target {i}", slices=slices)
            for i, target in enumerate(targets)
        ]
        if slices > 1 and not x_parts.absent:
            mistakes.check_sliced(x_parts.leaves, slices)
        sides = side_inputs.cut(config, side, microbatches) if side else {}
        every = (x_parts, *target_parts, *sides.values())
        if len(set[int]().union(*[part.lengths for part in every])) > 1:
            mistakes.check_rows({part.name: part.lengths for part in every})
        if any(part.absent for part in every):
            load_pass("elsewhere.arguments").check(config, x_parts, target_parts, sides)
        if any(part.late for part in every):
            cls = load_pass("late").LateCall
        if seed is None:
            seed = config.seed
        else:
            mistakes.check_seed(seed)
        leaves = {s: tree.flatten(params[s]) for s in config.here}
        state_leaves = {} if state is None else {s: tree.flatten(state[s]) for s in config.here}
        return cls(
            config,
            mode,
            params,
            state,
            leaves,
            state_leaves,
            microbatches * slices,
            x_parts,
            tuple(target_parts),
            sides,
            seed,
            argnums,
            has_aux,
            each,
            loss_scale,
        )

    @property
    def microbatches(self) -> int:
        """The number of whole microbatches."""
        return self.units // self.config.slices

    # ---- the parts of the batch ----
    @property
    def batch_parts(self) -> tuple[Parts, ...]:
        """The batch, the targets and the side inputs."""
        return (self.x, *self.targets, *self.sides.values())

    @property
    def absent(self) -> list[str]:
        """The names of the arguments that are elsewhere."""
        return [part.name for part in self.batch_parts if part.absent]

    @cached_property
    def side_leaves(self) -> dict[tuple[int, int], list[Any]]:
        """The leaves of the side inputs, by stage and microbatch."""
        if not self.sides:
            return {}
        return side_inputs.leaves(self.config.sides, self.sides, self.units)

    @property
    def batch_leaves(self) -> list[Any]:
        """The leaves of the states, the batch, the targets and the side inputs."""
        states = [leaf for leaves, _ in self.state_leaves.values() for leaf in leaves]
        return [*states, *(leaf for part in self.batch_parts for leaf in part.leaves)]

    # ---- the loss ----
    def weights(self) -> Weights | None:
        """Compute the weights of the microbatches' losses; copies of the pipeline communicate.

        Returns None without a loss, or where only other ranks need the weights.
        """
        config = self.config
        if config.loss is None:
            return None
        reduction = config.reduction
        if reduction == "mean":
            return Weights(1.0 / self.units, (), self.loss_scale)
        if reduction == "sum":
            return Weights(1.0, (), self.loss_scale)
        sides = side_inputs.of_stage(reduction.sides, self.sides)
        if any(part.absent for part in (*self.targets, *sides.values())):
            return None
        weights_of = load_pass("weighting").weights_of
        weights = weights_of(reduction, self.targets, sides, self.units, config.copies)
        return Weights(None, weights, self.loss_scale)

    # ---- devices ----
    def misplaced(self) -> str | None:
        """Explain which tensor is on a device that no rank of this process can read.

        Ranks read tensors on the CPU and on their own device. Returns None if all are there.
        """
        group = self.config.group
        devices = {group.device(rank).type: group.device(rank) for rank in group.here}
        if "meta" in devices:
            return None
        arguments = [(f"the parameters of stage {s}", flat[0]) for s, flat in self.leaves.items()]
        arguments += [(part.name, part.leaves) for part in self.batch_parts if not part.absent]
        for name, leaves in arguments:
            for leaf in filter(tree.is_tensor, leaves):
                if leaf.device.type not in ("cpu", *devices):
                    return mistakes.misplaced(name, leaf, group, [*devices.values()])
        return None

    # ---- the signature ----
    def signature(self) -> tuple[Any, ...]:
        """Everything that plans depend on, as a key of a cache.

        Every call computes it, so it must be cheap.
        """
        structures: list[Any] = []
        all_leaves: list[Any] = []
        for leaves, structure in (*self.leaves.values(), *self.state_leaves.values()):
            structures.append(structure)
            all_leaves += leaves
        for part in self.batch_parts:
            structures.append(part.structure)
            all_leaves += part.leaves
        try:
            keys = tuple(tree.cache_keys(all_leaves))
        except RuntimeError as error:  # torch has no strides for these
            raise mistakes.without_strides(all_leaves) from error
        return (
            self.mode,
            self.argnums,
            self.has_aux,
            self.each is None,
            self.units,
            DEBUGGING.get(),
            surroundings(),
            tuple(self.sides),
            tuple(structures),
            keys,
        )

    def request(self, shares: Any) -> Request:
        """What the plans of this signature depend on, in full.

        ``shares`` are the shards of parameters that copies of the pipeline hold.
        """
        config = self.config
        training = self.mode != "forward"
        params: list[AbstractTree | None] = [None] * config.stages
        states: list[AbstractTree | None] = [None] * config.stages
        layouts: dict[int, Any] = {}
        for stage, (leaves, structure) in self.leaves.items():
            passed = self.params[stage]
            trained = [False] * len(leaves)
            if training and 0 in self.argnums:
                trained = config.trained(stage, passed)
            for leaf, wanted in zip(leaves, trained, strict=True):
                if tree.is_tensor(leaf) and (leaf.is_sparse or (wanted and tree.is_float8(leaf))):
                    raise mistakes.untrainable(stage, leaf)
            if shares is not None:
                leaves, layouts[stage] = shares.seen(stage, passed, leaves, config.frozen)
            params[stage] = AbstractTree.flat(structure, leaves, trained)
        for stage, (leaves, structure) in self.state_leaves.items():
            states[stage] = AbstractTree.flat(structure, leaves)
        wants_dx = training and 1 in self.argnums
        schedule = config.schedule_for(self.microbatches)
        chain = schedule.slices if config.carries else 1
        kinds, kind_of = self._kinds(wants_dx, chain)
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
            tuple(kind_of),
            wants_dx,
            layouts,
            self.each is not None,
            self.has_aux,
            DEBUGGING.get(),
            config.pipeline_id,
            chain,
        )

    def _kinds(self, wants_dx: bool, chain: int) -> tuple[list[MicrobatchKind], list[int]]:
        """The kinds of microbatches, and the number of each microbatch's kind.

        A chain is the slices of one microbatch, of which each passes a carry to the next. Its kinds
        have consecutive numbers. Without carries a chain is one slice or microbatch.
        """
        if all(part.uniform and len(part.descriptions) < 2 for part in self.batch_parts):
            kinds = [self._kind(m, wants_dx) for m in range(chain)]
            return kinds, [*range(chain)] * (self.units // chain)
        first_numbers: dict[tuple[MicrobatchKind, ...], int] = {}
        kind_of: list[int] = []
        for start in range(0, self.units, chain):
            kinds = tuple(self._kind(m, wants_dx) for m in range(start, start + chain))
            first = first_numbers.setdefault(kinds, len(first_numbers) * chain)
            kind_of += range(first, first + chain)
        return [kind for kinds in first_numbers for kind in kinds], kind_of

    def _kind(self, m: int, wants_dx: bool) -> MicrobatchKind:
        x = self.x.abstract(m, wants_dx)
        targets = tuple(target.abstract(m) for target in self.targets)
        readers = range(self.config.stages + 1)
        if not self.sides:
            return MicrobatchKind(x, targets, tuple(AbstractTree.of({}) for _ in readers))
        names = self.config.sides
        sides = tuple(side_inputs.abstract(names[s], self.sides, m) for s in readers)
        return MicrobatchKind(x, targets, sides)
