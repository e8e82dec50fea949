"""The cost of a split backward pass: (F, I, W) against (F, B), and against torch's split of
autograd.

Four transformer blocks as one stage; prints medians of alternating runs on one thread.
"""

from __future__ import annotations

import statistics

import torch
from torch import nn
from torch.distributed.pipelining._backward import stage_backward_input, stage_backward_weight
from torch.nn.functional import gelu, layer_norm, linear, scaled_dot_product_attention

import fpipe
from benchmarks.command import options, save
from benchmarks.measure import alternate, ratio

HEADS = 4


def block(p, x):
    """A pre-norm transformer block."""
    batch, tokens, width = x.shape
    h = layer_norm(x, (width,), p["n1"], p["b1"])
    q, k, v = (
        linear(h, p["qkv"]).view(batch, tokens, 3, HEADS, width // HEADS).permute(2, 0, 3, 1, 4)
    )
    a = (
        scaled_dot_product_attention(q, k, v, is_causal=True)
        .transpose(1, 2)
        .reshape(batch, tokens, width)
    )
    x = x + linear(a, p["out"])
    h = layer_norm(x, (width,), p["n2"], p["b2"])
    return x + linear(gelu(linear(h, p["up"], p["bu"])), p["down"], p["bd"])


def make(width: int) -> dict[str, torch.Tensor]:
    """Parameters of one block."""

    def weight(*shape):
        return torch.randn(*shape) * width**-0.5

    return {
        "n1": torch.ones(width),
        "b1": torch.zeros(width),
        "n2": torch.ones(width),
        "b2": torch.zeros(width),
        "qkv": weight(3 * width, width),
        "out": weight(width, width),
        "up": weight(4 * width, width),
        "bu": torch.zeros(4 * width),
        "down": weight(width, 4 * width),
        "bd": torch.zeros(width),
    }


def stage(params, x):
    """Four blocks."""
    for p in params:
        x = block(p, x)
    return x


class Stage(nn.Module):
    """The same four blocks as a module, for torch's split."""

    def __init__(self, params):
        super().__init__()
        cloned = ({k: nn.Parameter(v.clone()) for k, v in p.items()} for p in params)
        self.blocks = nn.ModuleList(map(nn.ParameterDict, cloned))

    def forward(self, x):
        """Run the blocks."""
        for p in self.blocks:
            x = block(p, x)
        return x


def measure(width: int, tokens: int, rounds: int) -> dict[str, float]:
    """Ratios and medians at one width."""
    params = [make(width) for _ in range(4)]
    x, dy = torch.randn(2, tokens, width), torch.randn(2, tokens, width)
    programs = fpipe.trace(stage, params, x)
    flat = {f"p{i}": t for i, t in enumerate(t for p in params for t in (p[k] for k in sorted(p)))}

    def run(program, values):
        values.update(
            zip(program.outputs, program([values[n] for n in program.inputs]), strict=True)
        )

    def whole():
        with torch.no_grad():
            values = {**flat, "x0": x, "dy0": dy}
            run(programs.f, values)
            run(programs.b, values)

    def split():
        with torch.no_grad():
            values = {**flat, "x0": x, "dy0": dy}
            run(programs.f, values)
            run(programs.i, values)
            run(programs.w, values)

    module = Stage(params)

    def peer():
        leaf = x.detach().requires_grad_()
        y = module(leaf)
        _, groups = stage_backward_input([y], [dy], [leaf], module.parameters())
        stage_backward_weight(module.parameters(), groups)
        for p in module.parameters():
            p.grad = None

    whole_t, split_t, peer_t = alternate([whole, split, peer], rounds)
    return {
        "width": width,
        "split/whole": ratio(split_t, whole_t),
        "split/torch": ratio(split_t, peer_t),
        "whole ms": 1e3 * statistics.median(whole_t),
        "split ms": 1e3 * statistics.median(split_t),
        "torch ms": 1e3 * statistics.median(peer_t),
    }


def main() -> None:
    """Print the table."""
    args = options(__doc__, rounds=30, tokens=32).parse_args()
    fpipe.init()  # under torchrun it sets what glibc does with freed memory, as for every rank
    rows = [measure(width, args.tokens, args.rounds) for width in (64, 256, 512)]
    print(
        f"{'width':>6} {'F+I+W / F+B':>12} {'F+I+W / torch':>14} {'F+B ms':>8} {'F+I+W ms':>9} "
        f"{'torch ms':>9}"
    )
    for r in rows:
        print(
            f"{r['width']:6} {r['split/whole']:12.3f} {r['split/torch']:14.3f} {r['whole ms']:8.2f}"
            f" {r['split ms']:9.2f} {r['torch ms']:9.2f}"
        )
    save(rows, args.json)


if __name__ == "__main__":
    main()
