"""Values as bytes: what is data, what is refused, and that bytes of any kind run nothing."""

from __future__ import annotations

import json
import os
import pickle
import random
from collections import OrderedDict, defaultdict, deque
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import optree
import pytest
import torch

from fpipe.collectives.codec import MOST_LEVELS, decode, encode
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
    OrderedDict([((1, 2), b"x")]),
    torch.return_types.max((1, 2)),  # type: ignore[call-arg]
    Node(1, [b"a constant", {None: 1}]),  # type: ignore[arg-type]
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


def test_sets_have_one_encoding():
    """Their order differs between processes, and encodings are compared."""
    assert encode(set("abcdef")) == encode(set("fedcba")) == encode(set("cabfed"))


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


def forged(node: Any) -> bytes:
    return json.dumps(node).encode()


def _deep(levels: int) -> Any:
    return ["tuple", [_deep(levels - 1)]] if levels else ["none"]


ONE, TEXT = ["value", 1], ["value", "true"]
FORGED = {
    "empty": b"",
    "no base64": forged(["bytes", "1*"]),
    "half of base64": forged(["bytes", "MTIz"[:3]]),
    "a number as bytes": forged(["bytes", 1]),
    "deep": forged(_deep(MOST_LEVELS + 2)),
    "deeper": forged(0).replace(b"0", b"[" * 100_000),
    "more than a value": forged(["none"]) + b"N",
    "no tag": forged(ONE[1:]),
    "no node": forged(7),
    "another tag": forged(["run", "rm"]),
    "another value": forged(["value", [1]]),
    "an unhashable key": forged(["dict", [[["list", [ONE]], ONE]]]),
    "a key without value": forged(["dict", [[1]]]),
    "an unknown dtype": forged(["dtype", "save"]),
    "a tensor of other size": forged(["tensor", "float32", [1 << 40], "MTIzNA=="]),
    "a tensor of negative size": forged(["tensor", "float32", [-1, -1], "MTIzNA=="]),
    "a function as a class": forged(["named", "os", "system", [["x", TEXT]]]),
    "another class": forged(["named", "subprocess", "Popen", [["x", TEXT]]]),
    "a module that is not loaded": forged(["named", "antigravity", "X", []]),
    "a named tuple without fields": forged(["named", Pair.__module__, "Pair", [["one", ONE]]]),
    "an unknown node": forged(["node", "os", "system", ["none"], [["x", TEXT]]]),
    "a factory": forged(["default", "eval", ["dict", []]]),
    "other text": forged(["none"])[:-1] + b"\xff",
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
