# SPDX-License-Identifier: Apache-2.0
"""The environment variables of SLURM, Open MPI and other launchers of MPI as those of torchrun.

``setup`` loads this file where one of them is set. A variable of torchrun that is set stays. A
process that is alone in its job, as in ``salloc`` or a notebook, gets none. This module must not
know torch.
"""

from __future__ import annotations

import os
import re
import sys
from typing import NamedTuple, TypeAlias
from zlib import crc32

from ..errors import GroupError

#: The port of torchrun, where the launcher does not say which job this is.
_PORT = 29_500
#: Ports for jobs: below those that Linux gives to clients, and those that Kubernetes gives away.
_FIRST = 20_000
_PORTS = 10_000
_MPIEXEC = "`mpiexec -n {} env MASTER_ADDR=HOST python train.py`, where HOST has rank 0"


#: Names of variables, of which the first that is set counts.
Names: TypeAlias = tuple[str, ...]


class Launcher(NamedTuple):
    """The variables of a launcher: for each fact, names of which the first that is set counts.

    ``facts`` are what only a launcher knows, by variable of torchrun. ``local_size`` equals
    WORLD_SIZE where all processes are on one machine. ``nodes`` is a list of hosts, and ``job``
    names what all processes of a job share. ``command`` starts so many.
    """

    name: str
    command: str
    facts: dict[str, Names]
    local_size: Names
    nodes: Names
    job: Names

    @property
    def size(self) -> str | None:
        """How many processes the launcher says that there are."""
        return _first(self.facts["WORLD_SIZE"])


OPEN_MPI = Launcher(
    "Open MPI",
    _MPIEXEC,
    {
        "RANK": ("OMPI_COMM_WORLD_RANK",),
        "WORLD_SIZE": ("OMPI_COMM_WORLD_SIZE",),
        "LOCAL_RANK": ("OMPI_COMM_WORLD_LOCAL_RANK",),
    },
    local_size=("OMPI_COMM_WORLD_LOCAL_SIZE",),
    nodes=("MASTER_ADDR", "SLURM_JOB_NODELIST"),
    job=("PMIX_NAMESPACE",),
)
#: MPICH and Intel MPI (Hydra) set the first names, PALS the others.
PMI = Launcher(
    "MPI",
    _MPIEXEC,
    {
        "RANK": ("PMI_RANK", "PALS_RANKID"),
        "WORLD_SIZE": ("PMI_SIZE",),
        "LOCAL_RANK": ("MPI_LOCALRANKID", "PMI_LOCAL_RANK", "PALS_LOCAL_RANKID"),
    },
    local_size=("MPI_LOCALNRANKS", "PMI_LOCAL_SIZE", "PALS_LOCAL_SIZE"),
    nodes=("MASTER_ADDR", "SLURM_JOB_NODELIST"),
    job=("PALS_APID", "I_MPI_HYDRA_UUID"),
)
#: Of a step, which ``srun`` makes: SLURM_NTASKS is that of the job, also where one process runs.
SLURM = Launcher(
    "SLURM",
    "`srun --ntasks={} python train.py`",
    {
        "RANK": ("SLURM_PROCID",),
        "WORLD_SIZE": ("SLURM_STEP_NUM_TASKS",),
        "LOCAL_RANK": ("SLURM_LOCALID",),
    },
    local_size=("SLURM_STEP_TASKS_PER_NODE",),  # "2(x2)" on two machines
    nodes=("SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST"),
    job=("SLURM_JOB_ID", "SLURM_STEP_ID"),
)


