# SPDX-License-Identifier: Apache-2.0
"""The parameters of a pipeline as leaves of a torch optimizer: gradients, their norm, offload, and
checkpoints.

This module must not know models or trainers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TypeAlias

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ... import Pipeline, global_norm, load as load_trees, save as save_trees, stream, tree
from ...errors import CheckpointError
from ...tree import Tree
from ..binding import Results

#: By stage, tensors by name; None for a stage of another process.
ByStage: TypeAlias = list[dict[str, Tree] | None]


class Weights:
    """Parameters of the stages here, which a torch optimizer changes in place.

    Args:
        pipe: the pipeline.
        params: the parameters of the stages here (with ``zero=``, the parts here, as ``pipe.shard``
            returns them), on any device.
        compute: the dtype in which the pipeline gets floating parameters, if not their own.

    >>> import fpipe
    >>> pipe = fpipe.pipeline([lambda p, x: x * p["w"]] * 2, loss=torch.sum, microbatches=1,
    ...     group=fpipe.local(2))
    >>> weights = Weights(pipe, [{"w": torch.ones(1)}, {"w": torch.ones(1)}])
    >>> optimizer = torch.optim.SGD(weights.trained(), lr=0.1)
    >>> weights.add_grads(fpipe.value_and_grad(pipe)(weights.for_call(), torch.ones(1))[1])
    >>> round(weights.norm().item(), 4)
    1.4142
    >>> optimizer.step()
    >>> weights.values()[1]
    {'w': tensor([0.9000])}
    """

    def __init__(
        self,
        pipe: Pipeline,
        params: Sequence[Mapping[str, Tensor] | None],
        compute: torch.dtype | None = None,
    ):
        self.pipe = pipe
        self.compute = compute
        self.leaves: list[dict[str, nn.Parameter] | None] = [None] * len(params)
        shared = dict[str, nn.Parameter]()  # by tie of stages here, unless their leaves are parts
        for stage, row in enumerate(params):
            if row is None:
                continue
            ties = {} if pipe.parts else dict(pipe.config.functions[stage].ties)
            trained = dict(zip(tree.names(row), pipe.config.trained(stage, row), strict=True))
            leaves = self.leaves[stage] = {}
            for name, part in row.items():
                leaf = nn.Parameter(part, requires_grad=trained[name] and part.is_floating_point())
                leaves[name] = shared.setdefault(ties[name], leaf) if name in ties else leaf

    def __iter__(self) -> Iterator[tuple[int, str, nn.Parameter]]:
        for stage, row in enumerate(self.leaves):
            for name, leaf in (row or {}).items():
                yield stage, name, leaf

    def trained(self) -> list[nn.Parameter]:
        """Return the parameters that the optimizer gets, a tied one of two stages here once."""
        return list({leaf: None for _, _, leaf in self if leaf.requires_grad})

    def values(self) -> ByStage:
        """Return the parameters (with ``zero=``, the parts here), in the memory of the leaves."""
        return self._by_stage(lambda _, leaf: leaf.detach())

    def _by_stage(self, of: Callable[[str, nn.Parameter], Tree]) -> ByStage:
        """Return a function of the name of each leaf and the leaf."""
        return [row and {name: of(name, leaf) for name, leaf in row.items()} for row in self.leaves]

    def for_call(self, adapted: bool = True) -> ByStage:
        """Return the parameters for a call of the pipeline; without its LoRA adapters, the factors
        of these that are 0 at the start are 0.
        """

        def value(name: str, leaf: nn.Parameter) -> Tensor:
            whole = leaf.detach()
            if ".lora_B." in name and not adapted:
                whole = torch.zeros_like(whole)
            return whole.to(self.compute) if whole.is_floating_point() else whole

        return self._by_stage(value)

    def exported(
        self, aliases: Mapping[str, Sequence[str]], bucket_bytes: int
    ) -> Iterator[tuple[str, Tensor]]:
        """Return whole parameters by their names in the model, on all ranks in one order.

        Args:
            aliases: further names of tied parameters, by the first.
            bucket_bytes: the memory for tensors of other ranks.
        """
        for name, tensor in stream(self.pipe, self.values(), bucket_bytes):
            for alias in (name, *aliases.get(name, ())):
                yield alias, tensor

    # ---- gradients ----
    def add_grads(self, grads: Results) -> None:
        """Add gradients, as ``fpipe.value_and_grad`` returns them, to ``.grad`` of the leaves."""
        added = set[nn.Parameter]()  # a tied parameter has the sum over all of its stages in each
        for stage, name, leaf in self:
            grad = (grads[stage] or {}).get(name)
            if grad is not None and leaf.requires_grad and leaf not in added:
                added.add(leaf)
                grad = grad.to(leaf.dtype)
                leaf.grad = grad if leaf.grad is None else leaf.grad.add_(grad)

    def norm(self) -> Tensor:
        """Return the norm of all gradients of the model; every process calls it."""
        return global_norm(self._by_stage(lambda _, leaf: leaf.grad), over=self.pipe)

    # ---- devices ----
    def move(
        self,
        device: torch.device,
        optimizer: Optimizer | None,
        model: bool,
        grad: bool,
    ) -> None:
        """Move parameters, gradients, and states of the optimizer."""
        for _, _, leaf in self if model else ():
            grad_value = leaf.grad
            leaf.grad = None  # a gradient must be where its parameter is
            leaf.data = leaf.data.to(device, non_blocking=True)
            if grad_value is not None:
                leaf.grad = grad_value.to(device if grad else leaf.device, non_blocking=True)
        for state in () if optimizer is None else optimizer.state.values():
            for key, value in state.items():
                if isinstance(value, Tensor) and value.dim():
                    state[key] = value.to(device, non_blocking=True)
        if device.type == "cpu" and torch.accelerator.is_available():
            torch.accelerator.synchronize()

    # ---- checkpoints ----
    def save(
        self,
        path: Path,
        optimizer: Optimizer | None,
        more: dict[str, object],
    ) -> None:
        """Write parameters, and the state of an optimizer if there is one; every process calls it.

        Args:
            path: of the checkpoint; a complete one must not be there.
            optimizer: of the parameters.
            more: numbers and text, alike on all processes.
        """
        trees = {"params": self.values(), "more": more}
        if optimizer is not None:
            trees["optimizer"] = self.state_of(optimizer)
        save_trees(path, self.pipe, **trees)

    def load(
        self,
        path: Path,
        optimizer: Optimizer | None,
        contents: Sequence[str],
    ) -> dict[str, Tree]:
        """Read what ``save`` wrote; every process calls it.

        Args:
            path: of the checkpoint.
            optimizer: of the parameters; None leaves its state out.
            contents: "model", "optimizer", ...: what to read.

        Returns:
            The numbers and text.
        """
        if "model" in contents:
            values = load_trees(path, self.pipe, "params")
            with torch.no_grad():
                for stage, name, leaf in self:
                    leaf.copy_(values[stage][name])
        if optimizer is not None and "optimizer" in contents:
            states = load_trees(path, self.pipe, "optimizer")
            for stage, name, leaf in self:
                state = states[stage].get(name)
                if state and leaf.requires_grad:
                    optimizer.state[leaf] = {  # torch's optimizers have numbers as tensors
                        key: torch.tensor(value) if isinstance(value, float) else value
                        for key, value in state.items()
                    }
        return load_trees(path, self.pipe, "more")

    def state_of(self, optimizer: Optimizer) -> ByStage:
        """Return what an optimizer holds, by stage and leaf: a dict each.

        Tensors of one number become numbers, which are the same in all processes.

        Raises:
            CheckpointError: if it holds tensors of other shapes than the parameters.
        """
        states: list[Tree] = self._by_stage(lambda *_: {})
        for stage, name, leaf in self:
            for key, value in optimizer.state.get(leaf, {}).items():
                is_tensor = isinstance(value, Tensor)
                if is_tensor and value.dim() and value.shape != leaf.shape:
                    raise CheckpointError(
                        f"{type(optimizer).__name__} holds {key!r} of shape {list(value.shape)} "
                        f"for {name!r} of stage {stage}, which has {list(leaf.shape)}; only states "
                        "of the parameters' shapes can be saved"
                    )
                states[stage][name][key] = float(value) if is_tensor and not value.dim() else value
        return states
