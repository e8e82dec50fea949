# SPDX-License-Identifier: Apache-2.0
"""verl's engine on a pipeline of fpipe, for language models and for value models."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import cached_property, partial
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.optim.lr_scheduler import LRScheduler

from ... import Microbatches, Pipeline, adopt, copies, make_schedule, pipeline, value_and_grad
from ...errors import ScheduleError, StageError, UnsupportedError
from ...programs import setting
from ...saving import export_model
from ...stage import Stage
from .._rl import models
from .._rl.sequences import Tokens, tokens_of
from .._rl.weights import Weights
from .config import DTYPES
from .losses import CURRENT, Batch, Loss, asked, like

base = import_module("verl.workers.engine.base")
engines = import_module("verl.workers.engine.utils")
tensordicts = import_module("verl.utils.tensordict_utils")
devices = import_module("verl.utils.device")
optimizers = import_module("verl.workers.config.optimizer")
functional = import_module("verl.utils.torch_functional")

#: The folder of a checkpoint of fpipe in one of verl.
FOLDER = "fpipe"
#: The types of devices for which the engine is registered.
DEVICES = ["cpu", "cuda", "npu", "xpu"]


class _Mode(base.BaseEngineCtx):
    """Training or evaluation; verl's base class moves parameters from the host and back."""

    def __exit__(self, kind: object, value: object, trace: object) -> None:
        if self.mode == "train" and (self.zero_grad_on_exit or kind is not None):
            self.engine.optimizer_zero_grad()
        super().__exit__(kind, value, trace)


