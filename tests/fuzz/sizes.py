"""Functions of sizes against autograd, at several lengths: ``python -m tests.fuzz.sizes``.

A function uses its sizes in ways that are drawn from ``NUMBERS`` and ``TENSORS``: as a number, a
text, a key, a type, a condition, the length of a loop or of a tensor. A pipeline of two such stages
runs at several lengths, so that from the second one on a trace with symbolic sizes may serve it.
The oracle is autograd on the functions themselves, which sees sizes as Python numbers.
"""

from __future__ import annotations

import json
import linecache
import math
import multiprocessing
import numbers
import operator
import random
import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import click
import numpy as np
import torch
from einops import rearrange
from rich.progress import track
from torch import Tensor

import fpipe
from fpipe.programs.cache import _traces_of

#: Numbers for texts of some sizes; the others take a default.
BY_TEXT = {
    "3": 2.0,
    "5": 3.0,
    "6": 0.5,
    "04": 1.5,
    "08": 0.25,
    "[2, 7]": 4.0,
    "1000": 5.0,
    "0x9": 7.0,
}
BY_NUMBER = {2: 1.5, 3: 2.0, 7: 3.0, 12: 0.5}


@lru_cache(maxsize=100)
def cached(n: int) -> float:
    """A helper with a cache by size."""
    return n + 0.5


def first_number(values: Sequence[int]) -> float:
    """The first number of some, by its exact type."""
    for value in values:
        if type(value) is int:
            return float(value)
    return -1.0


def by_number(n: int) -> float:
    """A number of a table, and 1 where a size is no key."""
    try:
        return BY_NUMBER[n]
    except (KeyError, TypeError):
        return 1.0


def functional(n: int, *, scale: float = 0.5) -> float:
    """A helper with a default."""
    return n * scale


