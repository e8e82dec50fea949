"""All families of causal models of the installed transformers package: tiny models, in stages and
unsplit.

``examine`` trains a family for one step under 1F1B and under ZBV, traced and with rows padded on
the left, and compares with autograd on the unsplit model. ``benchmarks/trial_families.py`` does so
for all of them.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import transformers
from torch import Tensor
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as FAMILIES

import fpipe
from fpipe.interop import huggingface

LAYERS, ROWS, MICROBATCHES, LENGTH, VOCABULARY = 4, 4, 2, 7, 64

#: attributes of configurations -> small values; a configuration gets those that its defaults have
SMALL: dict[str, Any] = {
    **dict.fromkeys(
        ("hidden_size", "n_embd", "d_model", "dim", "emb_dim", "embedding_dim", "embedding_size"),
        32,
    ),
    **dict.fromkeys(("intermediate_size", "ffn_dim", "n_inner", "d_ff", "dff"), 48),
    **dict.fromkeys(("decoder_ffn_dim", "encoder_ffn_dim"), 48),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "n_layers", "num_layers"), LAYERS),
    **dict.fromkeys(("decoder_layers", "encoder_layers"), LAYERS),
    **dict.fromkeys(
        ("num_attention_heads", "n_head", "n_heads", "num_heads", "decoder_attention_heads"), 4
    ),
    **dict.fromkeys(
        ("encoder_attention_heads", "num_key_value_heads", "decoder_key_value_heads"), 4
    ),
    **dict.fromkeys(
        ("max_position_embeddings", "n_positions", "max_seq_len", "n_ctx", "max_target_positions"),
        64,
    ),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"), 4),
    **dict.fromkeys(("num_experts_per_tok", "moe_k", "moe_topk", "top_k_experts"), 2),
    **dict.fromkeys(
        ("moe_intermediate_size", "shared_expert_intermediate_size", "expert_hidden_size"), 24
    ),
    **dict.fromkeys(("n_group", "topk_group", "n_shared_experts", "first_k_dense_replace"), 1),
    **dict.fromkeys(("head_dim", "kv_channels", "d_kv", "attention_head_size", "v_head_dim"), 8),
    **dict.fromkeys(("q_lora_rank", "kv_lora_rank"), 16),
    **dict.fromkeys(
        ("qk_rope_head_dim", "qk_nope_head_dim", "state_size", "ssm_state_size", "mamba_d_state"), 8
    ),
    **dict.fromkeys(
        ("mamba_n_heads", "mamba_d_head", "mamba_headdim", "mamba_num_heads", "mamba_head_dim"), 8
    ),
    **dict.fromkeys(("linear_key_head_dim", "linear_value_head_dim", "linear_head_dim"), 8),
    **dict.fromkeys(("vocab_size", "vocab_size_per_layer_input"), VOCABULARY),
    "rotary_dim": 4,
    "time_step_rank": 4,
    "hidden_size_global": 32,
    "encoder_hash_byte_group_vocab": 100,
    "linear_num_heads": 4,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "lru_width": 32,
}
ENDS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1}
#: what a family needs beyond these
MORE: dict[str, dict[str, Any]] = {
    "falcon": {"head_dim": None},
    "falcon_h1": {"mamba_d_ssm": 64},
    "gpt_neo": {"attention_types": [[["global", "local"], LAYERS // 2]], "num_layers": LAYERS},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"] * (LAYERS // 2)},
    "mamba2": {"num_heads": 8, "head_dim": 8, "expand": 2},
    "prophetnet": {
        "num_hidden_layers": None,
        "num_encoder_layers": 1,
        "num_decoder_layers": LAYERS,
    },
    "reformer": {"is_decoder": True, "axial_pos_embds": False, "attn_layers": ["local"] * LAYERS},
    "rwkv": {"attention_hidden_size": 32, "rescale_every": 0},
    "xlnet": {"max_position_embeddings": None},
    "xlstm": {"v_head_dim": None},
    "zamba": {
        "num_hidden_layers": 6,
        "attn_layer_period": 3,
        "attn_layer_offset": 2,
        "layers_block_type": None,
    },
    "zaya": {"num_experts_per_tok": 1},
    "gemma3n_text": {
        "num_kv_shared_layers": 0,
        "layer_types": ["sliding_attention", "full_attention"] * (LAYERS // 2),
    },
    "dbrx": {"attn_config": {"kv_n_heads": 4, "rope_theta": 10000.0, "clip_qkv": 8.0}},
    "xmod": {"default_language": "en_XX"},
    "qwen4_exp_text": {
        "indexer_n_heads": 4,
        "indexer_kv_heads": 1,
        "indexer_head_dim": 8,
        "indexer_budget": 4,
        "indexer_compress_ratio": 2,
        "layer_types": ["linear_attention", "full_attention"] * 2,
    },
    "cohere_compass_text": {
        "rope_parameters": {"full_attention": {"rope_type": "default", "rope_theta": 1e4}}
    },
    "mimo_v2_flash": {"num_attention_heads": 16},
}


class Row(NamedTuple):
    """What became of a family: right, untraced (right, but on autograd), refused, wrong, failed, or
    unknown, where no small model could be built.
    """

    family: str
    end: str
    text: str = ""


def small(family: str) -> Any:
    """A small model of a family with random weights, in training without dropout."""
    kind = transformers.AutoConfig.for_model(family)
    config = _shrunk(kind, MORE.get(family, {}))
    torch.manual_seed(0)
    cls = getattr(
        transformers, FAMILIES[family] if isinstance(FAMILIES[family], str) else FAMILIES[family][0]
    )
    wanted = cls.config_class
    if wanted is not None and not isinstance(config, wanted):
        config = next(part for part in vars(config).values() if isinstance(part, wanted))
    model = cls(config).train()
    with torch.no_grad():
        for (
            parameter
        ) in model.parameters():  # biases and scales that begin as 0 or 1 would hide mistakes
            parameter.add_(torch.randn_like(parameter) * 0.05)
    return model


def _shrunk(config: Any, more: dict[str, Any]) -> Any:
    known = config.to_dict()
    parts = {
        name: value
        for name, value in vars(config).items()
        if isinstance(value, transformers.PreTrainedConfig)
    }
    changes = {
        name: value
        for name, value in {**SMALL, **ENDS}.items()
        if name in known or hasattr(config, name)
    }
    lists = {
        name: value[:LAYERS]
        for name, value in known.items()
        if isinstance(value, list) and len(value) >= LAYERS
    }
    lists = {
        name: value
        for name, value in lists.items()
        if name.endswith(("_types", "_type", "block_configs"))
    }
    changes |= {
        name: 0.0 for name, value in known.items() if _is_dropout(name) and isinstance(value, float)
    }
    changes = {name: value for name, value in changes.items() if name not in parts}
    shrunk = {name: _shrunk(part, {}).to_dict() for name, part in parts.items()}
    for attempt in (
        {**changes, **lists, **shrunk, **more},
        {**changes, **shrunk, **more},
        {**changes, **more},
    ):
        try:
            return type(config)(
                **{name: value for name, value in attempt.items() if value is not None}
            )
        except Exception as error:
            last = error
    raise last


def batch() -> tuple[Tensor, Tensor]:
    """Token ids, and a mask that pads two rows on the left."""
    ids = torch.randint(3, VOCABULARY, (ROWS, LENGTH), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(ids)
    mask[1, :2], mask[2, :3] = 0, 0
    return ids, mask


def weighted(logits: Tensor, weights: Tensor) -> Tensor:
    """A loss that reads every logit but those of padding, whose weights are 0."""
    return torch.where(weights == 0, 0.0, logits.float() * weights).sum()


def unsplit(
    model: Any, ids: Tensor, side: dict[str, Tensor]
) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """Weights, the mean loss over microbatches, and its gradients by autograd."""
    leaves = {name: p for name, p in model.named_parameters() if p.requires_grad}
    total, grads, rows = torch.zeros(()), dict[str, Tensor](), ROWS // MICROBATCHES
    with torch.no_grad():
        logits = _logits(model, ids, side)
    weights = torch.linspace(-1, 1, logits.numel()).view(logits.shape)
    if "attention_mask" in side and logits.shape[:2] == side["attention_mask"].shape:
        weights = weights * side["attention_mask"][..., None]
    for low in range(0, ROWS, rows):
        part = slice(low, low + rows)
        logits = _logits(model, ids[part], {name: value[part] for name, value in side.items()})
        loss = weighted(logits, weights[part]) / MICROBATCHES
        found = torch.autograd.grad(loss, list(leaves.values()), allow_unused=True)
        total = total + loss.detach()
        for name, grad in zip(leaves, found, strict=True):
            if grad is not None:
                grads[name] = grads.get(name, 0) + grad
    return weights, total, grads


def _logits(model: Any, ids: Tensor, side: dict[str, Tensor]) -> Tensor:
    return model(input_ids=ids, use_cache=False, **side).logits


def split(
    model: Any, schedule: str, ids: Tensor, weights: Tensor, side: dict[str, Tensor]
) -> tuple[Tensor, dict[str, Tensor], bool]:
    """The same by a pipeline on two ranks, and whether every stage was traced. Tied parameters
    count once.
    """
    count = {"1F1B": 2, "ZBV": 4}[schedule]
    model.config.output_router_logits = False
    stages, params = huggingface.stages(model, count)
    taken = {
        name: value for name, value in side.items() if name in stages[0].fn.__signature__.parameters
    }
    pipe = fpipe.pipeline(
        stages, schedule, loss=weighted, microbatches=MICROBATCHES, group=fpipe.local(2)
    )
    loss, grads = fpipe.value_and_grad(pipe)(params, ids, weights, **taken)
    first = {
        id(p): name for name, p in reversed(list(model.named_parameters(remove_duplicate=False)))
    }
    names = {name: first[id(p)] for name, p in model.named_parameters(remove_duplicate=False)}
    found = {
        names[name]: grad
        for own in grads
        for name, grad in own.items()
        if grad is not None and name in names
    }
    return loss, found, all(stage.engine != "eager" for stage in stages)


def examine(family: str, schedules: Sequence[str] = ("1F1B", "ZBV")) -> Row:
    """Split a family and compare."""
    try:
        model = small(family)
    except Exception as error:
        return Row(family, "unknown", f"no small model: {_brief(error)}")
    ids, mask = batch()
    side = (
        {"attention_mask": mask}
        if "attention_mask" in inspect.signature(model.forward).parameters
        else {}
    )
    want, alone = None, ""
    try:
        want = unsplit(model, ids, side)
    except Exception as error:
        alone = _brief(error)
    worst, traced = [0.0, 0.0], True
    for schedule in schedules:
        try:
            loss, grads, all_traced = split(
                model, schedule, ids, want[0] if want else torch.ones(ROWS, 1, 1), side
            )
        except fpipe.errors.StageError as error:
            return Row(
                family,
                "unknown" if isinstance(error.__cause__, TimeoutError) else "refused",
                reason(error),
            )
        except Exception as error:
            return Row(family, "failed", f"{schedule}: {_brief(error)}")
        if want is None:
            return Row(family, "wrong", f"split, but the model itself fails: {alone}")
        weights, total, reference = want
        scale = float(weights.abs().sum()) / MICROBATCHES
        errors = float((loss - total).abs()) / scale, _distance(grads, reference)
        worst, traced = (
            [max(a, b) for a, b in zip(worst, errors, strict=True)],
            traced and all_traced,
        )
        if not (errors[0] < 1e-6 and errors[1] < 1e-4):
            return Row(
                family, "wrong", f"{schedule}: loss {errors[0]:.1e}, gradients {errors[1]:.1e}"
            )
    text = "loss {:.1e}, gradients {:.1e}".format(*worst)
    return Row(family, "right" if traced else "untraced", text)


def reason(error: Exception) -> str:
    """The first sentence of an error, without the shapes of a stage's leaves and the folders of
    files.
    """
    text = re.sub(r" \((?=[a-z]+\d*\[)[^()]*\)", "", str(error))
    text = re.sub(r"/\S*/(?=\w+\.py)", "", text)
    return re.split(r"; |\. |: a value|, which a trace", text)[0]


def _is_dropout(name: str) -> bool:
    return any(word in name for word in ("dropout", "pdrop", "layerdrop", "jitter"))


def _distance(found: dict[str, Tensor], want: dict[str, Tensor]) -> float:
    zero = torch.zeros(())
    off = sum(
        float((found.get(n, zero).float() - want.get(n, zero).float()).norm() ** 2)
        for n in {**found, **want}
    )
    return (off / max(sum(float(g.float().norm() ** 2) for g in want.values()), 1e-30)) ** 0.5


def _brief(error: Exception) -> str:
    return (
        f"{type(error).__name__}: "
        f"{str(error).strip().splitlines()[0] if str(error).strip() else ''}"
    )[:200]
