"""On one GPU, a local group of four ranks on it: a pipeline step beside the same model without a
pipeline.

Transformer stages in bf16. The peer runs the same microbatches one after another through the whole
model, by plain autograd; with ``compile="inductor"`` the peer is the compiled unsplit model. Also
the host's time per instruction, and memory for the same number of microbatches in flight.
Alternating runs, medians. Without a GPU it prints a message and ends; ``--device cpu`` runs a small
case.

Then a layer of the shape of Llama 8B: its split backward, memory, time of the host, offload, and
weaving with a copy stream in place of a network (``gpu_layers``).

    python -m benchmarks.bench_gpu [--width 2048] [--tokens 2048] [--hidden 4096] [--rounds 15]
    [--json FILE]
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from functools import partial
from itertools import chain
from typing import Any

import torch
from torch.nn.functional import (
    cross_entropy,
    gelu,
    layer_norm,
    linear,
    scaled_dot_product_attention,
)

import fpipe
from benchmarks.bench_runner import measure as host_work
from benchmarks.command import options, save
from benchmarks.gpu_layers import Shape, Split, of_a_step, offload, weave
from benchmarks.measure import peak

RANKS, MICROBATCHES, VOCABULARY = 4, 8, 1024
STAGES = 2 * RANKS


def block(p: dict[str, torch.Tensor], x: torch.Tensor) -> torch.Tensor:
    """A pre-norm transformer block with heads of 64, or four where it is narrow."""
    batch, tokens, width = x.shape
    heads = max(width // 64, 4)
    h = layer_norm(x, (width,), p["n1"])
    q, k, v = (
        linear(h, p["qkv"]).view(batch, tokens, 3, heads, width // heads).permute(2, 0, 3, 1, 4)
    )
    a = (
        scaled_dot_product_attention(q, k, v, is_causal=True)
        .transpose(1, 2)
        .reshape(batch, tokens, width)
    )
    x = x + linear(a, p["out"])
    h = layer_norm(x, (width,), p["n2"])
    return x + linear(gelu(linear(h, p["up"])), p["down"])


def embed(p: dict[str, torch.Tensor], tokens: torch.Tensor) -> torch.Tensor:
    """Tokens to vectors, and a block."""
    return block(p, p["wte"][tokens])


def head(p: dict[str, torch.Tensor], x: torch.Tensor) -> torch.Tensor:
    """A block, and logits."""
    return linear(block(p, x), p["wte"])


def loss(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Cross entropy over tokens."""
    return cross_entropy(logits.flatten(0, -2).float(), targets.flatten())


FUNCTIONS = [embed, *[block] * (STAGES - 2), head]


def parameters(
    width: int, dtype: torch.dtype, device: torch.device
) -> list[dict[str, torch.Tensor]]:
    """One dict a stage."""
    torch.manual_seed(0)

    def weight(*shape: int) -> torch.Tensor:
        return (torch.randn(*shape) * width**-0.5).to(dtype).to(device)

    def one(stage: int) -> dict[str, torch.Tensor]:
        ones = {name: torch.ones(width, dtype=dtype, device=device) for name in ("n1", "n2")}
        table = {"wte": weight(VOCABULARY, width)} if stage in (0, STAGES - 1) else {}
        return (
            table
            | ones
            | {
                "qkv": weight(3 * width, width),
                "out": weight(width, width),
                "up": weight(4 * width, width),
                "down": weight(width, 4 * width),
            }
        )

    return [one(stage) for stage in range(STAGES)]


def model(
    params: list[dict[str, torch.Tensor]], tokens: torch.Tensor, targets: torch.Tensor
) -> torch.Tensor:
    """The whole model and its loss, unsplit."""
    x = tokens
    for fn, p in zip(FUNCTIONS, params, strict=True):
        x = fn(p, x)
    return loss(x, targets)


class Plain:
    """Plain autograd over microbatches, ``ahead`` of them in flight."""

    def __init__(
        self,
        params: list[dict[str, torch.Tensor]],
        run: Callable[..., torch.Tensor],
        ahead: int = 1,
    ):
        self.params = [
            {name: leaf.detach().requires_grad_() for name, leaf in p.items()} for p in params
        ]
        self.run, self.ahead = run, ahead

    def __call__(self, tokens: torch.Tensor, targets: torch.Tensor) -> None:
        """One step; gradients stand in ``.grad``."""
        for p in self.params:
            for leaf in p.values():
                leaf.grad = None
        flying = []
        for x, t in zip(tokens.chunk(MICROBATCHES), targets.chunk(MICROBATCHES), strict=True):
            flying.append(self.run(self.params, x, t) / MICROBATCHES)
            if len(flying) == self.ahead:
                flying.pop(0).backward()
        for value in flying:
            value.backward()


