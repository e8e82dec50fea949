"""The environment variables of SLURM, MPI and PALS: one job of all tasks, or an error that names
what is missing.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from typing import Any

import pytest
import torch

import fpipe
import training_steps
from fpipe.collectives.launchers import first_host, variables
from fpipe.errors import GroupError
from sample import also

#: What begins the variables of launchers and of torchrun.
OURS = (
    "SLURM_",
    "OMPI_",
    "PMI_",
    "PMIX_",
    "PALS_",
    "MPI_LOCAL",
    "I_MPI_",
    "MASTER_",
    "TORCHELASTIC",
)
STEP = {
    "SLURM_JOB_ID": "4711",
    "SLURM_STEP_ID": "0",
    "SLURM_NTASKS": "4",
    "SLURM_STEP_NUM_TASKS": "4",
    "SLURM_STEP_NODELIST": "node[003-004]",
    "SLURM_STEP_TASKS_PER_NODE": "2(x2)",
    "SLURM_JOB_NODELIST": "node[002-004]",
}
HYDRA = {"PMI_SIZE": "4", "MPI_LOCALNRANKS": "4"}


def task(launcher: str, rank: int, size: int, host: str) -> dict[str, str]:
    """What a launcher sets for one of the tasks, all of them on this machine."""
    r, n = str(rank), str(size)
    return {
        "srun": {
            **STEP,
            "SLURM_PROCID": r,
            "SLURM_LOCALID": r,
            "SLURM_STEP_NUM_TASKS": n,
            "SLURM_STEP_NODELIST": host,
            "SLURM_JOB_ID": str(os.getppid()),  # whose port no other run of the tests has
        },
        "mpirun": {
            "OMPI_COMM_WORLD_RANK": r,
            "OMPI_COMM_WORLD_SIZE": n,
            "OMPI_COMM_WORLD_LOCAL_RANK": r,
            "OMPI_COMM_WORLD_LOCAL_SIZE": n,
            "PMIX_NAMESPACE": str(os.getppid()),
        },
        "hydra": {
            "PMI_RANK": r,
            "PMI_SIZE": n,
            "MPI_LOCALRANKID": r,
            "MPI_LOCALNRANKS": n,
            "I_MPI_HYDRA_UUID": str(os.getppid()),
        },
        "pals": {
            "PALS_RANKID": r,
            "PMI_SIZE": n,
            "PALS_LOCAL_RANKID": r,
            "PALS_LOCAL_SIZE": n,
            "PALS_APID": str(os.getppid()),
        },
    }[launcher]


def clear(environ: Any) -> None:
    """Remove what torchrun and other launchers set."""
    for name in [*environ]:
        if name.startswith(OURS) or name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
            del environ[name]


@pytest.fixture(autouse=True)
def _no_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [*os.environ]:
        if name.startswith(OURS) or name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
            monkeypatch.delenv(name)


def read(monkeypatch: pytest.MonkeyPatch, **values: str) -> dict[str, str]:
    for name, value in values.items():
        monkeypatch.setenv(name, value)
    return variables()


# ---- one job ----
def steps(launcher: str) -> tuple[int, dict[Any, str], str]:
    """In a process that ``fpipe.launch`` started: as if another launcher had."""
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    clear(os.environ)
    os.environ |= task(launcher, rank, size, socket.gethostname())
    group = fpipe.init(timeout=60)
    found = training_steps.steps(group, "ZBVZeroBubble", [(4, 2)])
    assert fpipe.init() is group and "LOCAL_RANK" in os.environ
    return group.rank, found, os.environ["MASTER_ADDR"]


@pytest.mark.xdist_group("launched")
@pytest.mark.parametrize("launcher", ["mpirun", *also("srun", "hydra", "pals")])
def test_tasks_form_one_job_with_the_bits_of_one_process(launcher: str):
    expected = training_steps.steps(fpipe.local(4), "ZBVZeroBubble", [(4, 2)])
    found = fpipe.launch(steps, launcher, ranks=4, timeout=100)
    assert [rank for rank, _, _ in found] == [0, 1, 2, 3]
    assert {address for _, _, address in found} == {
        socket.gethostname() if launcher == "srun" else "127.0.0.1"
    }
    for _, mine, _ in found:
        assert mine.items() <= expected.items() and ("loss", 0) in mine
    assert set().union(*(mine for _, mine, _ in found)) == expected.keys()


def gradients() -> list[Any]:
    """The loss and the gradients of plain autograd, and those of this rank, if it is one."""
    params = training_steps.parameters(4)
    x, y = training_steps.batch(8, 0)
    group = fpipe.init(pp=4)
    pipe = fpipe.pipeline(
        [training_steps.block] * 4,
        "1F1B",
        loss=training_steps.loss,
        microbatches=4,
        group=group,
    )
    value, grads = fpipe.value_and_grad(pipe)(pipe.place(params), x, y)
    for leaf in (leaf for stage in params for leaf in stage.values()):
        leaf.requires_grad_()
    out = x
    for stage in params:
        out = training_steps.block(stage, out)
    whole = training_steps.loss(out, y)
    whole.backward()
    torch.testing.assert_close(value, whole.detach())
    for stage, mine in zip(params, grads, strict=True):
        for name, leaf in stage.items() if mine is not None else ():
            torch.testing.assert_close(mine[name], leaf.grad)
    return [group.rank, group.size, *pipe.here]


def gradients_of_task(launcher: str) -> list[Any]:
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    clear(os.environ)
    os.environ |= task(launcher, rank, size, socket.gethostname())
    return gradients()


@pytest.mark.xdist_group("launched")
def test_emulated_srun_has_the_gradients_of_plain_autograd():
    found = fpipe.launch(gradients_of_task, "srun", ranks=4, timeout=100)
    assert found == [[rank, 4, rank] for rank in range(4)]


def test_a_rank_says_once_what_it_read(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    assert read(monkeypatch, **task("srun", 1, 4, "node[003,9]"))["MASTER_ADDR"] == "node003"
    assert capsys.readouterr() == ("", "")
    found = read(monkeypatch, SLURM_PROCID="0", MASTER_PORT="29511")
    assert capsys.readouterr().err == (
        "fpipe: 4 processes, which meet at node003:29511 (SLURM_PROCID, SLURM_STEP_NUM_TASKS, "
        "SLURM_LOCALID)\n"
    )
    assert read(monkeypatch, **found) == {} and capsys.readouterr().err == ""


# ---- which launcher ----
def test_nothing_is_loaded_without_a_launcher():
    code = "import fpipe, sys; fpipe.init(); print('fpipe.collectives.launchers' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"


@pytest.mark.parametrize(
    "values",
    [
        {  # salloc: a shell or a notebook beside the tasks
            "SLURM_JOB_ID": "3",
            "SLURM_JOB_NODELIST": "node1",
            "SLURM_NTASKS": "4",
            "SLURM_TASKS_PER_NODE": "4",
        },
        {  # a batch script that calls python without srun
            "SLURM_JOB_ID": "2",
            "SLURM_JOB_NODELIST": "node1",
            "SLURM_NTASKS": "4",
            "SLURM_PROCID": "0",
            "SLURM_LOCALID": "0",
            "SLURM_NODEID": "0",
        },
        {  # srun --pty in an allocation of four tasks
            **STEP,
            "SLURM_STEP_NUM_TASKS": "1",
            "SLURM_PROCID": "0",
            "SLURM_LOCALID": "0",
        },
        {"SLURM_PROCID": "0", "SLURM_NTASKS": "1"},
        {"OMPI_COMM_WORLD_SIZE": "1", "OMPI_COMM_WORLD_RANK": "0"},
        {"PMI_SIZE": "1", "PMI_RANK": "0", "PMI_FD": "9"},
        {"OMPI_MCA_btl": "tcp,self"},  # a setting of a shell
    ],
)
def test_one_task_stays_alone(monkeypatch: pytest.MonkeyPatch, values: dict[str, str]):
    assert read(monkeypatch, **values) == {}
    assert fpipe.init(pp=4).here == (0, 1, 2, 3)


def test_variables_of_torchrun_have_priority(monkeypatch: pytest.MonkeyPatch):
    """srun and torchrun: a task for each machine, whose agent starts the ranks."""
    assert read(monkeypatch, **task("srun", 1, 2, "node1"), RANK="3", WORLD_SIZE="8") == {}


def test_a_variable_of_torchrun_that_is_set_stays(monkeypatch: pytest.MonkeyPatch):
    own = {"MASTER_ADDR": "10.0.0.7", "MASTER_PORT": "4321", "LOCAL_RANK": "0", "WORLD_SIZE": "4"}
    found = read(monkeypatch, **task("srun", 2, 4, "node[003-004]"), **own)
    assert found == {"RANK": "2", **own}


def test_mpirun_within_a_job_of_slurm(monkeypatch: pytest.MonkeyPatch):
    """Its agents are tasks of a step; the host of rank 0 is the first of the job."""
    agent = {**STEP, "SLURM_PROCID": "1", "SLURM_LOCALID": "0", "SLURM_STEP_NUM_TASKS": "2"}
    mpi = {**task("mpirun", 5, 8, ""), "OMPI_COMM_WORLD_LOCAL_SIZE": "4"}
    found = read(monkeypatch, **agent, **mpi)
    assert (found["RANK"], found["WORLD_SIZE"]) == ("5", "8")
    assert found["MASTER_ADDR"] == "node002"


def test_hydra_within_a_job_of_slurm(monkeypatch: pytest.MonkeyPatch):
    """It starts its agent with ``srun``: a step with one task."""
    agent = {**STEP, "SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_STEP_NUM_TASKS": "1"}
    found = read(monkeypatch, **agent, **task("hydra", 2, 4, ""))
    assert (found["RANK"], found["MASTER_ADDR"]) == ("2", "127.0.0.1")


def test_srun_that_sets_the_variables_of_pmi(monkeypatch: pytest.MonkeyPatch):
    """``srun --mpi=pmi2`` has the local rank in SLURM_LOCALID alone."""
    own = {**task("srun", 1, 4, "node3"), "PMI_RANK": "1", "PMI_SIZE": "4", "PMI_FD": "13"}
    found = read(monkeypatch, **own)
    assert (found["LOCAL_RANK"], found["MASTER_ADDR"]) == ("1", "node3")


def test_steps_of_slurm_have_ports_of_their_own(monkeypatch: pytest.MonkeyPatch):
    ports = set()
    for job in range(4000, 4010):
        for step in range(3):
            names = task("srun", 1, 4, "a") | {"SLURM_JOB_ID": str(job), "SLURM_STEP_ID": str(step)}
            ports.add(int(read(monkeypatch, **names)["MASTER_PORT"]))
    assert len(ports) == 30 and min(ports) >= 20_000 and max(ports) < 30_000


def test_a_step_on_one_machine_needs_no_name_of_it(monkeypatch: pytest.MonkeyPatch):
    values = {**task("srun", 1, 4, "node3"), "SLURM_STEP_TASKS_PER_NODE": "4"}
    assert read(monkeypatch, **values)["MASTER_ADDR"] == "127.0.0.1"


@pytest.mark.parametrize(
    ("nodes", "first"),
    [
        ("gpu1", "gpu1"),
        ("gpu1,gpu2", "gpu1"),
        ("node[003-005,9],gpu1", "node003"),
        ("node[9,003-005]", "node9"),
        ("a-[10-12].cluster.edu,b", "a-10.cluster.edu"),
        ("rack[2-3]n[07,09]-ib", "rack2n07-ib"),
        ("n[0-8:2]", "n0"),
    ],
)
def test_first_host(nodes: str, first: str):
    assert first_host(nodes) == first


@pytest.mark.parametrize("nodes", ["", "node[", "node[]", "node]3", ",a", "a b"])
def test_no_list_of_hosts(nodes: str):
    with pytest.raises(GroupError, match="no list of hosts of SLURM; set MASTER_ADDR"):
        first_host(nodes)


# ---- errors ----
@pytest.mark.parametrize(
    ("values", "message"),
    [
        (
            {"SLURM_PROCID": "1", "SLURM_NTASKS": "4"},
            "this is one of 4 processes of SLURM, and SLURM_STEP_NUM_TASKS, SLURM_LOCALID, "
            "SLURM_STEP_NODELIST are not set; start them with torchrun, or with `srun --ntasks=4 "
            "python train.py`",
        ),
        (
            {"SLURM_PROCID": "0", "SLURM_NTASKS": "4"},
            "this is one of 4 processes of SLURM, and SLURM_STEP_NUM_TASKS",
        ),
        (
            {"SLURM_JOB_ID": "3", "SLURM_STEP_ID": "0", "SLURM_PROCID": "0", "SLURM_NTASKS": "4"},
            "this is one of 4 processes of SLURM, and SLURM_STEP_NUM_TASKS",
        ),
        (
            {"SLURM_JOB_ID": "3", "SLURM_STEP_NODELIST": "a", "SLURM_PROCID": "0"},
            "one of several processes of SLURM, and SLURM_STEP_NUM_TASKS, SLURM_LOCALID are not",
        ),
        (
            {**STEP, "SLURM_LOCALID": "1"},
            "this is one of 4 processes of SLURM, and SLURM_PROCID is not set",
        ),
        ({"OMPI_COMM_WORLD_RANK": "1"}, "one of several .* Open MPI, and OMPI_COMM_WORLD_SIZE, "),
        (
            {**task("mpirun", 1, 4, ""), "OMPI_COMM_WORLD_LOCAL_SIZE": "2"},
            "one of 4 processes of Open MPI, and MASTER_ADDR is not set; .* `mpiexec -n 4 env "
            "MASTER_ADDR=HOST python train.py`, where HOST has rank 0",
        ),
        ({**HYDRA, "MPI_LOCALRANKID": "1"}, "one of 4 processes of MPI, and PMI_RANK is not set"),
        (
            {**task("srun", 1, 4, "a"), "WORLD_SIZE": "1"},
            "WORLD_SIZE=1 contradicts SLURM_STEP_NUM_TASKS=4; unset WORLD_SIZE",
        ),
        (
            {**task("hydra", 1, 4, ""), "RANK": "0"},
            "RANK=0 contradicts PMI_RANK=1; unset RANK",
        ),
        (task("srun", 4, 4, "a"), "SLURM_PROCID=4 is not below SLURM_STEP_NUM_TASKS=4; start"),
        (
            {**task("srun", 1, 4, "a"), "SLURM_LOCALID": "-1"},
            "SLURM_LOCALID='-1'; the launcher sets a whole number",
        ),
        ({**task("srun", 1, 4, "a[")}, r"'a\[' is no list of hosts"),
    ],
)
def test_half_of_the_variables(
    monkeypatch: pytest.MonkeyPatch, values: dict[str, str], message: str
):
    with pytest.raises(GroupError, match=message):
        read(monkeypatch, **values)
    with pytest.raises(GroupError, match=message):
        fpipe.init(pp=4)
