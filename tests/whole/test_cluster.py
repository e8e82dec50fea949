"""The files of examples/cluster/ run, as far as one machine allows, with the losses of one process.

``srun`` and ``scontrol`` are stand-ins here: they set the variables that SLURM sets. Manifests are
compared with their schemas, and their commands run with the variables that they list.
"""

from __future__ import annotations

import os
import re
import runpy
import shutil
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from torch.distributed.run import get_args_parser

import fpipe
from doc_pages import ROOT
from fpipe.collectives.launchers import variables

CLUSTER = ROOT / "examples" / "cluster"
PAGE = (ROOT / "docs" / "howto" / "cluster.md").read_text(encoding="utf-8")
SCRIPTS = ["srun.sbatch", "srun_torchrun.sbatch", "mpirun.sh", "two_machines.sh"]
#: run by tests/products/training/test_ray.py
RAY = "ray_train.py"
#: What srun does on this machine, as if each node of the job were a machine of its own.
SRUN = """#!{python}
import os, subprocess, sys

command = sys.argv[1:]
while command[0].startswith("-"):
    assert "=" in command.pop(0)
nodes, tasks = (int(os.environ[name]) for name in ("SLURM_JOB_NUM_NODES", "SLURM_NTASKS"))
step = {{
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NUM_TASKS": str(tasks),
    "SLURM_STEP_NODELIST": os.environ["SLURM_JOB_NODELIST"],
    "SLURM_STEP_TASKS_PER_NODE": f"{{tasks // nodes}}(x{{nodes}})",
}}
running = []
for rank in range(tasks):
    own = {{"SLURM_PROCID": str(rank), "SLURM_LOCALID": str(rank % (tasks // nodes))}}
    running.append(subprocess.Popen(command, env=os.environ | step | own))
sys.exit(max(abs(each.wait()) for each in running))
"""
SCONTROL = "#!/bin/bash\n[[ $1 == show && $2 == hostnames ]] && tr , '\\n' <<< \"$3\"\n"


# ---- the files ----
def test_the_page_names_every_file_and_no_other():
    named = set(re.findall(r"examples/cluster/([\w.]+\w)", PAGE))
    there = {path.name for path in CLUSTER.iterdir() if path.is_file()}
    assert named == there == {*SCRIPTS, RAY, "job.yaml", "trainjob.yaml", "Dockerfile"}


