"""What a case does with fpipe: a pipeline, its calls in order, and what happens between them.

A session is one process: the whole pipeline, a copy of it, or one fake rank. It returns for each
call what the call was given and what it returned.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import optree
import torch
from torch import Tensor

import fpipe

from .cases import LOSSES, Call, Case, batch_of, made, parameters_of, stages_of, states_of, weight
from .features import SETTINGS
from .models import tensors_of
from .oracle import Expected, Given, leaves_of, map_leaves

RATE = 0.0625  # of steps between calls


class DifferenceError(Exception):
    """A difference that a session notices itself."""


@dataclass(frozen=True)
class Ran:
    """A call: its schedule, what it was given, and what it returned."""

    schedule: str
    ranks: int
    last: int  # the rank of the last stage
    given: Given
    result: Expected
    grads: Any  # of the parameters, as they were returned


@dataclass(frozen=True)
class Process:
    """Where a session runs: the group of a fake rank, or that of the copies; and a folder that all
    processes share.
    """

    folder: Path
    rank: Any = None
    copies: Any = None

    @property
    def copy(self) -> int:
        """Which copy this is."""
        return 0 if self.copies is None else self.copies.here[0]


def sessions(case: Case, folder: Path, names: tuple[str, int]) -> list[list[Ran]]:
    """The calls of each copy of a pipeline with this schedule and number of ranks."""
    fakes = case.features.get("fakes")
    how: dict[str, Any] = {"order": fakes or "buffered", "seed": case.seed}
    if "copies" in case.features:
        run = lambda group: _session(case, Process(folder, copies=group), names)
        return fpipe.testing.run(run, case.copies, **how)
    if fakes:
        run = lambda group: _session(case, Process(folder, rank=group), names)
        return [_merged(fpipe.testing.run(run, names[1], **how))]
    return [_session(case, Process(folder), names)]


def _session(case: Case, process: Process, names: tuple[str, int]) -> list[Ran]:
    pipe = _pipeline(case, process, names)
    whole = parameters_of(case)
    held = pipe.shard(_leaves_as(case.features.get("leaves", ""), whole))
    states: list[Any] = states_of(case)
    ran: list[Ran] = []
    for number, call in enumerate(case.calls):
        before = call.features.get("before", "")
        if number and before in ("step", "donate"):
            held = _stepped(pipe, held, ran[-1], before == "donate")
        if number and before in ("save", "move"):
            if before == "move" and process.rank is None and not case.model.draws:
                names = case.second
            moved = _pipeline(case, process, names)
            held = _through_a_checkpoint(pipe, moved, held, process.folder / f"{number}-{names[0]}")
            pipe = moved
        if number and before == "stream":
            held = fpipe.receive(pipe, fpipe.stream(pipe, held), like=whole)
        if number and before == "resume state" and ran[-1].result.state is not None:
            states = ran[-1].result.state
        if case.features.get("leaves") == "tuple":
            held = tuple(held)
        given = Given(
            [map_leaves(lambda t: t.detach().clone(), p) for p in pipe.unshard(held)],
            batch_of(case, call, number, process.copy),
            None,
            states if _passes_states(case, call) else states_of(case),
        )
        kept = [t.clone() for t in leaves_of(held)]
        with SETTINGS[call.features.get("setting", "")].call():
            result, cotangents, grads = _results(
                case, call, pipe, replace(given, params=held), process
            )
        if any(not torch.equal(a, b) for a, b in zip(kept, leaves_of(held), strict=True)):
            raise DifferenceError("the call changed the parameters")
        ran.append(
            Ran(*names, pipe.output_rank, replace(given, cotangents=cotangents), result, grads)
        )
    return ran


def _pipeline(case: Case, process: Process, names: tuple[str, int]) -> fpipe.Pipeline:
    features, model = case.features, case.model
    options: dict[str, Any] = {
        name: features[name]
        for name in ("accumulate", "order", "overlap", "slices", "outputs")
        if name in features
    }
    if model.loss:
        reduction = fpipe.weighted(weight) if case.reduction == "weighted" else case.reduction
        options |= {"loss": LOSSES[model.loss], "reduction": reduction}
    if process.copies is not None:
        how = {
            name: features[name]
            for name in ("reduce_dtype", "bucket_bytes", "unsharded")
            if name in features
        }
        options["dp"] = fpipe.copies(process.copies, zero=features["copies"], **how)
    stages = stages_of(model)
    if "initial_state" in features:
        stages = [
            replace(stage, initial_state=state) if stage.state else stage
            for stage, state in zip(stages, states_of(case), strict=True)
        ]
    frozen, tied = list(case.frozen), case.tied
    if features.get("frozen_leaf") == "stage":
        stages, frozen = _frozen_by_stage(stages, frozen)
    if "tied_by_stage" in features:
        stages, tied = _tied_by_stage(stages, tied), ()
    schedule = partial(made, names[0], stages=len(stages), slices=case.slices)
    return fpipe.pipeline(
        stages,
        schedule if " on " in names[0] else names[0],
        group=fpipe.local(names[1]) if process.rank is None else process.rank,
        frozen=frozen,
        tied=tied,
        microbatches=case.count,
        seed=7 if model.dropout else None,
        **options,
    )


def _frozen_by_stage(
    stages: Sequence[fpipe.Stage], frozen: Sequence[str]
) -> tuple[list[fpipe.Stage], list[str]]:
    """Patterns of single leaves as options of their stages."""
    own = lambda s: tuple(name.split(".")[1] for name in frozen if name.startswith(f"{s}."))
    stages = [replace(stage, frozen=own(s)) for s, stage in enumerate(stages)]
    return stages, [name for name in frozen if "." not in name]


def _tied_by_stage(
    stages: Sequence[fpipe.Stage], tied: Sequence[Sequence[str]]
) -> list[fpipe.Stage]:
    """Ties as options of their stages."""
    names = [(*name.split("."), f"group {n}") for n, group in enumerate(tied) for name in group]
    own = lambda s: tuple((leaf, group) for stage, leaf, group in names if int(stage) == s)
    return [replace(stage, ties=own(s)) for s, stage in enumerate(stages)]


# ---- parameters ----
def _leaves_as(kind: str, params: list[Any]) -> Any:
    """Parameters of a kind."""
    turn: dict[str, Callable[[Tensor], Tensor]] = {
        "requires a gradient": lambda t: t.clone().requires_grad_(),
        "parameter": torch.nn.Parameter,
        "transposed": lambda t: t.T.contiguous().T if t.dim() == 2 else t,
    }
    if kind == "flat buffer" and (leaves := leaves_of(params)):
        flat = torch.cat([leaves[0].new_zeros(1), *(t.flatten() for t in leaves)])
        parts = iter(flat.split([1, *(t.numel() for t in leaves)])[1:])
        return map_leaves(lambda t: next(parts).view(t.shape), params)
    return map_leaves(turn[kind], params) if kind in turn else params


def _stepped(pipe: fpipe.Pipeline, held: Any, last: Ran, donate: bool) -> Any:
    """The parameters after a step with the gradients of the last call."""
    grads = last.result.grads
    if grads is None or not all(g.isfinite().all() for g in tensors_of(grads)):
        return held
    tx, held = fpipe.sgd(RATE), [map_leaves(Tensor.detach, p) for p in held]
    grads = list(last.grads)
    if donate:
        return tx.step(grads, tx.init(held), held, donate=True)[0]
    updates, _ = tx.update(grads, tx.init(held), held)
    return fpipe.apply_updates(held, updates)


def _through_a_checkpoint(
    pipe: fpipe.Pipeline, moved: fpipe.Pipeline, held: Any, path: Path
) -> list[Any]:
    """The parameters, saved by one pipeline and loaded by another."""
    fpipe.save(path, pipe, params=held, step=3)
    loaded, step = fpipe.load(path, moved, "params", "step")
    same = zip(leaves_of(pipe.unshard(held)), leaves_of(moved.unshard(loaded)), strict=True)
    if step != 3 or not all(torch.equal(a, b) for a, b in same):
        raise DifferenceError("a checkpoint has other parameters than were saved")
    return loaded


# ---- calls ----
def _results(
    case: Case, call: Call, pipe: fpipe.Pipeline, given: Given, process: Process
) -> tuple[Expected, list[list[Tensor]] | None, Any]:
    batch = given.batch
    with torch.autocast("cpu", enabled=False):  # a copy in another setting may run beside this one
        x, target, scale = (
            fpipe.Microbatches(p) if call.split else torch.cat(p)
            for p in (batch.xs, batch.targets, batch.scales)
        )
    if "late" in call.features:
        x = fpipe.Microbatches(iter(x), len(x))
        if case.reduction != "weighted":  # else other last bits
            target, scale = (fpipe.Microbatches(iter(p), len(p)) for p in (target, scale))
    keywords: dict[str, Any] = {}
    if any("scale" in stage.sides for stage in stages_of(case.model)):
        keywords["scale"] = scale
    if case.model.stateful and _passes_states(case, call):
        keywords["state"] = given.state
    if "seed" in call.features and case.model.dropout:
        keywords["seed"] = call.features["seed"]
    if case.model.loss:
        result, grads = _with_loss(case, call, pipe, given, (x, target), keywords)
        return result, None, grads
    if call.kind == "forward":
        y = pipe(given.params, x, **keywords)
        y, state = y if case.model.stateful else (y, None)
        return Expected(_parts(y, call), state=state), None, None
    y, pullback = fpipe.vjp(pipe, given.params, x, **keywords)
    y, state = y if case.model.stateful else (y, None)
    parts = _parts(y, call)
    generator = torch.Generator().manual_seed(case.seed)
    draw = lambda t: (
        torch.randn(t.shape, generator=generator, dtype=t.dtype)
        if isinstance(t, Tensor) and t.is_floating_point()
        else t
    )
    dys = [map_leaves(draw, part) for part in parts or ()]
    if process.rank is not None and pipe.output_rank not in pipe.group.here:
        dys = [map_leaves(_zeros, part) for part in dys]  # other ranks do not know the outputs
    dy = None
    if parts is not None:
        dy = fpipe.Microbatches(dys) if call.split else _joined(dys)
    again = pullback(dy, retain=True) if "twice" in call.features else None
    grads, dx = pullback(dy)
    if again and not _same([again[0], _rows_of(again[1], call)], [grads, _rows_of(dx, call)]):
        raise DifferenceError("a pullback returned other gradients when it was called again")
    found = Expected(parts, as_rows(pipe, given.params, grads), _rows_of(dx, call), state=state)
    return found, [tensors_of(dy) for dy in dys], grads


def _zeros(leaf: Any) -> Any:
    return torch.zeros_like(leaf) if isinstance(leaf, Tensor) else leaf


def _passes_states(case: Case, call: Call) -> bool:
    """Whether a call gets ``state=``."""
    return "initial_state" not in case.features or "before" in call.features


def _same(a: Any, b: Any) -> bool:
    pairs = zip(leaves_of(a), leaves_of(b), strict=True)
    return all(torch.equal(x.nan_to_num(), y.nan_to_num()) for x, y in pairs)


def _with_loss(
    case: Case,
    call: Call,
    pipe: fpipe.Pipeline,
    given: Given,
    batch: tuple[Any, Any],
    keywords: dict[str, Any],
) -> tuple[Expected, Any]:
    has_aux = case.model.loss == "aux"
    wants = call.features
    each = _noted if "each" in wants else None
    grads = dx = None
    if call.kind == "forward":
        value = pipe(given.params, *batch, has_aux=has_aux, each=each, **keywords)
    else:
        argnums: Any = call.argnums
        keywords |= {"loss_scale": wants.get("loss_scale")}
        alone = each is None and not has_aux and not case.model.stateful
        if "without_value" in wants and alone:
            value = None
            found = fpipe.grad(pipe, argnums)(given.params, *batch, **keywords)
        else:
            step = fpipe.value_and_grad(pipe, argnums, has_aux=has_aux, each=each)
            value, found = step(given.params, *batch, **keywords)
        single = isinstance(argnums, int)
        by_number = {argnums: found} if single else dict(zip(argnums, found, strict=True))
        grads, dx = by_number.get(0), by_number.get(1)
    loss, *more = value if isinstance(value, tuple) else (value,)
    rest = iter(more)
    results = next(rest) if each is not None else None
    aux = next(rest) if has_aux and each is None else None
    state = next(rest) if case.model.stateful else None
    rows = None if grads is None else as_rows(pipe, given.params, grads)
    return Expected(loss, rows, _rows_of(dx, call), aux, state, results), grads


def _noted(number: Any, y: Any, out: Any) -> list[Any]:
    """What ``each=`` returns for a microbatch or slice."""
    copied = lambda leaf: leaf.clone() if isinstance(leaf, Tensor) else leaf
    return [str(number), map_leaves(copied, y), map_leaves(copied, out)]


def as_rows(pipe: fpipe.Pipeline, params: Sequence[Any], grads: Any) -> list[Any]:
    """Whole gradients as flat rows, with None where a leaf has none; None for a stage that is
    elsewhere.
    """
    rows: list[Any] = []
    for p, g in zip(params, pipe.unshard(grads), strict=True):
        if p is None:
            rows.append(None)
            continue
        none_is_leaf = optree.tree_leaves(g, none_is_leaf=True, namespace="fpipe")
        skeleton = optree.tree_leaves(p, none_is_leaf=True, namespace="fpipe")
        rows.append(
            [found for found, like in zip(none_is_leaf, skeleton, strict=True) if like is not None]
        )
    return rows


def _rows_of(dx: Any, call: Call) -> list[Tensor | None] | None:
    if dx is None:
        return None
    return list(dx) if call.split else list(torch.split(dx, list(call.rows)))


def _parts(y: Any, call: Call) -> Any:
    """Outputs by microbatch; None on ranks that have none."""
    if call.split or y is None:
        return y if y is None else list(y)
    leaves = leaves_of(y)
    rows = [
        torch.split(leaf, list(call.rows))
        if isinstance(leaf, Tensor)
        else [leaf] * call.microbatches
        for leaf in leaves
    ]
    parts = []
    for m in range(call.microbatches):
        column = iter([row[m] for row in rows])
        parts.append(map_leaves(lambda _, column=column: next(column), y))
    return parts


def _joined(parts: list[Any]) -> Any:
    join = lambda *leaves: torch.cat(leaves) if isinstance(leaves[0], Tensor) else leaves[0]
    with torch.autocast("cpu", enabled=False):
        return map_leaves(join, *parts)


# ---- fake ranks ----
def _merged(by_rank: list[list[Ran]]) -> list[Ran]:
    """The calls of a pipeline whose ranks are processes, as those of one."""
    return [_of_ranks(list(calls)) for calls in zip(*by_rank, strict=True)]


def _of_ranks(calls: list[Ran]) -> Ran:
    first = lambda every: next((each for each in every if each is not None), None)

    def rows(every: Sequence[Any]) -> Any:
        """The entries of all stages, each from a rank that has it."""
        present = [each for each in every if each is not None]
        return [first(row) for row in zip(*present, strict=True)] if present else None

    last = lambda name: first(getattr(call.result, name) for call in reversed(calls))
    values = [call.result.value for call in calls]
    if isinstance(values[0], Tensor) and not all(_same(values[0], value) for value in values):
        raise DifferenceError("ranks have different losses")
    result = Expected(
        values[calls[0].last],
        rows([call.result.grads for call in calls]),
        last("input_grads"),
        last("aux"),
        rows([call.result.state for call in calls]),
        rows([call.result.each for call in calls]),
    )
    merged = {name: rows([getattr(c.given, name) for c in calls]) for name in ("params", "state")}
    given = replace(calls[calls[0].last].given, **merged)
    return replace(calls[0], given=given, result=result)