def variables() -> dict[str, str]:
    """RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT of this process, or nothing if it
    is alone or torchrun started it. Rank 0 prints what was read.

    Raises:
        GroupError: if the process is one of several and a variable is missing or contradicts
        another.
    """
    launcher = _launcher()
    if launcher is None or {"RANK", "WORLD_SIZE"} <= os.environ.keys():
        return {}
    if launcher.size == "1" or (launcher is SLURM and _outside_of_steps()):
        return {}
    found = {name: _agreed(name, names) or "" for name, names in launcher.facts.items()}
    found["MASTER_ADDR"] = os.environ.get("MASTER_ADDR") or _address(launcher) or ""
    missing = [
        (launcher.facts.get(name) or launcher.nodes)[0]
        for name, value in found.items()
        if not value
    ]
    if missing:
        size = found["WORLD_SIZE"] or os.environ.get("SLURM_NTASKS")
        raise GroupError(
            f"this is one of {size or 'several'} processes of {launcher.name}, and "
            f"{', '.join(missing)} {'is' if len(missing) == 1 else 'are'} not set; start them with "
            f"torchrun, or with {launcher.command.format(size or 'N')}"
        )
    job = ".".join(os.environ[name] for name in launcher.job if name in os.environ)
    port = _FIRST + crc32(job.encode()) % _PORTS if job else _PORT
    found["MASTER_PORT"] = os.environ.get("MASTER_PORT") or str(port)
    _check(launcher, found)
    return found


def _check(launcher: Launcher, read: dict[str, str]) -> None:
    """Raise where no job has such numbers; else rank 0 says once what was read."""
    sources = {name: _name(names) or name for name, names in launcher.facts.items()}
    for name, source in sources.items():
        if not re.fullmatch("[0-9]+", read[name]):
            raise GroupError(f"{source}={read[name]!r}; the launcher sets a whole number")
    rank = int(read["RANK"])
    size = int(read["WORLD_SIZE"])
    if rank >= size:
        raise GroupError(
            f"{sources['RANK']}={rank} is not below {sources['WORLD_SIZE']}={size}; start all "
            "processes with one command"
        )
    if rank == 0:
        print(
            f"fpipe: {size} processes, which meet at {read['MASTER_ADDR']}:{read['MASTER_PORT']} "
            f"({', '.join(sources.values())})",
            file=sys.stderr,
        )


def first_host(nodes: str) -> str:
    """The first host of a list of SLURM.

    >>> first_host("node[003-005,9],gpu1"), first_host("rack[2-3]n[07,09]-ib"), first_host("a,b")
    ('node003', 'rack2n07-ib', 'a')
    """
    head = re.match(r"(?:[^][,\s]|\[\w+[^][]*\])+(?=,|$)", nodes)
    if head is None:
        raise GroupError(f"{nodes!r} is no list of hosts of SLURM; set MASTER_ADDR")
    return re.sub(r"\[(\w+)[^]]*\]", r"\1", head[0])


def _launcher() -> Launcher | None:
    """The launcher of this process. MPI comes first: within a job of SLURM, its agents are tasks of
    a step of their own. ``srun`` may set the variables of PMI too; then the sizes are equal.
    """
    present = [
        launcher for launcher in (OPEN_MPI, PMI, SLURM) if any(map(_name, launcher.facts.values()))
    ]
    if present == [PMI, SLURM] and PMI.size in (None, SLURM.size):
        return SLURM
    return present[0] if present else None


def _outside_of_steps() -> bool:
    """Whether this is the one process of a job or a batch script, which ``srun`` did not start."""
    step = os.environ.get("SLURM_STEP_ID", "batch")
    if step != "batch" or SLURM.size or os.environ.get("SLURM_STEP_NODELIST"):
        return False
    alone = os.environ.get("SLURM_NTASKS") == "1"
    return os.environ.get("SLURM_PROCID") == "0" and (alone or "SLURM_JOB_ID" in os.environ)


def _agreed(name: str, names: Names) -> str | None:
    """The value of a variable of torchrun, or of the launcher's. Only the local rank may differ."""
    own = os.environ.get(name)
    other = _first(names)
    if own and other and own != other and name != "LOCAL_RANK":
        raise GroupError(f"{name}={own} contradicts {_name(names)}={other}; unset {name}")
    return own or other


def _address(launcher: Launcher) -> str | None:
    """The host of rank 0, where the launcher says so."""
    size = launcher.size
    if size and size == _first(launcher.local_size):
        return "127.0.0.1"
    nodes = _first(launcher.nodes)
    return nodes and first_host(nodes)


def _name(names: Names) -> str | None:
    """The first of the names that is set."""
    return next((name for name in names if os.environ.get(name)), None)


def _first(names: Names) -> str | None:
    name = _name(names)
    return name and os.environ[name]
