"""torchtitan's debug models, imported on machines without a GPU as well."""

from __future__ import annotations

import builtins
import importlib.util
import sys
import types
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest


@contextmanager
def _stub_triton() -> Iterator[None]:
    """A stub of triton, which torchtitan imports even where nothing is compiled for a GPU."""
    if importlib.util.find_spec("triton") is not None:
        yield
        return
    import torch

    torch.compile(lambda x: x)  # torch's compiler looks for triton when it is loaded; load it before the stub exists

    triton, language = types.ModuleType("triton"), types.ModuleType("triton.language")
    triton.jit = lambda fn: fn  # type: ignore[attr-defined]
    language.constexpr = int  # type: ignore[attr-defined]
    triton.language = language  # type: ignore[attr-defined]
    sys.modules |= {"triton": triton, "triton.language": language}
    try:
        yield
    finally:
        del sys.modules["triton"], sys.modules["triton.language"]


def torchtitan_llama() -> Any:
    """The package's Llama, with its configuration class as ``JobConfig``; skips where torchtitan is not installed."""
    if importlib.util.find_spec("torchtitan") is None:
        pytest.skip("torchtitan is not installed")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return _loaded()


def _loaded() -> Any:
    vars(builtins).pop("_", None)  # doctests leave their last value there; tyro hashes all values of builtins
    with _stub_triton():
        from torchtitan.config import JobConfig
        from torchtitan.distributed.pipeline_parallel import generate_llm_fqn_per_model_part
        from torchtitan.models import llama3
    return types.SimpleNamespace(JobConfig=JobConfig, llama=llama3, names_per_part=generate_llm_fqn_per_model_part)
