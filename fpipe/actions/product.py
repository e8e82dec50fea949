# SPDX-License-Identifier: Apache-2.0
"""Loads passes and products by name, when they are used.

``fpipe.passes`` has features that most pipelines do not use. ``fpipe.products`` has what is built
on the library, which works without it.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

from ..errors import UnsupportedError


def load_product(name: str) -> Any:
    """A module of ``fpipe.products`` by name.

    Raises:
        UnsupportedError: if this installation does not have it.

    >>> load_product("pictures").FORMATS[0]
    '.svg'
    """
    return _part(f"products.{name}")


def load_pass(name: str) -> Any:
    """A module of ``fpipe.passes`` by name.

    Raises:
        UnsupportedError: if this installation does not have it.
    """
    return _part(f"passes.{name}")


def _part(name: str) -> Any:
    try:
        return import_module(f"fpipe.{name}")
    except ModuleNotFoundError as error:
        if not (error.name or "").startswith("fpipe."):
            raise
        raise UnsupportedError(
            f"this installation of fpipe has no fpipe/{name.replace('.', '/')}; install all of it"
        ) from error
