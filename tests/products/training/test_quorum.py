"""Copies of a pipeline of which some are lost: the others go on, and a copy that was started again
rejoins them.
"""

from __future__ import annotations

import json
import os
import random
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from torch import Tensor

import fpipe
from common import same
from fpipe.collectives.bounded import BoundedStore
from fpipe.errors import GroupError, UnsupportedError
from fpipe.products.command.copies import copies
from fpipe.products.training import quorum as quorums
from fpipe.products.training.quorum import Quorum

#: (copy, step) -> the rank that is killed there, once
Kills = dict[tuple[int, int], int]
PARTS = 2


def layer(p: Tensor, x: Tensor) -> Tensor:
    return torch.tanh(x @ p)


def loss(y: Tensor, t: Tensor) -> Tensor:
    return (y - t).square().mean()


def first_params() -> list[Tensor]:
    draw = torch.Generator().manual_seed(0)
    return [torch.randn(4, 4, generator=draw) for _ in range(2)]


def batch(step: int, copy: int) -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(1000 * copy + step)
    return torch.randn(2 * PARTS, 4, generator=draw), torch.randn(2 * PARTS, 4, generator=draw)


def optimizer(over: Any = None) -> Any:
    return fpipe.chain(fpipe.clip_by_global_norm(1.0, over=over), fpipe.adamw(1e-2))


def train(folder: Path, steps: int, kills: Kills, pause: float, ranks: int) -> Any:
    """On each process of each copy: the parameters of its stages at the end."""
    torch.set_num_threads(1)
    quorum = fpipe.quorum(timeout=20)
    assert quorum is not None
    pipe = fpipe.pipeline(
        [layer] * 2,
        "1F1B",
        loss=loss,
        microbatches=PARTS,
        group=fpipe.init(timeout=30) if ranks > 1 else None,
    )

    def data(step: int) -> tuple[Tensor, Tensor]:
        flag = folder / f"killed-{quorum.copy}-{step}"
        if kills.get((quorum.copy, step)) == pipe.group.here[0] and not flag.exists():
            flag.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(pause)
        return batch(step, quorum.copy)

    def log(record: dict[str, Any]) -> None:
        with open(folder / f"log-{quorum.copy}.jsonl", "a") as file:
            file.write(
                json.dumps({**record, "members": [member.copy for member in quorum.members]}) + "\n"
            )

    loop = fpipe.Loop(pipe, optimizer(pipe), log=log, quorum=quorum)
    return loop.run(pipe.place(first_params()), data, steps).params


def members_by_step(folder: Path, steps: int) -> list[list[int]]:
    rows = [
        json.loads(line) for path in folder.glob("log-*") for line in path.read_text().splitlines()
    ]
    assert sorted(row["step"] for row in rows) == list(range(1, steps + 1)), (
        "each step is logged once"
    )
    assert all(row["copies"] == len(row["members"]) for row in rows)
    return [row["members"] for row in sorted(rows, key=lambda row: row["step"])]


def expected(members: list[list[int]]) -> list[Tensor]:
    """Plain autograd: in each step the mean over the copies that took part, added in their
    order.
    """
    params, tx = first_params(), optimizer()
    state = tx.init(params)
    for step, present in enumerate(members):
        by_copy = []
        for copy in present:
            leaves = [p.clone().requires_grad_() for p in params]
            for x, t in zip(*(part.chunk(PARTS) for part in batch(step, copy)), strict=True):
                for p in leaves:
                    x = layer(p, x)
                (loss(x, t) / PARTS).backward()
            by_copy.append([leaf.grad for leaf in leaves])
        grads = [sum(parts[1:], parts[0]) / len(present) for parts in zip(*by_copy, strict=True)]
        updates, state = tx.update(grads, state, params)
        params = fpipe.apply_updates(params, updates)
    return params


def check(
    folder: Path, kills: Kills, count: int, steps: int, pause: float, ranks: int = 2
) -> list[list[int]]:
    """Run the copies; the members of each step. Every copy ends with the parameters of plain
    autograd.
    """
    results = fpipe.launch(
        train, folder, steps, kills, pause, ranks, ranks=ranks, copies=count, timeout=100
    )
    members = members_by_step(folder, steps)
    want = expected(members)
    for copy in results:
        assert copy is not None
        assert same(
            [next(p for p in stage if p is not None) for stage in zip(*copy, strict=True)], want
        )
    return members


