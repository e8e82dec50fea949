"""A decoder of the transformers package, with random weights, split into four stages and trained on sonnets.

python examples/huggingface.py            # needs: pip install '.[hf]'
"""

import torch

import fpipe
from fpipe.interop import huggingface
from fpipe.products.demo import sonnets


def main(steps: int = 10, layers: int = 4) -> list[float]:
    """Train a tiny Llama; any decoder-only family works the same."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    text = sonnets()
    config = LlamaConfig(
        vocab_size=len(text.letters),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
    )
    model = LlamaForCausalLM(config).train()
    stages, params = huggingface.stages(model, 4)  # layers dealt by their size, the head counted too
    loss_of = huggingface.causal_loss
    pipe = fpipe.pipeline(stages, "ZBH1", loss=loss_of, microbatches=4, group=fpipe.init(pp=4))
    params = pipe.place(params)
    step, tx = fpipe.value_and_grad(pipe), fpipe.adamw(1e-2)
    state, losses = tx.init(params), []
    for number in range(steps):
        tokens, _ = text.batch(number, rows=8, length=32)
        loss, grads = step(params, tokens, tokens)  # causal_loss shifts the labels itself
        updates, state = tx.update(grads, state, params)
        params = fpipe.apply_updates(params, updates)
        losses.append(loss.item())
    print(f"{type(model).__name__} in {len(stages)} stages: loss {losses[0]:.3f} -> {losses[-1]:.3f}")
    return losses


if __name__ == "__main__":
    main()
