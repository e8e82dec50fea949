"""Mutations of files: of their bytes, of the values in them, and of what is at their place.

Each takes a ``random.Random``, so that a seed is one mutation. Knows no format of fpipe.
"""

from __future__ import annotations

import copy
import json
import os
import random
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

#: Values that a file may have in place of any other.
HOSTILE: tuple[Any, ...] = (
    None,
    True,
    False,
    0,
    -1,
    1,
    2,
    7,
    10**6,
    2**31,
    2**63 - 1,
    2**64,
    10**400,
    0.5,
    -0.0,
    1e308,
    5e-324,
    float("nan"),
    float("inf"),
    float("-inf"),
    "",
    " ",
    "0",
    "nan",
    "1e5",
    "float32",
    "..",
    "../outside",
    "../outside/secret.safetensors",
    "/etc/passwd",
    "a/b",
    "x\0y",
    "\ud800",
    "\u0661",
    "first.w",
    "params",
    "os",
    "system",
    "x" * 5000,
    [],
    {},
    [[]],
    [0],
    [-1],
    [2**62],
    [2**40, 2**40],
    [2, 3],
    [1.5],
    {"": 0},
    {"a": {"b": 1}},
    ["leaf", "params/first.w"],
    ["none"],
    ["value", 1],
    ["named", "os", "path", []],
    ["node", "os", "system", ["value", "true"], []],
)
_NUMBER = re.compile(rb"-?[0-9]+(?:\.[0-9]+)?(?:e[+-]?[0-9]+)?")
_NUMBERS = (
    b"-1",
    b"0",
    b"1",
    b"2",
    b"3",
    b"7",
    b"00",
    b"1e999",
    b"nan",
    b"inf",
    b"1_0",
    b"0x10",
    b"2147483648",
    b"99999999999999999999",
    b"9" * 5000,
    b"",
    b"true",
    b'"a"',
    b"[]",
    b"1.5",
    "\u0661".encode(),
)


# ---- bytes ----
def of_bytes(draw: random.Random, raw: bytes) -> bytes:
    """Some bytes changed, removed, repeated, moved or inserted."""
    return draw.choice(BYTES)(draw, raw)


def _flip(draw: random.Random, raw: bytes) -> bytes:
    at = draw.randrange(len(raw) or 1)
    return (
        raw[:at] + bytes([(raw[at : at + 1] or b"\0")[0] ^ 1 << draw.randrange(8)]) + raw[at + 1 :]
    )


def _cut(draw: random.Random, raw: bytes) -> bytes:
    return raw[: draw.randrange(len(raw) + 1)]


def _span(draw: random.Random, raw: bytes) -> tuple[int, int]:
    first = draw.randrange(len(raw) + 1)
    return first, min(len(raw), first + draw.choice((1, 2, 8, 64, 512)))


def _remove(draw: random.Random, raw: bytes) -> bytes:
    first, last = _span(draw, raw)
    return raw[:first] + raw[last:]


def _repeat(draw: random.Random, raw: bytes) -> bytes:
    first, last = _span(draw, raw)
    return raw[:last] + raw[first:last] * draw.choice((1, 1, 2, 100)) + raw[last:]


def _insert(draw: random.Random, raw: bytes) -> bytes:
    at = draw.randrange(len(raw) + 1)
    texts = (b"\0", b"\xff\xfe", b"\xef\xbb\xbf", b"\r\n", b",", b"]", b"}", b"[" * 5000, b'"')
    return raw[:at] + draw.choice((*texts, draw.randbytes(9))) + raw[at:]


def _number(draw: random.Random, raw: bytes) -> bytes:
    found = list(_NUMBER.finditer(raw))
    if not found:
        return raw + draw.choice(_NUMBERS)
    match = draw.choice(found)
    return raw[: match.start()] + draw.choice(_NUMBERS) + raw[match.end() :]


