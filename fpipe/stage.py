# SPDX-License-Identifier: Apache-2.0
"""``Stage``: a stage function with its options.

A stage is a pure function of its parameters and its input. This module knows neither programs,
schedules nor ranks.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field, replace
from typing import Any, Literal, NamedTuple, TypeAlias, TypeVar, get_args

import torch

from .errors import StageError, checked

F = TypeVar("F", bound=Callable[..., Any])
#: Programs that were traced, or autograd.
Engine: TypeAlias = Literal["trace", "eager"]
#: The axes of inputs that may have any size; see ``dynamic`` of :class:`Stage`.
Dynamic: TypeAlias = bool | Sequence[int] | Mapping[str, Sequence[int]] | None
#: The numbers of blocks in the model; see ``layers`` of :class:`Stage`.
Layers: TypeAlias = Sequence[int] | Mapping[str, Sequence[int] | str] | None


class _Missing:
    """The type of MISSING: an argument that was not given, where None is a value."""

    def __repr__(self) -> str:
        return "MISSING"

    __reduce__ = __repr__  # it is pickled as the global of this name


MISSING = _Missing()


class Weight(NamedTuple):
    """A parameter of a module.

    ``key`` is its name in the whole model. ``like`` is a tensor without data, of its shape and
    dtype.
    """

    key: str
    like: torch.Tensor


@dataclass(frozen=True)
class Elsewhere:
    """Stands for the function of a stage that is on another process.

    ``text`` is the description that this process gave. If the function has modes, ``moded`` is the
    description for one of them. ``sides`` are the names of the side inputs.
    """

    text: str = ""
    sides: tuple[str, ...] = ()
    moded: str = ""

    def __call__(self, /, *args: Any, **side: Any) -> Any:
        raise StageError(
            "this stage is on another process and cannot run here; see fpipe.Stage.elsewhere"
        )


@dataclass(frozen=True)
class Stage:
    """A stage function with its options. A function without options can be passed as it is.

    Args:
        fn: ``fn(params, x, *, side)``; keyword-only arguments are side inputs.
        aux_loss: ``fn`` returns ``(y, scalar)``, and the scalar is added to the loss.
        state: ``fn(params, state, x)`` returns ``(y, state)``. If a stage has replicas, each
            updates its state from the microbatches that it runs, and the state of the first replica
            is returned.
        engine: overrides the engine of the pipeline.
        compile: overrides the compiler of the pipeline.
        frozen: patterns of leaves of this stage that get no gradient: dotted paths within the
            stage, such as ``"attention.*"``.
        ties: pairs of the path of a leaf and the name of a group. The leaves of a group, on any
            stages, are one parameter.
        name: the name of the stage in messages and checkpoints.
        initial_state: the first state, where the caller passes none.
        carry: ``fn(params, carry, x)`` returns ``(y, carry)`` and runs slice after slice of a
            sequence, see ``slices`` of ``fpipe.pipeline``. The carry of the last slice is dropped.
            With ``state``, ``fn(params, state, carry, x)`` returns ``(y, carry, state)``.
        initial_carry: what the first slice of each microbatch gets: a pytree of tensors and
            numbers, None, or a function of x that returns one.
        like: a function of the same arguments whose result has the structure, shapes and dtypes of
            the result of ``fn``; ``lambda p, x: x`` for most blocks. For ``engine="eager"``, if the
            control flow of ``fn`` depends on values of tensors.
        dynamic: which axes of inputs may have any size without another trace: ``True``, axes, or
            axes by leaf, ``{"x": (0, 1), "mask": (2, 3)}``. None: those that differ between calls.
            ``False`` traces every size.
        layers: the numbers in the model of the equal blocks of the stage. Checkpoints then do not
            depend on where the model is cut. If the parameters are a list of four blocks, give
            ``range(4, 8)``. If ``params["blocks"]`` is such a list, and ``params["wte"]`` is called
            ``embed`` in the model, give ``{"blocks": range(4, 8), "wte": "embed"}``.
        weights: the parameters of a module, by their names in the stage; ``from_module`` sets them.

    >>> Stage(lambda p, x: (x, x.sum()), aux_loss=True).aux_loss
    True
    """

    fn: Callable[..., Any]
    _: KW_ONLY
    aux_loss: bool = False
    state: bool = False
    engine: Engine | None = None
    compile: str | None = None
    frozen: tuple[str, ...] = ()
    ties: tuple[tuple[str, str], ...] = ()
    name: str = ""
    initial_state: Any = field(default=None, compare=False)
    carry: bool = False
    initial_carry: Any = field(default=MISSING, compare=False)
    like: Callable[..., Any] | None = None
    dynamic: Dynamic = None
    layers: Layers = field(default=None, compare=False)
    weights: Mapping[str, Weight] | None = field(default=None, compare=False)

    def __new__(cls, *args: Any, **named: Any) -> Stage:
        if named.keys() - cls.__dataclass_fields__:  # an error with the name that was meant
            checked(cls.__init__)(*args, **named)
        return object.__new__(cls)

    def __post_init__(self) -> None:
        check_function("a stage", "(params, x)", self.fn)
        if self.engine not in (None, *get_args(Engine)):
            raise StageError(
                f"engine={self.engine!r}; give one of {', '.join(map(repr, get_args(Engine)))}"
            )
        plain = self.compile in (None, "addmm")
        if not plain and self.compile not in torch.compiler.list_backends(()):
            raise StageError(
                f"compile={self.compile!r} is no compiler; choose 'addmm', 'inductor' or one of "
                "torch.compiler.list_backends()"
            )
        object.__setattr__(self, "frozen", patterns("frozen", self.frozen))
        if not _names_axes(self.dynamic):
            raise StageError(
                f"dynamic={self.dynamic!r}; give True, False, axes such as (0, 1), or axes by "
                f"leaf, {{'x': (0, 1)}}"
            )

    @classmethod
    def elsewhere(cls) -> Stage:
        """A stage that only other processes have, for the list of all stages in this process.

        Every process must then call ``fpipe.pipeline``: those that have the stage describe it to
        the others.

        Returns:
            A stage that cannot be called.

        >>> Stage.elsewhere().label
        'a stage of another process'
        """
        return cls(Elsewhere(), name="a stage of another process")

    def __call__(self, /, *args: object, **side: object) -> Any:
        return self.fn(*args, **side)

    @property
    def label(self) -> str:
        """A name for messages."""
        return self.name or getattr(self.fn, "__qualname__", type(self.fn).__name__)

    @property
    def sides(self) -> tuple[str, ...]:
        """The keyword-only arguments of the function: its side inputs."""
        return keyword_only(self.fn)


setattr(Stage.__new__, "__wrapped__", Stage.__init__)  # noqa: B010  (for inspect.signature)


def as_stage(fn: Callable[..., Any] | Stage) -> Stage:
    """A Stage of a function; a Stage itself."""
    if isinstance(fn, Stage):
        return fn
    if isinstance(fn, torch.nn.Module) and not _takes_params(fn):
        raise StageError(
            f"a stage must be a function fn(params, x), not the module {type(fn).__name__}; "
            f"{OF_MODULES}"
        )
    return Stage(fn)


def check_function(what: str, arguments: str, fn: object) -> None:
    """Raise StageError for a value that cannot be called."""
    if not callable(fn):
        raise StageError(f"{what} must be a function fn{arguments}, not {type(fn).__name__} {fn!r}")


def _names_axes(dynamic: object) -> bool:
    """Whether a value is valid for ``dynamic=``."""
    if isinstance(dynamic, bool | None):
        return True
    by_leaf = dynamic if isinstance(dynamic, Mapping) else {"": dynamic}
    return all(
        isinstance(leaf, str) and isinstance(axes, Sequence) and all(type(a) is int for a in axes)
        for leaf, axes in by_leaf.items()
    )


def patterns(option: str, names: object) -> tuple[str, ...]:
    """The patterns of names in the value of an option.

    A single text is refused, because its letters would be read as patterns.

    >>> patterns("frozen", ["0.*", "3.norm"])
    ('0.*', '3.norm')
    """
    if isinstance(names, str) or not isinstance(names, Iterable):
        raise StageError(f"{option}={names!r}; give a list of patterns such as {option}=['0.*']")
    listed = tuple(names)
    for name in listed:
        if not isinstance(name, str):
            raise StageError(
                f"{option}={list(listed)!r} has the {type(name).__name__} {name!r}; give texts "
                "such as '0.*'"
            )
    return listed


#: The remedy where a module was passed as a stage.
OF_MODULES = (
    "stages, params = fpipe.from_module(model, cuts) cuts a module, and "
    "fpipe.interop.bind(modules) takes one for each "
    "stage"
)


def keyword_only(fn: Callable[..., Any]) -> tuple[str, ...]:
    """The names of the keyword-only arguments of a function.

    >>> def block(p, x, *, mask): ...
    >>> keyword_only(block)
    ('mask',)
    """
    if isinstance(fn, Elsewhere):
        return fn.sides
    try:
        parameters = inspect.signature(fn).parameters.values()
    except (TypeError, ValueError):
        return ()
    return tuple(p.name for p in parameters if p.kind is p.KEYWORD_ONLY)


def with_defaults(stage: Stage, engine: Engine, compile: str | None = None) -> Stage:
    """The stage with the engine and the compiler of the pipeline, if it has none."""
    engine = stage.engine or engine
    default = compile if engine == "trace" else None
    return replace(stage, engine=engine, compile=stage.compile or default)


def _takes_params(module: torch.nn.Module) -> bool:
    """Whether a module can be called as a stage: with parameters and x."""
    try:
        inspect.signature(module.forward).bind(None, None)
    except TypeError:
        return False
    return True
