# SPDX-License-Identifier: Apache-2.0
"""Interfaces of stages as data for other ranks, and back.

Structures and abstract tensors are data already. The dataclasses that hold them, and leaves that
are not tensors, become lists of a name and parts. This module must not know groups.
"""

from __future__ import annotations

from dataclasses import fields
from typing import Any

from ..errors import StageError
from ..lowering.value_graph import Interface
from ..tree import AbstractTree, Aval, Static

_CLASSES = {"tree": AbstractTree, "interface": Interface}


def as_data(value: Any) -> Any:
    """Interfaces and abstract trees, in any containers, as data.

    >>> import torch
    >>> y = AbstractTree.of({"y": torch.ones(2), "n": 3})
    >>> interface = Interface(y, (None, 0), (None,), (False, True), (True,), (True, False))
    >>> from_data(as_data({4: interface})) == {4: interface}
    True
    """
    if isinstance(value, Aval):
        if value.kind is None:
            return value
        raise StageError(
            f"a stage returns or keeps a {value}, and only ordinary tensors go to other ranks; "
            "return its inner tensors"
        )
    if isinstance(value, Static):
        return ["static", value.value]
    if isinstance(value, dict):
        return {key: as_data(item) for key, item in value.items()}
    if isinstance(value, (tuple, list)):
        return tuple(map(as_data, value))
    for name, cls in _CLASSES.items():
        if isinstance(value, cls):
            return [name, *(as_data(getattr(value, field.name)) for field in fields(cls))]
    return value


def from_data(data: Any) -> Any:
    """The value that :func:`as_data` converted, with tuples in place of lists."""
    if type(data) is list:
        name, *parts = data
        if name == "static":
            return Static.of(*parts)
        return _CLASSES[name](*map(from_data, parts))
    if type(data) is dict:
        return {key: from_data(item) for key, item in data.items()}
    if type(data) is tuple:
        return tuple(map(from_data, data))
    return data
