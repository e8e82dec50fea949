"""Random cases: a model, a pipeline over it and a few calls of it, all from one seed.

``PER_MODEL`` consecutive seeds share a model, and so its traces, which take nine tenths of the time
of a case. They differ in schedule, ranks, options, parameters, data and calls.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, lru_cache
from typing import Any

import torch
from torch import Tensor

import fpipe

from .features import CALL, OF_THREADS, PIPELINE, Features, drawn
from .models import Body, Shape, function, initial_carry, parameters, random_body, tensors_of
from .operations import WIDTH

PER_MODEL = 16
#: schedules that take one stage a rank, any number, and two
ONE = (
    *("GPipe", "1F1B", "Eager1F1B", "ZBH1", "ZBH2", "ZB1P", "ZB2P", "DualPipe"),
    *("Seq1F1B", "SeqZBH1"),
)
SEVERAL = ("Interleaved1F1B", "LoopedBFS", "InterleavedZeroBubble", "Overlapped1F1B")
FOLDED = ("ZBV", "VHalf", "VMin", "DualPipeV", "Hanayo")
REPLICATED = ("GPipe", "1F1B", "Eager1F1B", "ZBH1", "ZBH2", "ZB1P", "ZB2P")


@dataclass(frozen=True)
class Call:
    """One call of the pipeline."""

    kind: str  # "grad", "forward" or "vjp"
    microbatches: int
    rows: tuple[int, ...]  # of each microbatch
    split: bool  # given as Microbatches
    tokens: int = 0  # of the second axis, if there is one
    features: Features = field(default_factory=dict)  # of features.CALL

    @property
    def argnums(self) -> int | tuple[int, ...]:
        """What is differentiated."""
        return self.features.get("argnums", 0)


@dataclass(frozen=True)
class Model:
    """Stages and their loss."""

    number: int
    bodies: tuple[Body, ...]
    engines: tuple[str, ...]
    loss: str  # "mean", "some", "aux" or "" for a pipeline without a loss
    dtype: torch.dtype
    dropout: bool  # the pipeline has a seed
    rows: tuple[int, ...]  # sizes of microbatches
    tokens: tuple[int, ...] = ()  # lengths of sequences; () for rows without an axis of tokens

    @property
    def blocks(self) -> str:
        """What of its stages are blocks."""
        return ("", "steps", "whole")[self.number % 3]

    @property
    def draws(self) -> bool:
        """Whether a stage draws random numbers."""
        return any(body.random for body in self.bodies)

    @property
    def stateful(self) -> bool:
        """Whether a stage carries state."""
        return any(body.state for body in self.bodies)


@dataclass(frozen=True)
class Case:
    """Everything that a seed determines."""

    seed: int
    model: Model
    schedule: str
    ranks: int
    reduction: str
    frozen: tuple[str, ...]
    tied: tuple[tuple[str, ...], ...]
    count: int  # microbatches of a whole batch
    calls: tuple[Call, ...]
    features: Features = field(default_factory=dict)  # of features.PIPELINE
    second: tuple[str, int] = ("GPipe", 1)  # another schedule of the stages, and its ranks

    @property
    def slices(self) -> int:
        """Into how many slices sequences are cut."""
        return self.features.get("slices", 1)

    @property
    def copies(self) -> int:
        """How many copies of the pipeline there are."""
        return 2 if "copies" in self.features else 1

    def __str__(self) -> str:
        model = self.model
        head = (
            f"case {self.seed}: {self.schedule} on {self.ranks} ranks, engines "
            f"{'/'.join(model.engines)}, "
            f"loss {model.loss or 'none'}, "
            f"reduction {self.reduction}, {str(model.dtype).removeprefix('torch.')}"
        )
        options = [f"frozen {self.frozen}"] if self.frozen else []
        options += [f"tied {self.tied}"] if self.tied else []
        options += [f"features {self.features}"] if self.features else []
        options += ["seed=7"] if model.dropout else []
        lines = [head, *(f"  {option}" for option in options)]
        for number, body in enumerate(model.bodies):
            lines += [f"  stage {number}: " + str(body).replace("\n", "\n    ")]
        return "\n".join([*lines, *(f"  {call}" for call in self.calls)])


@lru_cache(maxsize=2)
def random_model(number: int) -> Model:
    """The model of a number."""
    draw = random.Random(f"model {number}")
    stages = draw.choice((1, 2, 2, 2, 3, 4, 4, 6))
    dtype = draw.choice((torch.float32,) * 5 + (torch.float64, torch.bfloat16))
    dtype32, dropout = dtype is torch.float32, draw.random() < 0.15
    tokens = draw.choice(((), (), (4,), (4, 8)))
    bodies: list[Body] = []
    engines: list[str] = []
    inputs = 1
    for _ in range(stages):
        engine = "eager" if draw.random() < 0.2 else "trace"
        bodies.append(
            random_body(draw, inputs, Shape(dropout, dtype32, engine == "eager", bool(tokens)))
        )
        engines.append(engine)
        inputs = len(bodies[-1].outputs)
    loss = draw.choice(("mean", "some", "aux")) if draw.random() < 0.8 else ""
    if not loss:
        bodies = [replace(body, aux_loss=False) for body in bodies]
    rows = (2,) if draw.random() < 0.6 else tuple(draw.sample((1, 2, 3), 2))
    return Model(number, tuple(bodies), tuple(engines), loss, dtype, dropout, rows, tokens)


def random_case(seed: int) -> Case:
    """The case of a seed."""
    model, draw = random_model(seed // PER_MODEL), random.Random(seed)
    bodies, stages = model.bodies, len(model.bodies)
    name, ranks, count = _random_schedule(draw, model)
    features = _fitting(model, drawn(draw, PIPELINE))
    replicas = features.pop("replicas", ())
    if replicas and name in REPLICATED and ranks == stages and not model.stateful:
        copies = [replicas[stage % len(replicas)] for stage in range(stages)]
        name, ranks = f"{name} on {','.join(map(str, copies))}", sum(copies)
    frozen = [f"{s}" for s in range(stages) if draw.random() < 0.03 and bodies[s].shapes]
    if "frozen_leaf" in features:
        frozen += [
            f"{s}.{draw.randrange(len(body.shapes))}"
            for s, body in enumerate(bodies)
            if body.shapes and not body.nested and draw.random() < 0.5
        ]
    tied = _ties(draw, bodies)
    every = {name for group in tied for name in group}
    if every:
        frozen = [name for name in frozen if not any(leaf.startswith(name) for leaf in every)]
    number = draw.choice((1, 1, 2, 3))
    threads = not features.keys().isdisjoint({"fakes", "copies"})
    calls = tuple(_random_call(draw, model, count, threads) for _ in range(number))
    reduction = draw.choice(("mean", "mean", "sum", "weighted")) if model.loss else "mean"
    second = _random_schedule(draw, model)[:2]
    return Case(
        seed,
        model,
        name,
        ranks,
        reduction,
        tuple(frozen),
        tied,
        count,
        calls,
        features,
        second,
    )


def _fitting(model: Model, features: dict[str, Any]) -> dict[str, Any]:
    """The features that a model can have, together."""
    without = set[str]()
    if not model.tokens:
        without.add("slices")
    if "copies" in features:
        without.add("fakes")
    else:
        without |= {"reduce_dtype", "bucket_bytes", "unsharded"}
    if not model.stateful:
        without.add("initial_state")
    return {name: value for name, value in features.items() if name not in without}


def _random_schedule(draw: random.Random, model: Model) -> tuple[str, int, int]:
    """A schedule that takes the stages of a model: its name, ranks and microbatches."""
    stages = len(model.bodies)
    # The replicas of a stage, as in DualPipe, each carry a state.
    names = [name for name in ONE + SEVERAL + FOLDED if name != "DualPipe" or not model.stateful]
    while True:
        name = draw.choice(names)
        per_rank = (
            1
            if name in ONE
            else 2
            if name in FOLDED
            else draw.choice([n for n in (1, 2, 3) if stages % n == 0])
        )
        ranks = max(stages // per_rank, 1)
        count = ranks * draw.choice((1, 2, 2, 3)) if draw.random() < 0.7 else draw.randint(1, 6)
        if fits(name, ranks, count, stages):
            return name, ranks, count


def made(
    name: str, ranks: int, microbatches: int, *, stages: int, slices: int = 1
) -> fpipe.Schedule:
    """The schedule of a name; ``"1F1B on 2,1"`` has two copies of its first stage."""
    name, _, copies = name.partition(" on ")
    replicas = [int(k) for k in copies.split(",")] if copies else None
    return fpipe.make_schedule(
        name, ranks, microbatches, stages=stages, slices=slices, replicas=replicas
    )


@cache
def fits(name: str, ranks: int, microbatches: int, stages: int) -> bool:
    """Whether there is such a schedule."""
    try:
        made(name, ranks, microbatches, stages=stages)
    except fpipe.errors.ScheduleError:
        return False
    return True


def _random_call(draw: random.Random, model: Model, count: int, threads: bool) -> Call:
    split = draw.random() < 0.4
    number = draw.choice((count, count, count + 1, 2 * count)) if split else count
    rows = (
        tuple(draw.choice(model.rows) for _ in range(number)) if split else model.rows[:1] * number
    )
    kind = (
        draw.choice(("grad", "grad", "grad", "forward"))
        if model.loss
        else draw.choice(("vjp", "vjp", "forward"))
    )
    tokens = draw.choice(model.tokens or (0,))
    wanted = drawn(draw, CALL)
    if threads and wanted.get("setting", "") not in OF_THREADS:
        del wanted["setting"]
    if wanted.get("setting") == "autocast float16":  # large numbers overflow
        wanted.pop("loss_scale", None)
    only = {
        "grad": {"argnums", "without_value", "loss_scale", "each"},
        "forward": {"each"} if model.loss else set[str](),
        "vjp": {"twice"},
    }
    if split and len(set(rows)) == 1 and kind != "vjp":
        only[kind].add("late")
    apply = only[kind] | {"setting", "before", "seed"}
    return Call(kind, number, rows, split, tokens, {n: v for n, v in wanted.items() if n in apply})


def _ties(draw: random.Random, bodies: Sequence[Body]) -> tuple[tuple[str, ...], ...]:
    """Sometimes two parameters of equal shape in different stages, by name."""
    if draw.random() > 0.12:
        return ()
    flat = [
        (s, i, shape)
        for s, b in enumerate(bodies)
        if not b.nested
        for i, shape in enumerate(b.shapes)
    ]
    pairs = [(a, b) for a in flat for b in flat if a[0] < b[0] and a[2] == b[2]]
    if not pairs:
        return ()
    a, b = draw.choice(pairs)
    return ((f"{a[0]}.{a[1]}", f"{b[0]}.{b[1]}"),)


def is_frozen(case: Case, stage: int, index: int) -> bool:
    """Whether a leaf has no gradient."""
    return f"{stage}" in case.frozen or f"{stage}.{index}" in case.frozen


# ---- what a case runs ----
def _every(y: Any, target: Tensor) -> Tensor:
    return sum(((leaf - target.to(leaf.dtype)) ** 2).mean() for leaf in tensors_of(y))  # type: ignore[return-value]


def _some(y: Any, target: Tensor) -> Tensor:
    leaf = tensors_of(y)[0]
    return ((leaf - target.to(leaf.dtype)) ** 2).mean()


def _aux(y: Any, target: Tensor) -> tuple[Tensor, dict[str, Any]]:
    return _every(y, target), {"first": tensors_of(y)[0].detach().sum(), "n": 1}


#: "some" reads the first leaf alone, "aux" returns a second value too
LOSSES: dict[str, Callable[..., Any]] = {"mean": _every, "some": _some, "aux": _aux}


@lru_cache(maxsize=4)
def stages_of(model: Model, plain: bool = False) -> list[fpipe.Stage]:
    """The stages of a model; ``plain``: for plain autograd."""
    stages = []
    for n, (body, engine) in enumerate(zip(model.bodies, model.engines, strict=True)):
        options: dict[str, Any] = {"engine": engine, "name": f"s{n}"}
        if body.carry:
            options |= {"carry": True, "initial_carry": initial_carry(body)}
        traced = plain and engine == "trace"
        fn = function(body, model.blocks, bool(model.tokens), traced)
        stages.append(fpipe.Stage(fn, aux_loss=body.aux_loss, state=body.state, **options))
    return stages


def parameters_of(case: Case) -> list[Any]:
    """The parameters of all stages; tied ones are equal."""
    generator = torch.Generator().manual_seed(case.seed)
    params = [parameters(body, generator, case.model.dtype) for body in case.model.bodies]
    for first, second in case.tied:
        (s, i), (t, j) = (tuple(map(int, name.split("."))) for name in (first, second))
        params[t][j] = params[s][i].clone()
    return params


def states_of(case: Case) -> list[Any]:
    """The initial state of each stage, ``None`` for those without one."""
    start = lambda: {"n": torch.tensor(0), "m": torch.zeros(WIDTH, dtype=case.model.dtype)}
    return [start() if body.state else None for body in case.model.bodies]


@dataclass(frozen=True)
class Batch:
    """Inputs, targets and the side input, by microbatch."""

    xs: list[Tensor]
    targets: list[Tensor]
    scales: list[Tensor]


def batch_of(case: Case, call: Call, number: int, copy: int = 0) -> Batch:
    """The batch of a call of one of the copies."""
    generator = torch.Generator().manual_seed(10_000 * case.seed + 10 * number + copy)
    axes = (call.tokens,) if call.tokens else ()
    one = lambda *shape: torch.randn(shape, generator=generator, dtype=case.model.dtype)
    xs = [one(n, *axes, WIDTH) for n in call.rows]
    targets = [one(n, *axes, WIDTH) for n in call.rows]
    return Batch(xs, targets, [one(n, *axes, 1) for n in call.rows])


def weight(target: Tensor) -> Tensor:
    """The weight of a microbatch, for ``fpipe.weighted``."""
    return (target > 0).sum()


def tied_under_autocast(case: Case, call: Call) -> bool:
    """Whether a tied parameter is cast by autocast."""
    if case.tied and call.features.get("setting", "").startswith("autocast"):
        return True
    under = lambda s, i: any(
        i in step.params and step.name.startswith("autocast") for step in case.model.bodies[s].steps
    )
    return any(under(*map(int, name.split("."))) for pair in case.tied for name in pair)
