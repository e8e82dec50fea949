"""The engine of a trainer for reinforcement learning, in sixty lines: the layer between its algorithm and a pipeline.

    python examples/rl_engine.py                                       # two ranks in this process
    torchrun --nproc-per-node 2 examples/rl_engine.py                  # two processes

``forward_backward_batch(data, loss_function, forward_only)`` takes sequences of any lengths, groups them into
microbatches of a number of tokens, pads each to a multiple of a divisor, and returns losses, metrics and
log-probabilities in the order of the data. A loss is ``loss(log_probs, microbatch) -> (mean of tokens, metrics)``.
The weights of the microbatches are known before the first backward pass, so the gradient is that of the mean over all
tokens for any grouping.

Grouping, padding, the loss of PPO and sample data are in rl_data.py.
"""

from collections.abc import Callable
from functools import cache, partial
from typing import Any

import torch
from rl_data import cut, padded, ppo, rollouts
from torch import Tensor
from torch.nn import functional as F

import fpipe
from fpipe.products.demo import Sizes, gpt, sonnets


class Engine:
    """A policy whose stages are ``fn(params, x)``: tokens in, logits out."""

    def __init__(self, stages: Any, params: Any, *, budget: int, divisor: int = 8, rate: float = 3e-4, **pipeline: Any):
        self.budget, self.divisor = budget, divisor
        self.make = partial(fpipe.pipeline, stages, outputs="everywhere", **pipeline)
        self.logits = self.make()
        self.params, self.trained = self.logits.place(params), cache(self._trained)
        self.rules = fpipe.chain(fpipe.clip_by_global_norm(1.0, over=self.logits), fpipe.adamw(rate))
        self.state, self.grads = self.rules.init(self.params), None

    def forward_backward_batch(self, data: list[dict], loss_function: Any = None, forward_only: bool = False) -> dict:
        """Losses and metrics; the gradient stays here for ``step``. Forward only, without a loss: log-probabilities."""
        rows = cut([len(one["tokens"]) for one in data], self.budget, self.divisor)
        batches = [padded([data[row] for row in part], self.divisor) for part in rows]
        x = fpipe.Microbatches([batch["tokens"] for batch in batches])
        if loss_function is None:
            with torch.inference_mode():
                told = self.logits(self.params, x, each=lambda i, logits: log_probs(logits, batches[i]["tokens"]))
            order = [row for part in rows for row in part]
            lines = dict(zip(order, [line for part in told for line in part], strict=True))
            return {"log_probs": [lines[row][: len(one["tokens"])].clone() for row, one in enumerate(data)]}
        loss, train = self.trained(loss_function)
        if forward_only:
            with torch.inference_mode():
                value, metrics = loss(self.params, x, fpipe.Microbatches(batches), has_aux=True)
        else:
            (value, metrics), self.grads = train(self.params, x, fpipe.Microbatches(batches))
        return {"loss": value, "metrics": metrics, "rows": rows}

    def step(self) -> None:
        """Let the optimizer use the gradient of the last batch."""
        updates, self.state = self.rules.update(self.grads, self.state, self.params)
        self.params, self.grads = fpipe.apply_updates(self.params, updates), None

    def _trained(self, loss_function: Any) -> tuple[fpipe.Pipeline, Callable[..., Any]]:
        """The pipeline with a loss, and the gradient of it."""
        loss = lambda logits, batch: loss_function(log_probs(logits, batch["tokens"]), batch)
        pipe = self.make(loss=loss, reduction=fpipe.weighted(lambda batch: batch["mask"].sum()))
        return pipe, fpipe.value_and_grad(pipe, has_aux=True)


def log_probs(logits: Tensor, tokens: Tensor) -> Tensor:
    """Of each token, given those before it; 0 for the first."""
    after = logits[:, :-1].log_softmax(-1).gather(-1, tokens[:, 1:, None])
    return F.pad(after.squeeze(-1), (1, 0))


def main(steps: int = 6, budget: int = 128, ranks: int = 2) -> list[float]:
    """A few steps of PPO on one batch; the log-probabilities before them come from the engine itself."""
    torch.set_num_threads(1)
    stages, params = gpt(Sizes(len(sonnets().letters), width=32, layers=4), 2 * ranks)
    engine = Engine(stages, params, budget=budget, schedule="Interleaved1F1B", group=fpipe.init(pp=ranks))
    data = rollouts()
    before = engine.forward_backward_batch(data, forward_only=True)["log_probs"]
    data = [{**one, "old_log_probs": line} for one, line in zip(data, before, strict=True)]
    losses = []
    for number in range(steps):
        made = engine.forward_backward_batch(data, ppo)
        engine.step()
        losses.append(made["loss"].item())
        clipped, tokens = (sum(int(m[name]) for m in made["metrics"]) for name in ("clipped", "tokens"))
        if 0 in engine.logits.group.here:
            print(f"step {number}  loss {losses[-1]:+.4f}  clipped {clipped} of {tokens} tokens", flush=True)
    return losses


if __name__ == "__main__":
    main()
