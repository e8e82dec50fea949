# SPDX-License-Identifier: Apache-2.0
"""Kinds of GPUs: what their data sheets say, and which share of it large programs reach. Knows no
model.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from ...errors import PlanError

GIB = 1 << 30
MOST = 1e24  #: of a figure of a GPU
#: Bytes of an element: of bfloat16 parameters and activations, of float32 sums of gradients, and of
#: what Adam keeps: a float32 copy and two moments.
PARAMETER = 2
GRADIENT = 4
OPTIMIZER = 12


@dataclass(frozen=True)
class Gpu:
    """A kind of GPU and the machines that have it.

    Args:
        name: of the kind.
        memory: bytes of its memory.
        flops: dense 16-bit operations a second, by the data sheet.
        bandwidth: bytes a second of its memory.
        link: bytes a second to the other GPUs of its machine, in one direction.
        network: bytes a second to GPUs of other machines, in one direction.
        node: how many GPUs a machine has.
        matmul: the share of ``flops`` that large matrix products reach.

    >>> find_gpu("h100").memory // GIB
    80
    """

    name: str
    memory: float
    flops: float
    bandwidth: float
    link: float
    network: float
    node: int = 8
    matmul: float = 0.75

    def __post_init__(self) -> None:
        _, *figures = vars(self).items()  # all but the name
        for name, value in figures:
            if not isinstance(value, (int, float)) or not 0 < value <= MOST:
                raise PlanError(
                    f"gpu {self.name!s:.60}: {name} is {value!r:.40}, and must be a number above 0 "
                    f"and at most {MOST:.0e}; correct it"
                )

    def width(self, gpus: int) -> float:
        """Bytes a second between GPUs, of which so many communicate."""
        if gpus <= self.node:
            return self.link * LINK
        return self.network * NETWORK


#: Data sheets of the SXM modules. ``matmul`` is by published timings, and lower where power limits
#: the clock.
TABLE = {
    gpu.name: gpu
    for gpu in (
        Gpu("a100", 80 * GIB, 312e12, 2.0e12, 300e9, 25e9),
        Gpu("h100", 80 * GIB, 989e12, 3.35e12, 450e9, 50e9, matmul=0.65),
        Gpu("h200", 140 * GIB, 989e12, 4.8e12, 450e9, 50e9, matmul=0.65),
        Gpu("b200", 179 * GIB, 2250e12, 7.7e12, 900e9, 50e9, matmul=0.65),
    )
}
#: The shares of other figures that are reached: of attention that keeps no scores, of memory and of
#: links.
ATTENTION = 0.45
MEMORY = 0.8
LINK = 0.75
NETWORK = 0.8
#: The share of the memory that tensors can have; the rest is for the context, for buffers of
#: collectives and for gaps.
USABLE = 0.94
LATENCY = 10e-6  #: seconds of a message or a collective, beside its bytes
KERNEL = 4e-6  #: seconds of a kernel, beside its work


def find_gpu(name: str, memory: float | None = None, flops: float | None = None) -> Gpu:
    """A kind of GPU by name, in any case, with other figures where they are given.

    Args:
        name: a name of ``TABLE``.
        memory: bytes, in place of the table's.
        flops: operations a second, in place of the table's.

    Returns:
        The kind.

    Raises:
        PlanError: if there is no such kind.

    >>> find_gpu("A100", memory=40e9).memory
    40000000000.0
    """
    gpu = TABLE.get(str(name).lower())
    if gpu is None:
        raise PlanError(
            f"gpu {name!r} is not known, and known are {', '.join(TABLE)}; give the nearest of "
            "them, with memory= and flops= of yours"
        )
    return replace(gpu, memory=memory or gpu.memory, flops=flops or gpu.flops)
