"""The ready order: bits of the order of the row, no order that blocks, memory within the plan."""

from __future__ import annotations

import random
import time
from functools import partial
from typing import Any

import pytest
import torch

import fpipe
from fpipe.actions.action import unfused
from fpipe.actions.rule import needs, provides
from fpipe.errors import ScheduleError, StageError
from fpipe.lowering.memory import MemoryAccount
from fpipe.passes.ready.nodes import BODY, LAST, PLACED, SEND, WAIT
from fpipe.passes.ready.simulated import timeline
from fpipe.passes.ready.window import before
from fpipe.schedule import Schedule
from fpipe.tree import flatten
from random_schedules import drawn, random_case
from sample import also

NAMES = [name for name in fpipe.schedule_names() if not name.startswith("Seq")]


def layer(p, x):
    return torch.tanh(x @ p["w"] + p["b"])


def noisy(p, x):
    return torch.nn.functional.dropout(layer(p, x), 0.25)


def loss(y, t):
    return ((y - t) ** 2).sum()


def results(group, schedule, fn=layer, step=1, **options):
    """The loss and the gradients of a step; with ``step=None`` a function that makes one."""
    pipe = fpipe.pipeline([fn] * schedule.stages, schedule, loss=loss, group=group, **options)
    draws = torch.Generator().manual_seed(1)
    normal = partial(torch.randn, generator=draws)
    params = [{"w": normal(8, 8) / 3, "b": normal(8)} for _ in range(schedule.stages)]
    x, t = normal(2 * schedule.microbatches, 8), normal(2 * schedule.microbatches, 8)
    run = fpipe.value_and_grad(pipe)

    def once():
        value, grads = run(params, x, t)
        return value, {s: grad for s, grad in enumerate(grads) if grad is not None}

    if step is None:
        return once
    for _ in range(step - 1):
        run(params, x, t)
    return once()


def same(ranks, want) -> bool:
    value, grads = want
    found = {stage: grad for _, part in ranks for stage, grad in part.items()}
    return (
        found.keys() == grads.keys()
        and all(torch.equal(value, other) for other, _ in ranks)
        and all(torch.equal(found[s][k], grads[s][k]) for s in grads for k in grads[s])
    )


# ---- bits ----
@pytest.mark.covering
@pytest.mark.parametrize("window", [1, 4, None])
@pytest.mark.parametrize("name", NAMES)
def test_bits_of_all_schedules(name, window):
    schedule = fpipe.make_schedule(name, ranks=4, microbatches=8)
    order = "ready" if window is None else ("ready", window)
    want = results(fpipe.local(4), schedule)
    assert same([results(fpipe.local(4), schedule, order=order)], want)
    seed = NAMES.index(name)
    ranks = fpipe.testing.run(
        partial(results, schedule=schedule, order=order), ranks=4, order="buffered", seed=seed
    )
    assert same(ranks, want)


@pytest.mark.parametrize(
    ("seed", "deliveries"),
    [
        *((seed, 3) for seed in range(6)),
        *also(*((seed, 3) for seed in range(6, 12)), *((n, 20) for n in range(500))),
    ],
)
def test_bits_of_random_pipelines(seed, deliveries):
    schedule, order = random_case(seed)
    ranks = schedule.ranks
    want = results(fpipe.local(ranks), schedule)
    assert same([results(fpipe.local(ranks), schedule, order=order, step=2)], want)
    fn = partial(results, schedule=schedule, order=order)
    for delivery in range(deliveries):
        assert same(fpipe.testing.run(fn, ranks=ranks, order="buffered", seed=delivery), want)


def late(p, x):
    """A stage that takes a while, another one each time."""
    time.sleep(JITTER.random() * 1e-3)
    return layer(p, x)


JITTER = random.Random()


def on_late_processes(seeds, runs):
    """The results of random pipelines on four processes, by seed and run."""
    group = fpipe.init()
    JITTER.seed(group.rank)
    found = []
    for seed in seeds:
        schedule, order = random_case(seed, ranks=(4,))
        run = results(group, schedule, late, order=order, engine="eager", step=None)
        found += [run() for _ in range(runs)]
    return found


@pytest.mark.timeout(3600)
@pytest.mark.parametrize("seeds", [range(2), *also(range(500))])
def test_bits_of_random_pipelines_on_late_processes(seeds, long):
    runs = 20 if long else 3
    ranks = fpipe.launch(on_late_processes, seeds, runs, ranks=4, timeout=3600)
    for number, seed in enumerate(seeds):
        schedule, _ = random_case(seed, ranks=(4,))
        want = results(fpipe.local(4), schedule, engine="eager")
        for run in range(runs):
            assert same([rank[number * runs + run] for rank in ranks], want), (seed, run)


