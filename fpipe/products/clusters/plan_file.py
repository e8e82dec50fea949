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
_PARTS: dict[str, Any] = {"Model": Model, "Gpu": Gpu, "Precision": Precision}
Record = TypeVar("Record", Gpu, Job, Layout, Model, Precision)


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
    of_job = asdict(job)
    return {
        "model": of_job.pop("model"),
        "gpu": of_job.pop("gpu"),
        "job": {name: value for name, value in of_job.items() if name != "precision"},
        "precision": of_job["precision"],
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

    job = _record(Job, values, path)
    layout = _record(Layout, values, path).check(job)
    try:
        prediction = values["prediction"]
        memory, step = tuple(map(float, prediction["memory"])), float(prediction["step"])
    except (KeyError, TypeError, ValueError) as error:
        raise PlanError(f"{path}: {error!r} in a plan; give a file that fpipe plan wrote") from None
    if len(memory) != layout.pp:
        raise PlanError(
            f"{path}: memory has {len(memory)} numbers for {layout.pp} pipeline ranks; write the "
            "plan again"
        )
    return Planned(job, layout, memory, step)


def _record(kind: type[Record], values: Mapping[str, Any], where: str | PathLike[str]) -> Record:
    """A value from the table of its fields; values in it have tables of their own."""
    name, remedy = kind.__name__.lower(), "give a file that fpipe plan wrote"
    table = values.get(name)
    if not isinstance(table, dict):
        raise PlanError(f"{where} has no table [{name}]; {remedy}")
    types = {each.name: str(each.type) for each in fields(kind)}
    nested = [key for key, type_name in types.items() if type_name in _PARTS]
    parts = {key: _record(_PARTS[types.pop(key)], values, where) for key in nested}
    for key, value in table.items():
        expected = _TYPES[types[key]] if key in types else ()
        if not isinstance(value, expected) or (isinstance(value, bool) and expected is not bool):
            raise PlanError(f"{where}: [{name}] {key} = {value!r} does not belong there; {remedy}")
    if lacking := [key for key in types if key not in table]:
        raise PlanError(f"{where}: [{name}] lacks {', '.join(lacking)}; {remedy}")
    lists = {key: tuple(value) for key, value in table.items() if isinstance(value, list)}
    return kind(**{**table, **lists, **parts})
