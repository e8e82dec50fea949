"""Random stages: straight lines of operations between pytrees of every kind."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import optree
import torch
from torch import Tensor

import fpipe

from .operations import BY_NAME, OPERATIONS, WIDTH


class Named(NamedTuple):
    """A container of the user's, with fields."""

    first: Any
    rest: Any


class Step(NamedTuple):
    """One operation of a stage: on which working tensors, with which parameters."""

    name: str
    a: int
    b: int
    params: tuple[int, ...]


@dataclass(frozen=True)
class Body:
    """What a random stage does: ``outputs`` are working tensors, of which the first ``inputs`` are
    its input leaves.
    """

    steps: tuple[Step, ...]
    inputs: int
    outputs: tuple[int, ...]
    container: str
    shapes: tuple[tuple[int, ...], ...]
    nested: bool  # parameters in nested containers
    extras: tuple[Any, ...] = ()  # output leaves that are no tensors
    counter: bool = False  # an integer tensor passes through
    aux_loss: bool = False
    state: bool = False
    side: bool = False
    carry: str = ""  # a name of CARRIES
    remat: bool = False  # the whole stage

    @property
    def random(self) -> bool:
        """Whether the stage draws random numbers."""
        return any(BY_NAME[step.name].random for step in self.steps)

    @property
    def traceable(self) -> bool:
        """Whether the stage can be traced."""
        return all(BY_NAME[step.name].traceable for step in self.steps)

    def __str__(self) -> str:
        lines = [f"{self.inputs} in -> {self.container} of {list(self.outputs)}"]
        flags = [
            name
            for name in ("nested", "counter", "aux_loss", "state", "side", "remat")
            if getattr(self, name)
        ]
        flags += [f"carry {self.carry}"] if self.carry else []
        lines += (
            [f"  {' '.join(flags)} {self.extras or ''}".rstrip()] if flags or self.extras else []
        )
        lines += [
            f"  t{self.inputs + n} = {s.name}(t{s.a}, t{s.b}; p{list(s.params)})"
            for n, s in enumerate(self.steps)
        ]
        return "\n".join(lines)


def tensors_of(x: Any) -> list[Tensor]:
    """The floating leaves of a pytree."""
    return [
        leaf
        for leaf in optree.tree_leaves(x, namespace="fpipe")
        if isinstance(leaf, Tensor) and leaf.is_floating_point()
    ]


def pack(kind: str, leaves: Sequence[Any]) -> Any:
    """Leaves in a container of a kind."""
    rest = list(leaves[1:])
    match kind:
        case "tuple":
            return tuple(leaves)
        case "list":
            return list(leaves)
        case "dict":
            return {f"k{len(leaves) - n}": leaf for n, leaf in enumerate(leaves)}
        case "named":
            return Named(leaves[0], rest)
        case "deep":
            return {"x": (leaves[0], [None, {"y": rest}]), "none": None}
        case _:
            return leaves[0] if len(leaves) == 1 else tuple(leaves)


CONTAINERS = ("bare", "tuple", "list", "dict", "named", "deep")


#: Each operation as a block.
BLOCKS = {name: fpipe.block(operation.apply) for name, operation in BY_NAME.items()}


# ---- carries ----
class Carry(NamedTuple):
    """What a stage passes from slice to slice: the carry of the first slice, what is added to the
    input of the stage, and the carry of the next slice. ``x`` and ``y`` are the first and the last
    working tensor, of shape ``[rows, tokens, WIDTH]``.
    """

    initial: Callable[[Tensor], Any] | None
    read: Callable[[Any], Tensor | None]
    after: Callable[[Any, Tensor, Tensor], Any]


def _appended(carry: Any, x: Tensor, y: Tensor) -> Tensor:
    return y if carry is None else torch.cat([carry, y.to(carry.dtype)], 1)


def _counted(carry: Any, x: Tensor, y: Tensor) -> Any:
    return {"n": carry["n"] + 1, "h": 0.5 * carry["h"] + y[:, -1:].tanh(), "word": "kept"}


CARRIES = {
    "sum": Carry(
        lambda x: x.new_zeros(len(x), 1, WIDTH), lambda c: c, lambda c, x, y: c + y[:, :1]
    ),
    "append": Carry(None, lambda c: None if c is None else c.mean(1, keepdim=True), _appended),
    "tree": Carry(
        lambda x: {"n": torch.tensor(0), "h": x.new_ones(len(x), 1, WIDTH), "word": "kept"},
        lambda c: c["h"] * 0.5,
        _counted,
    ),
    "output": Carry(torch.zeros_like, lambda c: c, lambda c, x, y: y),
    "input": Carry(torch.ones_like, lambda c: c.sin(), lambda c, x, y: x),
    "kept": Carry(torch.ones_like, lambda c: c, lambda c, x, y: c),
    "detached": Carry(torch.ones_like, lambda c: c * 0.5, lambda c, x, y: y.detach()),
    "unread": Carry(torch.ones_like, lambda c: None, lambda c, x, y: y),
}


def initial_carry(body: Body) -> Any:
    """What ``Stage(initial_carry=)`` gets."""
    initial = CARRIES[body.carry].initial
    return None if initial is None else lambda x: initial(tensors_of(x)[0])