@pytest.mark.timeout(120)
def test_a_lost_copy_has_no_share_and_rejoins(tmp_path: Path):
    """The first copy, which logs, at its second rank."""
    members = check(tmp_path, {(0, 3): 1}, 2, 45, 0.12)
    assert members[:3] == [[0, 1]] * 3 and members[3] == [1] and members[-1] == [0, 1]


@pytest.mark.timeout(300)
@pytest.mark.parametrize("run", range(10))
def test_copies_are_killed_at_random_steps(run: int, long: bool, tmp_path: Path):
    if not long:
        pytest.skip("see --long")
    draw = random.Random(run)
    kills = {(draw.randrange(3), step): draw.randrange(2) for step in draw.sample(range(30), 2)}
    members = check(tmp_path, kills, 3, 50, 0.15)
    for copy, step in kills:
        assert copy not in members[step]
    assert members[-1] == [0, 1, 2]


def test_one_process_a_copy(tmp_path: Path):
    assert check(tmp_path, {}, 2, 3, 0.0, ranks=1) == [[0, 1]] * 3


def fails(error: bool) -> int:
    quorum = fpipe.quorum()
    assert quorum is not None
    if quorum.copy == 1 or error:
        raise ValueError(f"copy {quorum.copy} fails")
    return quorum.copy


def test_a_copy_that_always_fails_is_given_up():
    assert fpipe.launch(fails, False, ranks=1, copies=2, restarts=1, timeout=60) == [[0], None]
    with pytest.raises(ValueError, match=r"copy . fails"):
        fpipe.launch(fails, True, ranks=1, copies=2, restarts=0, timeout=60)
    with pytest.raises(
        fpipe.errors.LaunchError, match="copies=0, restarts=3; give at least one copy"
    ):
        fpipe.launch(fails, True, ranks=1, copies=0)


# ---- in one process, each copy a thread ----
def memory() -> Any:
    return torch.distributed.HashStore()  # pyright: ignore[reportPrivateImportUsage]


def quorum_of(store: Any, copy: int, copies: int = 2, timeout: float = 10.0) -> Quorum:
    return Quorum(BoundedStore(store, 5.0), copy, copies, timeout)


