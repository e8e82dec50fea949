# SPDX-License-Identifier: Apache-2.0
"""The engine "fpipe" for verl: importing this package registers it, for language models and for value models.

verl imports it by itself where fpipe is installed (entry points of the group ``verl.plugins``), and otherwise with
``VERL_USE_EXTERNAL_MODULES=fpipe.interop.verl``. Then ``engine=fpipe`` is a choice of verl's configurations, whose
options ``engine/fpipe.yaml`` documents. This package is all that knows verl (0.9); what it needs beside is in ``_rl``.
"""

from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

if find_spec("verl") is None:
    raise ImportError("fpipe.interop.verl needs verl 0.9; install fpipe[verl]")

from . import cpu as cpu  # first: what follows asks verl for the platform
from .config import FpipeEngineConfig
from .engine import FpipeEngine, FpipeValueEngine, register

__all__ = ["FpipeEngine", "FpipeEngineConfig", "FpipeValueEngine"]

register()


def _store() -> None:
    """Make ``engine=fpipe`` known to hydra, so that no search path is needed."""
    node = import_module("omegaconf").OmegaConf.load(Path(__file__).parent / "engine" / "fpipe.yaml")
    store = import_module("hydra.core.config_store").ConfigStore.instance()
    store.store(group="engine", name="fpipe", node=node, provider="fpipe")


_store()
