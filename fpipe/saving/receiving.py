# SPDX-License-Identifier: Apache-2.0
"""``fpipe.receive``: parameters of the stages here from pairs of name and tensor, or from
safetensors files.

Each process keeps, or reads, the tensors of its stages alone. This module must not know who named
the tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from os import PathLike
from typing import Any, TypeAlias

import torch
from torch import Tensor

from .. import tree
from ..errors import CheckpointError, check_floating
from ..tree import Tree
from ._processes import AnyPath, Pipe, agree, check_unused
from .files import stored
from .leaf_names import Names, StageTree, after, joined, misfit
from .structures import nested

#: Names with tensors, or with functions that read them.
Tensors: TypeAlias = Mapping[str, Tensor | Callable[[], Tensor]]
#: Tensors, a function that returns them, files, or a folder of files.
Source: TypeAlias = Iterable[tuple[str, Tensor]] | Tensors | Callable[[], Tensors] | AnyPath


def receive(
    pipe: Pipe,
    named_tensors: Source,
    *,
    like: Sequence[Tree] | None = None,
    dtype: torch.dtype | None = None,
    strict: bool = True,
) -> list[Tree]:
    """Parameters for this pipeline from whole tensors by name, such as those of ``fpipe.stream``.

    Each process keeps copies of the tensors of its stages, on their ranks' devices; with ``zero=``,
    its parts of them. Every process calls it, with an iterator that has the same names everywhere.

    Args:
        pipe: the pipeline that gets the parameters.
        named_tensors: pairs of name and tensor; a mapping, whose values may be functions that
            return the tensor; or the path of a safetensors file or a folder of them, of which each
            process reads its own tensors; or a function that returns a mapping.
        like: parameters whose structure, shapes and dtypes are expected, one tree per stage; by
            default those of the module behind each stage, and otherwise nested dicts and lists, by
            the dots in the names.
        dtype: convert floating tensors to it; otherwise they must have the dtype that is expected,
            if that is known.
        strict: with False, names that no stage takes are a warning.

    Returns:
        One tree per stage, ``None`` for stages of other processes.

    Raises:
        CheckpointError: on every process, for a tensor that is missing, not expected, or of another
        shape or dtype.

    >>> import fpipe
    >>> stages = [fpipe.Stage(lambda p, x: x @ p["w"], name=name) for name in ("first", "last")]
    >>> pipe = fpipe.pipeline(stages, loss=torch.sum, microbatches=2, group=fpipe.local(2))
    >>> fpipe.receive(pipe, [("first.w", torch.eye(2)), ("last.w", torch.ones(2))])[1]
    {'w': tensor([1., 1.])}
    """
    check_floating("dtype", dtype)
    pairs: Any = named_tensors
    if isinstance(named_tensors, (str, PathLike)):
        pairs = agree(pipe, lambda: stored(named_tensors))
    elif callable(named_tensors):
        pairs = agree(pipe, named_tensors)
    names = Names(pipe)
    expected = agree(pipe, lambda: names.expected(like))
    templates = {
        stage: names.tree(stage, given, whole=True)
        for stage, given in enumerate(expected)
        if given is not None
    }
    wanted = _wanted(names, templates)
    seen = set[str]()
    taken = dict[str, Tensor]()
    fault: Exception | None = None
    for name, value in pairs.items() if isinstance(pairs, Mapping) else pairs:
        seen.add(name)
        try:
            if fault is None and wanted(name):
                tensor = (value if isinstance(value, Tensor) else value()).detach()
                taken[name] = tensor.to(dtype if tensor.is_floating_point() else None, copy=True)
        except Exception as error:  # the other processes go on until all have seen all names
            fault = error

    def built() -> list[Tree]:
        if fault is not None:
            raise fault
        params: list[Tree] = [None] * pipe.stages
        for stage in pipe.here:
            if (here := templates.get(stage)) is not None:
                values = [_checked(stage, leaf.key, leaf.value, taken) for leaf in here.leaves]
                params[stage] = tree.unflatten(here.spec, values)
            else:
                params[stage] = _nested(names, stage, taken)
        return params

    params = agree(pipe, built)
    remedy = "pass the tensors of this model alone"
    check_unused(pipe, seen, taken, "no stage takes {}", remedy, strict)
    return pipe.shard(params)


# ---- what each stage takes ----
def _wanted(names: Names, templates: Mapping[int, StageTree]) -> Callable[[str], bool]:
    """Whether a tensor belongs to a stage here, by its name."""
    keys = {leaf.key for here in templates.values() for leaf in here.leaves}
    keys |= {key for (stage, _), (key, _) in names.ties.items() if stage in names.pipe.here}
    heads = [
        head
        for stage in names.pipe.here
        if stage not in templates
        for head in names.stages[stage].heads.values()
    ]
    return lambda name: name in keys or any(after(name, head) is not None for head in heads)


def _checked(stage: int, key: str, like: object, taken: Mapping[str, Tensor]) -> object:
    if not tree.is_tensor(like):
        return like
    value = taken.get(key)
    kind = None if value is None else tree.brief(value)
    if fault := misfit(stage, key, kind, tree.brief(like)):
        raise CheckpointError(
            f"{fault}; pass the tensors of the whole model, and dtype= to convert them"
        )
    return value


def _nested(names: Names, stage: int, taken: Mapping[str, Tensor]) -> Tree:
    """Nested dicts and lists of the tensors whose names begin as those of a stage."""
    keys = names.tied_leaves(stage)
    for path, head in names.stages[stage].heads.items():
        for key in taken:
            rest = after(key, head)
            if rest is not None:
                keys[joined(path, rest)] = key
    missing = [key for key in keys.values() if key not in taken]
    if missing or not keys:
        raise CheckpointError(
            f"there is no tensor {missing[0] if missing else names.stages[stage].prefix!r} for "
            f"stage {stage}; pass the tensors of the whole model, by names as fpipe.stream has "
            "them, and like=params if a stage has none"
        )
    return nested({path: taken[key] for path, key in keys.items()}, lists=True)
