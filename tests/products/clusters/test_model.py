"""Sizes of models from config.json: numbers of parameters as their authors count them, and what is
refused.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from fpipe.errors import PlanError
from fpipe.products.clusters.model import model_of, read_model

LLAMA = {
    "model_type": "llama",
    "hidden_size": 4096,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "intermediate_size": 11008,
    "vocab_size": 32000,
}
COUNTS = {
    "Llama 2 7B": (LLAMA, 6_738_415_616),
    "GPT-2": (
        {"model_type": "gpt2", "n_embd": 768, "n_layer": 12, "n_head": 12, "vocab_size": 50257},
        124_439_808,
    ),
    "Qwen2 7B": (
        {
            **LLAMA,
            "model_type": "qwen2",
            "hidden_size": 3584,
            "num_hidden_layers": 28,
            "num_attention_heads": 28,
            "num_key_value_heads": 4,
            "intermediate_size": 18944,
            "vocab_size": 152064,
        },
        7_615_616_512,
    ),
    "Mixtral 8x7B": (
        {
            **LLAMA,
            "model_type": "mixtral",
            "num_key_value_heads": 8,
            "intermediate_size": 14336,
            "num_local_experts": 8,
            "num_experts_per_tok": 2,
        },
        46_702_792_704,
    ),
    "Qwen3 30B-A3B": (
        {
            **LLAMA,
            "model_type": "qwen3_moe",
            "hidden_size": 2048,
            "num_hidden_layers": 48,
            "num_key_value_heads": 4,
            "head_dim": 128,
            "intermediate_size": 6144,
            "moe_intermediate_size": 768,
            "vocab_size": 151936,
            "num_experts": 128,
            "num_experts_per_tok": 8,
        },
        30_532_122_624,
    ),
    "Qwen1.5 MoE A2.7B": (
        {
            **LLAMA,
            "model_type": "qwen2_moe",
            "hidden_size": 2048,
            "num_hidden_layers": 24,
            "num_attention_heads": 16,
            "intermediate_size": 5632,
            "moe_intermediate_size": 1408,
            "shared_expert_intermediate_size": 5632,
            "num_experts": 60,
            "num_experts_per_tok": 4,
            "vocab_size": 151936,
        },
        14_315_784_192,
    ),
}


@pytest.mark.parametrize("name", COUNTS)
def test_numbers_of_parameters(name: str):
    config, count = COUNTS[name]
    assert model_of(config).parameters == count


def test_a_token_uses_a_part_of_the_experts():
    mixtral = model_of(COUNTS["Mixtral 8x7B"][0])
    assert 32 * mixtral.active_matrices + 2 * 32000 * 4096 == pytest.approx(12.9e9, rel=0.01)


REFUSED = [
    ({**LLAMA, "model_type": "t5"}, "model_type is 't5'.*give the nearest"),
    (
        {k: v for k, v in LLAMA.items() if k != "num_attention_heads"},
        "lacks 'num_attention_heads'; add it",
    ),
    ({"model_type": "gpt2"}, "lacks 'n_embd'; add it"),
    ({**LLAMA, "hidden_size": "wide"}, "hidden is 'wide', and must be a whole number"),
    ({**LLAMA, "hidden_size": "w" * 5000}, "hidden is 'www"),  # its name had 5,000 characters
    ({**LLAMA, "num_hidden_layers": 10**5}, "layers is 100000.* from 1 to 256; correct it"),
    ({**LLAMA, "hidden_size": 4097}, "heads must divide hidden 4097, or head_dim is given"),
    ({**LLAMA, "num_key_value_heads": 5}, "5 kv_heads must divide 32 heads"),
    (
        {**LLAMA, "num_experts": 2, "num_experts_per_tok": 3},
        "3 active of 2 experts are too many",
    ),
    ({**LLAMA, "decoder_sparse_step": 2}, "decoder_sparse_step is 2"),
    ([], "holds no JSON object"),
    ({**LLAMA, "model_type": {}}, "model_type is {}.*give the nearest"),  # was a TypeError
]


@pytest.mark.parametrize(
    ("config", "message"), REFUSED, ids=[message[:20] for _, message in REFUSED]
)
def test_configs_that_are_refused(config: object, message: str, tmp_path: Path):
    path = tmp_path / "config.json"
    path.write_text(json.dumps(config))
    with pytest.raises(PlanError, match=message) as refused:
        read_model(path)
    assert str(refused.value).startswith(("llama", str(path)))
    assert len(str(refused.value)) < 1000


def test_a_file_that_is_no_json(tmp_path: Path):
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(PlanError, match=r"give the config\.json of a model"):
        read_model(tmp_path / "config.json")


def test_the_text_of_several_modes(tmp_path: Path):
    path = tmp_path / "config.json"
    path.write_text(json.dumps({"model_type": "llava", "text_config": LLAMA}))
    assert read_model(path) == model_of(LLAMA, str(path))