@pytest.mark.parametrize("window", [1, 5])
@pytest.mark.parametrize("name", ["GPipe", "1F1B", "ZBH2"])
def test_bits_with_replicas(name, window):
    """The sum of a stage goes from copy to copy in the order of microbatches."""
    schedule = fpipe.make_schedule(name, ranks=5, microbatches=6, replicas=(2, 1, 2))
    want = results(fpipe.local(5), schedule)
    order = ("ready", window)
    assert same([results(fpipe.local(5), schedule, order=order)], want)
    fn = partial(results, schedule=schedule, order=order)
    for delivery in range(3):
        assert same(fpipe.testing.run(fn, ranks=5, order="buffered", seed=delivery), want)


def test_draws():
    """With a seed actions run out of order; without, draws continue one stream and keep theirs."""
    schedule = fpipe.make_schedule("ZBV", ranks=2, microbatches=4)
    want = results(fpipe.local(2), schedule, noisy, seed=3)
    assert same([results(fpipe.local(2), schedule, noisy, seed=3, order="ready")], want)
    torch.manual_seed(0)
    want = results(fpipe.local(2), schedule, noisy)
    torch.manual_seed(0)
    assert same([results(fpipe.local(2), schedule, noisy, order="ready")], want)


def test_strict_groups_keep_the_order_of_the_row():
    schedule = fpipe.make_schedule("1F1B", ranks=4, microbatches=8)
    fn = partial(results, schedule=schedule, order="ready")
    want = results(fpipe.local(4), schedule)
    assert same(fpipe.testing.run(fn, ranks=4, order="lockstep"), want)


def on_processes(name: str):
    group = fpipe.init()
    schedule = fpipe.make_schedule(name, ranks=group.size, microbatches=8)
    return results(group, schedule, order="ready", step=3)


@pytest.mark.parametrize("shared", ["0", "1"])
def test_bits_on_processes(shared):
    want = results(fpipe.local(2), fpipe.make_schedule("ZBV", ranks=2, microbatches=8))
    env = {"FPIPE_SHARED_MEMORY": shared}
    assert same(fpipe.launch(on_processes, "ZBV", ranks=2, env=env, start="fork"), want)


def test_wrong_orders():
    wrong: Any
    for wrong in ("free", ("ready", 0), ("ready", True), 3):
        with pytest.raises(StageError, match="give 'row', 'ready'"):
            fpipe.pipeline([layer], "GPipe", loss=loss, group=fpipe.local(1), order=wrong)


def test_row_is_the_default():
    schedule = fpipe.make_schedule("1F1B", ranks=2, microbatches=4)

    def plan(**options):
        pipe = fpipe.pipeline([layer] * 2, schedule, loss=loss, group=fpipe.local(2), **options)
        params = [{"w": torch.eye(8), "b": torch.ones(8)}] * 2
        return pipe.plan(params, torch.ones(8, 8), torch.ones(8, 8))

    assert str(plan()) == str(plan(order="row"))
    assert "in any order of 4 actions" in str(plan(order="ready")[0])


def stateful(p, state, x):
    y = layer(p, x)
    return y, state * 0.5 + y.mean()


def with_aux(y, t):
    return loss(y, t), y.mean()


#: What else changes a plan: options of the pipeline, of ``value_and_grad``, and the stage.
OTHERS: dict[str, tuple[dict, dict, Any]] = {
    "tied": ({"tied": [("0.w", "3.w")]}, {}, layer),
    "aux": ({"loss": with_aux}, {"has_aux": True}, layer),
    "dx": ({}, {"argnums": (0, 1)}, layer),
    "each": ({}, {"each": lambda number, y, value: (number, float(value))}, layer),
    "eager": ({"engine": "eager", "seed": 1}, {}, layer),
    "state": ({}, {}, fpipe.Stage(stateful, state=True)),
    "weighted": ({"reduction": fpipe.weighted(lambda t: (t > 0).sum())}, {}, layer),
    "accumulate": ({"accumulate": torch.float64}, {}, layer),
}


