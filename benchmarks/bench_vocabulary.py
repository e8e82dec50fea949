"""A head with a large vocabulary: ``fpipe.chunked_cross_entropy`` beside torch's cross entropy of
whole logits.

A step is the loss and the gradients of hidden states and of the head. Each runs in a process of its
own, on one thread, because the peak of a process's memory is measured. The peak is what a step adds
to the memory before it, with the gradients, which no way can avoid. Errors are those of gradients
against float64, relative to the largest gradient.

    python -m benchmarks.bench_vocabulary [--vocabulary 262144] [--tokens 2048] [--width 256]
"""

from __future__ import annotations

import multiprocessing
from pathlib import Path
from time import perf_counter, process_time
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.command import options, save
from fpipe import chunked_cross_entropy

CHUNKS = (1024, 4096, 16384)
MIB = 2**20


def drawn(vocabulary: int, tokens: int, width: int) -> tuple[Tensor, Tensor, Tensor]:
    """Hidden states, the head and targets."""
    draw = torch.Generator().manual_seed(0)
    return (
        torch.randn(tokens, width, generator=draw),
        torch.randn(vocabulary, width, generator=draw) / width**0.5,
        torch.randint(vocabulary, (tokens,), generator=draw),
    )


def step(hidden: Tensor, weight: Tensor, targets: Tensor, chunk: int) -> tuple[Tensor, ...]:
    """The loss and its gradients; of whole logits for ``chunk`` 0."""
    hidden, weight = hidden.detach().requires_grad_(), weight.detach().requires_grad_()
    if chunk:
        loss = chunked_cross_entropy(hidden, weight, targets, chunk=chunk)
    else:
        loss = F.cross_entropy(hidden @ weight.T, targets)
    return loss.detach(), *torch.autograd.grad(loss, (hidden, weight))


def peak() -> int:
    """The most bytes of this process that were in memory since ``reset``."""
    lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    return next(1024 * int(line.split()[1]) for line in lines if line.startswith("VmHWM"))


def measure(sizes: dict[str, int], chunk: int, check: bool, results: Any) -> None:
    """One step, in this process: seconds, seconds of the processor, bytes, and errors."""
    torch.set_num_threads(1)
    hidden, weight, targets = drawn(**sizes)
    step(hidden[:8], weight[:64], targets[:8] % 64, chunk)  # loads kernels
    Path("/proc/self/clear_refs").write_text("5", encoding="utf-8")
    before, start, used = peak(), perf_counter(), process_time()
    loss, *grads = step(hidden, weight, targets, chunk)
    row = {"seconds": perf_counter() - start, "cpu": process_time() - used, "peak": peak() - before}
    if check:
        exact = step(hidden.double(), weight.double(), targets, 4096)
        pairs = zip([loss, *grads], exact, strict=True)
        row["error"] = max(float((a.double() - b).abs().max() / b.abs().max()) for a, b in pairs)
    results.put(row)


def main() -> None:
    """Measure torch, then each number of columns."""
    told = options(__doc__, vocabulary=262144, tokens=2048, width=256)
    told.add_argument("--errors", action="store_true", help="compare with float64, which is slow")
    given = told.parse_args()
    sizes = {name: getattr(given, name) for name in ("vocabulary", "tokens", "width")}
    print(f"{sizes}; whole logits: {given.tokens * given.vocabulary * 4 / MIB:,.0f} MiB")
    processes, rows = multiprocessing.get_context("spawn"), {}
    for chunk in (0, *CHUNKS):
        results = processes.Queue()
        child = processes.Process(target=measure, args=(sizes, chunk, given.errors, results))
        child.start()
        row = results.get()
        child.join()
        name = f"fpipe, chunk={chunk}" if chunk else "torch, whole logits"
        rows[name] = row
        error = f"  error {row['error']:.1e}" if given.errors else ""
        print(
            f"{name:20} {row['peak'] / MIB:7,.0f} MiB  {row['seconds']:6.1f} s, "
            f"{row['cpu']:6.1f} s of the processor{error}",
            flush=True,
        )
    save({"sizes": sizes, "rows": rows}, given.json)


if __name__ == "__main__":
    main()