class Bench:
    """One size of model on one device."""

    def __init__(self, device: torch.device, width: int, tokens: int, rounds: int):
        self.device, self.rounds = device, rounds
        self.dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
        self.params = parameters(width, self.dtype, device)
        self.tokens = torch.randint(VOCABULARY, (MICROBATCHES, tokens), device=device)
        self.targets = torch.randint(VOCABULARY, (MICROBATCHES, tokens), device=device)

    def pipeline(self, captured: bool = False, **how: Any) -> Callable[[], Any]:
        """A ZBV step."""
        group = fpipe.local(devices=[str(self.device)] * RANKS)
        pipe = fpipe.pipeline(
            FUNCTIONS, "ZBV", loss=loss, microbatches=MICROBATCHES, group=group, **how
        )
        pipe = pipe.captured() if captured else pipe
        return partial(fpipe.value_and_grad(pipe), self.params, self.tokens, self.targets)

    def plain(self, run: Callable[..., torch.Tensor] = model, ahead: int = 1) -> Callable[[], Any]:
        """A step without a pipeline."""
        return partial(Plain(self.params, run, ahead), self.tokens, self.targets)

    def timed(self, step: Callable[[], Any]) -> float:
        """Seconds until the device is done."""
        self.wait()
        start = time.perf_counter()
        step()
        self.wait()
        return time.perf_counter() - start

    def wait(self) -> None:
        """Until the device is done."""
        if self.device.type != "cpu":
            torch.accelerator.synchronize(self.device)

    def compare(
        self, what: str, ours: Callable[[], Any], theirs: Callable[[], Any], limit: float
    ) -> dict[str, Any]:
        """Both in turn."""
        for step in (ours, theirs) * 3:
            self.timed(step)
        pairs = [(self.timed(ours), self.timed(theirs)) for _ in range(self.rounds)]
        ratio = statistics.median(a / b for a, b in pairs)
        mine, others = (statistics.median(times) for times in zip(*pairs, strict=True))
        return {
            "what": what,
            "fpipe": 1e3 * mine,
            "peer": 1e3 * others,
            "ratio": ratio,
            "limit": limit,
            "unit": "ms",
        }

    def memory(self, ahead: int) -> dict[str, Any]:
        """The most memory of a step beyond what was there before it."""
        peaks = []
        for step in (self.pipeline(), self.plain(ahead=ahead)):
            step()
            self.wait()
            peaks.append(peak(step, self.device))
        return {
            "what": f"memory, {ahead} microbatches in flight",
            "fpipe": peaks[0] / 2**20,
            "peer": peaks[1] / 2**20,
            "ratio": peaks[0] / max(peaks[1], 1),
            "limit": 1.0,
            "unit": "MiB",
        }


def in_flight() -> int:
    """As many whole microbatches as ZBV holds chunks of, over all its ranks."""
    return -(-sum(fpipe.make_schedule("ZBV", RANKS, MICROBATCHES).simulate().peak) // STAGES)


def rows(device: torch.device, width: int, tokens: int, rounds: int) -> Iterator[dict[str, Any]]:
    """All comparisons."""
    bench = Bench(device, width, tokens, rounds)
    yield bench.compare("step, eager", bench.pipeline(), bench.plain(), 1.02)
    yield bench.compare("step, addmm", bench.pipeline(compile="addmm"), bench.plain(), 1.0)
    if device.type != "cpu":
        compiled = bench.plain(torch.compile(model, dynamic=False))
        inductor = bench.pipeline(compile="inductor")
        yield bench.compare("step, inductor", inductor, compiled, 1.0)
        graph = bench.pipeline(captured=True, compile="inductor")
        yield bench.compare("step, inductor, graph", graph, compiled, 1.0)
        yield bench.memory(in_flight())
    work = host_work("ZBV", device=str(device))["us each"]
    yield {
        "what": "host work per instruction",
        "fpipe": work,
        "peer": None,
        "ratio": None,
        "limit": 5.0,
        "unit": "us",
    }
    small = Bench(device, 64, 16, rounds)
    if device.type != "cpu":
        graph = small.pipeline(captured=True)
        yield small.compare("small stages, graph", graph, small.pipeline(), 0.3)


def of_a_layer(
    device: torch.device, hidden: int, tokens: int, rounds: int
) -> Iterator[dict[str, Any]]:
    """A layer with the proportions of Llama 8B, and weaving."""
    shape = Shape(hidden, max(hidden // 128, 4), max(hidden // 512, 1), 7 * hidden // 2)
    split = Split(device, shape, tokens)
    yield from split.rows(rounds)
    yield from of_a_step(split, shape)
    for times in (1, 2, 4):
        yield offload(Split(device, shape, times * tokens), times * tokens)
    yield weave(device, hidden // 2, tokens, max(rounds // 3, 1))


def main() -> None:
    """Print the table, or a word where there is no GPU."""
    parser = options(__doc__, width=2048, tokens=2048, hidden=4096, rounds=15)
    parser.add_argument("--device")
    args = parser.parse_args()
    if args.device is None and not torch.accelerator.is_available():
        print("no GPU on this machine: skipped")
        return
    device = torch.device(args.device or torch.accelerator.current_accelerator())
    if device.type != "cpu" and device.index is None:
        device = torch.device(device.type, 0)
    torch.set_num_threads(1)
    name = (
        torch.get_device_module(device).get_device_name(device) if device.type != "cpu" else "CPU"
    )
    print(
        f"{name}, torch {torch.__version__}: width {args.width}, {args.tokens} tokens, "
        f"{MICROBATCHES} microbatches\n"
    )
    print(f"{'':38} {'fpipe':>10} {'peer':>10} {'':4} {'ratio':>6} {'at most':>8}")
    found = []
    layers = of_a_layer(device, args.hidden, 2 * args.tokens, args.rounds)
    for r in chain(rows(device, args.width, args.tokens, args.rounds), layers):
        found.append(r)
        parts = ((r["peer"], ".3f"), (r["ratio"], ".3f"), (r["limit"], ".2f"))
        peer, ratio, limit = ("" if value is None else f"{value:{width}}" for value, width in parts)
        print(f"{r['what']:38} {r['fpipe']:10.3f} {peer:>10} {r['unit']:4} {ratio:>6} {limit:>8}")
    save([{"device": name, **r} for r in found], args.json)


if __name__ == "__main__":
    main()