#: What functions use beside torch, by name.
NAMES: dict[str, Any] = {
    "torch": torch,
    "math": math,
    "json": json,
    "numbers": numbers,
    "operator": operator,
    "np": np,
    "rearrange": rearrange,
    "BY_TEXT": BY_TEXT,
    "BY_NUMBER": BY_NUMBER,
    "cached": cached,
    "first_number": first_number,
    "by_number": by_number,
    "functional": functional,
}
#: Expressions of two sizes ``b`` and ``n`` and of the tensor ``x``; each is a number.
NUMBERS = """
n
b
n / 3
n // 2
n % 3 + 1
-n
n ** 2
n ** 0.5
2 ** (n % 4)
b * n
n - b
abs(b - n) + 1
min(n, 6)
max(n, 6)
min(b, n)
divmod(n, 3)[1] + 1
round(n / 3)
int(n)
float(n)
int(n / 2)
math.sqrt(n)
math.log(n)
math.floor(n / 4)
math.ceil(n / 4)
math.prod(x.shape)
math.gcd(n, 6)
operator.index(n)
n.__index__()
n.bit_length()
sum(range(n))
len(x)
len(x[0])
x.numel()
x.dim()
x.stride(0)
x.nbytes
x.size(1)
x.shape.numel()
x[:, 1:].shape[1]
torch.Size((b, n)).numel()
2.0 if n > 5 else 3.0
2.0 if n == 5 else 3.0
2.0 if n % 2 else 3.0
2.0 if n in (3, 5, 9) else 3.0
2.0 if b < n else 3.0
2.0 if not n - 5 else 3.0
bool(n - 7) + 1
(n > 4) + 1
2.0 if 3 <= n < 8 else 3.0
2.0 if isinstance(n, int) else 3.0
2.0 if type(n) is int else 3.0
2.0 if isinstance(n, numbers.Integral) else 3.0
2.0 if type(n) == type(b) == int else 3.0
2.0 if n.__class__ is int else 3.0
2.0 if hasattr(n, 'bit_length') else 3.0
2.0 if isinstance(n / 2, float) else 3.0
2.0 if type(x.shape[1]).__name__ == 'int' else 3.0
2.0 if issubclass(type(n), int) else 3.0
first_number([n, 5])
2.0 if all(isinstance(s, int) for s in x.shape) else 3.0
BY_TEXT.get(str(n), 1.0)
BY_TEXT.get(f'{n}', 1.0)
BY_TEXT.get('%s' % n, 1.0)
BY_TEXT.get(repr(n), 1.0)
BY_TEXT.get('{}'.format(n), 1.0)
BY_TEXT.get('%d' % n, 1.0)
BY_TEXT.get(f'{n:02d}', 1.0)
BY_TEXT.get(format(n, '02d'), 1.0)
BY_TEXT.get(str(n).zfill(2), 1.0)
BY_TEXT.get(str([b, n]), 1.0)
BY_TEXT.get(str(list(x.shape)), 1.0)
BY_TEXT.get(json.dumps([b, n]), 1.0)
BY_TEXT.get(hex(n), 1.0)
BY_TEXT.get(f'{n!r}', 1.0)
BY_TEXT.get(str(n - 1), 1.0)
len(str(n))
len(str(tuple(x.shape)))
len(f'{x.shape}')
len('%s' % (x.shape,))
float(str(n))
int(f'{n}') + 1
len('x' * n)
len([0] * n)
ord(str(n)[0]) / 50
len(str(n / 4))
hash(str(n)) * 0.0 + len(str(b))
BY_NUMBER.get(n, 1.0)
by_number(n)
cached(n)
{n: 2.0}.get(5, 3.0)
2.0 if n in BY_NUMBER else 3.0
2.0 if n in {3, 7} else 3.0
hash(n) % 5 + 1
[1.0, 2.0, 3.0][n % 3]
[1.0] * n and 2.0
float(np.int64(n))
float(np.arange(n).sum())
float(np.full((n,), 2.0).mean())
float(torch.tensor(3.0)) + n
n if torch.is_tensor(n) else n + 1
sorted([n, 5, b])[1]
functional(n)
(lambda m: m * 2)(n)
n << 1
n & 3
n | 1
n ^ 2
complex(n).real
(n, b)[0]
next(iter(range(n, n + 1)))
sum(1 for s in x.shape if s > 3) + 1
n.real
n.numerator / n.denominator
""".strip().splitlines()
#: Statements that give ``x`` another value of the same shape.
TENSORS = """
x = x + torch.arange(n)[:, None]
x = x * torch.full((n, 1), 0.5)
x = x.reshape(b * n, -1).reshape(b, n, -1)
x = x.flatten(0, 1).unflatten(0, (b, n))
x = torch.cat([x[:, n // 2 :], x[:, : n // 2]], 1)
x = torch.nn.functional.pad(x, (0, 0, 1, 0))[:, :n]
x = x / x.sum((0, 1)).numel()
x = x * torch.ones(n, n).tril().sum(1)[:, None] / n
x = x.roll(n // 3, 1)
x = x - x.mean(1, keepdim=True) * (n - 1)
x = x.transpose(0, 1).reshape(n, -1).reshape(n, b, -1).transpose(0, 1).contiguous()
x = torch.where(torch.arange(n)[:, None] < n // 2, x, 2 * x)
x = x + torch.linspace(0, 1, n)[:, None]
x = x.index_select(1, torch.arange(n - 1, -1, -1))
x = torch.stack([x[:, i] * i for i in range(n)], 1)
x = torch.cat([part * i for i, part in enumerate(x.split(2, 1))], 1)
x = torch.cat(list(x.chunk(2, 1)), 1)
x = rearrange(x, 'b n d -> (b n) d').view(b, n, -1)
x = x.expand(b, n, x.shape[2]).clone()
x = x + torch.eye(n).sum(0)[:, None]
x = x.repeat(1, 2, 1)[:, n:]
x = torch.nn.functional.layer_norm(x, x.shape[1:])
x = x * torch.zeros(b, n).add(n)[..., None].sqrt()
x = torch.cumsum(x, 1) / n
x = x.view(-1, x.shape[-1]).softmax(0).view(x.shape)
x = x * torch.tensor([n, b]).sum()
x = x * torch.tensor(n / 2)
x = torch.addmm(x.reshape(b * n, -1), x.reshape(b * n, -1), p.diag()).view_as(x)
""".strip().splitlines()


