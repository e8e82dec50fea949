"""Tiny decoders of public families with random weights, for the tests of interop and of acceptance."""

from __future__ import annotations

from typing import Any

import torch
import transformers

VOCABULARY = 48

_SHAPE: dict[str, Any] = {
    "vocab_size": VOCABULARY, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 8,
    "num_attention_heads": 2, "max_position_embeddings": 64,
}  # fmt: skip
_GROUPED = {**_SHAPE, "num_key_value_heads": 1}
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 12, "output_router_logits": True}

#: name -> (transformers' name for the config, what differs from the common shape)
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", _GROUPED),
    "mistral": ("MistralConfig", {**_GROUPED, "sliding_window": 4}),
    "qwen2": ("Qwen2Config", {**_GROUPED, "use_sliding_window": True, "sliding_window": 4, "max_window_layers": 2}),
    "qwen3": ("Qwen3Config", {**_GROUPED, "head_dim": 8}),
    "qwen2-moe": ("Qwen2MoeConfig", {**_GROUPED, **_EXPERTS, "shared_expert_intermediate_size": 12}),
    "qwen3-moe": ("Qwen3MoeConfig", {**_GROUPED, **_EXPERTS, "head_dim": 8, "mlp_only_layers": [1]}),
    "mixtral": ("MixtralConfig", {**_GROUPED, "num_local_experts": 4, "output_router_logits": True}),
    "gemma": ("GemmaConfig", {**_GROUPED, "head_dim": 8}),
    "gemma2": ("Gemma2Config", {**_GROUPED, "head_dim": 8, "query_pre_attn_scalar": 8, "sliding_window": 4}),
    "gemma3": ("Gemma3TextConfig", {**_GROUPED, "head_dim": 8, "query_pre_attn_scalar": 8, "sliding_window": 4}),
    "gpt2": ("GPT2Config", {"vocab_size": VOCABULARY, "n_embd": 16, "n_layer": 8, "n_head": 2, "n_positions": 64}),
    "gpt-neox": ("GPTNeoXConfig", _SHAPE),
}


def decoder(family: str, *, train: bool = False, seed: int = 0, **changes: Any) -> Any:
    """A model of a family; ``changes`` go to its config. Dropout is off unless it trains."""
    name, shape = FAMILIES[family]
    config = getattr(transformers, name)(**{**shape, **changes})
    torch.manual_seed(seed)
    return transformers.AutoModelForCausalLM.from_config(config).train(train)


def tokens(rows: int, length: int = 7, seed: int = 1) -> torch.Tensor:
    """Random token ids."""
    return torch.randint(0, VOCABULARY, (rows, length), generator=torch.Generator().manual_seed(seed))
