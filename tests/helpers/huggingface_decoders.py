"""Tiny decoders of public model families with random weights, and their comparison with the unsplit
model.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cache
from typing import Any, NamedTuple

import torch
import transformers
from torch import Tensor

import fpipe
from fpipe.interop import huggingface
from schedule_table import Case

VOCABULARY = 48
MICROBATCHES = 4

_SHAPE: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_attention_heads": 2,
    "max_position_embeddings": 64,
}
_GROUPED = {**_SHAPE, "num_key_value_heads": 1}
_EXPERTS = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 12,
}

#: name -> (config class in transformers, its arguments)
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", _GROUPED),
    "mistral": ("MistralConfig", {**_GROUPED, "sliding_window": 4}),
    "qwen2": (
        "Qwen2Config",
        {**_GROUPED, "use_sliding_window": True, "sliding_window": 4, "max_window_layers": 1},
    ),
    "qwen3": ("Qwen3Config", {**_GROUPED, "head_dim": 8}),
    "qwen2-moe": (
        "Qwen2MoeConfig",
        {**_GROUPED, **_EXPERTS, "shared_expert_intermediate_size": 12},
    ),
    "qwen3-moe": (
        "Qwen3MoeConfig",
        {**_GROUPED, **_EXPERTS, "head_dim": 8, "mlp_only_layers": [1]},
    ),
    "mixtral": (
        "MixtralConfig",
        {**_GROUPED, "num_local_experts": 4},
    ),
    "gemma": ("GemmaConfig", {**_GROUPED, "head_dim": 8}),
    "gemma2": (
        "Gemma2Config",
        {**_GROUPED, "head_dim": 8, "query_pre_attn_scalar": 8, "sliding_window": 4},
    ),
    "gemma3": (
        "Gemma3TextConfig",
        {
            **_GROUPED,
            "head_dim": 8,
            "query_pre_attn_scalar": 8,
            "sliding_window": 4,
            "sliding_window_pattern": 2,
        },
    ),
    "granite": ("GraniteConfig", {**_GROUPED, "embedding_multiplier": 3.0, "logits_scaling": 2.0}),
    "gpt2": (
        "GPT2Config",
        {"vocab_size": VOCABULARY, "n_embd": 16, "n_head": 2, "n_positions": 64},
    ),
    "gpt-neox": ("GPTNeoXConfig", _SHAPE),
}


#: families that run under every schedule, in 4 and in 8 stages
ACCEPTANCE = ("llama", "qwen3", "qwen3-moe", "mixtral", "gemma", "gpt2")


def decoder(family: str, layers: int = 8, *, train: bool = False, **changes: Any) -> Any:
    """A model of a family; ``changes`` are arguments of its config. Dropout is off unless
    ``train``.
    """
    name, shape = FAMILIES[family]
    ends = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
    config = getattr(transformers, name)(
        **{**ends, **shape, "num_hidden_layers": layers, **changes}
    )
    torch.manual_seed(0)
    return transformers.AutoModelForCausalLM.from_config(config).train(train)


def tokens(rows: int, length: int = 7, seed: int = 1) -> Tensor:
    """Random token ids."""
    return torch.randint(
        0, VOCABULARY, (rows, length), generator=torch.Generator().manual_seed(seed)
    )


def unsplit(
    model: Any, microbatches: int, ids: Tensor, **side: Any
) -> tuple[Tensor, dict[str, Tensor]]:
    """Loss and gradients by the model's own forward, loss and autograd, one microbatch after
    another.

    A tied parameter's gradient appears under each of its names; frozen parameters have none.
    """
    total = torch.zeros(())
    for part in range(microbatches):
        arguments = {name: value.chunk(microbatches)[part] for name, value in side.items()}
        piece = ids.chunk(microbatches)[part]
        total = (
            total
            + model(input_ids=piece, labels=piece, use_cache=False, **arguments).loss / microbatches
        )
    leaves = {
        name: p for name, p in model.named_parameters(remove_duplicate=False) if p.requires_grad
    }
    unique = dict.fromkeys(leaves.values())
    grads = dict(zip(unique, torch.autograd.grad(total, list(unique)), strict=True))
    return total.detach(), {name: grads[p] for name, p in leaves.items()}


def distance(grads: Iterable[dict[str, Tensor | None] | None], want: dict[str, Tensor]) -> float:
    """Norm of the difference of all gradients, relative to the norm of all; names must be those of
    ``want``.
    """
    found = {name: g for stage in grads for name, g in (stage or {}).items() if g is not None}
    assert found.keys() <= want.keys()
    difference = sum(float((g - want[name]).norm()) ** 2 for name, g in found.items())
    return (difference / sum(float(g.norm()) ** 2 for g in want.values())) ** 0.5


# ---- one family, split and unsplit, under any schedule ----
class Split(NamedTuple):
    """Stages and parameters of a model with frozen parameters, and the unsplit model's loss and
    gradients.
    """

    stages: Any
    params: Any
    loss: Tensor
    grads: dict[str, Tensor]


class Errors(NamedTuple):
    """One run on one rank: the loss's relative error, and per gradient the squared norms of its
    error and of itself. ``wrong`` names frozen parameters with a gradient and trained ones without.
    """

    loss: float
    grads: dict[str, tuple[float, float]]
    wrong: tuple[str, ...]


class Verdict(NamedTuple):
    """Relative errors of the loss, of all gradients as one vector, and of the worst single
    gradient; wrong names.
    """

    loss: float
    grads: float
    worst: float
    wrong: tuple[str, ...]

    @property
    def right(self) -> bool:
        """Whether the errors are within float32's accuracy. NaN is not."""
        return self.loss < 1e-6 and self.grads < 1e-6 and self.worst < 1e-5 and not self.wrong


