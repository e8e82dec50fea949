# SPDX-License-Identifier: Apache-2.0
"""Gradients that a program on a CPU adds to sums, without new memory for each of them.

*Tables* of which a microbatch reads few rows, such as embeddings, are added row by row, where the
gradient itself is a table of zeros but for those rows. *Large products* are written into one block
of memory, which is kept: glibc returns blocks of more than 32 MiB to the system when they are
freed, and the next microbatch would fault their pages in again.

The bits are those of the sum with the whole gradient: a row that is read several times is summed
first, by the same operation, and a row that is not read stays as it is.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from ..programs.operations import Operation, Ref, users
from ..tree import Aval

_aten = torch.ops.aten
_TURNED = (_aten.t.default, _aten.transpose.int, _aten.permute.default)
_ZEROS = (_aten.new_zeros.default, _aten.zeros.default)
#: A table has at least so many rows for each that is read.
_FEW = 4
#: The bytes from which on a product is large.
LARGE = 32 << 20
_kept = threading.local()


def adding(
    operations: Sequence[Operation], adds: dict[str, Sequence[str]], outputs: Sequence[str]
) -> list[Operation]:
    """The operations, of which those that compute what is added save memory. Those that add it
    themselves leave ``adds``.
    """
    readers = users(operations)
    by_name = {op.name: op for op in operations}
    found: dict[str, Operation] = {**by_name}
    for op in operations:
        value = op.value
        into = adds.get(op.name, ())
        if len(into) != 1 or op.name in readers or op.name in outputs:
            continue
        if not isinstance(value, Aval) or value.kind or value.device.type != "cpu":
            continue
        if add := _rows(op, value, by_name, readers):
            del adds[op.name]
            args = (Ref(into[0]), *add[1:])
            inputs = tuple(dict.fromkeys(map(str, args)))
            name = f"{op.name}_rows"
            found[op.name] = replace(op, name=name, target=add[0], args=args, inputs=inputs)
            if op.target is _aten.index_put.default:
                del found[op.args[0]]
        elif value.nbytes > LARGE and (source := _product(op, by_name, readers)):
            found[source.name] = replace(source, target=product)
    return list(found.values())


def _product(
    op: Operation, by_name: Mapping[str, Operation], readers: Mapping[str, Sequence[Operation]]
) -> Operation | None:
    """The product that a result is, or that it shows transposed; None: it is another one."""
    while op.target in _TURNED and op.args[0] in by_name and len(readers[op.args[0]]) == 1:
        op = by_name[op.args[0]]
    return op if op.target is _aten.mm.default else None


def _rows(
    op: Operation,
    value: Aval,
    by_name: Mapping[str, Operation],
    readers: Mapping[str, Sequence[Operation]],
) -> tuple[Callable[..., None], Ref, Ref] | None:
    """What adds a result to a table: a function, and the names of the rows and of their places;
    None: it is added whole.
    """
    match op.target, op.args:
        case _aten.embedding_dense_backward.default, (Ref() as rows, Ref() as index, _, -1, False):
            target = add_embedding
        case _aten.index_put.default, (Ref() as zeros, [Ref() as index], Ref() as rows, True):
            source = by_name.get(zeros)
            if source is None or source.target not in _ZEROS or len(readers[zeros]) > 1:
                return None
            target = add_indexed
        case _:
            return None
    read = op.reads[op.inputs.index(index)]
    if not isinstance(read, Aval) or read.dtype not in (torch.int64, torch.int32):
        return None
    return (target, rows, index) if _FEW * math.prod(read.shape) <= value.shape[0] else None


def add_embedding(table: Tensor, rows: Tensor, index: Tensor) -> None:
    """Add the gradient of ``embedding`` to a table."""
    read, places = torch.unique(index, return_inverse=True)
    total = _aten.embedding_dense_backward(rows, places, len(read), -1, False)
    table.index_add_(0, read, total)


def add_indexed(table: Tensor, rows: Tensor, index: Tensor) -> None:
    """Add the gradient of ``x[index]`` to a table."""
    read, places = torch.unique(index % len(table), return_inverse=True)
    total = rows.new_zeros(len(read), *table.shape[1:]).index_put((places,), rows, True)
    table.index_add_(0, read, total)


def product(a: Tensor, b: Tensor) -> Tensor:
    """``mm`` into memory that this thread keeps. The next call writes into it again."""
    shape = (a.shape[0], b.shape[1])
    kept = vars(_kept).get("block")
    nbytes = math.prod(shape) * a.dtype.itemsize
    if kept is None or kept.numel() < nbytes:
        kept = _kept.block = torch.empty(nbytes, dtype=torch.uint8)
    return torch.mm(a, b, out=kept[:nbytes].view(a.dtype).view(shape))
