"""Weaves: the search, segments, one order of collectives, and the bits."""

from __future__ import annotations

import random
import time
from typing import Any

import optree
import pytest
import torch
import torch.distributed as dist

import fpipe
from collective_stages import WIDTH, all_collectives, moe_stage, parameters
from common import same, squared
from fpipe.errors import GroupError, WeaveError
from fpipe.passes.weaving.collective_order import Start, difference
from fpipe.passes.weaving.search import weave
from fpipe.passes.weaving.segments import collectives_of, segments_of
from fpipe.passes.weaving.weave import Task, Transfer, Weave
from sample import also
from storage_meter import peak_bytes


# ---- the search ----
def line(number: int, *pieces: tuple[int, int], tail: int = 10, loose: int = 0) -> list[Task]:
    """Tasks that compute, then send, in turn; (compute, carry) each."""
    tasks, before = [], ()
    for k, (compute, carry) in enumerate(pieces):
        value = f"{number}.{k}"
        transfer = Transfer(value, "all_to_all", "g", carry)
        tasks.append(Task(number, f"s{k}", compute, before, (value,), (transfer,), before))
        before = (value,)
    tasks.append(Task(number, "last", tail, before, (), (), before))
    if loose:
        tasks.append(Task(number, "weights", loose, loose=True))
    return tasks


def test_balanced_lines_take_the_time_of_the_longer_stream():
    tasks = line(0, (100, 100), (100, 100)) + line(1, (100, 100), (100, 100), loose=200)
    made = weave(("1F1", "1B0"), tasks)
    assert made.compute == 620
    assert made.communication == 400
    assert made.one_after_another == 1020
    assert made.total <= 1.15 * 620


def test_what_nobody_waits_for_fills_what_is_left():
    made = weave(("1B0",), line(0, (10, 100), loose=100))
    assert made.total == 120
    assert [made.tasks[k].name for k in made.order] == ["s0", "weights", "last"]


def valid(made: Weave) -> bool:
    place = {k: i for i, k in enumerate(made.order)}
    makers = {v: k for k, task in enumerate(made.tasks) for v in task.writes}
    kept = all(
        place[a] < place[b]
        for a in range(len(place))
        for b in range(a + 1, len(place))
        if made.tasks[a].line == made.tasks[b].line
        and not made.tasks[a].loose
        and not made.tasks[b].loose
    )
    read = all(
        place[makers[v]] < place[k]
        for k, t in enumerate(made.tasks)
        for v in t.reads
        if v in makers
    )
    return kept and read and sorted(made.order) == list(range(len(made.tasks)))


@pytest.mark.parametrize("seed", range(30))
def test_any_lines_give_a_valid_weave_no_slower(seed: int):
    draw = random.Random(seed)
    tasks = [
        task
        for number in range(draw.choice([2, 2, 3]))
        for task in line(
            number,
            *((draw.randrange(200), draw.randrange(200)) for _ in range(draw.randrange(5))),
            loose=draw.choice([0, 50, 300]),
        )
    ]
    made = weave([f"{k}F0" for k in range(3)], tasks)
    assert valid(made)
    assert made.total <= made.one_after_another
    assert made.total >= max(made.compute, made.communication)
    assert made == weave([f"{k}F0" for k in range(3)], tasks), "not the same twice"


@pytest.mark.parametrize("said", ["wave", 3, None])
def test_overlap_is_refused_with_a_word(said: Any):
    with pytest.raises(WeaveError, match="give 'weave' or 'sequential'"):
        fpipe.pipeline([lambda p, x: x], "GPipe", group=fpipe.local(1), overlap=said)


