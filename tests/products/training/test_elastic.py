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
from collections.abc import Callable, Iterator
from datetime import timedelta
from functools import partial
from multiprocessing.synchronize import Event
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from click.testing import CliRunner
from torch import Tensor

import fpipe
import network_namespaces
from common import same
from fpipe.errors import GroupError, UnsupportedError
from fpipe.products.command.cli import main
from fpipe.products.command.copies import copies
from fpipe.products.training import elastic as elastic_copies
from fpipe.products.training.elastic import COPIES, COPY, LIGHTHOUSE, Elastic, Members
from fpipe.products.training.peers import Peers

os.environ.setdefault("RUST_LOG", "error")  # else torchft prints several lines a step
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning:torchft")
coordination = pytest.importorskip(
    "torchft.coordination", reason="torchft is not installed: pip install '.[elastic]'"
)

#: (copy, step) -> the rank that is killed there, once
Kills = dict[tuple[int, int], int]
PARTS = 2
LAST = 15  #: the steps in which a copy that was started again joins


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
    elastic = fpipe.elastic(timeout=60)
    assert elastic is not None
    if list(folder.glob(f"killed-{elastic.copy}-*")):
        time.sleep(6)  # the others go on meanwhile
    pipe = fpipe.pipeline(
        [layer] * 2,
        "1F1B",
        loss=loss,
        microbatches=PARTS,
        group=fpipe.init(timeout=30) if ranks > 1 else None,
    )

    def data(step: int) -> tuple[Tensor, Tensor]:
        flag = folder / f"killed-{elastic.copy}-{step}"
        if kills.get((elastic.copy, step)) == pipe.group.here[0] and not flag.exists():
            flag.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        if step == steps - LAST:
            wait_for_returns(folder, elastic.copies)
        time.sleep(pause)
        return batch(step, elastic.copy)

    def log(record: dict[str, Any]) -> None:
        with open(folder / f"log-{elastic.copy}.jsonl", "a") as file:
            file.write(json.dumps(record) + "\n")

    if pipe.group.here[0] == 0:
        (folder / f"started-{elastic.copy}-{os.getpid()}").touch()
    loop = fpipe.Loop(pipe, optimizer(pipe), log=log, elastic=elastic)
    return loop.run(pipe.place(first_params()), data, steps).params


def wait_for_returns(folder: Path, copies: int) -> None:
    """Wait until each copy that was killed has been started again: the machine may be busy."""
    end = time.monotonic() + 15

    def away(copy: int) -> bool:
        kills, starts = (list(folder.glob(f"{what}-{copy}-*")) for what in ("killed", "started"))
        return len(starts) <= len(kills)

    while any(away(copy) for copy in range(copies)) and time.monotonic() < end:
        time.sleep(0.05)


