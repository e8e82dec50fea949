# SPDX-License-Identifier: Apache-2.0
"""Mistakes in options and arguments: errors that name the value, the rule and the remedy.

``option_checks`` checks the options of a pipeline. Knows no configuration and no plan.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping, Sequence, Set
from difflib import get_close_matches
from numbers import Integral, Real
from typing import Any

import torch
from torch import Tensor

from ..actions.text import counted
from ..collectives.group import Group
from ..errors import BatchError, StageError
from ..programs.cache import Spent
from ..schedule import Schedule


def check_seed(seed: object) -> None:
    """Raise StageError for a seed that is no integer.

    Ranks compare the text of a seed, and the text of another value may differ between them.
    """
    if seed is not None and (isinstance(seed, bool) or not isinstance(seed, Integral)):
        raise StageError(f"seed={seed!r}; give an integer, such as int(...) of it")


def wrong_schedule(
    schedule: Schedule, ranks: int, stages: int, microbatches: int, slices: int
) -> StageError:
    """The error for a schedule that does not fit the pipeline."""
    if schedule.slices != slices:
        remedy = (
            f"schedule.sliced({slices})" if schedule.slices == 1 else f"slices={schedule.slices}"
        )
        return StageError(
            f"slices={slices}, but the schedule has {counted(schedule.slices, 'slice')} a "
            f"microbatch; give {remedy}, or a name, which is made with as many"
        )
    if schedule.ranks != ranks:
        return StageError(
            f"the schedule is for {schedule.ranks} ranks, the group has {ranks}; make both agree"
        )
    if schedule.stages != stages:
        return StageError(
            f"the schedule runs {schedule.stages} stages, the pipeline has {stages}; give as many "
            "stages as it runs, or make_schedule(..., stages=)"
        )
    return StageError(
        f"the schedule is for {schedule.microbatches} microbatches, but {microbatches} are run; "
        "say microbatches= as the schedule does, or give a name or a function"
    )


# ---- arguments of a call ----
def check_call(has_loss: bool, has_aux: bool, each: object, scale: Any) -> None:
    """Raise BatchError where an option of a call has a value that is not allowed."""
    if has_aux and not has_loss:
        raise BatchError(
            "has_aux=True, but the pipeline has no loss to return it; say pipeline(..., loss=)"
        )
    if each is not None and not callable(each):
        loss = ", what the loss returned" if has_loss else ""
        raise BatchError(
            f"each={each!r}; give a function of (the microbatch's number, its output{loss})"
        )
    if scale is None or (isinstance(scale, Tensor) and scale.shape == ()):
        return
    if (
        isinstance(scale, bool)
        or not isinstance(scale, Real)
        or not 0 < float(scale) < float("inf")
    ):
        raise BatchError(f"loss_scale={scale!r}; give one number above 0, or a tensor without axes")


def no_graph(**_: object) -> None:
    """In place of ``loss.backward``."""
    raise StageError(
        "loss.backward(): the loss of a pipeline has no graph, since the schedule computes the "
        "gradients; loss, grads = fpipe.value_and_grad(pipe)(params, x, y) returns them, and "
        "fpipe.interop.bind(modules).add_grads(grads) adds them to .grad"
    )


#: Attributes of the loss that a call returns. Without a state it is pickled as any tensor.
LOSS = {"backward": no_graph, "__getstate__": dict}


def check_sliced(leaves: Sequence[object], slices: int) -> None:
    """Raise BatchError where no tensor of x can be cut: each slice would be all of x."""
    tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
    if all(leaf.dim() < 2 for leaf in tensors):
        raise BatchError(
            f"slices={slices}, but no tensor of x has a second axis, that of the sequence; give "
            "it one, or leave out slices="
        )


def check_sides(read: Set[str], side: Iterable[str]) -> None:
    """Raise BatchError for a side input that no stage reads, and neither the loss.

    ``read`` are the names that these read.
    """
    for name in side:
        if name not in read:
            near = get_close_matches(name, read, 1)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            raise BatchError(
                f"no stage and no loss names a keyword-only argument {name!r}{hint} (they name "
                f"{', '.join(sorted(read)) or 'none'}); targets come behind x without names, and a "
                "stage names a side input behind a *, as in stage(p, x, *, mask)"
            )


def uncut(leaf: Tensor, parts: int, name: str) -> BatchError:
    """The error for a tensor that cannot be cut into equal parts."""
    if leaf.layout is not torch.strided:
        return BatchError(
            f"{name} holds a tensor of layout {leaf.layout}, which cannot be cut into {parts} "
            "microbatches; pass fpipe.Microbatches([...]), or to_dense() of it"
        )
    if leaf.dim() == 0:
        return BatchError(
            f"{name} holds a tensor without axes, which cannot be cut into {parts} microbatches; "
            "give it a batch axis, or pass a Python number to give every microbatch the same"
        )
    return BatchError(
        f"{name} has {leaf.shape[0]} rows, which {parts} microbatches do not divide; change the "
        "batch or microbatches=, or pass fpipe.Microbatches([...]) of any sizes"
    )


def check_rows(lengths: Mapping[str, Set[int]]) -> None:
    """Raise BatchError where two batch arguments, by name, have other numbers of rows: rows that
    do not belong together would be in one microbatch.
    """
    pairs = [
        (name, rows)
        for name, several in lengths.items()
        for rows in sorted(several)
        if rows != 1 or not (name.startswith("side") or several > {1})  # such as a mask for all
    ]
    first, one = pairs[0]
    for name, rows in pairs:
        if rows != one:
            raise BatchError(
                f"{first} has {one} rows and {name} has {rows}; give arguments of as many rows, "
                "fpipe.Microbatches([...]) of parts that belong together, or a Python number that "
                "all microbatches get"
            )


def without_strides(leaves: Sequence[object]) -> BatchError:
    """The error for a tensor without strides among the arguments."""
    layouts = {str(leaf.layout) for leaf in leaves if isinstance(leaf, Tensor)}
    without = ", ".join(sorted(layouts - {"torch.strided"}))
    return BatchError(
        f"an argument has the layout {without}, and a "
        "tensor without strides cannot be an argument of a stage; give its parts (crow_indices, "
        "col_indices and values, say), or to_dense() of it"
    )


def nested(name: str) -> BatchError:
    """The error for a nested tensor in a batch argument."""
    return BatchError(
        f"{name} holds a nested tensor, whose rows have different lengths, and stages take tensors "
        "of one shape; pass its values and lengths, or torch.nested.to_padded_tensor of it"
    )


def untrainable(stage: int, leaf: Tensor) -> StageError:
    """The error for a sparse parameter, or a trained one of float8."""
    what = f"a parameter of stage {stage} is"
    if leaf.is_sparse:
        return StageError(f"{what} sparse, and parameters must be dense; pass to_dense() of it")
    return StageError(
        f"{what} trained and {leaf.dtype}, of which torch adds no gradients; freeze it with "
        "frozen=, or keep it in bfloat16 and convert it in the stage"
    )


def unhashable(call: Any) -> BatchError:
    """The error for a call with a leaf that is not hashable, as a signature must be."""
    trees = {f"params[{stage}]": flat for stage, flat in call.leaves.items()}
    trees |= {f"state[{stage}]": flat for stage, flat in call.state_leaves.items()}
    trees |= {part.name: (part.leaves, part.structure) for part in call.batch_parts}
    remedy = 'numbers, strings or None, or register its class (optree, namespace="fpipe")'
    for tree, (leaves, structure) in trees.items():
        for name, leaf in zip(_names(tree, structure), leaves, strict=True):
            try:
                hash(leaf)
            except TypeError:
                kind = type(leaf).__name__
                if kind == "ndarray":
                    remedy = "torch.from_numpy(...) of it, which shares its memory"
                what = f"{name} is a {kind}, neither a tensor nor hashable"
                return BatchError(f"{what}; pass {remedy}")
    return BatchError(f"a side input is neither a tensor nor hashable; pass tensors, {remedy}")


def _names(name: str, structure: Any) -> list[str]:
    """The names of the leaves of an argument: of a tree, or of ``Microbatches``."""
    if isinstance(structure, tuple):
        return [leaf for m, part in enumerate(structure) for leaf in _names(f"{name}[{m}]", part)]
    return [name + "".join(f"[{key!r}]" for key in path) for path in structure.paths()]


def misplaced(name: str, leaf: Tensor, group: Group, devices: Sequence[torch.device]) -> str:
    """The message for a tensor on a device that no rank of this process can read.

    On the device meta, for instance, tensors hold no numbers.
    """
    return (
        f"a tensor of {name} is on {leaf.device} and rank {group.here[0]} is on "
        f"{' and '.join(map(str, devices))}; give tensors with numbers in them, on the CPU or "
        "where the rank is"
    )


def warn_of_shapes(spent: Sequence[Sequence[Spent]], limit: float) -> None:
    """Warn of the time that many shapes cost, if it is more than ``limit`` seconds.

    The plans of the first call are not counted.
    """
    total = sum((part for parts in spent[1:] for part in parts), Spent())
    if total.seconds > limit:
        warnings.warn(
            f"plans for {len(spent)} kinds of arguments were prepared so far; after the first "
            f"this took {total.seconds:.1f} s: {total}. fpipe.pad(..., multiple=) gives fewer "
            "lengths; a stage that is traced for each length can name the axes that vary: "
            "fpipe.Stage(fn, dynamic=). A Python number that is another one in each call costs a "
            "trace each time; as a tensor, torch.tensor(...), it costs one",
            stacklevel=2,
        )


def surrounded(stage: str | None) -> StageError:
    """The error for a plan that would run inside a stage, or inside a torch.func transform."""
    where = "a torch.func transform" if stage is None else f"stage {stage}"
    return StageError(
        f"a plan cannot run inside {where}, which would not see its gradients; call the pipeline, "
        "fpipe.grad or fpipe.value_and_grad there, or torch.func's transforms of them"
    )