class Found(NamedTuple):
    """What a function came to."""

    seed: int
    kind: str
    text: str


def stage_of(draw: random.Random, seed: int, uses: Sequence[str]) -> Callable[..., Tensor]:
    """A random function of its sizes, whose source is found by tracebacks."""
    lines = ["def stage(p, x):", "    b, n = x.shape[:2]"]
    for _ in range(draw.randint(1, 3)):
        if draw.random() < 0.7:
            lines.append(f"    x = x * (0.1 + 0.05 * ({draw.choice(uses)}))")
        else:
            lines.append(f"    {draw.choice(TENSORS)}")
    lines.append("    return torch.tanh(x * p)")
    source = "\n".join(lines) + "\n"
    name = f"<sizes {seed} {draw.randrange(10**9)}>"
    linecache.cache[name] = len(source), None, source.splitlines(keepends=True), name
    space = dict(NAMES)
    exec(compile(source, name, "exec"), space)
    stage = space["stage"]
    stage.source = source
    return stage


def expected(
    stages: Sequence[Callable[..., Tensor]], params: Sequence[Tensor], x: Tensor
) -> tuple[Tensor, ...]:
    """Loss and gradients of autograd."""
    leaves = [p.clone().requires_grad_() for p in params]
    out = x
    for stage, p in zip(stages, leaves, strict=True):
        out = stage(p, out)
    loss = out.square().mean()
    return (loss.detach(), *torch.autograd.grad(loss, leaves))


def run(seed: int, lengths: int = 8, uses: Sequence[str] = NUMBERS) -> Found:
    """Compare the pipeline of one pair of functions with autograd at some lengths."""
    draw = random.Random(seed)
    stages = [stage_of(draw, seed, uses) for _ in range(2)]
    source = "\n".join(stage.source for stage in stages)
    pipe = fpipe.pipeline(
        stages, loss=lambda y: y.square().mean(), microbatches=1, group=fpipe.local(2)
    )
    step = fpipe.value_and_grad(pipe)
    params = [torch.rand(3) + 0.5 for _ in stages]
    tried = []
    symbolic = False
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for n in draw.sample(range(2, 14), lengths):
            b = draw.choice((2, 2, 2, 3, 4))
            tried.append((b, n))
            x = torch.rand(b, n, 3)
            try:
                right = expected(stages, params, x)
            except Exception as error:
                return Found(seed, "fails itself", f"{error!r}\n{source}")
            try:
                loss, grads = step(params, x)
            except fpipe.FpipeError as error:
                return Found(seed, "refused", f"at {tried}: {error}\n{source}")
            if not all(map(torch.equal, right, (loss, *grads))):
                return Found(seed, "different", f"at {tried}: {right} {(loss, *grads)}\n{source}")
            symbolic = symbolic or bool(_families(stages))
    return Found(seed, "equal, symbolic" if symbolic else "equal, a trace for each size", source)


def _families(stages: Sequence[Callable[..., Tensor]]) -> list[object]:
    """The traces for many sizes of these functions."""
    rows = [row for stage in stages for row in _traces_of(stage).families.values()]
    return [family for row in rows for family in row.families]


@click.command()
@click.option("--functions", default=300, show_default=True)
@click.option("--first", default=0, show_default=True)
@click.option("--jobs", default=2, show_default=True)
def main(functions: int, first: int, jobs: int) -> None:
    """Compare random functions of sizes with autograd at eight lengths each."""
    torch.set_num_threads(1)
    counts: Counter[str] = Counter()
    bad = 0
    seeds = range(first, first + functions)
    with multiprocessing.get_context("spawn").Pool(jobs, torch.set_num_threads, (1,)) as pool:
        for found in track(pool.imap_unordered(run, seeds, chunksize=4), total=functions):
            counts[found.kind] += 1
            if not found.kind.startswith("equal"):
                bad += 1
                click.echo(f"{found.seed} {found.kind}: {found.text[:1500]}")
    click.echo(", ".join(f"{n} {kind}" for kind, n in sorted(counts.items())))
    raise SystemExit(bool(bad))


if __name__ == "__main__":
    main()
