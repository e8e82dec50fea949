# SPDX-License-Identifier: Apache-2.0
"""Programs and families of programs as JSON data, and back.

Each operation and each abstract tensor is written once. The source of a program is written anew
from its operations when it is read. Knows programs; no functions, files or keys.
"""

from __future__ import annotations

import ast
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import torch

from ...tree import Aval
from ..families import Axis, Family
from ..graphs import Held
from ..internals import storage_id
from ..operations import Operation, Ref, Value
from ..program import Program
from ..signature import Outputs, Signature
from ..sizes import Formulas
from ..stage_programs import Programs
from .text import ForgedError, UnstorableError, from_text, name_of, to_text

_LETTERS = "fbiw"
_LIFTS = (torch.ops.aten.lift_fresh_copy.default, torch.ops.aten.lift_fresh.default)


# ---- programs ----
def programs_as_data(programs: Programs, tensors: Sequence[torch.Tensor]) -> dict[str, Any]:
    """Programs as data. ``tensors`` are those that the function holds: a captured one is written as
    its place.
    """
    if programs.eager or programs.compiled or programs.origin is not None:
        raise UnstorableError("programs that are not a trace")
    avals: _Avals = {}
    each = [getattr(programs, letter) for letter in _LETTERS]
    pool = list(dict.fromkeys(one for program in each for one in program.traced))
    place = {id(one): number for number, one in enumerate(pool)}
    captured = {name: value for program in each for name, value in program.constants.items()}
    return {
        "operations": [_operation_as_data(one, avals) for one in pool],
        "inputs": _given(pool, avals),
        "programs": [
            [
                [place[id(one)] for one in p.traced],
                list(p.inputs),
                list(p.outputs),
                list(p.constants),
            ]
            for p in each
        ],
        "captured": {
            name: _captured(name, value, tensors, pool) for name, value in captured.items()
        },
        "counts": list(programs.counts),
        "outputs": _outputs_as_data(programs.outputs),
        "names": to_text(
            (programs.ys, programs.aux, programs.new_state, programs.dps, programs.dxs)
        ),
        "saved": list(programs.saved),
        "kept": list(programs.kept),
        "gradients": {name: _number(aval, avals) for name, aval in programs.grad_avals.items()},
        "memory": {
            n: [held.root, to_text(held.nbytes), held.given]
            for n, held in programs.traced_memory.items()
        },
        "fresh": sorted(programs.fresh),
        "avals": [text for _, text in avals.values()],
    }


def programs_from_data(
    data: Mapping[str, Any], tensors: Sequence[torch.Tensor], label: str, shown: str
) -> Programs:
    """The programs of data. ``label`` and ``shown`` describe the stage, and it with its
    signature.
    """
    avals = [from_text(text) for text in data["avals"]]
    values = {name: _value(number, avals) for name, number in data["inputs"].items()}
    values |= {name: _value(number, avals) for name, *_, number, _ in data["operations"]}
    pool = [_operation_from_data(each, values) for each in data["operations"]]
    captured = {
        name_of(name): tensors[each] if isinstance(each, int) else from_text(each)
        for name, each in data["captured"].items()
    }
    programs = [
        Program.of(
            letter.upper(),
            [pool[place] for place in places],
            list(map(name_of, inputs)),
            list(map(name_of, outputs)),
            {name: captured[name] for name in constants},
            stage=shown,
        )
        for letter, (places, inputs, outputs, constants) in zip(
            _LETTERS, data["programs"], strict=True
        )
    ]
    ys, aux, new_state, dps, dxs = from_text(data["names"])
    return Programs(
        *programs,
        counts=tuple(data["counts"]),
        outputs=_outputs_from_data(data["outputs"]),
        ys=ys,
        aux=aux,
        new_state=new_state,
        dps=dps,
        dxs=dxs,
        saved=tuple(data["saved"]),
        kept=tuple(data["kept"]),
        grad_avals={name: avals[number] for name, number in data["gradients"].items()},
        traced_memory={
            n: Held(root, from_text(size), given)
            for n, (root, size, given) in data["memory"].items()
        },
        fresh=frozenset(data["fresh"]),
        label=label,
    )


#: Texts of abstract tensors, each once, by the text as JSON.
_Avals: TypeAlias = dict[str, Any]


def _number(aval: Aval, avals: _Avals) -> int:
    """The place of an abstract tensor among those that were written."""
    text = to_text(aval)
    key = repr(text)
    avals.setdefault(key, (len(avals), text))
    return avals[key][0]


def _value_as_data(value: Value, avals: _Avals) -> Any:
    """What an operation computes: the number of an abstract tensor, several, or None."""
    if value is None:
        return None
    return (
        _number(value, avals)
        if isinstance(value, Aval)
        else [_value_as_data(item, avals) for item in value]
    )


def _value(data: Any, avals: Sequence[Aval]) -> Value:
    if data is None:
        return None
    return tuple(_value(item, avals) for item in data) if isinstance(data, list) else avals[data]


def _operation_as_data(one: Operation, avals: _Avals) -> list[Any]:
    if one.inputs != tuple(_refs((one.args, one.kwargs))):
        raise UnstorableError(f"the order of what {one.name} reads")
    arguments = to_text(one.args), to_text(dict(one.kwargs))
    return [one.name, to_text(one.target), *arguments, _value_as_data(one.value, avals), one.mark]


