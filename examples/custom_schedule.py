"""A custom schedule in twenty lines: 1F1B with at most ``limit`` microbatches in flight.

python examples/custom_schedule.py
"""

from itertools import count

import torch

import fpipe


def capped(ranks: int, microbatches: int, limit: int = 3) -> fpipe.Schedule:
    """1F1B with a warm-up of at most ``limit`` forwards: less memory on the first ranks, a larger bubble."""
    rows = []
    for rank in range(ranks):
        first = min(limit, ranks - rank, microbatches)
        ops = ["F"] * first + ["B", "F"] * (microbatches - first) + ["B"] * first
        number = {"F": count(), "B": count()}
        rows.append([fpipe.Action(rank, op, next(number[op])) for op in ops])
    return fpipe.Schedule(rows, name="Capped")


def main(picture: str | None = None) -> fpipe.Timeline:
    """Check it, draw it beside 1F1B, and run it."""
    mine = capped(4, 8).check()  # raises an error with the position if two ranks would wait for each other
    for schedule in (mine, fpipe.make_schedule("1F1B", 4, 8)):
        timeline = schedule.simulate(fpipe.Costs(F=1, B=2))
        print(timeline.draw(width=140), f"peak by rank {timeline.peak}\n")
    if picture:
        mine.simulate().save(picture)

    fpipe.register_schedule("capped", capped)  # from here on a name like any other
    layer = lambda p, x: torch.tanh(x @ p)
    squared = lambda y, t: (y - t).square().mean()
    pipe = fpipe.pipeline([layer] * 4, "capped", loss=squared, microbatches=8, group=fpipe.local(4))
    loss, grads = fpipe.value_and_grad(pipe)([torch.eye(3)] * 4, torch.ones(16, 3), torch.zeros(16, 3))
    print(f"loss {loss.item():.6f}, {len(grads)} gradients")
    return mine.simulate()


if __name__ == "__main__":
    main("capped.svg")
