"""The cost of an optimizer step: fpipe's transforms and torch's optimizers, in one process on one
thread.

All step 200 parameters (100 matrices, each with a vector) in 8 stages. Each family of rows has a
reference of torch. The rounds alternate, and medians of the time of the processor are compared,
which other processes change less.

    python -m benchmarks.bench_optimizer [--rounds 21] [--sides 32,128,512] [--json FILE]
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from functools import partial
from time import thread_time
from typing import Any

import torch

from benchmarks.command import options, save
from benchmarks.measure import alternate, ratio
from fpipe.devices.kinds import keep_freed
from fpipe.transforms import Transform, adamw, apply_updates, chain, clip_by_global_norm

STAGES, LAYERS = 8, 100


def model(side: int) -> list[dict[str, torch.Tensor]]:
    """Stages of named matrices and vectors."""
    stages: list[dict[str, torch.Tensor]] = [{} for _ in range(STAGES)]
    for layer in range(LAYERS):
        stages[layer % STAGES] |= {
            f"w{layer}": torch.randn(side, side),
            f"b{layer}": torch.randn(side),
        }
    return stages


def flat(tree: list[dict[str, torch.Tensor]]) -> list[torch.Tensor]:
    """All leaves."""
    return [leaf for stage in tree for leaf in stage.values()]


def stepper(tx: Transform, params: Any, grads: Any, donate: bool) -> Callable[[], object]:
    """A step in one pass that remembers parameters and state for the next one."""
    kept = [params, tx.init(params)]

    def step() -> None:
        kept[0], kept[1] = tx.step(grads, kept[1], kept[0], donate=donate)

    return step


def updater(tx: Transform, params: Any, grads: Any) -> Callable[[], object]:
    """The same by ``update`` and ``apply_updates``."""
    kept = [params, tx.init(params)]

    def step() -> None:
        updates, kept[1] = tx.update(grads, kept[1], kept[0])
        kept[0] = apply_updates(kept[0], updates)

    return step


def torch_step(
    params: Any, grads: Any, optimizer: Callable[..., Any], max_norm: float | None = None
) -> Callable[[], object]:
    """A step of an optimizer on copies."""
    own = [torch.nn.Parameter(leaf.clone()) for leaf in flat(params)]
    for leaf, gradient in zip(own, flat(grads), strict=True):
        leaf.grad = gradient.clone()
    instance = optimizer(own)

    def step() -> None:
        if max_norm is not None:
            torch.nn.utils.clip_grad_norm_(own, max_norm)
        instance.step()

    return step


def copying(params: Any, grads: Any, steps_too: bool) -> Callable[[], object]:
    """The least that new parameters and state cost with torch's kernels: three lists are copied,
    then stepped.
    """
    kept = [[leaf.clone() for leaf in flat(params)] for _ in range(3)]
    gs, one, steps = flat(grads), torch.ones(()), [torch.ones(())] * (2 * LAYERS)

    def step() -> None:
        kept[:] = [list(torch._foreach_mul(xs, one)) for xs in kept]
        if not steps_too:
            return
        ps, ms, vs = kept
        torch._fused_adamw_(
            ps,
            gs,
            ms,
            vs,
            [],
            steps,
            lr=3e-4,
            beta1=0.9,
            beta2=0.999,
            eps=1e-8,
            weight_decay=1e-2,
            amsgrad=False,
            maximize=False,
        )

    return step


def families(side: int) -> dict[str, dict[str, tuple[Callable[[], object], float | None]]]:
    """By the name of a reference, which is the first of its rows: functions, each with the bound of
    its ratio.
    """
    params, grads = (
        model(side),
        [{name: 0.01 * leaf for name, leaf in stage.items()} for stage in model(side)],
    )
    copied = lambda tree: [{name: leaf.clone() for name, leaf in stage.items()} for stage in tree]
    torchs = partial(torch_step, params, grads)
    given = lambda make: stepper(make(donate=True), copied(params), grads, donate=True)
    kept = lambda make: stepper(make(), copied(params), grads, donate=False)
    adam, clip = partial(adamw, 3e-4), clip_by_global_norm
    clipped = lambda donate=False: chain(clip(1.0), adamw(3e-4, donate=donate))
    exact = lambda donate=False: chain(clip(1.0, exact=True), adamw(3e-4, donate=donate))
    fused = partial(torch.optim.AdamW, lr=3e-4, fused=True)
    return {
        "adamw": {
            "torch fused": (torchs(fused), None),
            "torch foreach": (torchs(partial(torch.optim.AdamW, lr=3e-4, foreach=True)), None),
            "torch copies alone": (copying(params, grads, False), None),
            "torch copies, then fused": (copying(params, grads, True), None),
            "fpipe donate": (given(adam), 1.15),
            "fpipe": (kept(adam), 1.6),
            "fpipe update, apply": (updater(adam(), copied(params), grads), None),
        },
        "clip": {
            "torch clip + fused": (torchs(fused, 1.0), None),
            "fpipe clip donate": (given(clipped), 1.15),
            "fpipe clip": (kept(clipped), 1.6),
            "fpipe clip exact donate": (given(exact), None),
        },
    }


def measure(side: int, rounds: int) -> dict[str, tuple[float, float, float | None]]:
    """Median milliseconds of each row, the median ratio to the reference of its family in the same
    round, its bound.
    """
    measured = {}
    for rows in families(side).values():
        times = alternate([run for run, _ in rows.values()], rounds, warmup=3, clock=thread_time)
        for (name, (_, bound)), took in zip(rows.items(), times, strict=True):
            measured[name] = (1e3 * statistics.median(took), ratio(took, times[0]), bound)
    return measured


def main() -> None:
    """Print a table, with ratios to the reference of each family."""
    parser = options(__doc__, rounds=21)
    parser.add_argument("--sides", default="32,128,512")
    args = parser.parse_args()
    torch.manual_seed(0)
    keep_freed()  # as ranks on a CPU do
    tables = {}
    for side in map(int, args.sides.split(",")):
        tables[side] = measure(side, args.rounds)
        print(
            f"200 parameters, matrices {side} x {side}, {args.rounds} rounds, torch "
            f"{torch.__version__}"
        )
        for name, (took, times, bound) in tables[side].items():
            print(
                f"    {name:<26} {took:8.3f} ms  {times:5.2f}"
                + (f"  at most {bound}" if bound else "")
            )
    save(tables, args.json)


if __name__ == "__main__":
    main()
