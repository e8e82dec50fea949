# SPDX-License-Identifier: Apache-2.0
"""Other values in the place of some, anywhere in nested data."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields, is_dataclass, replace
from typing import Any, TypeVar

import torch

T = TypeVar("T")

#: Have no parts; looked at first, since most values are of these.
_LEAVES = (int, str, type(None), torch.dtype, torch.device)


def replaced(value: Any, kind: type[T], fn: Callable[[T], object]) -> Any:
    """A value with ``fn`` of each part of a kind in it; the same object where nothing changes.

    Parts are looked for in tuples, lists, dicts and dataclasses.

    >>> replaced({"a": (1, "b")}, int, lambda number: number + 1)
    {'a': (2, 'b')}
    """
    if isinstance(value, kind):
        return fn(value)
    if isinstance(value, _LEAVES):
        return value
    if isinstance(value, (tuple, list)):
        items = [replaced(item, kind, fn) for item in value]
        if all(new is old for new, old in zip(items, value, strict=True)):
            return value
        make: Callable[[list[Any]], Any] = getattr(value, "_make", type(value))
        return make(items)
    if isinstance(value, dict):
        changed = {key: replaced(item, kind, fn) for key, item in value.items()}
        if all(changed[key] is item for key, item in value.items()):
            return value
        return changed
    if not is_dataclass(value) or isinstance(value, type):
        return value
    known = {each.name: getattr(value, each.name) for each in fields(value)}
    changed = replaced(known, kind, fn)
    if changed is known:
        return value
    return replace(value, **changed)
