"""From a call's signature to bound plans: programs for the stages that live here, faces of all, lowering, binding.

This is the cold path, run once for every new signature; what it makes is cached by the pipeline. It knows groups only
to learn the faces of stages that live elsewhere.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from .. import __version__, tree
from ..collectives.group import Group
from ..errors import MismatchError, StageError
from ..plans.collective_order import lower_together
from ..plans.plan import LoweringInput, Plan, ProgramSet
from ..plans.sharding import Copies, Layout
from ..plans.value_graph import Interface, ValueGraph
from ..plans.weaving.weave import Overlap
from ..programs.losses import check_scalar, loss_stage
from ..programs.stage_programs import Programs
from ..programs.tracing import Signature, programs_of
from ..schedule import Schedule
from ..stage import Stage
from ..tree import AbstractTree, Aval, Spec, Static, contiguous
from .handshake import agree, tag_of, together
from .loop import Check, Executable, Options, bind

_NOTHING = tree.flatten(None)[1]


@dataclass(frozen=True)
class Request:
    """Everything that the plans of a call depend on, but for the stages themselves.

    ``params[s]`` is ``None`` where stage s lives elsewhere. ``kinds`` are the kinds of microbatches as (x, targets,
    sides by stage), and ``kind_of`` says which is which.
    """

    schedule: Schedule
    params: tuple[AbstractTree | None, ...]
    states: tuple[AbstractTree | None, ...]
    kinds: tuple[tuple[AbstractTree, tuple[AbstractTree, ...], tuple[AbstractTree, ...]], ...]
    kind_of: tuple[int, ...]
    mode: str  # "grad", "forward" or "vjp"
    wants_dx: bool
    layouts: Mapping[int, Layout] = field(default_factory=dict)  # by stage, where the pipeline has copies
    each: bool = False  # outputs go to a function of the caller's


@dataclass(frozen=True)
class Resolved:
    """Executable plans for the ranks that live here, and the structure of what comes out."""

    request: Request
    bound: Mapping[int, Executable]
    job: Mapping[int, LoweringInput]
    interfaces: tuple[tuple[Interface, ...], ...]  # by kind
    loss: tuple[Programs | None, ...]  # by kind
    random: bool
    tag: int = 0  # of what every rank must have agreed on
    _memo: dict[str, Any] = field(default_factory=dict, repr=False, compare=False)

    def memo(self, name: str, make: Callable[[], Any]) -> Any:
        """Something that follows from the plans, made at its first use."""
        found = self._memo.get(name)
        if found is None:
            found = self._memo[name] = make()
        return found

    @property
    def plans(self) -> dict[int, Plan]:
        """The plans by rank."""
        return {rank: bound.plan for rank, bound in self.bound.items()}


@dataclass(frozen=True)
class Config:
    """What a pipeline is made of, as the cold path needs it."""

    stages: tuple[Stage, ...]
    loss: Callable[..., Any] | None
    has_aux: bool
    group: Group
    tied: tuple[tuple[str, ...], ...]
    wide: torch.dtype | None
    frozen: tuple[str, ...] = ()
    check: Check | None = None
    overlap: Overlap = field(default_factory=Overlap)
    copies: Copies | None = None
    reduction: str = "mean"
    seed: int | None = None


def resolve(recipe: Config, request: Request) -> Resolved:
    """Trace, exchange faces, lower and bind."""
    here = recipe.group.here
    facts = _facts(recipe, request)
    agree(recipe.group, facts, lambda fact: str(request.schedule) if fact == "schedule" else "")
    kinds = [_Kind(recipe, request, index) for index in range(len(request.kinds))]
    _exchange(recipe, request, kinds)
    training = request.mode != "forward"
    if kinds:
        _check_frozen(recipe, kinds[0].interfaces)
    bound: dict[int, Executable] = {}
    jobs: dict[int, LoweringInput] = {}
    for rank in here:
        made = tuple(kind.for_rank(rank) for kind in kinds)
        tied, specs = _ties(recipe, request, kinds)
        jobs[rank] = LoweringInput(
            request.schedule, made, request.kind_of, training=training, tied=tied, grad_specs=specs,
            wide=recipe.wide, wants_dx=request.wants_dx, phased=request.mode == "vjp",
            wired=len(here) < recipe.group.size and not recipe.group.at_once,
            strict=recipe.group.strict, each=request.each, overlap=recipe.overlap,
            early_loss=recipe.group.at_once and len(here) < recipe.group.size and request.mode != "vjp",
            copies=recipe.copies,
            layouts=request.layouts,
        )  # fmt: skip
    for rank, plan in lower_together(jobs).items():
        first = 0 if recipe.copies is None else recipe.copies.part * request.schedule.microbatches
        options = Options(wide=recipe.wide, check=recipe.check, device=recipe.group.device(rank), first=first)
        bound[rank] = bind(plan, recipe.group, options)
    random = any(ins.program is not None and ins.program.random for b in bound.values() for ins in b.plan.instructions)
    return Resolved(
        request,
        bound,
        jobs,
        tuple(tuple(k.interfaces) for k in kinds),
        tuple(k.loss for k in kinds),
        random,
        tag_of(facts),
    )


def _facts(recipe: Config, request: Request) -> dict[str, str | None]:
    """What every rank must say alike before a step is prepared."""
    schedule = request.schedule

    def shapes(groups: Sequence[AbstractTree]) -> str | None:
        seen = [[leaf for leaf in group.leaves if isinstance(leaf, Aval)] for group in groups]
        return None if not any(seen) else "; ".join(", ".join(map(str, group)) for group in seen)

    return {
        "versions": f"fpipe {__version__}, torch {torch.__version__}",
        "call": f"{request.mode}, argnums {'0 and 1' if request.wants_dx else '0'}, has_aux={recipe.has_aux}"
        + (", each=" if request.each else ""),
        "microbatches": str(schedule.microbatches),
        "schedule": f"{schedule.name or 'a schedule'} of {schedule.stages} stages ({schedule.digest})",
        "the kinds of microbatches": str(request.kind_of) if len(request.kinds) > 1 else "(one)",
        "the shape of x": shapes([kind[0] for kind in request.kinds]),
        "the shapes of the targets": shapes([target for kind in request.kinds for target in kind[1]]),
        "the reduction": recipe.reduction,
        "the pipeline's seed": str(recipe.seed),
        "tied parameters": str(recipe.tied),
        "the dtype of accumulation": str(recipe.wide),
        "copies": "none" if recipe.copies is None else recipe.copies.told,
        "overlap": recipe.overlap.how,
    }


class _Kind:
    """One kind of microbatch while its faces become known, stage by stage."""

    def __init__(self, recipe: Config, request: Request, index: int):
        self.recipe, self.request = recipe, request
        self.x, self.targets, self.sides = request.kinds[index]
        self.interfaces: list[Interface] = []
        self.programs: dict[tuple[int, torch.device], Programs] = {}
        self.loss: Programs | None = None

    def next_input(self) -> AbstractTree:
        """The input of the stage whose face is not known yet."""
        if not self.interfaces:
            return self.x
        face = self.interfaces[-1]
        static = dict(face.y_static)
        leaves = tuple(Static.of(static[j]) if a is None else a for j, a in enumerate(face.y_avals))
        return AbstractTree(face.y_spec, leaves)

    def advance(self) -> bool:
        """Make the face of the next stage, if that stage lives here."""
        stage = len(self.interfaces)
        params = self.request.params[stage]
        placement = self.request.schedule.placement
        ranks = [r for r in placement.ranks_of(stage) if r in self.recipe.group.here]
        if not ranks:
            return False
        if params is None:
            raise StageError(
                f"stage {stage} lives on rank {ranks[0]}, which is in this process, but its parameters are missing; "
                "give params one entry per stage (pipe.place keeps those that live here)"
            )
        state = self.request.states[stage] or AbstractTree.of(None)
        source = self.next_input()
        groups = [params, source, self.sides[stage], state]
        for device in dict.fromkeys(map(self.recipe.group.device, ranks)):
            self.programs[stage, device] = _programs(self.recipe.stages[stage], groups, device, stage)
        told = self.programs[stage, self.recipe.group.device(ranks[0])]
        self.interfaces.append(Interface.of(told, _paths(params.spec)))
        return True

    def graph(self) -> ValueGraph:
        """The value graph; faces must be complete."""
        batch = tuple(leaf if isinstance(leaf, Aval) else None for leaf in self.x.leaves)
        last = self.interfaces[-1]
        if self.loss is not None:
            sink = Interface.of(self.loss)
            given_back = {source for source in sink.ys if isinstance(source, int)}  # the loss returns its own input
            takes = tuple(reads or leaf in given_back for leaf, reads in enumerate(sink.takes_x))
            return ValueGraph(tuple(self.interfaces), sink.dxs, takes, batch)
        dxs = tuple((f"dx{j}", a) if a is not None and a.grad else None for j, a in enumerate(last.y_avals))
        return ValueGraph(tuple(self.interfaces), dxs, (True,) * len(last.ys), batch, has_loss=False)

    def trace_loss(self) -> None:
        """The loss's programs; known to every process, since targets' shapes are."""
        if self.recipe.loss is None:
            return
        y = self.next_input()
        spec = tree.together([y.spec, *(t.spec for t in self.targets)])
        x = AbstractTree(spec, (*y.leaves, *(leaf for t in self.targets for leaf in t.leaves)))
        nothing = AbstractTree.of({})
        stage = loss_stage(self.recipe.loss, self.recipe.has_aux)
        top = self.request.schedule.placement.ranks_of(self.request.schedule.stages - 1)
        here = [r for r in top if r in self.recipe.group.here]
        device = self.recipe.group.device(here[0] if here else self.recipe.group.here[0])
        self.loss = _programs(stage, [nothing, x, self.sides[-1], AbstractTree.of(None)], device, None)
        check_scalar(stage, self.loss)

    def for_rank(self, rank: int) -> ProgramSet:
        """What lowering needs on one rank."""
        device = self.recipe.group.device(rank)
        held = self.request.schedule.placement.stages_of(rank)
        return ProgramSet(self.graph(), {s: self.programs[s, device] for s in held}, self.loss)


def _paths(spec: tree.Structure) -> tuple[str, ...]:
    return tuple(".".join(map(str, path)) for path in spec.paths())


def _programs(stage: Stage, groups: Sequence[AbstractTree], device: torch.device, index: int | None) -> Programs:
    try:
        return programs_of(stage, Signature(*(group.on(device) for group in groups)))
    except StageError as error:
        if getattr(error, "told", False):
            raise
        error.args = (_told(str(error), groups[0], index),)
        error.told = True  # type: ignore[attr-defined]
        raise


def _told(text: str, params: AbstractTree, index: int | None) -> str:
    """What went wrong with a stage, or with the loss, and where what it was given comes from."""
    text = text.replace("FakeTensor", "Tensor")
    if index is None:
        return text.replace("stage ", "the loss ", 1)
    hints = ["its parameters are None: give params one entry per stage"] if params.spec == _NOTHING else []
    hints += [f"its input is what stage {index - 1} returns"] if index else []
    return f"stage {index}: {text}" + (f" ({'; '.join(hints)})" if hints else "")


def _exchange(recipe: Config, request: Request, kinds: Sequence[_Kind]) -> None:
    """Let every process know every face. Each round, whoever holds the next stages tells theirs."""
    stages = request.schedule.stages

    def advance() -> list[list[Interface]]:
        known = [len(kind.interfaces) for kind in kinds]
        for kind in kinds:
            while len(kind.interfaces) < stages and kind.advance():
                pass
        return [kind.interfaces[count:] for kind, count in zip(kinds, known, strict=True)]

    while any(len(kind.interfaces) < stages for kind in kinds):
        before = [len(kind.interfaces) for kind in kinds]
        told = together(recipe.group, advance)
        for index, (kind, count) in enumerate(zip(kinds, before, strict=True)):
            kind.interfaces = [*kind.interfaces[:count], *max((faces[index] for faces in told), key=len)]
        if before == [len(kind.interfaces) for kind in kinds]:
            raise MismatchError(
                f"no process told what stage {min(before)} gives; every process must run the same pipeline"
            )
    for kind in kinds:
        if request.mode != "vjp" or recipe.loss is not None:
            kind.trace_loss()


def _check_frozen(recipe: Config, faces: Sequence[Interface]) -> None:
    """A pattern that fits no leaf would leave what it should have frozen to be trained."""
    names = [f"{stage}.{leaf}" for stage, face in enumerate(faces) for leaf in face.leaves]
    for pattern in recipe.frozen:
        if not any(tree.matches(name, [pattern]) for name in names):
            near = ", ".join(difflib.get_close_matches(pattern, names, 3, 0.3) or names[:3])
            raise StageError(f"frozen={pattern!r} fits no leaf of the parameters; they are called like {near}")


def _ties(
    recipe: Config, request: Request, kinds: Sequence[_Kind]
) -> tuple[tuple[tuple[tuple[int, int], ...], ...], dict[tuple[int, int], Spec]]:
    """Tied names as (stage, leaf) pairs, and how the gradients that travel look."""
    placement = request.schedule.placement
    groups = []
    for names in recipe.tied:
        members = []
        for name in names:
            head, _, rest = name.partition(".")
            stage = int(head)
            leaves = kinds[0].interfaces[stage].leaves
            if rest not in leaves:
                raise StageError(
                    f"tied={names!r} names {name!r}, but stage {stage} has no such leaf; it has {', '.join(leaves)}"
                )
            members.append((stage, leaves.index(rest)))
        groups.append(tuple(members))
    specs: dict[tuple[int, int], Spec] = {}
    for stage, params in enumerate(request.params):
        if params is None:
            continue
        for index, leaf in enumerate(params.leaves):
            if isinstance(leaf, Aval) and leaf.grad and len(placement.ranks_of(stage)) > 1:
                specs[stage, index] = _grad_spec(leaf, recipe.wide)
    for group in groups:
        known = [(s, i) for s, i in group if request.params[s] is not None]
        _check_tie(request, known)
        for stage, index in known:
            leaf = request.params[stage].leaves[index]  # type: ignore[union-attr]
            for member in group:
                specs[member] = _grad_spec(leaf, recipe.wide)
    return tuple(groups), specs


def _check_tie(request: Request, members: Sequence[tuple[int, int]]) -> None:
    """What is one parameter has one shape."""
    seen: dict[str, str] = {}
    for stage, index in members:
        leaf = request.params[stage].leaves[index]  # type: ignore[union-attr]
        seen.setdefault(str(leaf), f"{leaf} in stage {stage}")
    if len(seen) > 1:
        raise StageError(f"tied parameters differ in shape or dtype: {', '.join(seen.values())}; tie copies of one")


def _grad_spec(leaf: Aval, wide: torch.dtype | None) -> Spec:
    dtype = wide if wide is not None and leaf.dtype.is_floating_point else leaf.dtype
    return Spec(leaf.shape, contiguous(leaf.shape), dtype)
