"""Models of other libraries: encoders and decoders of public packages and of torch itself, random
weights.

Each is traced whole, as one stage, and split: outputs and gradients agree with plain autograd to
1e-6.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fpipe
from sample import also, mostly

SMALL = {
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 32,
    "vocab_size": 50,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
PICTURE = {"image_size": 8, "patch_size": 4}
HALVES = {
    "vocab_size": 50,
    "d_model": 16,
    "encoder_layers": 1,
    "decoder_layers": 1,
    "encoder_attention_heads": 2,
    "decoder_attention_heads": 2,
    "encoder_ffn_dim": 32,
    "decoder_ffn_dim": 32,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "decoder_start_token_id": 1,
}
IDS = torch.tensor([[5, 7, 11, 13, 17], [3, 9, 27, 4, 12]])


def few(*names: str) -> dict[str, Any]:
    return {name: SMALL[name] for name in SMALL if name not in names}


def text(kind: str, **more: Any) -> tuple[str, dict[str, Any], dict[str, Tensor]]:
    return kind, few() | more, {"input_ids": IDS}


#: model, configuration, inputs
PACKAGED = {
    "BERT": text("BertModel"),
    "DeBERTa": text(
        "DebertaV2Model", relative_attention=True, position_buckets=4, pos_att_type=["p2c", "c2p"]
    ),
    "ModernBERT": text("ModernBertModel", cls_token_id=1, sep_token_id=2),
    "GPT-2": (
        "GPT2LMHeadModel",
        {
            "vocab_size": 50,
            "n_embd": 16,
            "n_layer": 2,
            "n_head": 2,
            "bos_token_id": 1,
            "eos_token_id": 2,
        },
        {"input_ids": IDS},
    ),
    "Llama": text("LlamaForCausalLM", num_key_value_heads=1),
    "Gemma 2": text("Gemma2ForCausalLM", num_key_value_heads=1, head_dim=8),
    "T5": (
        "T5ForConditionalGeneration",
        {"vocab_size": 50, "d_model": 16, "d_kv": 8, "d_ff": 32, "num_layers": 1, "num_heads": 2},
        {"input_ids": IDS, "decoder_input_ids": IDS},
    ),
    "BART": ("BartModel", HALVES | {"max_position_embeddings": 20}, {"input_ids": IDS}),
    "Whisper": (
        "WhisperModel",
        HALVES | {"num_mel_bins": 4, "max_source_positions": 8, "max_target_positions": 8},
        {
            "input_features": torch.linspace(-1, 1, 128).sin().view(2, 4, 16),
            "decoder_input_ids": IDS,
        },
    ),
    "ViT": (
        "ViTModel",
        few("vocab_size", "pad_token_id", "bos_token_id", "eos_token_id") | PICTURE,
        {"pixel_values": torch.linspace(-2, 2, 384).view(2, 3, 8, 8)},
    ),
    "Swin": (
        "SwinModel",
        {
            "embed_dim": 8,
            "depths": [1, 1],
            "num_heads": [1, 2],
            "window_size": 2,
            "image_size": 16,
            "patch_size": 4,
        },
        {"pixel_values": torch.linspace(-2, 2, 1536).view(2, 3, 16, 16)},
    ),
}


#: Decoders, which test_huggingface.py splits, and models with the parts of others in the table.
ALIKE = ("GPT-2", "Llama", "Gemma 2", "BERT", "ModernBERT", "BART", "ViT", "Whisper")


def agree(module: nn.Module, inputs: Any, call: Callable[[dict[str, Tensor], Any], Any]) -> None:
    """Trace, split, and compare with autograd on the module's own parameters."""
    params = {name: value.detach() for name, value in module.named_parameters()}
    programs = fpipe.trace(call, params, inputs)
    y, saved = programs.forward(params, inputs)
    dy = torch.linspace(-1, 1, y.numel()).view(y.shape)
    _, kept = programs.backward_input(saved, [dy])
    grads = programs.backward_weight(kept)
    leaves = {name: value.clone().requires_grad_() for name, value in params.items()}
    true = call(leaves, inputs)
    wanted = torch.autograd.grad(true, list(leaves.values()), dy, allow_unused=True)
    assert near(y, true.detach())
    for (name, leaf), want in zip(leaves.items(), wanted, strict=True):
        assert near(grads[name], torch.zeros_like(leaf) if want is None else want), name


def near(a: Tensor, b: Tensor) -> bool:
    return bool((a - b).abs().max() <= 1e-6 * b.abs().max())


@pytest.fixture
def transformers(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    return pytest.importorskip("transformers")


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", [*(name for name in PACKAGED if name not in ALIKE), *also(*ALIKE)])
def test_models_of_the_transformers_package(name: str, transformers: Any):
    kind, options, inputs = PACKAGED[name]
    torch.manual_seed(0)
    family = getattr(transformers, kind)
    module = family(family.config_class(**options)).eval()

    def call(p: dict[str, Tensor], x: Any) -> Tensor:
        return torch.func.functional_call(module, p, (), x | {"return_dict": False})[0]

    agree(module, inputs, call)


OWN: dict[str, Callable[[], tuple[nn.Module, Any]]] = {
    "encoder layer": lambda: (
        nn.TransformerEncoderLayer(8, 2, 16, 0.0, batch_first=True),
        (torch.randn(2, 3, 8),),
    ),
    "encoder layer, norm first": lambda: (
        nn.TransformerEncoderLayer(8, 2, 16, 0.0, "gelu", batch_first=True, norm_first=True),
        (torch.randn(2, 3, 8),),
    ),
    "decoder layer": lambda: (
        nn.TransformerDecoderLayer(8, 2, 16, 0.0, batch_first=True),
        (torch.randn(2, 3, 8), torch.randn(2, 4, 8)),
    ),
    "a gated recurrent unit": lambda: (nn.GRU(4, 5, 2, batch_first=True), (torch.randn(2, 3, 4),)),
    "a recurrent network": lambda: (
        nn.RNN(4, 5, batch_first=True, bidirectional=True),
        (torch.randn(2, 3, 4),),
    ),
    "a small picture network": lambda: (
        nn.Sequential(
            nn.Conv2d(3, 4, 3),
            nn.GroupNorm(2, 4),
            nn.PReLU(),
            nn.MaxPool2d(2),
            nn.Flatten(),
            nn.LazyLinear(2),
        ),
        (torch.randn(2, 3, 8, 8),),
    ),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "name",
    mostly(OWN, lambda name: name in ("encoder layer", "a recurrent network")),
)
def test_modules_of_torch(name: str):
    torch.manual_seed(0)
    module, inputs = OWN[name]()
    with torch.no_grad():
        module(*inputs)

    def call(p: dict[str, Tensor], x: Any) -> Tensor:
        y = torch.func.functional_call(module, p, x)
        return y[0] if isinstance(y, tuple) else y

    agree(module, inputs, call)