def step_of(group, options, of_step, stage, order):
    """All that a second step returns, flat."""
    options = {"loss": loss, "microbatches": 8, "order": order, **options}
    pipe = fpipe.pipeline([stage] * 4, "ZBV", group=group, **options)
    draws = torch.Generator().manual_seed(1)
    params = [{"w": torch.randn(8, 8, generator=draws), "b": torch.ones(8)} for _ in range(4)]
    params[3]["w"] = params[0]["w"].clone()
    x, t = torch.randn(16, 8, generator=draws), torch.randn(16, 8, generator=draws)
    side = {"state": [torch.zeros(())] * 4} if stage is not layer else {}
    run = fpipe.value_and_grad(pipe, **of_step)
    run(params, x, t, **side)
    return flatten(run(params, x, t, **side))[0]


def equal(a, b) -> bool:
    return torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b


@pytest.mark.parametrize("name", OTHERS)
def test_bits_with_other_features(name):
    row = step_of(fpipe.local(2), *OTHERS[name], "row")
    ready = step_of(fpipe.local(2), *OTHERS[name], "ready")
    assert all(map(equal, row, ready))
    assert len(row) == len(ready)
    both = []
    for order in ("row", "ready"):
        fn = partial(on_fake, name=name, order=order)
        both.append(fpipe.testing.run(fn, ranks=2, order="buffered", seed=2))
    for one, other in zip(*both, strict=True):
        assert len(one) == len(other)
        assert all(map(equal, one, other))


def on_fake(group, name, order):
    return step_of(group, *OTHERS[name], order)


# ---- memory and progress of a rank, in random orders ----
def plans_of(schedule, window):
    pipe = fpipe.pipeline(
        [layer] * schedule.stages,
        schedule,
        loss=loss,
        group=fpipe.local(schedule.ranks),
        order=("ready", window),
    )
    params = [{"w": torch.eye(8), "b": torch.ones(8)}] * schedule.stages
    x = torch.ones(2 * schedule.microbatches, 8)
    return pipe.plan(params, x, x).by_rank.values()


def held(plan, rng: random.Random) -> int:
    """The most bytes of a random order: messages arrive whenever their turn in the channel came."""
    done = set()
    before = [
        {one for one in range(len(plan.nodes)) if node.before >> one & 1} for node in plan.nodes
    ]
    row = [n for n, node in enumerate(plan.nodes) if node.kind in (BODY, LAST, PLACED)]
    account, most = MemoryAccount(plan.wired), 0
    while len(done) < len(plan.nodes):
        front = next((n for n in row if n not in done), None)
        end = len(plan.row) + 1 if front is None else plan.nodes[front].position + plan.window
        able = [
            n
            for n, node in enumerate(plan.nodes)
            if n not in done and before[n] <= done
            if node.kind == SEND
            or (node.kind == PLACED and n == front)
            or (node.kind in (BODY, LAST, WAIT) and node.position < end)
        ]
        assert able, "no node can run"
        sends = [n for n in able if plan.nodes[n].kind == SEND]
        place = rng.choice(sends or able)
        for number in plan.nodes[place].steps:
            ins, (ends, needed) = plan.keyed[number], plan.uses[number]
            during = ins.op.hold(ins, ends, account)
            most = max(most, during, account.live)
            for key, later in zip(ins.writes, needed, strict=True):
                if not later:
                    account.end(key)
            for at in ends:
                account.end(ins.reads[at])
        done.add(place)
    return most


@pytest.mark.parametrize("name", ["1F1B", "ZBV", "DualPipeV", "GPipe"])
def test_peak_within_the_plan(name):
    rng = random.Random(0)
    schedule = fpipe.make_schedule(name, ranks=4, microbatches=8)
    for window in (1, 3, 8):
        for plan in plans_of(schedule, window):
            most = max(held(plan, rng) for _ in range(20))
            assert most <= plan.peak
            assert plan.peak <= 4 * most