def _operation_from_data(data: Sequence[Any], values: Mapping[str, Value]) -> Operation:
    name, target, args, kwargs, _, mark = data
    args, kwargs = from_text(args), from_text(kwargs)
    inputs = tuple(_refs((args, kwargs)))
    reads = tuple(values.get(each) for each in inputs)
    kwargs = {name_of(key): each for key, each in kwargs.items()}
    return Operation(
        name_of(name), from_text(target), args, kwargs, inputs, reads, values[name], mark
    )


def _refs(value: Any) -> dict[str, None]:
    """The names in arguments, each once, in order."""
    if isinstance(value, Ref):
        return {str(value): None}
    items = (
        value.values()
        if isinstance(value, dict)
        else value
        if isinstance(value, (list, tuple))
        else ()
    )
    return {name: None for item in items for name in _refs(item)}


def _given(pool: Sequence[Operation], avals: _Avals) -> dict[str, Any]:
    """The values that operations read and that none computes."""
    computed = {one.name for one in pool}
    pairs = (
        (name, value) for one in pool for name, value in zip(one.inputs, one.reads, strict=True)
    )
    return {name: _value_as_data(value, avals) for name, value in pairs if name not in computed}


def _captured(
    name: str, value: Any, tensors: Sequence[torch.Tensor], pool: Sequence[Operation]
) -> Any:
    """A captured tensor: its place among those of the function, or its numbers if the function
    creates it.
    """
    if not isinstance(value, torch.Tensor):
        raise UnstorableError(f"a captured {type(value).__name__}")
    for place, tensor in enumerate(tensors):
        if _same(tensor, value):
            return place
    if any(name in one.inputs and one.target not in _LIFTS for one in pool):
        raise UnstorableError("a captured tensor that the function does not hold itself")
    return to_text(value)


def _same(one: torch.Tensor, other: torch.Tensor) -> bool:
    def place(t):
        return (storage_id(t), t.storage_offset(), t.shape, t.stride(), t.dtype)

    return one.layout is other.layout is torch.strided and place(one) == place(other)


def _outputs_as_data(outputs: Outputs) -> list[Any]:
    return list(
        map(
            to_text,
            (outputs.y, outputs.aux, outputs.state, outputs.copies, tuple(sorted(outputs.unused))),
        )
    )


def _outputs_from_data(data: Sequence[Any]) -> Outputs:
    y, aux, state, copies, unused = map(from_text, data)
    return Outputs(y, aux, state, copies, frozenset(unused))


# ---- signatures and families ----
def signature_as_data(signature: Signature) -> list[Any]:
    """A signature as data."""
    return list(map(to_text, signature))


def family_as_data(family: Family, tensors: Sequence[torch.Tensor]) -> dict[str, Any]:
    """A family as data."""
    formulas = family.formulas
    return {
        "signature": signature_as_data(family.signature),
        "axes": [[list(place) for place in axes] for axes in family.axes],
        "formulas": [list(formulas.symbols), list(formulas.texts), list(formulas.conditions)],
        "programs": programs_as_data(family.traced, tensors),
    }


def family_from_data(
    data: Mapping[str, Any], tensors: Sequence[torch.Tensor], label: str, shown: str
) -> Family:
    """The family of data."""
    signature = Signature(*map(from_text, data["signature"]))
    axes = tuple(tuple(Axis(*place) for place in axes) for axes in data["axes"])
    symbols, texts, conditions = (tuple(each) for each in data["formulas"])
    for name in symbols:
        name_of(name)
    for text in (*texts, *conditions):
        _check_formula(text, symbols)
    programs = programs_from_data(data["programs"], tensors, label, shown)
    return Family(signature, axes, Formulas(symbols, texts, conditions), programs)


_NODES = (
    ast.Expression,
    ast.BinOp,
    ast.UnaryOp,
    ast.BoolOp,
    ast.Compare,
    ast.IfExp,
    ast.Constant,
    ast.Load,
    ast.operator,
    ast.unaryop,
    ast.boolop,
    ast.cmpop,
)
_FUNCTIONS = ("max", "min", "abs", "float", "int", "round")
_MATH = ("floor", "ceil", "trunc", "sqrt", "log", "log2", "exp", "pow", "fabs", "inf", "nan")


def _check_formula(text: str, symbols: Sequence[str]) -> None:
    """Refuse a formula that is more than arithmetic of symbols."""
    for node in ast.walk(ast.parse(text, mode="eval")):
        if isinstance(node, ast.Attribute):
            fits = (
                isinstance(node.value, ast.Name) and node.value.id == "math" and node.attr in _MATH
            )
        elif isinstance(node, ast.Name):
            fits = node.id in symbols or node.id in _FUNCTIONS or node.id == "math"
        elif isinstance(node, ast.Constant):
            fits = isinstance(node.value, (bool, int, float))
        elif isinstance(node, ast.Call):
            fits = not node.keywords
        else:
            fits = isinstance(node, _NODES)
        if not fits:
            raise ForgedError(f"{text!r} is no formula")