@base.EngineRegistry.register(model_type="language_model", backend="fpipe", device=DEVICES)
class FpipeEngine(base.BaseEngine):
    """verl's engine on a pipeline of fpipe."""

    values = False

    def __init__(
        self,
        model_config: Any,
        engine_config: Any,
        optimizer_config: Any,
        checkpoint_config: Any,
    ):
        super().__init__()
        self.model_config = model_config
        self.engine_config = engine_config
        self.optimizer_config = optimizer_config
        self.checkpoint_config = checkpoint_config
        self.mode: str | None = None
        world = dist.get_world_size()
        if model_config.get("use_liger", False):
            raise UnsupportedError(
                "model.use_liger is not supported by engine=fpipe; fpipe fuses what torch.compile "
                "fuses: engine.compile=inductor"
            )
        pp = engine_config.pipeline_parallel_size
        if pp == -1:
            pp = world
        if pp < 1 or world % pp:
            raise StageError(
                f"engine.pipeline_parallel_size={pp} does not divide the {world} processes; "
                "change one"
            )
        kind = devices.get_device_name()
        self.mesh = init_device_mesh(kind, (world // pp, pp), mesh_dim_names=("dp", "pp"))
        self.group = adopt(self.mesh["pp"], kind)
        self.copies = adopt(self.mesh["dp"], kind) if world > pp else None
        self.schedule = make_schedule(engine_config.schedule, pp, 2 * pp, engine_config.stages)
        self.device = self.group.device(self.group.here[0])
        self.saved: list[str] = []

    @property
    def is_param_offload_enabled(self) -> bool:
        """Whether parameters are on the host between phases."""
        return self.engine_config.param_offload

    @property
    def is_optimizer_offload_enabled(self) -> bool:
        """Whether states of the optimizer are on the host between phases."""
        return self.engine_config.optimizer_offload

    # ---- the model ----
    def initialize(self) -> None:
        """Load the model, cut it, and build pipeline, optimizer and learning rate scheduler."""
        config = self.engine_config
        if config.full_determinism:
            engines.enable_full_determinism(seed=config.seed)
        self.cut, from_files = self._cut()
        self.pipe = self._pipeline()
        if from_files:
            dtype = DTYPES[config.model_dtype]
            parts = models.read(self.model_config.local_path, self.pipe, dtype)
        else:
            parts = self.pipe.shard(self.pipe.place(self.cut.params))
        self.weights = Weights(self.pipe, parts, DTYPES[config.dtype])
        self.cut = self.cut._replace(params=[])
        self.cut.model.to("meta")  # the stages here have their parameters
        self.steps = 0
        self.adapted = True
        self.optimizer: torch.optim.Optimizer | None = None
        self.scheduler: Any = None
        if not config.forward_only:
            optimizer = optimizers.build_optimizer(self.weights.trained(), self.optimizer_config)
            self.optimizer = optimizer
            self.scheduler = _scheduler_of(optimizer, self.optimizer_config)
        self._offload()

    def _offload(self) -> None:
        """Move to the host what the configuration keeps there between phases."""
        model = self.is_param_offload_enabled
        self.to("cpu", model=model, optimizer=self.is_optimizer_offload_enabled, grad=model)

    def _cut(self) -> tuple[models.Cut, bool]:
        """Return the model as stages, and whether its parameters are still to be read from its
        files.
        """
        config = self.engine_config
        model = self.model_config
        load = partial(
            models.load,
            model.local_path,
            model.hf_config,
            DTYPES[config.model_dtype],
            values=self.values,
            attention=config.attn_implementation,
            trust=model.trust_remote_code,
        )
        module = load(empty=True)
        from_files = model.lora_rank <= 0 and models.has_files(model.local_path, module)
        if not from_files:
            # what the files do not have must be alike on all processes
            torch.manual_seed(config.seed)
            module = load()
        if model.lora_rank > 0:
            names = ("target_modules", "target_parameters", "exclude_modules")
            to_python = import_module("verl.utils.py_functional").convert_to_regular_types
            options = {name: to_python(model.get(name)) for name in names}
            options |= {"r": model.lora_rank, "lora_alpha": model.lora_alpha}
            models.add_adapters(module, options, model.get("lora_adapter_path"))
        cut = models.cut(
            module,
            self.schedule.stages,
            cuts=config.cuts,
            engine=None if config.trace else "eager",
            checkpointing=model.enable_gradient_checkpointing,
        )
        return cut, from_files

    def _pipeline(self) -> Pipeline:
        config = self.engine_config
        group = self.get_data_parallel_group()
        loss = Loss(self.values, config.logits_chunk_size, group, self.device)
        options: dict[str, Any] = {
            "loss": Stage(loss, engine="eager", like=like, name="loss"),
            "reduction": "sum",
            "group": self.group,
            "compile": config.compile,
        }
        if config.dtype != config.model_dtype:
            options["accumulate"] = torch.float32
        if self.copies is not None:
            dtype = DTYPES.get(config.reduce_dtype)
            options["dp"] = copies(
                self.copies, zero=config.zero, reduce_dtype=dtype, reduction="mean"
            )
        return pipeline(self.cut.stages, config.schedule, **options | config.override)

    @contextmanager
    def disable_adapter(self) -> Iterator[None]:
        """Run the model without its LoRA adapters."""
        self.adapted = False
        try:
            yield
        finally:
            self.adapted = True

    def train_mode(self, **keywords: object) -> Any:
        """Return a context in which the engine trains."""
        return _Mode(self, "train", **keywords)

    def eval_mode(self, **keywords: object) -> Any:
        """Return a context in which the engine evaluates."""
        return _Mode(self, "eval", **keywords)

    # ---- steps ----
    def forward_backward_batch(
        self,
        data: Any,
        loss_function: Callable | None,
        forward_only: bool = False,
    ) -> Any:
        """Run a batch: losses, metrics and outputs of its sequences, and without ``forward_only``
        gradients.
        """
        if asked(data, "distillation_use_topk"):
            raise UnsupportedError(
                "distillation from the top of a teacher's logits is not supported by engine=fpipe"
            )
        group = self.get_data_parallel_group()
        size = self.get_data_parallel_size()
        total = data["loss_mask"].sum().to(self.device)
        dist.all_reduce(total, group=group)
        tensordicts.assign_non_tensor(data, sp_size=1, batch_num_tokens=total.item(), dp_size=size)
        batches, indices = engines.prepare_micro_batches(
            data=data,
            dp_group=group,
            same_micro_num_in_dp=True,
            min_num_micro_batch=self._least,
        )
        if not asked(batches[0], "use_remove_padding", True):
            raise UnsupportedError(
                "sequences with padding are not supported by engine=fpipe; set "
                "model.use_remove_padding=True"
            )
        tokens = [
            tokens_of(
                batch["input_ids"].to(self.device),
                batch["position_ids"].to(self.device),
                batch["temperature"],
            )
            for batch in batches
        ]
        keep_outputs = forward_only or asked(data, "return_model_output")
        with setting(CURRENT, Batch(batches, tokens, loss_function, keep_outputs)):
            rows = self._run(tokens, forward_only)
        return engines.postprocess_batch_func(output_lst=rows or [], indices=indices, data=data)

    @cached_property
    def _least(self) -> int | None:
        """The smallest number of microbatches that the schedule can run."""
        for number in range(1, 4 * self.group.size + 1):
            with suppress(ScheduleError):
                self.pipe.schedule(number)
                return number
        return None

    def _run(self, tokens: Sequence[Tokens], forward_only: bool) -> list[object] | None:
        pipe = self.pipe
        if self.cut.moded:
            pipe = pipe.train(not forward_only and self.mode != "eval")
        params = self.weights.for_call(self.adapted)
        x = Microbatches([one.input_ids for one in tokens])
        positions = Microbatches([one.position_ids for one in tokens])
        numbers = Microbatches([torch.tensor(n) for n in range(len(tokens))])

        def content(number, logits, out):
            return out[1].content

        if forward_only:
            with torch.no_grad():
                _, rows = pipe(
                    params, x, numbers, has_aux=True, each=content, position_ids=positions
                )
            return rows
        seed = self.engine_config.seed * 1_000_003 + self.steps if self.cut.moded else None
        self.steps += 1
        step = value_and_grad(pipe, has_aux=True, each=content)
        (_, rows), grads = step(params, x, numbers, seed=seed, position_ids=positions)
        self.weights.add_grads(grads)
        return rows

    # ---- the optimizer ----
    def optimizer_zero_grad(self) -> None:
        """Forget the gradients."""
        if self.optimizer is not None:
            self.optimizer.zero_grad()

    def optimizer_step(self) -> float:
        """Clip the gradients and update the parameters, unless the norm is not finite.

        Returns:
            The norm before clipping.
        """
        norm = self.weights.norm()
        clip = self.optimizer_config.clip_grad
        assert self.optimizer is not None, "forward_only engines have no optimizer"
        if torch.isfinite(norm):
            if clip is not None and clip > 0:
                torch.nn.utils.clip_grads_with_norm_(self.weights.trained(), clip, norm)
            self.optimizer.step()
        else:
            print(f"WARN: grad_norm is not finite: {norm}")
            self.optimizer_zero_grad()
        return norm.item()

    def lr_scheduler_step(self) -> float:
        """Advance the learning rate scheduler; the new learning rate."""
        self.scheduler.step()
        return self.scheduler.get_last_lr()[0]

    def to(
        self,
        device: str,
        model: bool = True,
        optimizer: bool = True,
        grad: bool = True,
    ) -> None:
        """Move parameters, states of the optimizer and gradients to the host ("cpu") or back to the
        device.
        """
        super().to(device=device, model=model, optimizer=optimizer, grad=grad)
        target = torch.device("cpu") if device == "cpu" else self.device
        self.weights.move(target, self.optimizer if optimizer else None, model, grad)

    # ---- groups ----
    def get_data_parallel_rank(self) -> int:
        """Return the number of this copy of the pipeline."""
        return self.mesh.get_local_rank("dp")

    def get_data_parallel_size(self) -> int:
        """Return how many copies of the pipeline there are."""
        return self.mesh.size(0)

    def get_data_parallel_group(self) -> Any:
        """Return the process group of the copies of this rank."""
        return self.mesh.get_group("dp")

    def is_mp_src_rank_with_outputs(self) -> bool:
        """Return whether this rank has losses and outputs."""
        return self.schedule.output_rank in self.group.here

    # ---- weights ----
    def get_per_tensor_param(
        self, **keywords: object
    ) -> tuple[Iterator[tuple[str, torch.Tensor]], None]:
        """Return all parameters by their names in the model, whole and in one order on all ranks,
        with the adapters added to them.
        """
        model = self.model_config
        named = self.weights.exported(self.cut.aliases, self.engine_config.export_bucket_bytes)
        moved = ((name, tensor.to(self.device, non_blocking=True)) for name, tensor in named)
        if model.lora_rank <= 0:
            unfused = import_module("verl.workers.engine.fsdp.utils").unfuse_moe_params
            return unfused(moved, model.hf_config.model_type), None
        if not model.lora.get("merge", False):
            raise UnsupportedError(
                "engine=fpipe exports adapters added to the model; set model.lora.merge=True"
            )
        return models.with_merged_adapters(moved, self.cut.scaling), None

    def save_checkpoint(
        self,
        local_path: str,
        hdfs_path: str | None = None,
        global_step: int = 0,
        max_ckpt_to_keep: int | None = None,
        **keywords: object,
    ) -> None:
        """Write a checkpoint that any other number of processes and any other schedule can load."""
        first = dist.get_rank() == 0
        contents = self.checkpoint_config.save_contents
        path = Path(local_path, FOLDER)
        if first:
            shutil.rmtree(path, ignore_errors=True)
            path.parent.mkdir(parents=True, exist_ok=True)
        dist.barrier()
        more: dict[str, object] = {"steps": self.steps, "global_step": global_step}
        if self.scheduler is not None:
            more |= {"epoch": self.scheduler.last_epoch, "rates": self.scheduler.get_last_lr()}
        self.weights.save(path, self.optimizer if "optimizer" in contents else None, more)
        if first:
            folder = path.with_name("huggingface")
            if "hf_model" in contents:
                shutil.rmtree(folder, ignore_errors=True)
                export_model(path, folder)
            model = self.model_config
            for part in (model.hf_config, model.get_processor(), model.generation_config):
                if part is not None:
                    part.save_pretrained(folder)
            # this run removes checkpoints that it wrote before the last ones
            self.saved = [*(path for path in self.saved if path != local_path), local_path]
            while 0 < (max_ckpt_to_keep or 0) < len(self.saved):
                shutil.rmtree(self.saved.pop(0), ignore_errors=True)
        dist.barrier()

    def load_checkpoint(
        self,
        local_path: str,
        hdfs_path: str | None = None,
        del_local_after_load: bool = True,
        **keywords: object,
    ) -> None:
        """Read a checkpoint; it stays where it is, since it is no copy of a remote one."""
        if local_path is None:
            return
        contents = self.checkpoint_config.load_contents
        more = self.weights.load(Path(local_path, FOLDER), self.optimizer, contents)
        if "extra" in contents:
            self.steps = more["steps"]
            if self.optimizer is not None and "epoch" in more:
                self.scheduler.last_epoch = more["epoch"]
                for group, rate in zip(self.optimizer.param_groups, more["rates"], strict=True):
                    group["lr"] = rate
        dist.barrier()
        self._offload()


@base.EngineRegistry.register(model_type="value_model", backend="fpipe", device=DEVICES)
class FpipeValueEngine(FpipeEngine):
    """The engine for models with one value for each token."""

    values = True


def _scheduler_of(optimizer: torch.optim.Optimizer, config: Any) -> LRScheduler:
    """verl's learning rate scheduler for an optimizer, from its configuration."""
    total = config.total_training_steps
    warmup = config.lr_warmup_steps
    if warmup is None or warmup <= 0:
        warmup = int(config.lr_warmup_steps_ratio * total)
    kind = config.get("lr_scheduler_type", "constant")
    if kind == "constant":
        return functional.get_constant_schedule_with_warmup(
            optimizer=optimizer, num_warmup_steps=warmup
        )
    if kind == "cosine":
        return functional.get_cosine_schedule_with_warmup(
            optimizer=optimizer,
            num_warmup_steps=warmup,
            num_training_steps=total,
            min_lr_ratio=config.min_lr_ratio,
            num_cycles=config.num_cycles,
            zero_indexed_step=config.zero_indexed_step,
        )
    raise UnsupportedError(f"optim.lr_scheduler_type={kind!r}; give 'constant' or 'cosine'")