def run_copies(
    fn: Callable[..., Any], *args: object, ranks: int, copies: int, restarts: int = 3
) -> list[Any]:
    """Run ``fn(*args)`` on the processes of several copies, and start a copy that fails again as
    long as no other one has ended.

    Returns:
        The results by copy and rank; ``None`` for a copy that was lost for good.

    Raises:
        Exception: the first one, if all copies were lost.
    """
    server = coordination.LighthouseServer(
        bind="127.0.0.1:0", min_replicas=1, heartbeat_timeout_ms=2000, join_timeout_ms=60_000
    )
    _, _, port = server.address().rpartition(":")
    address = f"http://127.0.0.1:{port}"
    results: list[Any] = [None] * copies
    errors: list[Exception] = []
    ended = threading.Event()

    def run(copy: int) -> None:
        env = {LIGHTHOUSE: address, COPY: str(copy), COPIES: str(copies)}
        for _ in range(restarts + 1):
            try:
                results[copy] = fpipe.launch(fn, *args, ranks=ranks, env=env)
            except Exception as error:  # of the user's function, or of the processes
                errors.append(error)
                if ended.is_set():
                    return
            else:
                ended.set()
                return

    threads = [threading.Thread(target=run, args=(copy,), daemon=True) for copy in range(copies)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    server.shutdown()
    if not ended.is_set():
        raise errors[0]
    return results


def members_by_step(folder: Path, steps: int) -> list[list[int]]:
    """By the log. A copy that begins to write it repeats the last step."""
    rows = {}
    for path in sorted(folder.glob("log-*"), reverse=True):
        for row in map(json.loads, path.read_text().splitlines()):
            assert rows.setdefault(row["step"], row)["copies"] == row["copies"]
    assert sorted(rows) == list(range(1, steps + 1)), "each step is logged"
    return [rows[step]["copies"] for step in sorted(rows)]


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
    results = run_copies(train, folder, steps, kills, pause, ranks, ranks=ranks, copies=count)
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


@pytest.mark.long
def test_one_process_a_copy(tmp_path: Path):
    assert check(tmp_path, {}, 2, 3, 0.0, ranks=1) == [[0, 1]] * 3


# ---- on two hosts ----
@pytest.mark.long
@pytest.mark.timeout(180)
def test_copies_on_two_hosts_and_a_lighthouse_that_returns(tmp_path: Path):
    """The lighthouse is on the first host. It dies after a process of the other host."""
    steps, lost, ended = 60, 8, threading.Event()
    try:
        with network_namespaces.two_namespaces():
            watch = threading.Thread(
                target=lighthouse_of_hosts, args=(tmp_path, 16, ended), daemon=True
            )
            watch.start()
            try:
                results = network_namespaces.jobs(
                    on_host, tmp_path, steps, {(1, lost): 1}, restarts=1, timeout=150
                )
            finally:
                ended.set()
                watch.join()
    except network_namespaces.NotAllowedError as error:
        pytest.skip(f"no network namespaces here ({error})")
    members = members_by_step(tmp_path, steps)
    want = [p.tolist() for p in expected(members)]
    assert [[parts[stage][stage] for stage in range(2)] for parts in results] == [want] * 2
    assert members[:lost] == [[0, 1]] * lost and members[lost] == [0] and members[-1] == [0, 1]
    assert (tmp_path / "returned").exists()


def on_host(number: int, folder: Path, steps: int, kills: Kills) -> Any:
    address = f"http://{network_namespaces.SIDES[0][2]}:29510"
    os.environ |= {LIGHTHOUSE: address, COPY: str(number), COPIES: "2"}
    params = train(folder, steps, kills, 0.12, ranks=2)
    return [p if p is None else p.tolist() for p in params]


def lighthouse_of_hosts(folder: Path, step: int, ended: threading.Event) -> None:
    """Serve it; after some steps end it, and serve it again a second later."""

    def lines() -> int:
        return sum(len(path.read_text().splitlines()) for path in folder.glob("log-*"))

    processes = network_namespaces.PROCESSES
    served = []
    for _ in range(2):  # both have imported what they need before the first one dies
        begin = processes.Event()
        process = processes.Process(
            target=serve_on_host, args=(network_namespaces.SIDES[0], begin), daemon=True
        )
        process.start()
        served.append((process, begin))
    (first, begin_first), (second, begin_second) = served
    begin_first.set()
    while lines() < step and first.is_alive() and not ended.is_set():
        time.sleep(0.05)
    first.kill()
    first.join()
    time.sleep(1)
    begin_second.set()
    (folder / "returned").touch()
    ended.wait()  # copies ask it once more after their last step
    second.kill()
    second.join()


def serve_on_host(side: network_namespaces.Side, begin: Event) -> None:
    network_namespaces.enter(side)
    begin.wait()
    _server = serve(f"{side[2]}:29510")
    threading.Event().wait()


# ---- in one process, each copy a thread ----
def serve(bind: str, min_replicas: int = 1) -> Any:
    return coordination.LighthouseServer(
        bind=bind, min_replicas=min_replicas, heartbeat_timeout_ms=1000, join_timeout_ms=10_000
    )


@pytest.fixture
def lighthouse() -> Iterator[str]:
    server = serve("127.0.0.1:0")
    yield f"http://127.0.0.1:{server.address().rpartition(':')[2]}"
    server.shutdown()


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


def members_of(lighthouse: str, copies: int, timeout: float = 10.0) -> list[Members]:
    return together(
        *(
            partial(Members, Elastic(copy, copies, lighthouse, timeout), fpipe.local(1))
            for copy in range(copies)
        )
    )


def test_the_latest_state_is_that_of_all(lighthouse: str):
    """Of tensors of other shapes, and of numbers, too."""
    one, two = members_of(lighthouse, 2)
    old = {"a": torch.zeros(()), "b": torch.zeros(0), "count": 0, "none": None}
    new = {"a": torch.ones(3, dtype=torch.float64), "b": torch.ones(0), "count": 7, "none": None}
    found = together(lambda: one.join(old, 0), lambda: two.join(new, 7))
    assert all(same(state, new) and step == 7 for state, step in found)
    assert one.copies == two.copies == (0, 1) and one.leads and not two.leads
    one.leave()
    two.leave()


def test_means_are_added_in_the_order_of_the_copies(lighthouse: str):
    three = members_of(lighthouse, 3)
    parts = [
        [torch.randn(7), torch.randn(2, 2, dtype=torch.float64), torch.tensor(float(n))]
        for n in range(3)
    ]

    def run(copy: int) -> Any:
        three[copy].join({}, 0)
        return three[copy].mean(parts[copy])

    want = [(a + b + c) / 3 for a, b, c in zip(*parts, strict=True)]
    found = together(*(partial(run, copy) for copy in range(3)))
    assert all(same(means, want) for means in found)


@pytest.mark.long
def test_a_copy_that_does_not_answer_has_no_share_and_returns(lighthouse: str):
    """Its step is void, and it takes over what the others have."""
    one, two = members_of(lighthouse, 2, timeout=3.0)
    together(lambda: one.join([0], 0), lambda: two.join([0], 0))
    assert one.mean([torch.ones(1)]) is None, "the other one does not take part"
    two.leave()  # its manager is silent: it was stopped
    begin = time.monotonic()
    assert one.join([0], 0) == ([0], 0) and one.copies == (0,)
    assert time.monotonic() - begin < 15
    assert same(one.mean([torch.ones(1)]), [torch.ones(1)])
    two = Members(Elastic(1, 2, lighthouse, 3.0), fpipe.local(1))

    def goes_on() -> int:
        step = 1
        while one.join([1], step) and one.copies == (0,):
            assert same(one.mean([torch.ones(1)]), [torch.ones(1)])
            step += 1
        return step

    steps, found = together(goes_on, lambda: two.join([0], 0))
    assert found == ([1], steps)


def test_a_member_that_fails_frees_those_that_wait_for_it(lighthouse: str):
    """Its connections end, although its process goes on."""
    three = members_of(lighthouse, 3, timeout=60.0)
    together(*(partial(each.join, [0], 0) for each in three))
    begin = time.monotonic()
    three[2]._lost(RuntimeError("a connection failed"))
    assert together(*(partial(each.mean, [torch.ones(1)]) for each in three[:2])) == [None] * 2
    assert time.monotonic() - begin < 20
    for each in three:
        each.leave()


@pytest.mark.long
def test_a_member_that_is_lost_before_it_connects(lighthouse: str):
    class Silent(Members):
        def configure(self, *args: object) -> None:
            pass

    one = Members(Elastic(0, 2, lighthouse, 60.0), fpipe.local(1))
    two = Silent(Elastic(1, 2, lighthouse, 60.0), fpipe.local(1))
    begin = time.monotonic()
    one._last = 1  # not the first step, which waits for all
    together(lambda: one.join([0], 1), lambda: (two._start(begin + 60), time.sleep(1), two.leave()))
    assert one.copies == (0,) and time.monotonic() - begin < 25
    one.leave()


def test_a_store_that_is_gone_fails_at_once():
    with pytest.raises(ConnectionRefusedError):
        Peers.connect("127.0.0.1:1/torchft", 0, (0, 1), 1, 60.0)


def test_ranks_of_a_copy_agree_on_its_members(lighthouse: str):
    """Another rank has no answer of torchft: this one asks again too."""

    class Two:
        here, size, failures = (0,), 1, [(False, "no answer"), None]

        def gather_objects(self, mine: Any) -> list[Any]:
            return [mine, self.failures.pop(0)] if mine is None else [mine]

        def barrier(self) -> None:
            pass

    one = Members(Elastic(0, 1, lighthouse, 10.0), cast(Any, Two()))
    before = one._manager
    one._start(time.monotonic() + 10)
    assert Two.failures == [] and one._manager is not before
    one.leave()


def test_one_step_of_two_histories_counts(lighthouse: str):
    """A copy counted a step, and was stopped while the other one did it again alone."""
    one, two = members_of(lighthouse, 2)
    one._last, two._last = 3, 5  # as if each had counted a step of its own
    found = together(lambda: one.join(["first"], 4), lambda: two.join(["second"], 4))
    assert found == [(["second"], 4)] * 2 and one._last == 5


def test_a_lighthouse_that_dies_and_returns():
    server = serve("127.0.0.1:0")
    port = server.address().rpartition(":")[2]
    one, two = members_of(f"http://127.0.0.1:{port}", 2)
    together(lambda: one.join([0], 0), lambda: two.join([1], 0))
    assert None not in together(*(partial(each.mean, [torch.ones(1)]) for each in (one, two)))
    server.shutdown()

    def returns() -> Any:
        time.sleep(1)
        return serve(f"127.0.0.1:{port}")

    first, second, server = together(lambda: one.join([0], 1), lambda: two.join([1], 1), returns)
    assert first[1] == second[1] == 1
    one.leave()
    two.leave()
    server.shutdown()


@pytest.mark.long
def test_a_lighthouse_that_dies_with_a_request(monkeypatch: pytest.MonkeyPatch):
    """The request was never answered, nor was any later one."""
    monkeypatch.setattr(elastic_copies, "_ANSWER", timedelta(seconds=3))
    server = serve("127.0.0.1:0", min_replicas=2)
    port = server.address().rpartition(":")[2]
    one = Members(Elastic(0, 1, f"http://127.0.0.1:{port}", 10.0), fpipe.local(1))

    def returns() -> Any:
        time.sleep(1)
        server.shutdown()
        while True:  # the port is free a moment later
            try:
                return serve(f"127.0.0.1:{port}")
            except RuntimeError:
                time.sleep(0.1)

    found, server = together(lambda: one.join([0], 4), returns)
    assert found == ([0], 4)
    one.leave()
    server.shutdown()


@pytest.mark.long
def test_copies_with_other_states_are_refused(lighthouse: str):
    one, two = members_of(lighthouse, 2, timeout=5.0)
    _, second = together(
        lambda: one.join([torch.ones(1)], 4),
        lambda: (two.join([torch.ones(1)] * 2, 0), two.leave()),
    )
    assert isinstance(second, GroupError)
    assert "another 2; all copies must have the same pipeline" in str(second)
    two.leave()


@pytest.mark.parametrize(
    ("env", "message"),
    [
        ({LIGHTHOUSE: "x"}, "wrong: 'REPLICA_GROUP_ID'"),
        (
            {LIGHTHOUSE: "http://x:1", COPY: "2", COPIES: "2"},
            "REPLICA_GROUP_ID=2 with NUM_REPLICA_GROUPS=2",
        ),
    ],
)
def test_a_wrong_environment(env: dict[str, str], message: str, monkeypatch: pytest.MonkeyPatch):
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(GroupError, match=message):
        fpipe.elastic()


@pytest.mark.parametrize(
    ("address", "message"),
    [("http://127.0.0.1:1", "cannot be reached"), ("nowhere", "is no address, such as http")],
)
def test_a_lighthouse_that_is_not_there(address: str, message: str):
    with pytest.raises(GroupError, match=message):
        Members(Elastic(0, 1, address, 0.5), fpipe.local(1))


def test_what_a_loop_refuses(tmp_path: Path):
    class Data:
        def __call__(self, step: int) -> Any:
            return ()

        def state_dict(self) -> int:
            return 0

        def load_state_dict(self, state: int) -> None:
            pass

    elastic = Elastic(0, 1, "http://127.0.0.1:1", 1.0)
    pipe = fpipe.pipeline([layer], loss=loss, microbatches=PARTS, group=fpipe.local(1))
    with pytest.raises(UnsupportedError, match="data must depend on the step and the copy alone"):
        fpipe.Loop(pipe, fpipe.sgd(0.1), elastic=elastic).run(first_params()[:1], Data(), 1)


@pytest.mark.parametrize("written", [2, 3])
def test_the_record_of_a_copy_that_was_lost_is_in_the_log(written: int, tmp_path: Path):
    """It was lost after step 3 counted, before or after it wrote the record."""
    file = tmp_path / "log.jsonl"
    file.write_text("".join(f'{{"step": {step}}}\n' for step in range(1, written + 1)))
    pipe = fpipe.pipeline([layer], loss=loss, microbatches=PARTS, group=fpipe.local(1))
    log = fpipe.Loop(pipe, fpipe.sgd(0.1), tmp_path)._logger(3, {"step": 3, "copies": [0, 1]})
    assert log is not None
    log({"step": 4})
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    assert [row["step"] for row in rows] == [1, 2, 3, 4] and rows[2]["copies"] == [0, 1]


#: One copy fails once.
SCRIPT = """
import pathlib, sys, torch, fpipe

elastic = fpipe.elastic(timeout=20)
folder = pathlib.Path(sys.argv[1])
flag = folder / f"failed-{elastic.copy}"
if elastic.copy == 1 and not flag.exists():
    flag.touch()
    raise ValueError("copy 1 fails once")
loss = lambda y, t: (y - t).square().mean()
pipe = fpipe.pipeline([lambda p, x: x * p], loss=loss, microbatches=2)
loop = fpipe.Loop(pipe, fpipe.sgd(0.1), elastic=elastic)
batch = lambda step: (torch.ones(2, 4), torch.zeros(2, 4))
step = loop.run(pipe.place([torch.ones(4)]), batch, 2).step
(folder / f"done-{elastic.copy}").write_text(str(step))
"""


def test_a_script_is_run_as_copies(tmp_path: Path):
    """A copy that fails is started again; the exit status is that of the best copy."""
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    assert main(["copies", "--copies", "2", str(script), str(tmp_path)]) == 0
    assert (tmp_path / "failed-1").exists()
    assert [(tmp_path / f"done-{copy}").read_text() for copy in range(2)] == ["2", "2"]


@pytest.mark.long
def test_a_script_of_which_all_copies_fail(tmp_path: Path):
    script = tmp_path / "script.py"
    script.write_text("raise SystemExit(3)")
    assert main(["copies", "--restarts", "0", str(script)]) > 0


def test_the_command():
    assert "Run a script as several copies" in CliRunner().invoke(copies, ["--help"]).output
    assert "Missing argument 'FILE'" in CliRunner().invoke(copies, []).output


@pytest.mark.long
def test_a_checkpoint_of_the_first_copy_continues(tmp_path: Path):
    """All copies were lost: the next run continues from what the first of them wrote."""
    results = [run_copies(saved, tmp_path, steps, ranks=1, copies=2) for steps in (2, 4)]
    assert same(results[1][0][0], expected([[0, 1]] * 4)) and same(
        results[1][1][0], results[1][0][0]
    )
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "log.jsonl",
        "step-000000002",
        "step-000000004",
    ]


def saved(folder: Path, steps: int) -> Any:
    elastic = fpipe.elastic(timeout=20)
    assert elastic is not None
    pipe = fpipe.pipeline(
        [fpipe.Stage(layer, name=name) for name in "ab"], loss=loss, microbatches=PARTS
    )
    loop = fpipe.Loop(pipe, optimizer(pipe), folder, every=2, elastic=elastic)
    return loop.run(
        pipe.place(first_params()), lambda step: batch(step, elastic.copy), steps
    ).params
