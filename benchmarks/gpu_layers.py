"""Parts of ``bench_gpu``: a layer of the shape of Llama 8B, its split backward, memory, host time
and offload.

``weave`` has a copy stream in place of a network: ``CopyStream`` is a process group of two members,
of which there is one, and its all_to_all carries the bytes to the host and back beside the kernels.
All work on a CPU too, for a check.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining._backward import stage_backward_input, stage_backward_weight
from torch.nn.functional import linear, rms_norm, scaled_dot_product_attention, silu

import fpipe
from benchmarks.bench_overlap import mean_square, stage_of
from benchmarks.measure import alternate, peak, ratio

Row = dict[str, Any]


class Shape(NamedTuple):
    """Sizes of a layer: those of Llama 8B by default."""

    hidden: int = 4096
    heads: int = 32
    kv_heads: int = 8
    feed_forward: int = 14336


def layer(p: dict[str, Tensor], x: Tensor, shape: Shape) -> Tensor:
    """Attention with fewer heads for keys and values, and a gated feed-forward."""
    batch, tokens, hidden = x.shape
    size = hidden // shape.heads
    h = rms_norm(x, (hidden,), p["n1"])
    split = lambda name, heads: linear(h, p[name]).view(batch, tokens, heads, size).transpose(1, 2)
    q, k, v = split("q", shape.heads), split("k", shape.kv_heads), split("v", shape.kv_heads)
    a = scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    x = x + linear(a.transpose(1, 2).reshape(batch, tokens, hidden), p["o"])
    h = rms_norm(x, (hidden,), p["n2"])
    return x + linear(silu(linear(h, p["gate"])) * linear(h, p["up"]), p["down"])


def parameters(shape: Shape, dtype: torch.dtype, device: torch.device) -> dict[str, Tensor]:
    """Of one layer."""
    hidden, narrow = shape.hidden, shape.hidden * shape.kv_heads // shape.heads
    sizes = {
        "q": (hidden, hidden),
        "k": (narrow, hidden),
        "v": (narrow, hidden),
        "o": (hidden, hidden),
        "gate": (shape.feed_forward, hidden),
        "up": (shape.feed_forward, hidden),
        "down": (hidden, shape.feed_forward),
    }
    torch.manual_seed(0)
    weights = {
        name: torch.randn(size, dtype=dtype, device=device) * size[1] ** -0.5
        for name, size in sizes.items()
    }
    return weights | {name: torch.ones(hidden, dtype=dtype, device=device) for name in ("n1", "n2")}


class Layer(nn.Module):
    """The same as a module."""

    def __init__(self, params: dict[str, Tensor], shape: Shape):
        super().__init__()
        self.p, self.shape = (
            nn.ParameterDict({k: nn.Parameter(v.clone()) for k, v in params.items()}),
            shape,
        )

    def forward(self, x: Tensor) -> Tensor:
        return layer(self.p, x, self.shape)  # pyright: ignore[reportArgumentType]


class Split:
    """One microbatch through a layer: forward and backward, whole or split, by fpipe's programs,
    torch and autograd.
    """

    def __init__(self, device: torch.device, shape: Shape, tokens: int):
        self.device, dtype = device, torch.float32 if device.type == "cpu" else torch.bfloat16
        self.params = parameters(shape, dtype, device)
        self.x, self.dy = (
            torch.randn(1, tokens, shape.hidden, dtype=dtype, device=device) for _ in "xy"
        )
        self.programs = fpipe.trace(lambda p, x: layer(p, x, shape), self.params, self.x)
        self.module = Layer(self.params, shape)
        names = sorted(self.params)
        self.given = {"x0": self.x, "dy0": self.dy} | {
            f"p{i}": self.params[name] for i, name in enumerate(names)
        }

    def run(self, letters: str) -> dict[str, Tensor]:
        """Programs in turn, on values by name."""
        values = dict(self.given)
        with torch.no_grad():
            for letter in letters:
                program = getattr(self.programs, letter.lower())
                values.update(
                    zip(program.outputs, program([values[n] for n in program.inputs]), strict=True)
                )
        self.wait()
        return values

    def wait(self) -> None:
        """Until the device is done."""
        if self.device.type != "cpu":
            torch.accelerator.synchronize(self.device)

    def plain(self) -> None:
        """Autograd."""
        x = self.x.detach().requires_grad_()
        self.module(x).backward(self.dy)
        self.module.zero_grad(set_to_none=True)
        self.wait()

    def torchs(self) -> None:
        """Torch's split of autograd."""
        x = self.x.detach().requires_grad_()
        y = self.module(x)
        _, groups = stage_backward_input([y], [self.dy], [x], self.module.parameters())
        stage_backward_weight(self.module.parameters(), groups)
        self.module.zero_grad(set_to_none=True)
        self.wait()

    def rows(self, rounds: int) -> list[Row]:
        """Ratios, and the parts."""
        letters = ("FB", "FIW", "FI", "F")
        runs = [
            self.plain,
            self.torchs,
            *(lambda letters=letters: self.run(letters) for letters in letters),
        ]
        plain, torchs, whole, split, without_w, forward = alternate(runs, rounds)
        ms = lambda times: 1e3 * statistics.median(times)
        row = lambda what, ours, theirs, limit: {
            "what": what,
            "fpipe": ms(ours),
            "peer": ms(theirs),
            "ratio": ratio(ours, theirs),
            "limit": limit,
            "unit": "ms",
        }
        part = lambda what, time: {
            "what": what,
            "fpipe": time,
            "peer": None,
            "ratio": None,
            "limit": None,
            "unit": "ms",
        }
        return [
            row("layer F B, autograd", whole, plain, 1.03),
            row("layer F I W, autograd F B", split, plain, 1.03),
            row("layer F I W, torch's split", split, torchs, 1.0),
            part("layer F", ms(forward)),
            part("layer I", ms(without_w) - ms(forward)),
            part("layer W", ms(split) - ms(without_w)),
        ]


