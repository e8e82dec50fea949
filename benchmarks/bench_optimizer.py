"""The cost of an optimizer step: fpipe's transforms and torch's foreach AdamW, in one process on one thread.

Both step 200 parameters (100 matrices, each with a vector) in 8 stages; the rounds alternate, and medians are compared.

    python -m benchmarks.bench_optimizer [--rounds 21] [--sides 32,128,512] [--json FILE]
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from typing import Any

import torch

from benchmarks.command import options, save
from benchmarks.measure import alternate, ratio
from fpipe.transforms import Transform, adamw, apply_updates, chain, clip_by_global_norm

STAGES, LAYERS = 8, 100


def model(side: int) -> list[dict[str, torch.Tensor]]:
    """Stages of named matrices and vectors."""
    stages: list[dict[str, torch.Tensor]] = [{} for _ in range(STAGES)]
    for layer in range(LAYERS):
        stages[layer % STAGES] |= {f"w{layer}": torch.randn(side, side), f"b{layer}": torch.randn(side)}
    return stages


def flat(tree: list[dict[str, torch.Tensor]]) -> list[torch.Tensor]:
    """All leaves."""
    return [leaf for stage in tree for leaf in stage.values()]


def stepper(tx: Transform, params: Any, grads: Any, donate: bool) -> Callable[[], object]:
    """A step that remembers parameters and state for the next one."""
    kept = [params, tx.init(params)]

    def step() -> None:
        updates, kept[1] = tx.update(grads, kept[1], kept[0])
        kept[0] = apply_updates(kept[0], updates, donate=donate)

    return step


def torch_step(params: Any, grads: Any, max_norm: float | None, **how: bool) -> Callable[[], object]:
    """torch's step on copies."""
    own = [torch.nn.Parameter(leaf.clone()) for leaf in flat(params)]
    for leaf, gradient in zip(own, flat(grads), strict=True):
        leaf.grad = gradient.clone()
    optimizer = torch.optim.AdamW(own, lr=3e-4, **how)

    def step() -> None:
        if max_norm is not None:
            torch.nn.utils.clip_grad_norm_(own, max_norm)
        optimizer.step()

    return step


def measure(side: int, rounds: int) -> dict[str, tuple[float, float]]:
    """Median milliseconds of each way, and the median ratio to torch's foreach way in the same round."""
    params, grads = model(side), [{name: 0.01 * leaf for name, leaf in stage.items()} for stage in model(side)]

    def copy() -> list[dict[str, torch.Tensor]]:
        return [{name: leaf.clone() for name, leaf in stage.items()} for stage in params]

    calls = {
        "torch foreach": torch_step(params, grads, None, foreach=True),
        "torch fused": torch_step(params, grads, None, fused=True),
        "fpipe": stepper(adamw(3e-4), copy(), grads, donate=False),
        "fpipe donate": stepper(adamw(3e-4, donate=True), copy(), grads, donate=True),
        "fpipe foreach": stepper(adamw(3e-4, fused=False), copy(), grads, donate=False),
        "fpipe foreach donate": stepper(adamw(3e-4, fused=False, donate=True), copy(), grads, donate=True),
        "torch clip + foreach": torch_step(params, grads, 1.0, foreach=True),
        "fpipe clip": stepper(chain(clip_by_global_norm(1.0), adamw(3e-4)), copy(), grads, donate=False),
        "fpipe clip exact": stepper(
            chain(clip_by_global_norm(1.0, exact=True), adamw(3e-4)), copy(), grads, donate=False
        ),
    }
    times = dict(zip(calls, alternate(list(calls.values()), rounds, warmup=3), strict=True))
    base = {name: times["torch clip + foreach" if "clip" in name else "torch foreach"] for name in times}
    return {name: (1e3 * statistics.median(took), ratio(took, base[name])) for name, took in times.items()}


def main() -> None:
    """Print a table, with ratios to torch's foreach AdamW (for clipping: after torch's clipping)."""
    parser = options(__doc__, rounds=21)
    parser.add_argument("--sides", default="32,128,512")
    args = parser.parse_args()
    torch.manual_seed(0)
    tables = {}
    for side in map(int, args.sides.split(",")):
        tables[side] = measure(side, args.rounds)
        print(f"200 parameters, matrices {side} x {side}, {args.rounds} rounds, torch {torch.__version__}")
        for name, (took, times) in tables[side].items():
            print(f"    {name:<22} {took:8.3f} ms  {times:5.2f}")
    save(tables, args.json)


if __name__ == "__main__":
    main()
