# SPDX-License-Identifier: Apache-2.0
"""The engine "fpipe" for verl: importing this package registers it, for language models and for
value models.

verl imports it by itself where fpipe is installed (entry points of the group ``verl.plugins``), and
otherwise with ``VERL_USE_EXTERNAL_MODULES=fpipe.interop.verl``. Then verl's configurations take
``engine=fpipe``, whose options ``yaml/engine/fpipe.yaml`` documents, and those of its PPO trainer
``model_engine=fpipe``. This package is all that knows verl (0.9); what it needs beside is in
``_rl``.
"""

from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

if find_spec("verl") is None:
    raise ImportError(
        "fpipe.interop.verl needs verl 0.9; pip install '.[verl]' in a checkout of fpipe"
    )

from . import cpu as cpu  # first: what follows asks verl for the platform
from .config import FpipeActorConfig, FpipeCriticConfig, FpipeEngineConfig
from .engine import FpipeEngine, FpipeValueEngine

__all__ = [
    "FpipeActorConfig",
    "FpipeCriticConfig",
    "FpipeEngine",
    "FpipeEngineConfig",
    "FpipeValueEngine",
]


def _store() -> None:
    """Make ``engine=fpipe`` and ``model_engine=fpipe`` known to hydra, so that no search path is
    needed.
    """
    store = import_module("hydra.core.config_store").ConfigStore.instance()
    for file in sorted((Path(__file__).parent / "yaml").glob("*/*.yaml")):
        node = import_module("omegaconf").OmegaConf.load(file)
        group = file.parent.name
        head = file.read_text(encoding="utf-8").partition("\n")[0]
        package = head.removeprefix("# @package ") if head.startswith("# @package") else None
        store.store(group=group, name=file.stem, node=node, package=package, provider="fpipe")


_store()
