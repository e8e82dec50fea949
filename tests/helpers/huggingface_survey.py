"""All families of causal models of the installed transformers package: each is equal to its unsplit model, or refused.

    PYTHONPATH=.:tests/helpers python -m huggingface_survey [NAME ...]

prints one row per family, then the counts, and exits with 1 if a family is wrong or fails without an error of fpipe.
"""

from __future__ import annotations

import signal
import sys
import warnings
from collections import Counter
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
import transformers
from torch import Tensor
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as FAMILIES

import fpipe
from fpipe.interop import huggingface

LAYERS, ROWS, LENGTH, VOCABULARY = 4, 2, 7, 64
SECONDS = 90

#: attributes of configurations -> small values; a configuration gets those that its defaults have
SMALL: dict[str, Any] = {
    **dict.fromkeys(("hidden_size", "n_embd", "d_model", "dim", "emb_dim", "embedding_dim", "embedding_size"), 32),
    **dict.fromkeys(("intermediate_size", "ffn_dim", "n_inner", "d_ff", "dff"), 48),
    **dict.fromkeys(("decoder_ffn_dim", "encoder_ffn_dim"), 48),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "n_layers", "num_layers"), LAYERS),
    **dict.fromkeys(("decoder_layers", "encoder_layers"), LAYERS),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "num_heads", "decoder_attention_heads"), 4),
    **dict.fromkeys(("encoder_attention_heads", "num_key_value_heads", "decoder_key_value_heads"), 4),
    **dict.fromkeys(("max_position_embeddings", "n_positions", "max_seq_len", "n_ctx", "max_target_positions"), 64),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"), 4),
    **dict.fromkeys(("num_experts_per_tok", "moe_k", "moe_topk", "top_k_experts"), 2),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size", "expert_hidden_size"), 24),
    **dict.fromkeys(("n_group", "topk_group", "n_shared_experts", "first_k_dense_replace"), 1),
    **dict.fromkeys(("head_dim", "kv_channels", "d_kv", "attention_head_size", "v_head_dim"), 8),
    **dict.fromkeys(("q_lora_rank", "kv_lora_rank"), 16),
    **dict.fromkeys(("qk_rope_head_dim", "qk_nope_head_dim", "state_size", "ssm_state_size", "mamba_d_state"), 8),
    **dict.fromkeys(("mamba_n_heads", "mamba_d_head", "mamba_headdim", "mamba_num_heads", "mamba_head_dim"), 8),
    **dict.fromkeys(("linear_key_head_dim", "linear_value_head_dim"), 8),
    "vocab_size": VOCABULARY, "rotary_dim": 4, "time_step_rank": 4, "linear_num_key_heads": 2,
    "linear_num_value_heads": 4, "lru_width": 32,
}  # fmt: skip
ENDS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1}
#: what a family needs beyond these
MORE: dict[str, dict[str, Any]] = {
    "falcon": {"head_dim": None},
    "falcon_h1": {"mamba_d_ssm": 64},
    "gpt_neo": {"attention_types": [[["global", "local"], LAYERS // 2]], "num_layers": LAYERS},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"] * (LAYERS // 2)},
    "mamba2": {"num_heads": 8, "head_dim": 8, "expand": 2},
    "prophetnet": {"num_hidden_layers": None, "num_encoder_layers": 1, "num_decoder_layers": LAYERS},
    "reformer": {"is_decoder": True, "axial_pos_embds": False, "attn_layers": ["local"] * LAYERS},
    "rwkv": {"attention_hidden_size": 32},
    "xlnet": {"max_position_embeddings": None},
    "xlstm": {"v_head_dim": None},
    "zamba": {"num_hidden_layers": 8, "attn_layer_period": 3, "attn_layer_offset": 2, "layers_block_type": None},
    "zaya": {"num_experts_per_tok": 1},
    "gemma3n_text": {"num_kv_shared_layers": 0, "layer_types": ["sliding_attention", "full_attention"] * (LAYERS // 2)},
    "dbrx": {"attn_config": {"kv_n_heads": 4, "rope_theta": 10000.0}},
}


class Row(NamedTuple):
    """What became of a family: equal, refused, wrong, failed, or unknown where no small model could be built."""

    family: str
    end: str
    text: str = ""


def small(family: str) -> Any:
    """A small model of a family with random weights, in eval mode."""
    kind = transformers.AutoConfig.for_model(family)
    config = _shrunk(kind, MORE.get(family, {}))
    torch.manual_seed(0)
    cls = getattr(transformers, FAMILIES[family] if isinstance(FAMILIES[family], str) else FAMILIES[family][0])
    wanted = cls.config_class
    if wanted is not None and not isinstance(config, wanted):
        config = next(part for part in vars(config).values() if isinstance(part, wanted))
    model = cls(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():  # biases and scales that begin as 0 or 1 would hide mistakes
            parameter.add_(torch.randn_like(parameter) * 0.05)
    return model


def _shrunk(config: Any, more: dict[str, Any]) -> Any:
    known = config.to_dict()
    parts = {name: value for name, value in vars(config).items() if isinstance(value, transformers.PreTrainedConfig)}
    changes = {name: value for name, value in {**SMALL, **ENDS}.items() if name in known or hasattr(config, name)}
    lists = {name: value[:LAYERS] for name, value in known.items() if isinstance(value, list) and len(value) >= LAYERS}
    lists = {name: value for name, value in lists.items() if name.endswith(("_types", "_type", "block_configs"))}
    changes = {name: value for name, value in changes.items() if name not in parts}
    shrunk = {name: _shrunk(part, {}).to_dict() for name, part in parts.items()}
    for attempt in ({**changes, **lists, **shrunk, **more}, {**changes, **shrunk, **more}, {**changes, **more}):
        try:
            return type(config)(**{name: value for name, value in attempt.items() if value is not None})
        except Exception as error:
            last = error
    raise last


def unsplit(model: Any, ids: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    """Logits, and gradients of their weighted sum, of the model itself."""
    leaves = {name: p for name, p in model.named_parameters() if p.requires_grad}
    logits = model(input_ids=ids, use_cache=False).logits
    grads = torch.autograd.grad(_sum(logits), list(leaves.values()), allow_unused=True)
    return logits.detach(), {n: g for n, g in zip(leaves, grads, strict=True) if g is not None}


def split(model: Any, ids: Tensor, count: int) -> tuple[Tensor, dict[str, Tensor]]:
    """The same by the stages, one after another; gradients of tied parameters are added."""
    stages, params = huggingface.stages(model, count, aux_loss=False)
    leaves = [{n: t.requires_grad_(t.is_floating_point()) for n, t in own.items()} for own in params]
    x: Any = ids
    for stage, own in zip(stages, leaves, strict=True):
        x = stage(own, x)
    flat = [(name, t) for own in leaves for name, t in own.items() if t.requires_grad]
    grads = torch.autograd.grad(_sum(x), [t for _, t in flat], allow_unused=True)
    first = {id(p): name for name, p in reversed(list(model.named_parameters(remove_duplicate=False)))}
    names = {name: first[id(p)] for name, p in model.named_parameters(remove_duplicate=False)}
    total: dict[str, Tensor] = {}
    for (name, _), grad in zip(flat, grads, strict=True):
        if grad is not None:
            total[names[name]] = total.get(names[name], 0) + grad
    return x.detach(), total


def _sum(logits: Tensor) -> Tensor:
    return (logits.float() * torch.linspace(-1, 1, logits.numel()).view(logits.shape)).sum()


def examine(family: str, count: int = 2) -> Row:
    """Split a family and compare."""
    try:
        model = small(family)
    except Exception as error:
        return Row(family, "unknown", f"no small model: {_brief(error)}")
    ids = torch.randint(3, VOCABULARY, (ROWS, LENGTH), generator=torch.Generator().manual_seed(1))
    want, alone = None, ""
    try:
        want = unsplit(model, ids)
    except Exception as error:
        alone = _brief(error)
    try:
        found, mine = split(model, ids, count)
    except fpipe.FpipeError as error:
        return Row(family, "refused", str(error))
    except Exception as error:
        return Row(family, "failed", _brief(error))
    if want is None:
        return Row(family, "wrong", f"split, but the model itself fails: {alone}")
    logits, grads = want
    error = _distance({"logits": found}, {"logits": logits}), _distance(mine, grads)
    right = error[0] < 1e-5 and error[1] < 1e-4 and mine.keys() == grads.keys()
    return Row(family, "equal" if right else "wrong", f"logits {error[0]:.1e}, gradients {error[1]:.1e}")


def _distance(found: dict[str, Tensor], want: dict[str, Tensor]) -> float:
    zero = torch.zeros(())
    off = sum(float((found.get(n, zero).float() - want.get(n, zero).float()).norm() ** 2) for n in {**found, **want})
    return (off / max(sum(float(g.float().norm() ** 2) for g in want.values()), 1e-30)) ** 0.5


def _brief(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error).strip() else ''}"[:200]


def survey(names: list[str]) -> Iterator[Row]:
    """The families by name, each for a limited time."""

    def late(*_: object) -> None:
        raise TimeoutError(f"longer than {SECONDS} s")

    signal.signal(signal.SIGALRM, late)
    for family in names:
        signal.alarm(SECONDS)
        try:
            yield examine(family)
        except TimeoutError as error:
            yield Row(family, "unknown", str(error))
        finally:
            signal.alarm(0)


def main() -> int:
    """Print the survey."""
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    torch.set_num_threads(1)
    rows = []
    for row in survey(sys.argv[1:] or sorted(FAMILIES)):
        rows.append(row)
        print(f"{row.family:24} {row.end:8} {row.text}", flush=True)
    counts = Counter(row.end for row in rows)
    print(", ".join(f"{count} {end}" for end, count in counts.most_common()), f"of {len(rows)}")
    return 1 if counts["wrong"] + counts["failed"] else 0


if __name__ == "__main__":
    sys.exit(main())