def together(*functions: Any) -> list[Any]:
    """The results of functions that run at the same time."""
    results: list[Any] = [None] * len(functions)

    def run(place: int) -> None:
        try:
            results[place] = functions[place]()
        except Exception as error:
            results[place] = error

    threads = [threading.Thread(target=run, args=(place,)) for place in range(len(functions))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    return results


def test_the_latest_state_is_that_of_all():
    """Of tensors of other shapes, and of numbers, too."""
    one, two = (quorum_of(memory(), 0, 1), quorum_of(memory(), 0, 1))
    assert one.join(fpipe.local(2), {"a": torch.ones(2)}, 3)[1] == 3
    assert two.members == () and two.changed
    store = memory()
    one, two = quorum_of(store, 0), quorum_of(store, 1)
    old = {"a": torch.zeros(()), "count": 0, "none": None}
    new = {"a": torch.ones(3, dtype=torch.float64), "count": 7, "none": None}
    found = together(
        lambda: one.join(fpipe.local(2), old, -1), lambda: two.join(fpipe.local(2), new, 7)
    )
    assert all(same(state, new) and step == 7 for state, step in found)
    assert one.members == two.members == ((0, 1), (1, 1)) and not one.changed


def test_means_are_added_in_the_order_of_the_copies():
    store = memory()
    three = [quorum_of(store, copy, 3) for copy in range(3)]
    parts = [
        [torch.randn(7), torch.randn(2, 2, dtype=torch.float64), torch.tensor(float(n))]
        for n in range(3)
    ]

    def run(copy: int) -> Any:
        three[copy].join(fpipe.local(1), {}, 0)
        return three[copy].mean(parts[copy], 0)

    want = [(a + b + c) / 3 for a, b, c in zip(*parts, strict=True)]
    assert all(
        same(found, want) for found in together(*(lambda copy=copy: run(copy) for copy in range(3)))
    )


def test_a_copy_that_does_not_answer_is_left_out_and_learns_it():
    store = memory()
    one, two = quorum_of(store, 0, timeout=3.0), quorum_of(store, 1, timeout=3.0)
    together(lambda: one.join(fpipe.local(1), {}, 0), lambda: two.join(fpipe.local(1), {}, 0))
    begin = time.monotonic()
    assert one.mean([torch.ones(1)], 0) is None, "the other one does not take part"
    assert one.join(fpipe.local(1), {}, 0) == ({}, 0) and one.members == ((0, 1),)
    assert time.monotonic() - begin < 15
    assert same(one.mean([torch.ones(1)], 0), [torch.ones(1)])
    assert two.mean([torch.ones(1)], 0) is None
    with pytest.raises(
        GroupError,
        match="copy 1 took longer than timeout=3 s, or one of its processes was lost, and the "
        "others went on",
    ):
        two.join(fpipe.local(1), {}, 0)


def test_a_copy_that_comes_after_the_end():
    store = memory()
    one = quorum_of(store, 0, 1)
    one.join(fpipe.local(1), {}, 0)
    one.leave(50)
    late = quorum_of(store, 0, 1)
    assert not late.running(fpipe.local(1))
    with pytest.raises(
        GroupError, match="the other copies ended after step 50; copy 0 came too late"
    ):
        late.join(fpipe.local(1), {}, 49)
    late = quorum_of(store, 0, 1)
    assert late.join(fpipe.local(1), {}, 50) == ({}, 50), (
        "it has the state of the end, as from a checkpoint"
    )


def test_copies_with_other_states_are_refused():
    store = memory()
    one, two = quorum_of(store, 0, timeout=5.0), quorum_of(store, 1, timeout=5.0)
    first, second = together(
        lambda: one.join(fpipe.local(1), [torch.ones(1)], 4),
        lambda: two.join(fpipe.local(1), [torch.ones(1)] * 2, 0),
    )
    assert isinstance(
        second, GroupError
    ) and "another 2; all copies must have the same pipeline" in str(second)
    assert first == ([torch.ones(1)], 4) and one.members == ((0, 1),)


@pytest.mark.parametrize(
    ("env", "message"),
    [
        ({quorums.ADDRESS: "x"}, "wrong: 'FPIPE_COPY'"),
        (
            {quorums.ADDRESS: "x:1", quorums.COPY: "2", quorums.COPIES: "2"},
            "FPIPE_COPY=2 with FPIPE_COPIES=2",
        ),
        (
            {quorums.ADDRESS: "127.0.0.1:1", quorums.COPY: "0", quorums.COPIES: "2"},
            "cannot be reached",
        ),
    ],
)
def test_a_wrong_environment(env: dict[str, str], message: str, monkeypatch: pytest.MonkeyPatch):
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(GroupError, match=message):
        fpipe.quorum(timeout=0.5)


def test_what_a_loop_refuses(tmp_path: Path):
    class Data:
        def __call__(self, step: int) -> Any:
            return ()

        def state_dict(self) -> int:
            return 0

        def load_state_dict(self, state: int) -> None:
            pass

    quorum = quorum_of(memory(), 0, 1)
    pipe = fpipe.pipeline([layer], loss=loss, microbatches=PARTS, group=fpipe.local(1))
    with pytest.raises(UnsupportedError, match="data must depend on the step and the copy alone"):
        fpipe.Loop(pipe, fpipe.sgd(0.1), quorum=quorum).run(first_params()[:1], Data(), 1)


def test_the_command():
    assert "Run a script as several copies" in CliRunner().invoke(copies, ["--help"]).output
    assert (
        "give the file of a script, or --serve HOST:PORT" in CliRunner().invoke(copies, []).output
    )
    assert "is not HOST:PORT" in CliRunner().invoke(copies, ["--serve", "x"]).output


def test_a_checkpoint_of_the_first_copy_continues(tmp_path: Path):
    """All copies were lost: the next run continues from what the first of them wrote."""
    results = [
        fpipe.launch(saved, tmp_path, steps, ranks=1, copies=2, timeout=60) for steps in (2, 4)
    ]
    assert same(results[1][0][0], expected([[0, 1]] * 4)) and same(
        results[1][1][0], results[1][0][0]
    )
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "log.jsonl",
        "step-000000002",
        "step-000000004",
    ]


def saved(folder: Path, steps: int) -> Any:
    quorum = fpipe.quorum(timeout=20)
    assert quorum is not None
    pipe = fpipe.pipeline(
        [fpipe.Stage(layer, name=name) for name in "ab"], loss=loss, microbatches=PARTS
    )
    loop = fpipe.Loop(pipe, optimizer(pipe), folder, every=2, quorum=quorum)
    return loop.run(pipe.place(first_params()), lambda step: batch(step, quorum.copy), steps).params
