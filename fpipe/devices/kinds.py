# SPDX-License-Identifier: Apache-2.0
"""The table of device types: data only, with a conservative record for types that are not in it."""

from __future__ import annotations

from dataclasses import dataclass
from types import MappingProxyType


@dataclass(frozen=True)
class DeviceKind:
    """The properties of a type of device.

    Args:
        type: of ``torch.device``.
        backend: the default of torch.distributed.
        visible: the environment variable that selects the devices that a process can use.
        package: the package to import where support is not part of torch.
        attention: the attention implementation to use.
        compile_many: whether torch.compile is trusted where several devices are used.
        name: for people.

    >>> kind("xpu").backend
    'xccl'
    """

    type: str
    backend: str
    visible: str | None = None
    package: str | None = None
    attention: str = "eager"
    compile_many: bool = True
    name: str = ""

    @property
    def backends(self) -> str:
        """The backend string of a process group that carries CPU tensors too.

        >>> kind("cuda").backends, kind("cpu").backends
        ('cpu:gloo,cuda:nccl', 'gloo')
        """
        return (
            self.backend
            if self.type == "cpu" or self.backend == "gloo"
            else f"cpu:gloo,{self.type}:{self.backend}"
        )


_ROWS = (
    DeviceKind("cpu", "gloo", attention="sdpa", name="CPU"),
    DeviceKind("cuda", "nccl", "CUDA_VISIBLE_DEVICES", attention="sdpa", name="NVIDIA or AMD GPU"),
    # The device selector of oneAPI is read and never set: it can hide a device that attention
    # kernels need. The fused attention needs is_causal=True; explicit masks take a slow path.
    DeviceKind(
        "xpu",
        "xccl",
        "ZE_AFFINITY_MASK",
        attention="sdpa",
        compile_many=False,
        name="Intel GPU",
    ),
    DeviceKind("npu", "hccl", "ASCEND_RT_VISIBLE_DEVICES", "torch_npu", name="Ascend NPU"),
    DeviceKind("hpu", "hccl", "HABANA_VISIBLE_MODULES", "habana_frameworks.torch", name="Gaudi"),
    DeviceKind("mps", "gloo", name="Apple GPU"),
)
KINDS = MappingProxyType({row.type: row for row in _ROWS})


def kind(type: str) -> DeviceKind:
    """The record of a device type; a conservative one for a type that is not in the table.

    Args:
        type: of ``torch.device``.

    Returns:
        A ``DeviceKind``.

    >>> kind("cuda").visible, kind("newcomer").attention
    ('CUDA_VISIBLE_DEVICES', 'eager')
    """
    return KINDS.get(type) or DeviceKind(
        type, "gloo", compile_many=False, name=f"unknown device {type!r}"
    )