def offload(split: Split, tokens: int, rounds: int = 5) -> Row:
    """k of PipeOffload: how long activations take to the host and back, relative to a forward and
    backward.
    """
    held = torch.empty(split.programs.saved_bytes, dtype=torch.uint8, device=split.device)
    host = torch.empty(held.shape, dtype=torch.uint8, pin_memory=split.device.type == "cuda")

    def there_and_back() -> None:
        host.copy_(held, non_blocking=True)
        held.copy_(host, non_blocking=True)
        split.wait()

    carried, computed = alternate([there_and_back, lambda: split.run("FIW")], rounds)
    return {
        "what": f"offload k, {tokens} tokens",
        "fpipe": 1e3 * statistics.median(carried),
        "peer": 1e3 * statistics.median(computed),
        "ratio": ratio(carried, computed),
        "limit": None,
        "unit": "ms",
    }


def of_a_step(split: Split, shape: Shape, microbatches: int = 4) -> list[Row]:
    """Memory of a step against its plan, and the time of the host against that of the device."""
    group = fpipe.local(devices=[str(split.device)])
    fn = lambda p, x: layer(p, x, shape)
    pipe = fpipe.pipeline(
        [fn, fn], "Interleaved1F1B", loss=mean_square, microbatches=microbatches, group=group
    )
    params, x = [split.params, split.params], split.x.expand(microbatches, -1, -1).contiguous()
    step, plan = fpipe.value_and_grad(pipe), pipe.plan([split.params] * 2, x, x)
    for _ in range(2):
        step(params, x, x)
        split.wait()
    hosts, wholes = [], []
    for _ in range(5):
        start = time.perf_counter()
        kept = step(params, x, x)
        hosts.append(time.perf_counter() - start)
        split.wait()
        wholes.append(time.perf_counter() - start)
        del kept
    host, whole = statistics.median(hosts), statistics.median(wholes)
    most, actions = peak(lambda: step(params, x, x), split.device), 4 * microbatches
    return [
        {
            "what": "memory of a step, its plan",
            "fpipe": most / 2**20,
            "peer": plan.peak[0] / 2**20,
            "ratio": most / plan.peak[0],
            "limit": 1.02,
            "unit": "MiB",
        },
        {
            "what": "host, the device",
            "fpipe": 1e3 * host,
            "peer": 1e3 * whole,
            "ratio": host / whole,
            "limit": 1.0,
            "unit": "ms",
        },
        {
            "what": "host work per action",
            "fpipe": 1e6 * host / actions,
            "peer": None,
            "ratio": None,
            "limit": None,
            "unit": "us",
        },
    ]


# ---- weaving ----
class Copied(dist.Work):
    """A copy on a stream of its own; the current stream waits for it."""

    def __init__(self, event: Any):
        super().__init__()
        self.event = event

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        if self.event is not None:
            self.event.wait()
        return True

    def is_completed(self) -> bool:
        return self.event is None or self.event.query()


