"""The part of verl 0.9 that fpipe's engine for it uses, restated: for tests where verl is not
installed.

``installed()`` puts modules of verl's names in place. Batches are dicts instead of TensorDicts.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any, ClassVar

import torch
import yaml
from torch import Tensor


class Data(dict[str, Any]):
    """Tensors and other values by name."""

    def to(self, device: Any) -> Data:
        return Data(
            {
                name: value.to(device) if isinstance(value, Tensor) else value
                for name, value in self.items()
            }
        )


# ---- verl.workers ----
@dataclass
class EngineConfig:
    strategy: str | None = None
    param_offload: bool = False
    optimizer_offload: bool = False
    forward_only: bool = False
    dtype: str = "bfloat16"
    seed: int = 42
    full_determinism: bool = False

    def __post_init__(self) -> None:
        pass


@dataclass
class BaseConfig:
    pass


@dataclass
class RoleConfig(BaseConfig):
    """Of an actor or a critic."""

    strategy: str = ""
    engine: Any = None

    def __post_init__(self) -> None:
        pass


class BaseEngine:
    def to(
        self, device: str, model: bool = True, optimizer: bool = True, grad: bool = True
    ) -> None:
        assert model or not grad

    def train_batch(self, data: Data, loss_function: Any) -> Any:
        self.optimizer_zero_grad()  # type: ignore[attr-defined]
        outputs = self.forward_backward_batch(data, loss_function, forward_only=False)  # type: ignore[attr-defined]
        norm = self.optimizer_step()  # type: ignore[attr-defined]
        if self.is_mp_src_rank_with_outputs():  # type: ignore[attr-defined]
            outputs["metrics"]["grad_norm"] = norm
        return outputs


class BaseEngineCtx:
    def __init__(self, engine: Any, mode: str, **keywords: Any):
        self.engine, self.mode = engine, mode
        self.zero_grad_on_exit = keywords.pop("zero_grad_on_exit", True)

    def __enter__(self) -> None:
        self.engine.mode = self.mode

    def __exit__(self, *_: object) -> None:
        self.engine.mode = None


class EngineRegistry:
    engines: ClassVar[dict[tuple[str, str, str], type]] = {}

    @classmethod
    def register(
        cls, model_type: str, backend: str, device: Sequence[str]
    ) -> Callable[[type], type]:
        def keep(engine: type) -> type:
            cls.engines.update({(model_type, backend, kind): engine for kind in device})
            return engine

        return keep


def prepare_micro_batches(data: Data, min_num_micro_batch: int | None = None, **_: Any) -> Any:
    """Sequences in turn, so that the order of microbatches is not that of the data."""
    rows = len(data["input_ids"].unbind())
    count = max(min_num_micro_batch or 1, -(-rows // data["micro_batch_size_per_gpu"]))
    parts = [list(range(first, rows, count)) for first in range(count)]
    take = lambda value, part: (
        torch.nested.as_nested_tensor([value.unbind()[i] for i in part], layout=torch.jagged)
        if isinstance(value, Tensor) and value.is_nested
        else value
    )
    return [
        Data({name: take(value, part) for name, value in data.items()}) for part in parts
    ], parts


def postprocess_batch_func(output_lst: Sequence[Any], indices: Any, data: Data) -> dict[str, Any]:
    outputs: dict[str, dict[int, Tensor]] = {}
    for row, part in zip(output_lst, indices, strict=False):
        for name, value in row.get("model_output", {}).items():
            outputs.setdefault(name, {}).update(zip(part, value.unbind(), strict=True))
    return {
        "model_output": {name: [rows[i] for i in sorted(rows)] for name, rows in outputs.items()},
        "loss": [row["loss"] for row in output_lst if "loss" in row],
        "metrics": {"each": [row["metrics"] for row in output_lst if "metrics" in row]},
    }


def build_optimizer(parameters: Any, config: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=config.lr, eps=1e-3)


def with_warmup(optimizer: torch.optim.Optimizer, num_warmup_steps: int) -> Any:
    rule = lambda step: min(1.0, (step + 1) / max(num_warmup_steps, 1))
    return torch.optim.lr_scheduler.LambdaLR(optimizer, rule)


# ---- the rest ----
class PlatformRegistry:
    platforms: ClassVar[dict[str, type]] = {}

    @classmethod
    def register(cls, platform: str) -> Callable[[type], type]:
        return lambda found: cls.platforms.setdefault(platform, found)


@dataclass
class ConfigStore:
    stored: dict[tuple[str, str], Any] = field(default_factory=dict)

    def store(self, group: str, name: str, node: Any, package: str | None, provider: str) -> None:
        self.stored[group, name] = node

    @staticmethod
    def instance() -> ConfigStore:
        return STORE


STORE = ConfigStore()


def get(data: Data, key: str, default: Any) -> Any:
    return data.get(key, default)


MODULES: dict[str, dict[str, Any]] = {
    "verl": {},
    "verl.base_config": {"BaseConfig": BaseConfig},
    "verl.workers.config": {
        "EngineConfig": EngineConfig,
        "ActorConfig": RoleConfig,
        "CriticConfig": RoleConfig,
    },
    "verl.workers.config.optimizer": {"build_optimizer": build_optimizer},
    "verl.workers.engine.base": {
        "BaseEngine": BaseEngine,
        "BaseEngineCtx": BaseEngineCtx,
        "EngineRegistry": EngineRegistry,
    },
    "verl.workers.engine.utils": {
        "prepare_micro_batches": prepare_micro_batches,
        "postprocess_batch_func": postprocess_batch_func,
    },
    "verl.workers.engine.fsdp.utils": {"unfuse_moe_params": lambda named, kind: named},
    "verl.utils.tensordict_utils": {
        "get_non_tensor_data": get,
        "assign_non_tensor": lambda data, **more: data.update(more),
    },
    "verl.utils.device": {"get_device_name": lambda: "cpu"},
    "verl.utils.torch_functional": {"get_constant_schedule_with_warmup": with_warmup},
    "verl.plugin.platform.platform_manager": {"PlatformRegistry": PlatformRegistry},
    "verl.plugin.platform.platform_base": {"PlatformBase": object},
    "hydra.core.config_store": {"ConfigStore": ConfigStore},
    "omegaconf": {
        "OmegaConf": type(
            "OmegaConf", (), {"load": staticmethod(lambda p: yaml.safe_load(p.read_text()))}
        )
    },
}


@contextmanager
def installed() -> Iterator[None]:
    """A context in which ``import fpipe.interop.verl`` finds this stand-in."""
    added: list[str] = []
    for name, values in MODULES.items():
        module = ModuleType(name)
        module.__dict__.update(values, __spec__=ModuleSpec(name, None))
        if name not in sys.modules:
            sys.modules[name] = module
            added.append(name)
    try:
        yield
    finally:
        for name in [
            *added,
            *(name for name in sys.modules if name.startswith("fpipe.interop.verl")),
        ]:
            sys.modules.pop(name, None)