def test_the_page_shows_the_error(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("SLURM_PROCID", "1")
    monkeypatch.setenv("SLURM_NTASKS", "4")
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(fpipe.errors.GroupError) as caught:
        variables()
    assert f"```text\n{caught.value}\n```" in PAGE


@pytest.mark.parametrize("name", SCRIPTS)
def test_scripts_have_no_error_of_syntax(name: str):
    subprocess.run(["bash", "-n", CLUSTER / name], check=True)
    assert os.access(CLUSTER / name, os.X_OK)


def test_the_image_has_what_the_package_needs():
    lines = (CLUSTER / "Dockerfile").read_text(encoding="utf-8").splitlines()
    copied = {word for line in lines if line.startswith("COPY") for word in line.split()[1:-1]}
    assert copied == {"pyproject.toml", "README.md", "LICENSE", "fpipe", "examples"}
    assert all((ROOT / name).exists() for name in copied)
    tag = re.search(r"-t (\S+)", lines[1])
    assert tag and all(
        f"image: {tag[1]} " in (CLUSTER / name).read_text(encoding="utf-8")
        for name in ("job.yaml", "trainjob.yaml")
    )


# ---- manifests ----
def manifests(name: str) -> list[dict[str, Any]]:
    yaml = pytest.importorskip("yaml")
    return list(yaml.safe_load_all((CLUSTER / name).read_text(encoding="utf-8")))


def test_manifests_fit_their_schemas():
    """A model reads the fields of its schema, of the right types, and drops others."""
    models = pytest.importorskip("kubeflow_trainer_api.models")
    kinds = {
        "Service": models.IoK8sApiCoreV1Service,
        "Job": models.IoK8sApiBatchV1Job,
        "TrainJob": models.TrainerV1alpha1TrainJob,
    }
    seen = [*manifests("job.yaml"), *manifests("trainjob.yaml")]
    assert [each["kind"] for each in seen] == list(kinds)
    for each in seen:
        assert kept(each, kinds[each["kind"]].from_dict(each).to_dict())
    wrong = {**seen[1], "spec": {**seen[1]["spec"], "paralellism": 2}}
    assert not kept(wrong, models.IoK8sApiBatchV1Job.from_dict(wrong).to_dict())


def kept(value: Any, read: Any) -> bool:
    """Whether a model has read all of a value; it adds defaults."""
    read = getattr(read, "actual_instance", read)  # of a number or a text
    if isinstance(value, dict):
        return all(key in read and kept(each, read[key]) for key, each in value.items())
    if isinstance(value, list):
        return len(value) == len(read) and all(map(kept, value, read))
    return value == read


def test_pods_find_each_other(monkeypatch: pytest.MonkeyPatch):
    service, job = manifests("job.yaml")
    pod = job["spec"]["template"]["spec"]
    assert service["spec"]["clusterIP"] == "None" and service["spec"]["publishNotReadyAddresses"]
    assert service["spec"]["selector"] == {"batch.kubernetes.io/job-name": job["metadata"]["name"]}
    assert pod["subdomain"] == service["metadata"]["name"]
    for name, value in environment(job, 1).items():
        monkeypatch.setenv(name, value)
    (container,) = pod["containers"]
    assert container["command"][0] == "torchrun"
    found = get_args_parser().parse_args([*container["command"], *container["args"]][1:])
    assert found.master_addr == f"{job['metadata']['name']}-0.{service['metadata']['name']}"
    assert found.master_port == service["spec"]["ports"][0]["port"]
    assert found.node_rank == 1 and found.rdzv_backend == "static"
    nodes = int(found.nnodes)
    assert nodes == job["spec"]["completions"] == job["spec"]["parallelism"]
    assert ranks(container) == nodes * int(found.nproc_per_node)


def test_a_trainjob_starts_as_many_ranks_as_its_script_has():
    (job,) = manifests("trainjob.yaml")
    trainer = job["spec"]["trainer"]
    assert trainer["command"][0] == "torchrun" and (ROOT / trainer["command"][1]).exists()
    assert ranks(trainer) == trainer["numNodes"] * trainer["numProcPerNode"]


def ranks(container: dict[str, Any]) -> int:
    return int(container["args"][container["args"].index("--ranks") + 1])


def environment(job: dict[str, Any], index: int) -> dict[str, str]:
    """The variables of a pod of an indexed job."""
    (container,) = job["spec"]["template"]["spec"]["containers"]
    return {each["name"]: each.get("value", str(index)) for each in container["env"]}


# ---- runs ----
@pytest.fixture(scope="module")
def losses() -> list[str]:
    """What one process prints in twenty steps."""
    train = runpy.run_path(str(ROOT / "examples" / "train.py"))
    return [f"step {number} loss {loss!r}" for number, loss in enumerate(train["main"]())]


def run(*commands: Any) -> list[str]:
    """Start commands, each with its variables, at once; the losses that one of them prints."""
    found = []
    running = []
    words, extra = commands[::2], commands[1::2]
    for command, own in zip(words, extra, strict=True):
        env = {
            "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
            "PYTHONPATH": str(ROOT),
            "OMP_NUM_THREADS": "1",
            **own,
        }
        running.append(
            subprocess.Popen(
                command,
                cwd=ROOT,
                env=env,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
        )
    for each in running:
        out, errors = each.communicate(timeout=200)
        assert each.returncode == 0, errors[-3000:]
        found += re.findall(r"^step \d+ loss [\d.]+$", out, re.M)
    return found


def slurm(script: str, folder: Path) -> dict[str, str]:
    """The variables of a job as its directives ask for it, and stand-ins for SLURM's commands."""
    for name, text in (("srun", SRUN.format(python=sys.executable)), ("scontrol", SCONTROL)):
        (folder / name).write_text(text)
        (folder / name).chmod(0o755)
    directives = dict(
        re.findall(r"^#SBATCH --([\w-]+)=(\S+)", (CLUSTER / script).read_text(), re.M)
    )
    nodes = int(directives["nodes"])
    return {
        "PATH": f"{folder}:{Path(sys.executable).parent}:{os.environ['PATH']}",
        "SLURM_JOB_ID": str(os.getpid()),
        "SLURM_NTASKS": str(nodes * int(directives["ntasks-per-node"])),
        "SLURM_JOB_NUM_NODES": str(nodes),
        "SLURM_JOB_NODELIST": ",".join(["localhost", *(f"node{k}" for k in range(1, nodes))]),
        "SLURM_CPUS_PER_TASK": directives["cpus-per-task"],
        "SLURM_PROCID": "0",  # those of the batch script
        "SLURM_LOCALID": "0",
    }


@pytest.mark.long  # test_launchers.py runs jobs of SLURM
@pytest.mark.timeout(300)
@pytest.mark.parametrize("script", ["srun.sbatch", "srun_torchrun.sbatch"])
def test_a_batch_script_of_slurm(script: str, tmp_path: Path, losses: list[str]):
    assert run(["bash", CLUSTER / script, "--steps", "2"], slurm(script, tmp_path)) == losses[:2]


@pytest.mark.long
@pytest.mark.timeout(300)
def test_mpirun_of_open_mpi(losses: list[str]):
    if shutil.which("mpirun") is None:
        pytest.skip("no mpirun here: install openmpi-bin")
    found = run([CLUSTER / "mpirun.sh", "--allow-run-as-root", "--oversubscribe"], {})
    assert len(found) == 20 and found == losses


@pytest.mark.long
@pytest.mark.timeout(300)
def test_two_machines_by_hand(losses: list[str]):
    with socket.create_server(("", 0)) as free:
        port = {"PORT": str(free.getsockname()[1])}
    command = [CLUSTER / "two_machines.sh", "localhost", "--steps", "2"]
    assert run(command, port, command, port) == losses[:2]


@pytest.mark.long
@pytest.mark.timeout(300)
def test_the_pods_of_a_job(losses: list[str]):
    _, job = manifests("job.yaml")
    (container,) = job["spec"]["template"]["spec"]["containers"]
    with socket.create_server(("", 0)) as free:
        there = {"PET_MASTER_ADDR": "localhost", "PET_MASTER_PORT": str(free.getsockname()[1])}
    command = [*container["command"], *container["args"], "--steps", "2"]
    pods = [command, environment(job, 0) | there, command, environment(job, 1) | there]
    assert run(*pods) == losses[:2]
