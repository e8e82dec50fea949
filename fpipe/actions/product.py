# SPDX-License-Identifier: Apache-2.0
"""Loads parts of ``fpipe.products`` when they are used: the library works without that folder."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from ..errors import UnsupportedError


def product(name: str) -> Any:
    """A module of ``fpipe.products`` by name.

    Raises:
        UnsupportedError: if this installation does not have it.

    >>> product("pictures").FORMATS[0]
    '.svg'
    """
    try:
        return import_module(f"fpipe.products.{name}")
    except ModuleNotFoundError as error:
        if not (error.name or "").startswith("fpipe."):
            raise
        raise UnsupportedError(
            f"this installation of fpipe has no products.{name}; install fpipe whole"
        ) from error
