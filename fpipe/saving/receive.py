# SPDX-License-Identifier: Apache-2.0
"""``fpipe.receive``: parameters of the stages here from pairs of name and tensor, or from
safetensors files.

Each process keeps, or reads, the tensors of its stages alone. This module must not know who named
the tensors.
"""

from __future__ import annotations

import json
import os
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor

from .. import tree
from ..collectives.codec import Node, from_bytes, from_node, under
from ..errors import CheckpointError
from ._pipe import Pipe, agree, everyone, is_first
from .files import Header, exactly, header, opened
from .keys import Names, Part, StageNames, StageTree, describe_stage, nested, stage_tree


class Stored(NamedTuple):
    """A tensor in a safetensors file."""

    folder: Path
    file: str
    entry: Header

    def __call__(self) -> Tensor:
        """Read it."""
        with opened(self.folder, self.file) as file:
            raw = exactly(file, self.entry.begin, self.entry.end - self.entry.begin)
        return from_bytes(raw, self.entry.dtype, self.entry.shape)


#: Names with tensors, or with functions that read them.
Tensors: TypeAlias = Mapping[str, Tensor | Callable[[], Tensor]]
#: Tensors, a function that returns them, files, or a folder of files.
Source: TypeAlias = (
    Iterable[tuple[str, Tensor]] | Tensors | Callable[[], Tensors] | str | os.PathLike[str]
)


def stored(path: str | os.PathLike[str]) -> dict[str, Stored]:
    """The tensors of a safetensors file, or of those in a folder, by name; their data are not read.

    Raises:
        CheckpointError: if there are none, a file is no safetensors file, or two have a tensor of
        one name.
    """
    place = Path(path)
    files = [place] if place.is_file() else sorted(place.glob("*.safetensors"))
    if not files:
        raise CheckpointError(
            f"{place} is no safetensors file and no folder of such; formats with pickles are not "
            "read"
        )
    found: dict[str, Stored] = {}
    for path in files:
        with opened(path.parent, path.name) as file:
            for name, entry in header(file, str(path))[0].items():
                if name in found:
                    raise CheckpointError(
                        f"{name!r} is in {found[name].file} and in {path.name}; remove one"
                    )
                found[name] = Stored(path.parent, path.name, entry)
    return found


