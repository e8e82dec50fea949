"""One call of a pipeline: its arguments cut into microbatches, laid into registers, run, and gathered.

The warm path is here: abstract the arguments, look the plans up, feed, drive, collect. Nothing is kept between calls
but the pipeline's cache of plans.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from .. import tree
from ..errors import BatchError, StageError
from ..plans.sharding import Layout
from ..programs.autocast import ambient, without_autocast
from ..tree import AbstractTree, matches
from .debugging import check, check_leaks, debugging
from .feed import Feeder, Values, check_devices, weights
from .loop import drive, execute
from .microbatches import Microbatches, Parts, count, merge, split
from .prepare import Request, Resolved, resolve
from .registers import Registers
from .results import Results, collect, output_tree
from .scalars import added

if TYPE_CHECKING:
    from .pipeline import Pipeline

#: Names that a call keeps for itself.
RESERVED = frozenset({"seed", "each", "has_aux", "loss_scale"})
#: How many signatures a pipeline keeps plans of; those of the least recent calls go.
KEPT = 128


class Call:
    """The arguments of one call, and what can be done with them."""

    def __init__(
        self, pipe: Pipeline, params: Any, x: Any, targets: Sequence[Any], side: dict[str, Any], *, mode: str,
        seed: int | None = None, wanted: tuple[int, ...] = (0,), has_aux: bool = False,
        each: Callable[[int, Any], Any] | None = None, loss_scale: float | torch.Tensor | None = None,
    ):  # fmt: skip
        pipe.check_params(params)
        self.pipe, self.params, self.mode, self.wanted, self.has_aux = pipe, params, mode, wanted, has_aux
        self.each, self.loss_scale = each, loss_scale
        self.told: dict[int, Any] = {}  # what ``each`` returned, by microbatch
        self._check_options()
        self.seed = pipe.seed if seed is None else seed
        side = dict(side)
        stateful = any(stage.state for stage in pipe.functions)
        self.state = side.pop("state", None) if stateful else None
        if stateful and self.state is None:
            self.state = [stage.initial_state for stage in pipe.functions]
        if stateful and (not isinstance(self.state, (list, tuple)) or len(self.state) != pipe.stages):
            raise StageError(
                f"state must be a list with one entry for each of the {pipe.stages} stages, None where none"
            )
        self._check_targets(targets)
        self.number = m = count([x, *targets, *side.values()], pipe.microbatches)
        self.whole = not isinstance(x, Microbatches)
        self.x = Parts(x, m, "x")
        self.targets = [Parts(t, m, f"target {i}") for i, t in enumerate(targets)]
        self._check_sides(side)
        self.sides = {name: Parts(value, m, f"side input {name!r}", True) for name, value in side.items()}
        self.leaves = {s: tree.flatten(params[s]) for s in pipe.here}
        self.state_leaves = {} if self.state is None else {s: tree.flatten(self.state[s]) for s in pipe.here}

    def _check_options(self) -> None:
        each, scale = self.each, self.loss_scale
        if self.has_aux and self.pipe.loss is None:
            raise BatchError("has_aux=True, but the pipeline has no loss to return it; say pipeline(..., loss=)")
        if each is not None and self.pipe.loss is not None:
            raise BatchError(
                "each= gets the outputs of a pipeline without a loss; leave loss= out, or let the loss return what you "
                "want beside the scalar and say has_aux=True"
            )
        if each is not None and not callable(each):
            raise BatchError(f"each={each!r}; give a function of (the microbatch's number, its output)")
        if scale is None or (isinstance(scale, torch.Tensor) and scale.shape == ()):
            return
        if isinstance(scale, (torch.Tensor, bool)) or not 0 < scale < float("inf"):
            raise BatchError(f"loss_scale={scale!r}; give one number above 0, or a tensor without axes")

    def _check_targets(self, targets: Sequence[Any]) -> None:
        if self.pipe.loss is None and targets:
            raise BatchError(
                f"{len(targets)} targets were given, but the pipeline has no loss; say pipeline(..., loss=)"
            )

    def _check_sides(self, side: dict[str, Any]) -> None:
        known = {name for names in (*self.pipe.sides, getattr(self.pipe.reduction, "sides", ())) for name in names}
        for name in side:
            if name not in known:
                near = difflib.get_close_matches(name, known, 1)
                hint = f"; did you mean {near[0]!r}?" if near else ""
                raise BatchError(
                    f"no stage and no loss names a keyword-only argument {name!r}{hint} (they name "
                    f"{', '.join(sorted(known)) or 'none'})"
                )

    def _sides(self, stage: int, mb: int) -> dict[str, Any]:
        """The side inputs of a stage, or of the loss (stage -1), for one microbatch."""
        return {n: self.sides[n].tree(mb) for n in self.pipe.sides[stage] if n in self.sides}

    # ---- the plans ----------------------------------------------------------------------------------------------
    def resolved(self) -> Resolved:
        """The plans for this call, made at its first of this signature."""
        debug = self.pipe.debugging or debugging()
        key = (
            self.mode, self.wanted, self.has_aux, self.each is None, self.number, debug, ambient(),
            tuple((spec, *map(tree.cache_key, leaves)) for leaves, spec in self.leaves.values()),
            tuple((spec, *map(tree.cache_key, leaves)) for leaves, spec in self.state_leaves.values()),
            self.x.signature(), tuple(t.signature() for t in self.targets),
            tuple((name, part.signature()) for name, part in self.sides.items()),
        )  # fmt: skip
        try:
            found = self.pipe.cache.get(key)
        except TypeError as error:
            raise BatchError(
                f"a leaf of the arguments is neither a tensor nor hashable ({error}); pass tensors, numbers, strings "
                'or None, or register its class (optree, namespace="fpipe")'
            ) from error
        if found is None:
            self.pipe.meet()
            recipe = self.pipe.recipe(self.has_aux, check if debug else None)
            found = self.pipe.cache[key] = resolve(recipe, self.request())
            if len(self.pipe.cache) > KEPT:
                del self.pipe.cache[next(iter(self.pipe.cache))]
        elif len(self.pipe.cache) > KEPT // 2:  # the one used last stands last
            self.pipe.cache[key] = self.pipe.cache.pop(key)
        return found

    def request(self) -> Request:
        """This call's signature, in full."""
        pipe, training = self.pipe, self.mode != "forward"
        params: list[AbstractTree | None] = [None] * pipe.stages
        layouts: dict[int, Layout] = {}
        states: list[AbstractTree | None] = [None] * pipe.stages
        for stage, (leaves, spec) in self.leaves.items():
            if pipe.shares is not None:
                leaves, layouts[stage] = pipe.shares.seen(stage, self.params[stage], leaves, pipe.frozen)
            params[stage] = AbstractTree.flat(spec, leaves, self._differentiated(stage, len(leaves)))
        for stage, (leaves, spec) in self.state_leaves.items():
            states[stage] = AbstractTree.flat(spec, leaves)
        kinds: dict[Any, int] = {}
        dx = training and 1 in self.wanted
        uniform = all(part.uniform for part in (self.x, *self.targets, *self.sides.values()))
        kind_of = [kinds.setdefault(self._kind(m, dx), len(kinds)) for m in range(1 if uniform else self.number)]
        schedule = pipe.schedule(self.number)
        return Request(
            schedule.only("F") if not training else pipe.phased(self.number) if self.mode == "vjp" else schedule,
            tuple(params), tuple(states), tuple(kinds), tuple(kind_of * (self.number if uniform else 1)),
            self.mode, dx, layouts, self.each is not None,
        )  # fmt: skip

    def _kind(self, m: int, dx: bool) -> tuple[AbstractTree, tuple[AbstractTree, ...], tuple[AbstractTree, ...]]:
        x = AbstractTree.flat(self.x.specs[m], self.x.rows[m], dx)
        targets = tuple(AbstractTree.flat(t.specs[m], t.rows[m]) for t in self.targets)
        return x, targets, tuple(AbstractTree.of(self._sides(stage, m)) for stage in (*range(self.pipe.stages), -1))

    def _differentiated(self, stage: int, count: int) -> list[bool]:
        if self.mode == "forward" or 0 not in self.wanted:
            return [False] * count
        if not self.pipe.frozen:
            return [True] * count
        return [not matches(f"{stage}.{name}", self.pipe.frozen) for name in tree.names(self.params[stage])]

    # ---- running ------------------------------------------------------------------------------------------------
    def _weights(self) -> Any:
        if self.pipe.loss is None:
            return None
        made = weights(self.pipe.reduction, self.targets, self.number, self.pipe.copies, self.sides)
        return made if self.loss_scale is None else replace(made, scaled=self.loss_scale)

    def weighed(self, scalars: Sequence[torch.Tensor]) -> torch.Tensor:
        """Scalars of the microbatches as one, by the pipeline's reduction, added as the loss is."""
        shares = self._weights()
        return added([value * shares.scale(m, value) for m, value in enumerate(scalars)])

    def _values(self) -> Values:
        sides = {
            (s, m): tree.leaves(self._sides(s if s < self.pipe.stages else -1, m))
            for s in range(self.pipe.stages + 1) if self.pipe.sides[s] for m in range(self.number)
        } if self.sides else {}  # fmt: skip
        return Values(
            params={s: leaves for s, (leaves, _) in self.leaves.items()},
            states={s: leaves for s, (leaves, _) in self.state_leaves.items()},
            x=self.x,
            targets=self.targets,
            sides=sides,
            weights=self._weights(),
        )

    def _prepared(self) -> tuple[Resolved, Values]:
        """The plans, and what is laid into their registers; devices are looked at once for every signature."""
        resolved, values = self.resolved(), self._values()
        resolved.memo("devices", lambda: check_devices(self.pipe.group, values, self.sides.values()))
        return resolved, values

    def _run(self, resolved: Resolved, feed: Callable[[Feeder, Registers], None], regs: dict[int, Registers],
             phase: int | None = None) -> None:  # fmt: skip
        """Feed and drive the ranks that live here, wholly or in one of two phases."""
        feeders = self.pipe.feeders(resolved)
        for rank, bound in resolved.bound.items():
            if rank not in regs:
                regs[rank] = Registers.empty(bound.plan.slots, self.seed)
            feed(feeders[rank], regs[rank])
        group = self.pipe.group
        saved = _save_random(resolved, self.seed, group)
        runs = {}
        for rank, bound in resolved.bound.items():
            split_at = bound.plan.split
            start, stop = (0, None) if phase is None else (0, split_at) if phase == 0 else (split_at, None)
            runs[rank] = execute(bound, regs[rank], start, stop)
        try:
            with torch.no_grad(), without_autocast():
                drive(runs, lambda rank: group.last_note(rank) or "waiting")
                group.flush()
            if phase != 0 and (self.pipe.debugging or debugging()):
                for rank, bound in resolved.bound.items():
                    check_leaks(bound.plan, regs[rank])
        except BaseException as error:
            group.failed(error)
            if self.pipe.copies is not None:
                self.pipe.copies.group.failed(error)
            group.reset()
            raise
        finally:
            _restore_random(saved)
            for r in regs.values():
                r.send_loss = None  # it refers to the registers

    def _all(self) -> Results:
        resolved, values = self._prepared()
        regs: dict[int, Registers] = {}
        made = collect(self.pipe, resolved, regs, values)

        def feed(feeder: Feeder, r: Registers) -> None:
            feeder.fill(r, values)
            r.send_loss = made.send_loss
            if self.each is not None:
                r.each = partial(self._tell, resolved)

        self._run(resolved, feed, regs)
        return made

    def _tell(self, resolved: Resolved, mb: int, tensors: list[Any]) -> None:
        """Hand a microbatch's output to the caller's function; nothing here keeps it."""
        assert self.each is not None
        y = output_tree(resolved, mb, tensors)
        tensors.clear()
        self.told[mb] = self.each(mb, y)

    def _all_told(self) -> list[Any] | None:
        """What ``each`` returned, in microbatch order, where it was called; with outputs="everywhere", anywhere."""
        if self.pipe.outputs == "everywhere" and len(self.pipe.group.here) < self.pipe.group.size:
            for part in self.pipe.gather(self.told):
                self.told |= part
        return [self.told.get(mb) for mb in range(self.number)] if self.told else None

    def forward(self) -> Any:
        """Loss or outputs, forward alone."""
        made = self._all()
        if self.pipe.loss is not None:
            return self._value(made)
        y = self._joined(made.outputs()) if self.each is None else self._all_told()
        return (y, made.states()) if self.state is not None else y

    def _value(self, made: Results) -> Any:
        loss = made.loss()  # first: it may have been told long ago, and what one rank tells all comes in order
        extras = [made.aux()] if self.has_aux else []
        extras += [made.states()] if self.state is not None else []
        return (loss, *extras) if extras else loss

    def _joined(self, parts: list[Any] | None) -> Any:
        if parts is None:
            return None
        return merge(parts) if self.whole else Microbatches(parts)

    def value_and_grad(self, value: bool = True) -> tuple[Any, tuple[Any, ...]]:
        """The whole schedule: value, where it is wanted, and gradients in the order of ``wanted``."""
        made = self._all()
        grads = {n: made.param_grads(self.params) if n == 0 else self._joined(made.input_grads()) for n in self.wanted}
        return self._value(made) if value else made.leave_loss(), tuple(grads[n] for n in self.wanted)

    def vjp(self) -> tuple[Any, Callable[..., Any]]:
        """The forward phase now; the backward phase in the pullback."""
        resolved, values = self._prepared()
        regs: dict[int, Registers] = {}
        self._run(resolved, lambda feeder, r: feeder.fill(r, values), regs, phase=0)
        made = collect(self.pipe, resolved, regs, values)
        y = self._joined(made.outputs())
        rest: list[dict[int, Registers]] = [regs]

        def pullback(dy: Any, *, retain: bool = False) -> tuple[Any, Any]:
            """Gradients of the parameters and the input for the outputs' cotangents."""
            if not rest:
                raise StageError(
                    "this pullback was called before and what it needs is freed; call it with retain=True to keep it"
                )
            kept = rest[0] if retain else rest.pop()
            mine = {rank: r.copy() for rank, r in kept.items()} if retain else kept
            cotangents = self._cotangents(resolved, dy)
            self._run(resolved, lambda feeder, r: feeder.fill_cotangents(r, cotangents), mine, phase=1)
            back = collect(self.pipe, resolved, mine, values)
            return back.param_grads(self.params), self._joined(back.input_grads())

        return ((y, made.states()) if self.state is not None else y), pullback

    def _cotangents(self, resolved: Resolved, dy: Any) -> list[list[Any]]:
        """dy cut as the outputs were."""
        if self.pipe.output_rank not in self.pipe.group.here and dy is None:
            return [[] for _ in range(self.number)]
        parts = split(dy, self.number, "dy") if self.whole or isinstance(dy, Microbatches) else list(dy)
        out = []
        for m, part in enumerate(parts):
            face = resolved.interfaces[resolved.request.kind_of[m]][-1]
            leaves = tree.leaves(part)
            tensors = [j for j, a in enumerate(face.y_avals) if a is not None]
            if len(leaves) == len(tensors) != len(face.y_avals):
                full: list[Any] = [None] * len(face.y_avals)
                for j, leaf in zip(tensors, leaves, strict=True):
                    full[j] = leaf
                leaves = full
            if len(leaves) != len(face.y_avals):
                raise BatchError(f"dy has {len(leaves)} leaves where the outputs have {len(face.y_avals)}")
            for leaf, aval in zip(leaves, face.y_avals, strict=True):
                if aval is not None and aval.grad and tuple(leaf.shape) != aval.shape:
                    raise BatchError(
                        f"dy has a leaf of shape {list(leaf.shape)} a microbatch where the output is {aval}; "
                        "give dy the outputs' shape"
                    )
            out.append(leaves)
        return out

    # ---- under torch.func ---------------------------------------------------------------------------------------
    def plainly(self) -> Any:
        """The same value from the functions themselves, one microbatch after another: for torch.func to transform."""
        if len(self.pipe.group.here) != self.pipe.group.size:
            raise StageError("torch.func transforms of a pipeline need a local group; use fpipe.grad across processes")
        if self.pipe.copies is not None:
            raise StageError("torch.func transforms of a pipeline with dp= are not defined; use fpipe.grad")
        functions, loss = self.pipe.functions, self.pipe.loss
        if any(stage.state for stage in functions):
            raise StageError("torch.func transforms of a pipeline with state are not defined; use fpipe.value_and_grad")
        total, outs, told = None, [], []
        shares = self._weights()
        for m in range(self.number):
            y, aux = self.x.tree(m), None
            for s, stage in enumerate(functions):
                y = stage.fn(self.params[s], y, **self._sides(s, m))
                if stage.aux_loss:
                    y, more = y
                    aux = more if aux is None else aux + more
            outs.append(y if self.each is None else self.each(m, y))
            if loss is not None and shares is not None:
                value = loss(y, *(t.tree(m) for t in self.targets), **self._sides(-1, m))
                if self.has_aux:
                    value, more = value
                    told.append(more)
                value = value if aux is None else value + aux
                value = value * shares.scale(m, value)
                total = value if total is None else total + value
        if loss is not None:
            return (total, told) if self.has_aux else total
        return self._joined(outs) if self.each is None else outs


def _save_random(resolved: Resolved, seed: int | None, group: Any) -> list[tuple[torch.device, torch.Tensor]]:
    """The random state to put back, where seeded draws will move it."""
    if seed is None or not resolved.random:
        return []
    devices = {group.device(rank) for rank in group.here}
    return [
        (d, torch.get_rng_state() if d.type == "cpu" else torch.get_device_module(d).get_rng_state(d)) for d in devices
    ]


def _restore_random(saved: list[tuple[torch.device, torch.Tensor]]) -> None:
    for device, state in saved:
        if device.type == "cpu":
            torch.set_rng_state(state)
        else:
            torch.get_device_module(device).set_rng_state(state, device)