@cache
def split(family: str, stages: int) -> Split:
    """Four stages with a layer each, or seven with a layer each and one with the head."""
    model = decoder(family, layers=4 if stages == 4 else 7)
    for index, (name, parameter) in enumerate(model.named_parameters()):
        parameter.requires_grad_("layers.1" not in name and "h.1" not in name and index % 5 != 3)
    return Split(
        *huggingface.stages(model, stages), *unsplit(model, MICROBATCHES, tokens(MICROBATCHES, 5))
    )


def against_unsplit(family: str, case: Case, group: Any) -> Errors:
    """Run one step under a schedule and compare it with the unsplit model."""
    model = split(family, case.stages)
    pipe = fpipe.pipeline(
        model.stages,
        case.make(),
        loss=huggingface.causal_loss,
        microbatches=MICROBATCHES,
        group=group,
    )
    ids = tokens(MICROBATCHES, 5)
    loss, grads = fpipe.value_and_grad(pipe)(pipe.place(model.params), ids, ids)
    found = {name: g for stage in grads for name, g in (stage or {}).items()}
    wrong = [name for name, g in found.items() if (g is None) != (name not in model.grads)]
    errors = {
        name: (
            float((g - model.grads[name]).square().sum()),
            float(model.grads[name].square().sum()),
        )
        for name, g in found.items()
        if g is not None and name in model.grads
    }
    return Errors(abs(float(loss / model.loss) - 1), errors, tuple(wrong))


def verdict(found: Sequence[Errors], family: str, stages: int) -> Verdict:
    """The errors of all ranks, combined."""
    grads: dict[str, tuple[float, float]] = {}
    for name, (error, norm) in (item for one in found for item in one.grads.items()):
        before = grads.get(name, (0.0, 0.0))  # several ranks hold a replicated stage
        grads[name] = before[0] + error, before[1] + norm
    missing = set(split(family, stages).grads) - set(grads)
    whole = sum(error for error, _ in grads.values()) / sum(norm for _, norm in grads.values())
    worst = max(error / norm for error, norm in grads.values() if norm)
    return Verdict(
        sum(one.loss for one in found),
        whole**0.5,
        worst**0.5,
        (*(w for one in found for w in one.wrong), *sorted(missing)),
    )