def receive(
    pipe: Pipe,
    named_tensors: Source,
    *,
    like: Sequence[Any] | None = None,
    dtype: torch.dtype | None = None,
    strict: bool = True,
) -> list[Any]:
    """Parameters for this pipeline from whole tensors by name, such as those of ``fpipe.stream``.

    Each process keeps copies of the tensors of its stages, on their ranks' devices; with ``zero=``,
    its parts of them. Every process calls it, with an iterator that has the same names everywhere.

    Args:
        pipe: the pipeline.
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
    pairs: Any = named_tensors
    if isinstance(named_tensors, (str, os.PathLike)):
        pairs = agree(pipe, lambda: stored(named_tensors))
    elif callable(named_tensors):
        pairs = agree(pipe, named_tensors)
    pairs = pairs.items() if isinstance(pairs, Mapping) else pairs
    trees, taken, every = _received(Names(pipe), pairs, like, dtype)
    _check_extra(pipe, every, taken, strict)
    return pipe.shard(trees)


def _received(
    names: Names,
    pairs: Iterable[tuple[str, Any]],
    like: Sequence[Any] | None,
    dtype: torch.dtype | None,
) -> tuple[list[Any], dict[str, Tensor], set[str]]:
    """Whole parameters of the stages here, their tensors by name, and all names."""
    templates = agree(names.pipe, lambda: _templates(names, like))
    wanted, taken, every = _wanted(names, templates), dict[str, Tensor](), set[str]()
    fault: Exception | None = None
    for name, value in pairs:
        every.add(name)
        try:
            if fault is None and wanted(name):
                taken[name] = _kept(value if isinstance(value, Tensor) else value(), dtype)
        except Exception as error:  # the other processes go on until all have seen all names
            fault = error
    return agree(names.pipe, lambda: _built(names, templates, taken, fault)), taken, every


def _kept(value: Tensor, dtype: torch.dtype | None) -> Tensor:
    return value.detach().to(
        dtype if dtype is not None and value.is_floating_point() else value.dtype, copy=True
    )


def _check_extra(pipe: Pipe, every: set[str], taken: Mapping[str, Tensor], strict: bool) -> None:
    texts = everyone(pipe, json.dumps(sorted(taken)))
    extra = sorted(every - {name for text in texts for name in json.loads(text)})
    if extra:
        more = f" (and {len(extra) - 1} more)" if len(extra) > 1 else ""
        text = f"no stage takes {extra[0]!r}{more}"
        if strict:
            raise CheckpointError(f"{text}; pass the tensors of this model alone, or strict=False")
        if is_first(pipe):
            warnings.warn(text, stacklevel=3)


# ---- what each stage takes ----
def _templates(names: Names, like: Sequence[Any] | None) -> dict[int, StageTree]:
    """What is known of the parameters of the stages here beforehand."""
    pipe, found = names.pipe, {}
    if like is not None:
        pipe.config.check_params(like)
    for stage in pipe.here:
        weights = names.stages[stage].stage.weights
        if like is not None:
            shape = like[stage]
        elif weights is not None:
            shape = {name: weight.like for name, weight in weights.items()}
        else:
            continue
        described = describe_stage(names, stage, shape)
        found[stage] = stage_tree(names, stage, shape, described, whole=True)
    return found


def _wanted(names: Names, templates: Mapping[int, StageTree]) -> Callable[[str], bool]:
    """Whether a tensor belongs to a stage here, by its name."""
    known = {key for here in templates.values() for key in here.keys}
    heads = [
        head
        for stage in names.pipe.here
        if stage not in templates
        for head in _heads(names.stages[stage])
    ]
    known |= {key for (stage, _), (key, _) in names.ties.items() if stage in names.pipe.here}
    return lambda name: (
        name in known or any(name == head or name.startswith(f"{head}.") for head, _ in heads)
    )


def _heads(of: StageNames) -> Iterator[tuple[str, str]]:
    """What names of a stage begin with, each with the path of these leaves in the stage."""
    for part in of.parts.values() or [Part("", of.prefix)]:
        if part.numbers is None:
            yield part.name, part.path
        else:
            yield from (
                (under(part.name, n), under(part.path, i)) for i, n in enumerate(part.numbers)
            )


def _built(
    names: Names,
    templates: Mapping[int, StageTree],
    taken: Mapping[str, Tensor],
    fault: Exception | None,
) -> list[Any]:
    """Parameters by stage from tensors by name."""
    if fault is not None:
        raise fault
    out: list[Any] = [None] * names.pipe.stages
    for stage in names.pipe.here:
        if stage in templates:
            here = templates[stage]
            values = (
                _checked(stage, *pair, taken) for pair in zip(here.keys, here.leaves, strict=True)
            )
            out[stage] = tree.unflatten(here.spec, values)
        else:
            out[stage] = _nested(names, stage, taken)
    return out


def _checked(stage: int, key: str, like: Any, taken: Mapping[str, Tensor]) -> Any:
    if not tree.is_tensor(like):
        return like
    if key not in taken:
        raise CheckpointError(
            f"{key!r} of stage {stage} is missing; pass the tensors of the whole model"
        )
    value = taken[key]
    if value.shape != like.shape or value.dtype != like.dtype:
        raise CheckpointError(
            f"{key!r} is {tree.describe([value])[1:-1]}, and stage {stage} takes "
            f"{tree.describe([like])[1:-1]}; pass "
            "the tensors of this model, and dtype= to convert them"
        )
    return value


def _nested(names: Names, stage: int, taken: Mapping[str, Tensor]) -> Any:
    """Nested dicts and lists of the tensors whose names begin as those of a stage."""
    rows: dict[str, Node] = {
        path: ["leaf", key] for (s, path), (key, _) in names.ties.items() if s == stage
    }
    for head, path in _heads(names.stages[stage]):
        for key in taken:
            if key == head or key.startswith(f"{head}."):
                below = key.removeprefix(head).removeprefix(".")
                rows[under(path, below) if below else path] = ["leaf", key]
    missing = [key for _, key in rows.values() if key not in taken]
    if missing or not rows:
        raise CheckpointError(
            f"there is no tensor {missing[0] if missing else names.stages[stage].prefix!r} for "
            f"stage {stage}; pass the "
            "tensors of the whole model, by names as fpipe.stream has them, or like=params"
        )

    def leaf(node, path):
        return taken[node[1]] if node[0] == "leaf" else NotImplemented

    return _lists(from_node(nested(rows), "", leaf))


def _lists(value: Any) -> Any:
    """Dicts whose keys count from 0 as lists."""
    if not isinstance(value, dict):
        return value
    below = {key: _lists(item) for key, item in value.items()}
    numbers = [str(number) for number in range(len(below))]
    return [below[number] for number in numbers] if set(below) == set(numbers) else below