def function(
    body: Body, blocks: str = "", tokens: bool = False, traced: bool = False
) -> Callable[..., Any]:
    """The stage function of a body; ``blocks``: its "steps", or the "whole", are blocks. With
    ``tokens`` tensors have an axis more, the second one. ``traced``: plain autograd is to have
    the bits of a trace.
    """

    def run(p: Any, carry: Any, x: Any, scale: Tensor | None) -> tuple[Any, Any, Tensor]:
        leaves = optree.tree_leaves(x, namespace="fpipe")
        shaped = [leaf for leaf in leaves if isinstance(leaf, Tensor) and leaf.is_floating_point()]
        axes = shaped[0].shape[:2]
        read = CARRIES[body.carry].read(carry) if body.carry else None
        work = shaped[:] if read is None else [shaped[0] + read.to(shaped[0].dtype), *shaped[1:]]
        if scale is not None:
            work[0] = work[0] * scale
        work = [leaf.flatten(0, 1) for leaf in work] if tokens else work
        flat = optree.tree_leaves(p, namespace="fpipe")
        for step in body.steps:
            operation = BY_NAME[step.name]
            params = [flat[i].to(work[step.a].dtype) for i in step.params]
            apply = BLOCKS[step.name] if blocks == "steps" else operation.apply
            apply = operation.traced or apply if traced else apply
            work.append(apply(work[step.a], work[step.b], params))
        first, last = shaped[0], work[-1]
        if tokens:
            work = [leaf.unflatten(0, axes) for leaf in work]
        outputs = [work[place] for place in body.outputs]
        others = [
            leaf for leaf in leaves if isinstance(leaf, Tensor) and not leaf.is_floating_point()
        ]
        if body.counter:
            count = torch.arange(len(last))
            others = others or [count.unflatten(0, axes) if tokens else count]
        carry = CARRIES[body.carry].after(carry, first, work[-1]) if body.carry else None
        return pack(body.container, [*outputs, *others[:1], *body.extras]), carry, last

    def results(p: Any, *given: Any, scale: Tensor | None = None) -> Any:
        *before, x = given
        state: Any = before.pop(0) if body.state else None
        y, carry, last = run(p, before[0] if before else None, x, scale)
        out = [y, *([carry] if body.carry else [])]
        out += [last.square().mean() * 0.1] if body.aux_loss else []
        if body.state:
            out.append({"n": state["n"] + 1, "m": 0.9 * state["m"] + 0.1 * last.detach().mean(0)})
        return out[0] if len(out) == 1 else tuple(out)

    if blocks == "whole":
        results = fpipe.block(results)
    # fpipe reads the signature: a side input is an argument that is given by keyword alone
    if body.side:
        with_side = lambda p, *given, scale: results(p, *given, scale=scale)
        return fpipe.remat(with_side) if body.remat else with_side
    without = lambda p, *given: results(p, *given)
    return fpipe.remat(without) if body.remat else without


def parameters(body: Body, generator: torch.Generator, dtype: torch.dtype) -> Any:
    """The parameters of a body, drawn."""
    leaves = [
        torch.randn(shape, generator=generator, dtype=dtype) / WIDTH**0.5 for shape in body.shapes
    ]
    if body.nested:
        return {
            "a": leaves[: len(leaves) // 2],
            "b": {"c": tuple(leaves[len(leaves) // 2 :])},
            "none": None,
        }
    return leaves


@dataclass(frozen=True)
class Shape:
    """What the generator may use."""

    dropout: bool = False
    dtype32: bool = True
    eager: bool = False
    tokens: bool = False


def random_body(draw: random.Random, inputs: int, limits: Shape) -> Body:
    """One random stage that takes ``inputs`` floating leaves."""
    usable = [
        o
        for o in OPERATIONS
        if (limits.dropout or not o.random)
        and (limits.dtype32 or not o.only32)
        and (limits.eager or o.traceable)
    ]
    steps: list[Step] = []
    shapes: list[tuple[int, ...]] = []
    for number in range(draw.choice((0, 1, 1, 2, 2, 3, 4, 6))):
        operation = draw.choice(usable)
        places = inputs + number
        reuse = [
            i
            for i in range(len(shapes))
            if len(operation.shapes) == 1 and shapes[i] == operation.shapes[0]
        ]
        if reuse and draw.random() < 0.3:
            params: tuple[int, ...] = (draw.choice(reuse),)
        else:
            params = tuple(range(len(shapes), len(shapes) + len(operation.shapes)))
            shapes += operation.shapes
        near = max(0, places - 3)
        steps.append(
            Step(operation.name, draw.randrange(near, places), draw.randrange(places), params)
        )
    if draw.random() < 0.15:
        shapes.append((2,))  # a parameter that nothing reads
    total = inputs + len(steps)
    outputs = [total - 1, *(draw.randrange(total) for _ in range(draw.choice((0, 0, 0, 1, 1, 2))))]
    draw.shuffle(outputs)
    extras = draw.choice(((), (), (), (), (3,), ("word", 0.5), (True,)))
    return Body(
        tuple(steps),
        inputs,
        tuple(outputs),
        draw.choice(CONTAINERS),
        tuple(shapes),
        draw.random() < 0.3,
        extras,
        counter=draw.random() < 0.15,
        aux_loss=draw.random() < 0.12,
        state=draw.random() < 0.1,
        side=draw.random() < 0.15,
        carry=draw.choice(list(CARRIES)) if limits.tokens and draw.random() < 0.6 else "",
        remat=draw.random() < 0.1,
    )
