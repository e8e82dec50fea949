# SPDX-License-Identifier: Apache-2.0
"""plan.toml: a layout with its job and what is expected of it, written and read.

Tables are ``[model]``, ``[gpu]``, ``[job]``, ``[layout]``, ``[schedule]``, ``[prediction]`` and
``[seconds]``. The first four have the fields of the value of that name, and ``[schedule]`` the
arguments of ``fpipe.make_schedule``.
"""

from __future__ import annotations

import json
import tomllib
from collections.abc import Mapping
from dataclasses import asdict, fields
from os import PathLike
from typing import Any, TypeAlias, TypeVar

from ...actions import read_bytes
from ...errors import PlanError
from .hardware import Gpu
from .layout import Job, Layout
from .model import Model
from .prediction import Prediction, predict

MOST = 1 << 20  #: bytes of a plan.toml
_HEAD = (
    "# Written by fpipe plan; fpipe rehearse makes the plans of its ranks. Sizes are in "
    "bytes, times in seconds.\n\n"
)
_REMEDY = "give a file that fpipe plan wrote"
#: What fields have by the names of their types.
_TYPES = {
    "int": (int,),
    "float": (int, float),
    "bool": (bool,),
    "str": (str,),
    "Recompute": (str,),
    "tuple[int, ...]": (list,),
}
Table: TypeAlias = Mapping[str, object]
Record = TypeVar("Record", Gpu, Job, Layout, Model)


def tables(prediction: Prediction) -> dict[str, Table]:
    """A prediction as tables of numbers, text and sequences, in the order of the file."""
    job = prediction.job
    layout = prediction.layout
    return {
        "model": asdict(job.model),
        "gpu": asdict(job.gpu),
        "job": {"gpus": job.gpus, "batch": job.batch, "sequence": job.sequence},
        "layout": {**asdict(layout), "layers": layout.counts(job.model)},
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
        },
        "seconds": prediction.parts,
    }


def as_toml(values: Mapping[str, Table]) -> str:
    """Tables as TOML.

    >>> print(as_toml({"a": {"x": 1, "y": [0.5, True]}}), end="")
    [a]
    x = 1
    y = [0.5, true]
    """
    blocks = []
    for name, table in values.items():
        lines = [f"[{name}]"]
        for key, value in table.items():
            key_text = key if key.isidentifier() else json.dumps(key)
            lines.append(f"{key_text} = {json.dumps(value)}")
        blocks.append("\n".join(lines))
    return "\n\n".join(blocks) + "\n"


def write_plan(prediction: Prediction) -> str:
    """The text of a plan.toml."""
    return _HEAD + as_toml(tables(prediction))


def read_plan(path: str | PathLike[str]) -> Prediction:
    """What is expected of the layout in a file.

    Args:
        path: of the file.

    Returns:
        The prediction for its ``[layout]`` and ``[job]``.

    Raises:
        PlanError: if the file is no plan, or its layout does not fit its job.
        OSError: if it cannot be read.
    """
    try:
        values = tomllib.loads(read_bytes(path, MOST).decode())
    except (ValueError, RecursionError) as error:
        raise PlanError(f"{path}: {error}; {_REMEDY}") from None
    model = _record(Model, values, path)
    job = _record(Job, values, path, model=model, gpu=_record(Gpu, values, path))
    return predict(job, _record(Layout, values, path))


def _record(
    kind: type[Record], values: Mapping[str, Any], where: str | PathLike[str], **parts: object
) -> Record:
    """A value from the table of its fields, but for those that are given."""
    name = kind.__name__.lower()
    table = values.get(name)
    if not isinstance(table, dict):
        raise PlanError(f"{where} has no table [{name}]; {_REMEDY}")
    types = {field.name: str(field.type) for field in fields(kind) if field.name not in parts}
    for key, value in table.items():
        if type(value) not in _TYPES.get(types.get(key, ""), ()):
            raise PlanError(
                f"{where}: [{name}] {key:.60} = {value!r:.60} does not belong there; {_REMEDY}"
            )
    if lacking := [key for key in types if key not in table]:
        raise PlanError(f"{where}: [{name}] lacks {', '.join(lacking)}; {_REMEDY}")
    lists = {key: tuple(value) for key, value in table.items() if isinstance(value, list)}
    return kind(**{**table, **lists, **parts})