# ---- blocking ----
def blocks(schedule: Schedule, window: int, *, waits: bool) -> bool:
    """Whether some order of the window blocks, by trying all of them.

    With ``waits`` a send waits until its receiver's window has its reader.
    """
    rows, stages = [tuple(unfused(row)) for row in schedule.rows], schedule.stages
    home = {
        fact: (rank, n)
        for rank, row in enumerate(rows)
        for n, action in enumerate(row)
        for fact in provides(action)
    }
    sources = [[[home[fact] for fact in needs(action, stages)] for action in row] for row in rows]
    readers: dict = {}
    for rank, of_row in enumerate(sources):
        for n, found in enumerate(of_row):
            for source in found:
                if source[0] != rank:
                    readers.setdefault(source, []).append((rank, n))
    chains = [before(row) for row in rows]

    def first(done, sending):
        return next((n for n in range(len(done)) if not done[n] or n == sending), len(done))

    def moves(state):
        ran, sending = state
        firsts = list(map(first, ran, sending))
        for rank, row in enumerate(rows):
            if sending[rank] is not None:
                wanted = readers.get((rank, sending[rank]), ())
                if all(firsts[r] + window > n for r, n in wanted):
                    yield ran, (*sending[:rank], None, *sending[rank + 1 :])
                continue
            for n in range(firsts[rank], min(firsts[rank] + window, len(row))):
                if ran[rank][n] or not all(ran[rank][one] for one in chains[rank][n]):
                    continue
                if all(ran[r][m] and sending[r] != m for r, m in sources[rank][n]):
                    done = (*ran[rank][:n], True, *ran[rank][n + 1 :])
                    after = (*ran[:rank], done, *ran[rank + 1 :])
                    busy = n if waits and (rank, n) in readers else None
                    yield after, (*sending[:rank], busy, *sending[rank + 1 :])

    start: Any = (tuple((False,) * len(row) for row in rows), (None,) * len(rows))
    seen, todo = {start}, [start]
    while todo:
        state = todo.pop()
        following = list(moves(state))
        if not following and not all(map(all, state[0])):
            return True
        new = [s for s in following if s not in seen]
        seen.update(new)
        todo += new
    return False


def test_no_order_blocks():
    """10,000 random partial orders in ``make test-long``; brute force finds none that blocks where
    sends return, and none that blocks where ``check`` accepts sends that wait.
    """
    compared(range(300))


@pytest.mark.long
def test_no_order_blocks_long():
    compared(range(300, 10_000))


def refuses(schedule: Schedule, window: int) -> bool:
    try:
        schedule.check(window=window)
    except ScheduleError as error:
        return error.rule == "window"
    return False


def compared(seeds):
    accepted = refused = 0
    for seed in seeds:
        rng = random.Random(seed)
        ranks = rng.choice([2, 2, 3])
        schedule = drawn(ranks, ranks, 2 if ranks == 3 else rng.choice([2, 3]), rng)
        window = rng.randrange(1, 6)
        assert not blocks(schedule, window, waits=False)
        blocked = blocks(schedule, window, waits=True)
        if refuses(schedule, window):
            refused += blocked
        else:
            accepted += 1
            assert not blocked, (seed, window)
    assert accepted > len(seeds) / 20
    assert refused > len(seeds) / 20


# ---- simulation ----
@pytest.mark.parametrize("name", fpipe.schedule_names())
def test_without_jitter_the_row_is_that_of_simulate(name):
    schedule = fpipe.make_schedule(name, ranks=4, microbatches=8)
    costs = fpipe.Costs(F=1, I=1.25, W=0.5, comm=0.5, send=0.125, receive=0.125)
    plain = schedule.simulate(costs)
    other = timeline(schedule._inspection, costs, "", jitter=0.0, seed=0, order="row", window=None)
    assert (plain.starts, plain.ends) == (other.starts, other.ends)
    assert schedule.simulate(costs, order="ready").total <= 1.02 * plain.total


@pytest.mark.parametrize("name", ["1F1B", "ZBV"])
def test_ready_takes_less_time(name):
    schedule = fpipe.make_schedule(name, ranks=8, microbatches=32)
    share = schedule.ranks / schedule.stages
    costs = fpipe.Costs(F=share, I=share, W=share, comm=1)
    total = {
        order: sum(schedule.simulate(costs, jitter=0.3, seed=n, order=order).total for n in (0, 1))
        for order in ("row", "ready")
    }
    assert total["ready"] <= 0.85 * total["row"]


def test_simulated_orders_are_those_of_the_window():
    schedule = fpipe.make_schedule("ZBV", ranks=4, microbatches=8)
    line = schedule.simulate(jitter=0.5, seed=4, order="ready", window=5)
    for row, ran in zip(schedule.rows, line.rows, strict=True):
        assert sorted(map(str, row)) == sorted(map(str, ran))
        left = list(row)
        for action in ran:
            assert action in row[row.index(left[0]) :][:5]
            left.remove(action)
    again = schedule.simulate(jitter=0.5, seed=4, order="ready", window=5)
    assert (line.starts, line.rows) == (again.starts, again.rows)


@pytest.mark.parametrize(
    "wrong", [{"order": "free"}, {"jitter": -1}, {"order": "ready", "window": 0}]
)
def test_wrong_simulations(wrong):
    with pytest.raises(ScheduleError):
        fpipe.make_schedule("GPipe", ranks=2, microbatches=2).simulate(**wrong)
