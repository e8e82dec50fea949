# SPDX-License-Identifier: Apache-2.0
"""plan.toml: a layout with its job and what is expected of it, written and read.

Tables are ``[model]``, ``[gpu]``, ``[job]``, ``[precision]``, ``[layout]``, ``[schedule]`` and
``[prediction]``. Each but the last two has the fields of the value of that name. ``[schedule]`` has
the arguments of ``fpipe.make_schedule``.
"""

from __future__ import annotations

import json
import tomllib
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from os import PathLike
from typing import Any, TypeVar

from ...actions import read_bytes
from ...errors import PlanError
from .hardware import Gpu
from .layout import Job, Layout, Precision
from .model import Model
from .prediction import Prediction

MOST = 1 << 20  #: bytes of a plan.toml
_HEAD = (
    "# Written by fpipe plan; fpipe rehearse makes the plans of its ranks. Sizes are in "
    "bytes, times in seconds.\n"
)
_TYPES: dict[str, Any] = {
    "int": int,
    "float": (int, float),
    "bool": bool,
    "str": str,
    "Recompute": str,
    "Attention": str,
    "tuple[int, ...]": list,
}
Record = TypeVar("Record", Gpu, Layout, Model, Precision)


@dataclass(frozen=True)
class Planned:
    """A plan that was read: a job, its layout, and the predicted bytes of each rank of a
    pipeline.
    """

    job: Job
    layout: Layout
    memory: tuple[float, ...]
    step: float


def tables(prediction: Prediction) -> dict[str, dict[str, Any]]:
    """A prediction as tables of numbers, text and lists, in the order of the file."""
    job, layout = prediction.job, prediction.layout
    simple = {
        "gpus": job.gpus,
        "batch": job.batch,
        "sequence": job.sequence,
        "attention": job.attention,
    }
    return {
        "model": asdict(job.model),
        "gpu": asdict(job.gpu),
        "job": simple,
        "precision": asdict(job.precision),
        "layout": {**asdict(layout), "layers": list(layout.counts(job.model))},
        "schedule": {
            "name": layout.schedule,
            "ranks": layout.pp,
            "microbatches": layout.microbatches(job),
            "stages": layout.stages,
        },
        "prediction": {
            "step": prediction.step,
            "flops": prediction.flops,
            "mfu": prediction.mfu,
            "bubble": prediction.bubble,
            "fullest": prediction.fullest.rank,
            "memory": [round(memory.total) for memory in prediction.memory],
            "limit": prediction.limit,
            "seconds": prediction.parts,
        },
    }


def as_toml(values: Mapping[str, Mapping[str, Any]]) -> str:
    """Tables as TOML.

    >>> print(as_toml({"a": {"x": 1, "y": [0.5, True]}}), end="")
    [a]
    x = 1
    y = [0.5, true]
    """
    lines = []
    for name, table in values.items():
        inner = {key: value for key, value in table.items() if isinstance(value, Mapping)}
        lines += [
            f"[{name}]",
            *(f"{key} = {json.dumps(value)}" for key, value in table.items() if key not in inner),
        ]
        for key, parts in inner.items():
            lines += [
                "",
                f"[{name}.{key}]",
                *(f"{json.dumps(k)} = {json.dumps(v)}" for k, v in parts.items()),
            ]
        lines.append("")
    return "\n".join(lines[:-1]) + "\n"


def write_plan(prediction: Prediction) -> str:
    """The text of a plan.toml."""
    return _HEAD + "\n" + as_toml(tables(prediction))


def read_plan(path: str | PathLike[str]) -> Planned:
    """The plan in a file.

    Args:
        path: of the file.

    Returns:
        The plan.

    Raises:
        PlanError: if the file is no plan, or its layout does not fit its job.
        OSError: if it cannot be read.
    """
    try:
        values = tomllib.loads(read_bytes(path, MOST).decode())
    except ValueError as error:
        raise PlanError(f"{path}: {error}; give a file that fpipe plan wrote") from None

    def table(name):
        return _table(values, name, str(path))

    job, prediction = table("job"), table("prediction")
    try:
        read = Job(
            _record(Model, table("model"), path),
            int(job["gpus"]),
            _record(Gpu, table("gpu"), path),
            int(job["batch"]),
            int(job["sequence"]),
            job["attention"],
            _record(Precision, table("precision"), path),
        )
        layout = _record(Layout, table("layout"), path)
        memory, step = tuple(map(float, prediction["memory"])), float(prediction["step"])
    except (KeyError, TypeError, ValueError) as error:
        if isinstance(error, PlanError):
            raise
        raise PlanError(f"{path}: {error!r} in a plan; give a file that fpipe plan wrote") from None
    if len(memory) != layout.pp:
        raise PlanError(
            f"{path}: memory has {len(memory)} numbers for {layout.pp} pipeline ranks; write the "
            "plan again"
        )
    return Planned(read, layout.check(read), memory, step)


def _table(values: Mapping[str, Any], name: str, where: str) -> Mapping[str, Any]:
    if not isinstance(values.get(name), dict):
        raise PlanError(f"{where} has no table [{name}]; give a file that fpipe plan wrote")
    return values[name]


def _record(kind: type[Record], table: Mapping[str, Any], where: str | PathLike[str]) -> Record:
    """A value from the table of its fields."""
    name = kind.__name__.lower()
    known = {field.name: _TYPES[str(field.type)] for field in fields(kind)}
    for key, value in table.items():
        wrong = isinstance(value, bool) and known.get(key) is not bool
        if key not in known or wrong or not isinstance(value, known[key]):
            raise PlanError(
                f"{where}: [{name}] {key} = {value!r} does not belong there; give a file of fpipe "
                "plan"
            )
    if lacking := [key for key in known if key not in table]:
        raise PlanError(
            f"{where}: [{name}] lacks {', '.join(lacking)}; give a file that fpipe plan wrote"
        )
    given: dict[str, Any] = {
        key: tuple(value) if isinstance(value, list) else value for key, value in table.items()
    }
    return kind(**given)