# ---- segments ----
@pytest.fixture(scope="module")
def members() -> Any:
    """A process group of two, of which this process is one and the other is not there."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    yield dist.group.WORLD
    dist.destroy_process_group()


@pytest.mark.xdist_group("weaving")
def test_segments_are_the_program_in_pieces(members: Any):
    programs = fpipe.trace(moe_stage(members, draws=False), parameters(1)[0], torch.ones(4, WIDTH))
    for program in (programs.f, programs.b, programs.i, programs.w, programs.adding("B")):
        segments = segments_of(programs, program)
        assert sorted(n.name for s in segments for n in s.program.operations) == sorted(
            n.name for n in program.operations
        )
        made = set(program.inputs)
        for segment in segments:
            assert set(segment.program.inputs) <= made, f"{segment} reads what is not there"
            made |= set(segment.program.outputs)
            started = {c.value for c in collectives_of(segment.program)}
            assert not started & set(segment.waits), "started and waited for at once"
        assert set(program.outputs) <= made
    starts = [len(collectives_of(s.program)) for s in segments_of(programs, programs.f)]
    waits = [len(s.waits) for s in segments_of(programs, programs.f)]
    assert starts == [1, 0, 1, 0], "dispatch, the shared expert, combine, the sum"
    assert waits == [0, 0, 1, 1]
    assert "fpipe" not in programs.f.code


def step(pipe: fpipe.Pipeline, seed: int = 0, rows: int = 24) -> tuple[Any, ...]:
    generator = torch.Generator().manual_seed(seed)
    x, t = torch.randn(2, rows, WIDTH, generator=generator)
    params = pipe.place(parameters(pipe.stages, seed))
    loss, grads = fpipe.value_and_grad(pipe)(params, x, t)
    return (loss, *optree.tree_leaves(grads))


def pipe_of(
    stage: Any, name: str, ranks: int, stages: int, group: Any, overlap: Any = "weave", **more: Any
) -> Any:
    more = {"microbatches": 6, "seed": 5, **more}
    return fpipe.pipeline(
        [stage] * stages, name, loss=squared, group=group, overlap=overlap, **more
    )


@pytest.mark.xdist_group("weaving")
@pytest.mark.parametrize(
    ("name", "stages"), [("DualPipeV", 4), ("DualPipe", 2), ("Overlapped1F1B", 2)]
)
def test_woven_or_not_the_bits_are_the_same_with_draws_and_remat(
    members: Any, name: str, stages: int
):
    """Dropout in three segments of one program must take one stream, wherever the segments run."""
    made = {
        how: pipe_of(moe_stage(None), name, 2, stages, fpipe.local(2), how)
        for how in ("sequential", "weave")
    }
    assert same(step(made["sequential"]), step(made["weave"])), "no collectives"
    woven = pipe_of(moe_stage(members), name, 2, stages, fpipe.local(2))
    plan = woven.plan(parameters(stages), torch.ones(24, WIDTH), torch.ones(24, WIDTH))
    assert "woven" in str(plan)
    assert "all_to_all_single goes" in str(plan)
    assert any(
        ins.program is not None and ins.program.label == "F1" for ins in plan[0].instructions
    )


@pytest.mark.xdist_group("weaving")
def test_a_draw_that_leads_to_a_collective_comes_after_the_draws_before_it(members: Any):
    """The second dropout leads to the exchange, the first does not: they must not change places."""
    if torch.__version__ < "2.12":
        pytest.skip("the fake backend leaves results as the memory was")

    def stage(p: Any, x: torch.Tensor) -> torch.Tensor:
        beside = torch.nn.functional.dropout(torch.relu(x @ p["s"]), 0.25)
        sent = torch.nn.functional.dropout(torch.tanh(x @ p["a"]), 0.25)
        return beside + torch.tanh(fpipe.ops.all_to_all(sent, members) @ p["b"])

    pipes = [
        pipe_of(stage, "DualPipeV", 1, 2, fpipe.local(1), how) for how in ("sequential", "weave")
    ]
    assert same(*map(step, pipes))


@pytest.mark.xdist_group("weaving")
def test_why_nothing_is_woven_is_reported(members: Any):
    params, x = parameters(4), torch.ones(24, WIDTH)
    printed = str(pipe_of(moe_stage(None), "DualPipeV", 2, 4, fpipe.local(2)).plan(params, x, x))
    assert "one after another: nothing is sent while it runs" in printed
    printed = str(
        pipe_of(moe_stage(members), "DualPipeV", 2, 4, fpipe.local(2), compile="aot_eager").plan(
            params, x, x
        )
    )
    assert "one after another: compiled programs run whole" in printed


@pytest.mark.xdist_group("weaving")
def test_a_plain_action_computes_beside_its_own_collectives(members: Any):
    pipe = pipe_of(moe_stage(members), "1F1B", 1, 1, fpipe.local(1))
    plan = pipe.plan(parameters(1), torch.ones(24, WIDTH), torch.ones(24, WIDTH))
    made = plan[0].weaves["0B1"]
    loose = [made.tasks[number].loose for number in made.order]
    assert any(loose[:-1]), "what nobody waits for is not at the end"
    assert (
        not pipe_of(moe_stage(None), "1F1B", 1, 1, fpipe.local(1))
        .plan(parameters(1), torch.ones(24, WIDTH), torch.ones(24, WIDTH))[0]
        .weaves
    )


@pytest.mark.parametrize(("name", "stages"), [*also(("DualPipeV", 2)), ("Overlapped1F1B", 1)])
def test_a_woven_step_holds_what_its_plan_says_and_no_more_than_what_is_in_flight_besides(
    members: Any, name: str, stages: int
):
    params, x = parameters(stages), torch.ones(6 * 512, WIDTH)
    predicted = {}
    for how in ("sequential", "weave"):
        pipe = pipe_of(moe_stage(members), name, 1, stages, fpipe.local(1), how)
        predicted[how] = pipe.plan(params, x, x).peak[0]
        held = peak_bytes(lambda pipe=pipe: fpipe.value_and_grad(pipe)(params, x, x))
        assert abs(predicted[how] / held - 1) < 0.02, how
    part = 512 * WIDTH * 4
    assert predicted["weave"] <= predicted["sequential"] + 2 * 2 * part  # one per direction


@pytest.mark.xdist_group("weaving")
def test_the_simulator_takes_a_woven_actions_time_from_its_weave(members: Any):
    pipe = pipe_of(moe_stage(members), "Overlapped1F1B", 1, 1, fpipe.local(1))
    plan = pipe.plan(parameters(1), torch.ones(24, WIDTH), torch.ones(24, WIDTH))
    line = pipe.schedule(6).simulate(plan.costs)
    fused = next(s for s in line if str(s.action) == "(0F1;0B0)OVERLAP_F_B")
    made = plan[0].weaves["(0F1;0B0)OVERLAP_F_B"]
    assert fused.end - fused.start == pytest.approx(made.total / 1e3)
    assert made.total < made.one_after_another
    carried = [each for each in line.carried[0] if fused.start <= each.start < fused.end]
    assert len(carried) == 4
    assert sum(each.end - each.start for each in carried) == pytest.approx(made.communication / 1e3)


# ---- one order of collectives ----
def starts(*named: str) -> list[Start]:
    """Collectives as ``F0`` in ``0F1``."""
    return [
        Start(name[0], int(name[1]), "all_to_all_single", "float32[2 axes]", action)
        for name, action in (each.split() for each in named)
    ]


def test_members_that_weave_in_different_orders_are_told_where():
    one = starts("F0 0F1", "B0 0B0", "F1 0F1", "B1 0B0")
    other = starts("B0 1B0", "F0 1F1", "F1 1F1", "B1 1B0")
    found = difference("ep", [one, other])
    assert "group ep would start its collectives in different orders" in found
    assert "member 0 starts all_to_all_single 0 of F (float32[2 axes]) in 0F1" in found
    assert "member 1 starts all_to_all_single 0 of B (float32[2 axes]) in 1B0" in found
    assert "member 1 has no more" in difference("ep", [one, one[:1]])
    assert difference("ep", [one, one]) == difference("ep", []) == ""


def _different_weaves() -> tuple[Any, ...]:
    """One process has a long forward, the other a long backward: without agreement, each would plan
    another weave.
    """
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    world = dist.group.WORLD

    def stage(p: Any, x: torch.Tensor) -> torch.Tensor:
        for _ in range(12 * rank):  # a long way to the first collective on one member only
            x = torch.tanh(x @ p["a"])
        h = fpipe.ops.all_to_all(x @ p["b"], world)
        return fpipe.ops.all_to_all(torch.tanh(h @ p["c"]), world)

    found = []
    for overlap in ("sequential", "weave"):
        pipe = pipe_of(stage, "Overlapped1F1B", 1, 1, fpipe.local(1), overlap)
        found.append(step(pipe))
    plan = pipe.plan(parameters(1), torch.ones(24, WIDTH), torch.ones(24, WIDTH))
    reasons = sorted({w.reason for w in plan[0].weaves.values()})
    return same(*found), reasons, str(plan)


def test_two_processes_that_would_weave_differently_fall_back_and_finish():
    for agrees, reasons, printed in fpipe.launch(_different_weaves, ranks=2, timeout=60):
        assert agrees
        assert any(
            "would start its collectives in different orders" in reason for reason in reasons
        ), printed
        assert "one after another: the members of group" in printed


# ---- collectives ----
def _collectives() -> list[bool]:
    """Values and gradients against one process that has everything."""
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.group.WORLD
    p = parameters(1)[0]
    xs = [torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(r)) for r in range(2)]
    programs = fpipe.trace(all_collectives(world, 2, rank), p, xs[rank])
    y, saved = programs.forward(p, xs[rank])
    dx, dp = programs.backward(saved, torch.ones_like(y))
    both = [x.clone().requires_grad_() for x in xs]
    q = {k: v.clone().requires_grad_() for k, v in p.items()}
    h = [torch.tanh(x @ q["a"]) for x in both]
    # uneven there and back again: what was exchanged comes home
    g = torch.cat([x @ q["b"] for x in h])
    summed = 2 * torch.tanh(g)
    whole = [
        both[r] + summed[4 * r : 4 * r + 4] + 0.1 * (h[0] @ q["c"] + h[1] @ q["c"])
        for r in range(2)
    ]
    (whole[0].sum() + whole[1].sum()).backward()
    total = {k: v.clone() for k, v in dp.items()}
    for value in total.values():
        dist.all_reduce(value)
    eager = all_collectives(world, 2, rank)(p, xs[rank])
    grads = [torch.allclose(total[k], q[k].grad) for k in "abc"]  # pyright: ignore[reportArgumentType]
    return [
        torch.allclose(y, whole[rank]),
        torch.allclose(dx, both[rank].grad),
        torch.equal(eager, y),
        *grads,
    ]  # pyright: ignore[reportArgumentType]


def test_collectives_have_the_gradient_of_the_sum_of_all_losses():
    assert fpipe.launch(_collectives, ranks=2, timeout=60) == [[True] * 6] * 2


@pytest.mark.xdist_group("weaving")
def test_collectives_refuse_with_a_word(members: Any):
    x = torch.ones(3, 2)
    with pytest.raises(GroupError, match="cuts 3 rows for 2 members"):
        fpipe.ops.all_to_all(x, members)
    with pytest.raises(GroupError, match="both send= and receive="):
        fpipe.ops.all_to_all(x, members, send=[1, 2])
    with pytest.raises(GroupError, match="does not fit 3 rows"):
        fpipe.ops.all_to_all(x, members, send=[1, 1], receive=[1, 1])
    with pytest.raises(GroupError, match="cuts 3 rows"):
        fpipe.ops.reduce_scatter(x, members)
    with pytest.raises(GroupError, match="give a process group"):
        fpipe.ops.all_reduce(x, "world")


# ---- on processes ----
SCHEDULES = (("DualPipeV", 2), ("DualPipe", 1), ("Overlapped1F1B", 1))


def _seeded_runs(runs: int) -> list[str]:
    """Woven and sequential side by side, on 2 x 2 processes with expert parallelism and on 4 x 1
    without.
    """
    torch.set_num_threads(1)
    wrong = []
    for experts in (2, 1):
        group = fpipe.init(dp=experts, timeout=60)
        stage = moe_stage(group.dp.pg if experts > 1 else None)  # type: ignore[attr-defined]
        pipes = {
            (name, m, how): pipe_of(
                stage, name, group.size, group.size * per, group, how, microbatches=m
            )
            for name, per in SCHEDULES
            for m in ((4, 7) if runs > len(SCHEDULES) else (7,))
            for how in ("sequential", "weave")
        }
        draw = random.Random(experts)
        delay = random.Random(dist.get_rank())
        for seed in range(runs):
            name, m, _ = (
                list(pipes)[2 * seed] if 2 * seed < len(pipes) else draw.choice(list(pipes))
            )
            found = []
            for how in ("sequential", "weave"):
                time.sleep(delay.random() * 0.004)  # ranks come at different times
                found.append(step(pipes[name, m, how], seed, rows=4 * m))
            woven = pipes[name, m, "weave"].cache.plans.values()
            if experts > 1 and not any(
                not w.reason
                for r in woven
                for p in r.prepared.plans.values()
                for w in p.weaves.values()
            ):
                wrong.append(f"{name} was not woven")
            if not same(*found):
                wrong.append(f"{name}, {m} microbatches, seed {seed}, experts over {experts}")
    return wrong


def test_seeded_runs_on_four_processes_bit_for_bit(long: bool):
    assert fpipe.launch(_seeded_runs, 50 if long else 3, ranks=4, timeout=240) == [[]] * 4
