"""A small model, a tokenizer and data for verl, in a folder:
``python -m benchmarks.verl_model FOLDER [--tied]``.
"""

from __future__ import annotations

import argparse
import random
from pathlib import Path
from typing import Any

import torch


def create(
    folder: Path, tied: bool = False, hidden: int = 64, layers: int = 4, rows: int = 64
) -> None:
    """Write a Qwen2 of random weights, a tokenizer of words, and conversations of various
    lengths.
    """
    import pandas
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

    words = [f"w{number}" for number in range(252)]
    vocabulary = {
        word: index
        for index, word in enumerate(["<pad>", "<eos>", "<user>", "<assistant>", *words])
    }
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<eos>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>")
    fast.chat_template = (
        "{% for m in messages %}{{ '<' + m['role'] + '> ' + m['content'] + ' <eos> ' }}{% endfor %}"
        "{% if add_generation_prompt %}<assistant> {% endif %}"
    )
    fast.save_pretrained(folder / "tokenizer")
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=len(vocabulary),
        hidden_size=hidden,
        intermediate_size=2 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        tie_word_embeddings=tied,
        pad_token_id=0,
        eos_token_id=1,
        initializer_range=0.1,
    )
    model = Qwen2ForCausalLM(config)
    model.save_pretrained(folder)
    _variants(folder, model)
    draw = random.Random(0)
    text = lambda low, high: " ".join(draw.choice(words) for _ in range(draw.randint(low, high)))
    data = [
        {
            "messages": [
                {"role": "user", "content": text(3, 20)},
                {"role": "assistant", "content": text(5, 60)},
            ]
        }
        for _ in range(rows)
    ]
    pandas.DataFrame(data).to_parquet(folder / "train.parquet")


def _variants(folder: Path, model: Any) -> None:
    """The same with a value for each token in "values", and adapters for it that are not zero in
    "adapter".
    """
    from peft import LoraConfig, get_peft_model
    from transformers import Qwen2ForTokenClassification

    model.config.num_labels = 1
    Qwen2ForTokenClassification(model.config).save_pretrained(folder / "values")
    options: Any = {
        "r": 4,
        "lora_alpha": 8,
        "target_modules": "all-linear",
        "task_type": "CAUSAL_LM",
    }
    adapted = get_peft_model(model, LoraConfig(**options))
    for name, parameter in adapted.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.1)
    adapted.save_pretrained(folder / "adapter")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--tied", action="store_true")
    parser.add_argument("--hidden", type=int, default=64)
    parser.add_argument("--layers", type=int, default=4)
    args = parser.parse_args()
    create(args.folder, args.tied, args.hidden, args.layers)