class CopyStream(dist.ProcessGroup):
    """Two members, of which there is one: all_to_all takes every byte to pinned memory of the host
    and back.
    """

    def __init__(self, device: torch.device):
        super().__init__(0, 2)
        self.module = None if device.type == "cpu" else torch.get_device_module(device)
        self.stream = None if self.module is None else self.module.Stream(device)
        self.free: dict[int, list[Tensor]] = {}

    def getBackendName(self) -> str:
        return "fake"

    def _set_group_name(self, name: str) -> None:
        self.name = name

    @property
    def group_name(self) -> str:  # pyright: ignore[reportIncompatibleVariableOverride]
        """A group in Python has no place for it."""
        return self.name

    def alltoall_base(
        self,
        output: Tensor,
        input: Tensor,
        sizes: Sequence[int],
        input_sizes: Sequence[int],
        opts: Any,
    ) -> Copied:
        """Start the copies."""
        if self.module is None or self.stream is None:
            output.copy_(input.clone())
            return Copied(None)
        self.stream.wait_stream(self.module.current_stream())
        with self.module.stream(self.stream):
            host = torch.empty(input.shape, dtype=input.dtype, pin_memory=True)
            host.copy_(input, non_blocking=True)
            output.copy_(host, non_blocking=True)
            event = self.module.Event()
            event.record()
        input.record_stream(self.stream)
        output.record_stream(self.stream)
        return Copied(event)


def _members(device: torch.device) -> CopyStream:
    """The process group of all processes, registered as torch's fake one is, whose members need no
    process.
    """
    groups: list[CopyStream] = []

    def create(*_: Any) -> CopyStream:
        groups.append(CopyStream(device))
        return groups[-1]

    dist.Backend.register_backend("fake", create, devices=[device.type])
    dist.init_process_group("fake", store=dist.HashStore(), rank=0, world_size=2)
    return groups[0]


def weave(device: torch.device, width: int, rows: int, rounds: int, microbatches: int = 8) -> Row:
    """A woven step against the longer of its computation and its copies."""
    group = _members(device)
    count = 2
    generator = torch.Generator().manual_seed(0)
    normal = lambda *size: torch.randn(*size, generator=generator).to(device)
    params = [
        {k: normal(width, width) / width**0.5 for k in ("dense", "expert")} for _ in range(count)
    ]
    x = normal(rows * microbatches, width)
    wait = lambda: None if device.type == "cpu" else torch.accelerator.synchronize(device)

    def step(members: Any, layers: int, overlap: str) -> Callable[[], None]:
        pipe = fpipe.pipeline(
            [stage_of(members, layers)] * count,
            "DualPipeV",
            loss=mean_square,
            microbatches=microbatches,
            group=fpipe.local(devices=[str(device)]),
            overlap=overlap,
        )
        run = fpipe.value_and_grad(pipe)
        return lambda: (run(params, x, x), wait())[1]

    def copies() -> None:
        out = torch.empty_like(x[:rows])
        for _ in range(4 * count * microbatches):
            group.alltoall_base(out, x[:rows], [], [], None).wait()
        wait()

    layers = _layers(lambda layers: step(None, layers, "sequential"), copies)
    names = ("woven", "sequential", "compute", "copies")
    runs = [
        step(dist.group.WORLD, layers, "weave"),
        step(dist.group.WORLD, layers, "sequential"),
        step(None, layers, "sequential"),
        copies,
    ]
    times = dict(zip(names, alternate(runs, rounds, warmup=2), strict=True))
    longer = [max(pair) for pair in zip(times["compute"], times["copies"], strict=True)]
    return {
        "what": f"woven, the longer part ({layers} layers)",
        "fpipe": 1e3 * statistics.median(times["woven"]),
        "peer": 1e3 * statistics.median(longer),
        "ratio": ratio(times["woven"], longer),
        "limit": 1.1,
        "unit": "ms",
    } | {f"{name} ms": 1e3 * statistics.median(times[name]) for name in names}


def _layers(
    step: Callable[[int], Callable[[], None]], copies: Callable[[], None], share: float = 0.75
) -> int:
    """How many layers make the copies that share of the computation."""
    one, five, carried = (
        statistics.median(times) for times in alternate([step(1), step(5), copies], 3, warmup=2)
    )
    return max(1, round(1 + (carried / share - one) / max((five - one) / 4, 1e-6)))
