"""Random cases: a model, a pipeline over it and a few calls of it, all from one seed."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

import fpipe

from .models import Body, Shape, function, parameters, random_body, tensors_of
from .operations import BY_NAME, WIDTH

#: schedules that take one stage a rank, and those that take several; all with any number of microbatches
ONE = ("GPipe", "1F1B", "ZBH1", "ZBH2")
SEVERAL = ("Interleaved1F1B", "LoopedBFS", "InterleavedZeroBubble")
FOLDED = ("ZBV", "VHalf", "VMin")


@dataclass(frozen=True)
class Call:
    """One call of the pipeline."""

    kind: str  # "grad", "forward" or "vjp"
    microbatches: int
    rows: tuple[int, ...]  # of each microbatch
    split: bool  # given as Microbatches
    input_grad: bool = False


@dataclass(frozen=True)
class Case:
    """Everything that a seed determines."""

    seed: int
    bodies: tuple[Body, ...]
    schedule: str
    ranks: int
    engines: tuple[str, ...]
    loss: str  # "mean", "some", "aux" or "" for a pipeline without a loss
    reduction: str
    frozen: tuple[str, ...]
    tied: tuple[tuple[str, ...], ...]
    dtype: torch.dtype
    wide: bool
    dropout: bool
    count: int  # microbatches of a whole batch
    calls: tuple[Call, ...]

    @property
    def exact(self) -> bool:
        """Whether every operation of the case keeps the bits of plain autograd."""
        return all(BY_NAME[step.name].exact for body in self.bodies for step in body.steps)

    def __str__(self) -> str:
        head = (
            f"case {self.seed}: {self.schedule} on {self.ranks} ranks, engines {'/'.join(self.engines)}, "
            f"loss {self.loss or 'none'}, "
            f"reduction {self.reduction}, {str(self.dtype).removeprefix('torch.')}"
        )
        options = [f"frozen {self.frozen}"] if self.frozen else []
        options += [f"tied {self.tied}"] if self.tied else []
        options += ["accumulate float64"] if self.wide else []
        options += ["seed=7"] if self.dropout else []
        lines = [head, *(f"  {option}" for option in options)]
        for number, body in enumerate(self.bodies):
            lines += [f"  stage {number}: " + str(body).replace("\n", "\n    ")]
        return "\n".join([*lines, *(f"  {call}" for call in self.calls)])


def random_case(seed: int) -> Case:
    """The case of a seed."""
    draw = random.Random(seed)
    kind = draw.random()
    ranks = draw.choice((1, 2, 2, 3, 4))
    if kind < 0.5:
        name, stages = draw.choice(ONE), ranks
    elif kind < 0.75:
        name, stages = draw.choice(SEVERAL), 2 * ranks
    else:
        name, stages = draw.choice(FOLDED), 2 * ranks
    dtype32, dropout = draw.random() < 0.75, draw.random() < 0.15
    bodies: list[Body] = []
    engines: list[str] = []
    inputs = 1
    for _ in range(stages):
        engine = "eager" if draw.random() < 0.2 else "trace"
        limits = Shape(dropout=dropout, dtype32=dtype32, eager=engine == "eager")
        body = random_body(draw, inputs, limits)
        bodies.append(body)
        engines.append(engine)
        inputs = len(body.outputs)
    has_loss = draw.random() < 0.8
    if not has_loss:
        bodies = [replace(body, aux_loss=False) for body in bodies]
    frozen = tuple(f"{s}" for s in range(stages) if draw.random() < 0.08 and bodies[s].shapes)
    count = ranks * draw.choice((1, 2, 2, 3)) if draw.random() < 0.8 else draw.randint(1, 7)
    calls = tuple(_random_call(draw, has_loss, count) for _ in range(draw.choice((1, 1, 2, 3))))
    return Case(
        seed, tuple(bodies), name, ranks, tuple(engines), draw.choice(("mean", "some", "aux")) if has_loss else "",
        draw.choice(("mean", "mean", "sum", "weighted")) if has_loss else "mean", frozen, _ties(draw, bodies),
        torch.float32 if dtype32 else torch.float64, draw.random() < 0.1 and dtype32, dropout, count, calls,
    )  # fmt: skip


def _random_call(draw: random.Random, has_loss: bool, count: int) -> Call:
    split = draw.random() < 0.4
    number = draw.choice((count, count, count + 1, 2 * count)) if split else count
    rows = tuple(draw.choice((1, 2, 3)) for _ in range(number)) if split and draw.random() < 0.6 else (2,) * number
    kind = draw.choice(("grad", "grad", "grad", "forward")) if has_loss else draw.choice(("vjp", "vjp", "forward"))
    return Call(kind, number, rows, split, draw.random() < 0.3)


def _ties(draw: random.Random, bodies: Sequence[Body]) -> tuple[tuple[str, ...], ...]:
    """Sometimes two parameters of equal shape in different stages, by name."""
    if draw.random() > 0.12:
        return ()
    flat = [(s, i, shape) for s, b in enumerate(bodies) if not b.nested for i, shape in enumerate(b.shapes)]
    pairs = [(a, b) for a in flat for b in flat if a[0] < b[0] and a[2] == b[2]]
    if not pairs:
        return ()
    a, b = draw.choice(pairs)
    return ((f"{a[0]}.{a[1]}", f"{b[0]}.{b[1]}"),)


# ---- what a case runs -----------------------------------------------------------------------------------------------
def loss_function(case: Case) -> Callable[..., Any]:
    """The loss; "some" reads the first leaf alone, "aux" returns a second value too."""

    def loss(y: Any, target: Tensor) -> Any:
        leaves = tensors_of(y)[:1] if case.loss == "some" else tensors_of(y)
        total = sum(((leaf - target.to(leaf.dtype)) ** 2).mean() for leaf in leaves)
        return (total, {"first": leaves[0].detach().sum(), "n": 1}) if case.loss == "aux" else total

    return loss


def stages_of(case: Case) -> list[fpipe.Stage]:
    """The stages of a case."""
    return [
        fpipe.Stage(function(body), aux_loss=body.aux_loss, state=body.state, engine=engine, name=f"s{n}")  # type: ignore[arg-type]
        for n, (body, engine) in enumerate(zip(case.bodies, case.engines, strict=True))
    ]


def parameters_of(case: Case) -> list[Any]:
    """The parameters of all stages; tied ones are equal."""
    generator = torch.Generator().manual_seed(case.seed)
    params = [parameters(body, generator, case.dtype) for body in case.bodies]
    for first, second in case.tied:
        (s, i), (t, j) = (tuple(map(int, name.split("."))) for name in (first, second))
        params[t][j] = params[s][i].clone()
    return params


def batch_of(case: Case, call: Call, number: int) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
    """Inputs, targets and the side input, by microbatch."""
    generator = torch.Generator().manual_seed(1000 * case.seed + number)
    one = lambda n, *shape: torch.randn(n, *shape, generator=generator, dtype=case.dtype)
    xs = [one(n, WIDTH) for n in call.rows]
    targets = [one(n, WIDTH) for n in call.rows]
    return xs, targets, [one(n, 1) for n in call.rows]


def weight(target: Tensor) -> Tensor:
    """The weight of a microbatch, for ``fpipe.weighted``."""
    return (target > 0).sum()
