"""Values as bytes: what is data, what is refused, and that bytes of any kind run nothing."""

from __future__ import annotations

import os
import pickle
import random
import struct
from collections import OrderedDict, defaultdict, deque
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import optree
import pytest
import torch

from fpipe.collectives.data import MOST_LEVELS, decode, encode
from fpipe.errors import GroupError
from fpipe.tree import flatten


class Pair(NamedTuple):
    one: Any
    other: Any


@optree.dataclasses.dataclass(namespace="fpipe")
class Node:
    x: Any
    label: str = optree.dataclasses.field(default="", pytree_node=False)


VALUES = [
    None,
    True,
    False,
    0,
    -1,
    127,
    128,
    -128,
    -129,
    1 << 200,
    -0.0,
    1e300,
    float("inf"),
    1 - 2j,
    "",
    "é\ud800",
    b"\0x",
    [],
    (),
    {},
    [1, [2, (3,)]],
    {"a": 1, (1, "b"): [None]},
    {1, 2},
    frozenset([(3,)]),
    torch.float8_e4m3fn,
    torch.device("cuda:1"),
    torch.Size([2, 3]),
    OrderedDict(z=1, a=2),
    defaultdict(list, a=[1]),
    deque([1, 2], 3),
    Pair(1, Pair("x", None)),
    Node((1, 2), "name"),
]


@pytest.mark.parametrize("value", VALUES, ids=repr)
def test_a_value_comes_back(value: Any):
    back = decode(encode(value))
    assert (type(back), back, repr(back)) == (type(value), value, repr(value))


def test_nan_comes_back():
    assert str(decode(encode([float("nan"), complex(0, float("nan"))]))) == "[nan, nanj]"


@pytest.mark.parametrize(
    "dtype", [torch.bool, torch.int64, torch.bfloat16, torch.complex64, torch.float8_e4m3fn]
)
@pytest.mark.parametrize("shape", [(), (0, 3), (2, 3)])
def test_a_tensor_comes_back(dtype: torch.dtype, shape: tuple[int, ...]):
    tensor = torch.arange(6).reshape(2, 3)[: shape[0] if shape else 1].to(dtype)
    tensor = tensor.T if shape == (2, 3) else tensor[0, 0] if shape == () else tensor
    back = decode(encode(tensor))
    assert back.dtype is dtype and back.shape == tensor.shape
    assert torch.equal(back.to(torch.complex64), tensor.to(torch.complex64))


@pytest.mark.parametrize(
    "tree", [3, None, {"b": 1, "a": (2, [None])}, Pair(1, {"x": Node(2)}), OrderedDict(z=1, a=2)]
)
def test_a_structure_comes_back(tree: Any):
    structure = flatten(tree)[1]
    assert decode(encode(structure)) == structure


def _loop() -> list[Any]:
    loop: list[Any] = []
    loop.append(loop)
    return loop


@pytest.mark.parametrize(
    ("value", "name"),
    [
        (print, "builtin_function"),
        (object(), "builtins.object"),
        (ValueError("x"), "ValueError"),
        ([{"x": Path("y")}], "Path"),
        (torch.ones(2, device="meta"), "torch.Tensor"),
        (_loop(), "contains itself"),
        (torch.ones(2).to_sparse(), "torch.Tensor"),
        (int, "builtins.type"),
        (defaultdict(lambda: 1), "builtins.function"),
    ],
    ids=lambda value: value if isinstance(value, str) else type(value).__name__,
)
def test_an_object_that_is_not_data_is_named(value: Any, name: str):
    with pytest.raises(GroupError, match=name):
        encode(value)


def test_pickles_and_other_bytes_run_nothing(tmp_path: Path):
    """Ranks unpickled the values of the store: whoever could write to it ran code as the owner of
    the job.
    """
    canary = tmp_path / "canary"

    class Attack:
        def __reduce__(self) -> Any:
            return os.system, (f"touch {canary}",)

    with pytest.raises(GroupError, match="not data"):
        decode(pickle.dumps(Attack()))
    assert not canary.exists()


def _tuple(tag: bytes, *parts: Any) -> bytes:
    return tag + struct.pack("<Q", len(parts)) + b"".join(map(encode, parts))


FORGED = {
    "empty": b"",
    "a length beyond the end": b"s" + struct.pack("<Q", 1 << 60),
    "parts beyond the end": b"t" + struct.pack("<Q", 1 << 60),
    "deep": b"".join([b"t" + struct.pack("<Q", 1)] * (MOST_LEVELS + 2)) + b"N",
    "more than a value": encode(1) + b"N",
    "a flag of two": b"B\2",
    "an unhashable key": _tuple(b"d", [1], 2),
    "a key without value": _tuple(b"d", 1),
    "an unknown dtype": _tuple(b"y", "torch.save"),
    "a tensor of other size": _tuple(b"x", "torch.float32", (1 << 40,), b"1234"),
    "a tensor of negative size": _tuple(b"x", "torch.float32", (-1, -1), b"1234"),
    "a function as a class": _tuple(b"n", "os", "system", "true"),
    "another class": _tuple(b"n", "subprocess", "Popen", "true"),
    "a module that is not loaded": _tuple(b"n", "antigravity", "X"),
    "a named tuple without fields": _tuple(b"n", Pair.__module__, "Pair", 1),
    "an unknown node": _tuple(b"r", "os", "system", None, "true"),
    "a factory": _tuple(b"D", "eval", "x", 1),
    "other text": b"s" + struct.pack("<Q", 1) + b"\xff",
}


@pytest.mark.parametrize("raw", FORGED.values(), ids=FORGED)
def test_forged_bytes_are_refused(raw: bytes):
    with pytest.raises(GroupError, match="not data"):
        decode(raw)


def test_changed_bytes_raise_nothing_else():
    draw = random.Random(0)
    good = encode([VALUES, torch.ones(2, 3), flatten(VALUES)[1]])
    for _ in range(3000):
        raw = bytearray(good)
        for _ in range(draw.randrange(1, 4)):
            raw[draw.randrange(len(raw))] = draw.randrange(256)
        with suppress(GroupError):
            decode(bytes(raw[: draw.choice([len(raw), draw.randrange(len(raw))])]))