def _lines(draw: random.Random, raw: bytes) -> bytes:
    lines = raw.split(b"\n")
    act = draw.choice(("swap", "remove", "repeat", "blank"))
    a, b = draw.randrange(len(lines)), draw.randrange(len(lines))
    if act == "swap":
        lines[a], lines[b] = lines[b], lines[a]
    elif act == "remove":
        del lines[a]
    elif act == "repeat":
        lines.insert(b, lines[a])
    else:
        lines[a] = b""
    return b"\n".join(lines)


def _other(draw: random.Random, raw: bytes) -> bytes:
    texts = (
        b"",
        b"\n",
        b"\0" * 64,
        b"{}",
        b"[]",
        b"null",
        b"\x80\x04N.",
        b"PK\3\4",
        draw.randbytes(300),
    )
    return draw.choice(texts)


BYTES: tuple[Callable[[random.Random, bytes], bytes], ...] = (
    _flip,
    _cut,
    _remove,
    _repeat,
    _insert,
    _number,
    _number,
    _lines,
    _lines,
    _other,
)


# ---- values ----
def of_values(draw: random.Random, value: Any) -> Any:
    """One to three values of JSON replaced, removed, added, swapped, or put into lists."""
    value = copy.deepcopy(value)
    for _ in range(draw.choice((1, 1, 1, 2, 3))):
        places = _places(value)
        if not places:
            return draw.choice(HOSTILE)
        parent, key = draw.choice(places)
        act = draw.choice(("replace",) * 6 + ("remove", "rename", "swap", "deep", "repeat", "near"))
        if act == "replace":
            parent[key] = copy.deepcopy(draw.choice(HOSTILE))
        elif act == "remove":
            del parent[key]
        elif act == "rename" and isinstance(parent, dict):
            parent[draw.choice([v for v in HOSTILE if isinstance(v, str)])] = parent.pop(key)
        elif act == "swap":
            other, name = draw.choice(places)
            inside = str(parent[key]) in str(other) or str(other[name]) in str(parent)
            if not (isinstance(parent[key], (dict, list)) or isinstance(other[name], (dict, list))):
                parent[key], other[name] = other[name], parent[key]
            elif not inside:
                parent[key] = copy.deepcopy(other[name])
        elif act == "deep":
            for _ in range(draw.choice((1, 50, 3000))):
                parent[key] = [parent[key]]
            break  # Python copies no such lists
        elif act == "repeat" and isinstance(parent, list):
            parent.insert(key, copy.deepcopy(parent[key]))
        elif isinstance(parent[key], (int, float)):
            parent[key] += draw.choice((-1, 1, 4, 8, -8))
    return value


def _places(value: Any) -> list[tuple[Any, Any]]:
    """Every container with each of its keys."""
    found: list[tuple[Any, Any]] = []
    rest = [value]
    while rest:
        inner = rest.pop()
        keys = inner if isinstance(inner, dict) else range(len(inner))
        for key in keys if isinstance(inner, (dict, list)) else ():
            found.append((inner, key))
            if isinstance(inner[key], (dict, list)):
                rest.append(inner[key])
    return found


def as_json(value: Any) -> bytes:
    """JSON, of any depth and of any text."""
    try:
        text = json.dumps(value, ensure_ascii=False)
    except RecursionError:
        text = "[" * 5000 + "]" * 5000
    return text.encode("utf-8", "surrogatepass")


# ---- places ----
def of_place(draw: random.Random, path: Path, outside: Path) -> str:
    """Something else where a file or a folder was."""
    act = draw.choice(
        ("missing", "link", "link inside", "device", "pipe", "folder", "file", "empty")
    )
    moved = path.with_name(f"moved-{path.name}")
    if act == "empty" and path.is_dir():
        act = "folder"
    if act == "link inside":
        path.rename(moved)
        path.symlink_to(moved.name)
        return act
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink()
    if act == "link":
        path.symlink_to(draw.choice((outside / "secret.safetensors", outside, outside / "none")))
    elif act == "device":
        path.symlink_to(draw.choice(("/dev/zero", "/dev/null", "/dev/full")))
    elif act == "pipe":
        os.mkfifo(path)
    elif act == "folder":
        path.mkdir()
    elif act in ("file", "empty"):
        path.write_bytes(draw.randbytes(100) if act == "file" else b"")
    return act
