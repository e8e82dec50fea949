"""What a new sequence length, and a new number of microbatches, cost beside a warm step.

A model like Llama of 16 layers in 2 stages under 1F1B, on 2 ranks of one process and on 2
processes. The first length is traced as it is, the second one with symbolic sizes; every later one
reuses that trace. The cost of a new length is the time of its first step over that of its second
step.

    python -m benchmarks.bench_lengths [--lengths 100] [--rounds 3] [--json FILE]
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable
from typing import Any

from benchmarks.command import options, save

LAYERS, WIDTH, HEADS, VOCABULARY, ROWS = 16, 64, 4, 256, 2


def measure(lengths: int, processes: bool = False) -> dict[str, float]:
    """The figures of one rank."""
    import torch

    import fpipe

    group = fpipe.init() if processes else fpipe.local(2)
    stages, params = _model()
    options: dict[str, Any] = {"loss": _loss, "microbatches": 4, "group": group}
    pipe = fpipe.pipeline(stages, "1F1B", **options)
    params, vag = pipe.place(params), fpipe.value_and_grad(pipe)
    draw = random.Random(0)

    def seconds(length: int, microbatches: int = 4) -> float:
        tokens = torch.randint(0, VOCABULARY, (ROWS * microbatches, length + 1))
        parts = fpipe.Microbatches(list(tokens[:, :-1].chunk(microbatches)))
        targets = fpipe.Microbatches(list(tokens[:, 1:].chunk(microbatches)))
        begin = time.perf_counter()
        vag(params, parts, targets)
        return time.perf_counter() - begin

    first, warm = seconds(64), statistics.median(seconds(64) for _ in range(9))
    second = seconds(80)
    new = _new(
        [lambda n=n: seconds(n) for n in draw.sample(range(60, 130), 12) if n not in (64, 80)]
    )
    counts = _new([lambda m=m: seconds(64, m) for m in (5, 6, 7, 8, 9, 10)])
    many = draw.sample(range(200, 200 + 2 * lengths), lengths)
    other = sum(seconds(n) for n in many)
    same = sum(seconds(n) for n in many)
    return {
        "warm step, ms": 1e3 * warm,
        "first call, steps": first / warm,
        "second length, steps": second / warm,
        "new length, steps": new,
        "new number of microbatches, steps": counts,
        "speed of different lengths": same / other,
    }


def _new(calls: list[Callable[[], float]]) -> float:
    """The median of the first time over the second time of some calls."""
    return statistics.median(call() / min(call(), call()) for call in calls)


def _model() -> tuple[list[Any], list[Any]]:
    import torch
    import torch.nn.functional as F

    def layer(p: Any, x: Any) -> Any:
        h = F.rms_norm(x, (WIDTH,), p["norm"])
        q, k, v = ((h @ w).unflatten(-1, (HEADS, -1)).transpose(1, 2) for w in p["qkv"])
        a = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        x = x + a @ p["out"]
        h = F.rms_norm(x, (WIDTH,), p["norm2"])
        return x + (F.silu(h @ p["gate"]) * (h @ p["up"])) @ p["down"]

    import fpipe

    block = fpipe.block(layer)

    def first(p: Any, tokens: Any) -> Any:
        return middle(p["layers"], p["embedding"][tokens])

    def last(p: Any, x: Any) -> Any:
        return middle(p["layers"], x) @ p["head"]

    def middle(layers: Any, x: Any) -> Any:
        for p in layers:
            x = block(p, x)
        return x

    def layers() -> list[Any]:
        matrix = lambda n, m: torch.randn(n, m) / n**0.5
        return [
            {
                "norm": torch.ones(WIDTH),
                "norm2": torch.ones(WIDTH),
                "qkv": [matrix(WIDTH, WIDTH) for _ in "qkv"],
                "out": matrix(WIDTH, WIDTH),
                "gate": matrix(WIDTH, 4 * WIDTH),
                "up": matrix(WIDTH, 4 * WIDTH),
                "down": matrix(4 * WIDTH, WIDTH),
            }
            for _ in range(LAYERS // 2)
        ]

    torch.manual_seed(0)
    embedding, head = torch.randn(VOCABULARY, WIDTH), torch.randn(WIDTH, VOCABULARY)
    return [first, last], [
        {"embedding": embedding, "layers": layers()},
        {"layers": layers(), "head": head},
    ]


def _loss(logits: Any, targets: Any) -> Any:
    import torch

    return torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


def _process(lengths: int) -> dict[str, float]:
    import torch

    torch.set_num_threads(1)
    return measure(lengths, processes=True)


def main() -> None:
    """Print the figures."""
    given = options(__doc__, lengths=100, rounds=3).parse_args()
    import fpipe

    runs: dict[str, Callable[[], dict[str, float]]] = {
        "2 local ranks": lambda: fpipe.launch(measure, given.lengths, ranks=1)[0],
        "2 processes": lambda: fpipe.launch(_process, given.lengths, ranks=2)[0],
    }
    found = {where: [run() for _ in range(given.rounds)] for where, run in runs.items()}
    rows = [
        {"where": where, **{name: statistics.median(one[name] for one in each) for name in each[0]}}
        for where, each in found.items()
    ]
    for row in rows:
        print(
            *(
                f"{name:36s} {value}" if name == "where" else f"{name:36s} {value:8.2f}"
                for name, value in row.items()
            ),
            sep="\n",
        )
    save(rows, given.json)


if __name__ == "__main__":
    main()
