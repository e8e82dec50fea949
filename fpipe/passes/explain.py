# SPDX-License-Identifier: Apache-2.0
"""Errors for a stage function that cannot be traced or is not pure.

Loaded when there is something to explain.
"""

from __future__ import annotations

import re
import traceback
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from os.path import dirname, sep
from types import GeneratorType

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    UnsupportedOperatorException,
)
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode
from torch.overrides import _get_current_function_mode_stack
from torch.utils import checkpoint

from ..engine.kinds import _NOTHING
from ..engine.request import Request
from ..errors import ActionError, FpipeError, StageError, TraceError
from ..lowering.instruction import Instruction
from ..programs.internals import quiet
from ..programs.program import Programs
from ..stage import Stage
from ..tree import AbstractTree, Aval

#: Parts of torch's messages about code that runs on real tensors but not on fake ones.
_UNTRACEABLE = (
    "symbolically trace",
    "fake impl",
    "meta kernel",
    "meta tensors",
    "inputs of bf16",
)
#: Parts of torch's messages about code that reads the memory of a tensor without data.
_MEMORY = ("data pointer", ".numpy()", 'set the storage of a tensor on device "meta"')

#: Errors of operations on fake tensors whose result depends on data.
_DATA_DEPENDENT = (
    DataDependentOutputException,
    DynamicOutputShapeException,
    GuardOnDataDependentSymNode,
)
#: Parts of torch's messages about code that reads values, also from C++.
_DATA = ("data-dependent", "data dependent", "its data is not allocated")
#: How to run a stage that cannot be traced, also where the caller did not write its function.
EAGERLY = (
    'run it on autograd, with engine="eager" for the pipeline or for the stage: fpipe.Stage(fn, '
    'engine="eager"), or '
    'dataclasses.replace(stage, engine="eager") for one from from_module or huggingface.stages'
)


def first_line(error: BaseException) -> str:
    """The first line of an error's message; torch adds advice for those who write kernels.

    >>> first_line(ValueError("no\\nuse torch.library"))
    'no'
    """
    return next(iter(str(error).strip().splitlines()), type(error).__name__)


def explain(error: Exception, label: str, shapes: str) -> TraceError | ActionError:
    """The exception to raise for an error in a stage function that ran on fake tensors of these
    shapes.
    """
    place = where(error)
    text = str(error).lower()
    if isinstance(error, _DATA_DEPENDENT) or any(part in text for part in _DATA):
        return TraceError(
            f"stage {label} {shapes} depends on data{place}: a value decides what is computed or "
            f"of which shape, so it has no straight-line program; {EAGERLY}"
        )
    if any(part in text for part in _MEMORY):
        return TraceError(
            f"stage {label} {shapes} reads the memory of a tensor{place}, as numpy() and copies of "
            "storages do, and tensors have no memory while a stage is traced; compute that outside "
            f"of the stage and close over the result, or {EAGERLY}"
        )
    if isinstance(error, UnsupportedOperatorException) or any(
        part in text for part in _UNTRACEABLE
    ):
        return TraceError(
            f"stage {label} {shapes} cannot be traced{place}: {first_line(error)}; {EAGERLY}"
        )
    return ActionError(f"stage {label} {shapes} raised {type(error).__name__}{place}: {error}")


@contextmanager
def explained(label: str, shapes: str) -> Iterator[None]:
    """Raise ``explain`` of what a stage function raises inside; errors of fpipe pass. Without
    torch's log of it.
    """
    try:
        with quiet():
            yield
    except FpipeError:
        raise
    except Exception as error:
        raise explain(error, label, shapes) from error


def leave_checkpoints(error: BaseException) -> None:
    """End the checkpoints of torch in which an error was raised.

    Before torch 2.13 their hooks stay, also for other functions, as long as the traceback exists:
    in a notebook until the next error.
    """
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    for frame in reversed(frames):
        if frame.f_code.co_filename == checkpoint.__file__:
            for value in frame.f_locals.values():
                if isinstance(value, GeneratorType):
                    value.close()


def where(error: BaseException) -> str:
    """The innermost line of the user's code in a traceback, for a message."""
    return where_in(traceback.extract_tb(error.__traceback__))


def where_in(stack: Iterable[traceback.FrameSummary]) -> str:
    """The innermost line of the user's code in a stack, for a message."""
    # Compared by path: a directory of the user's may be called fpipe, too.
    libraries = (*torch.__path__, dirname(dirname(__file__)))
    inside = (*(path + sep for path in libraries), "<fpipe")
    standard = dirname(traceback.__file__) + sep
    frames = [
        frame
        for frame in stack
        if not frame.filename.startswith(inside)
        and ("site-packages" in frame.filename or not frame.filename.startswith(standard))
    ]
    if frames:
        return f" at {frames[-1].filename}:{frames[-1].lineno} ({frames[-1].line})"
    return ""


def nested_tensor_error(label: str, aval: Aval) -> TraceError:
    """The error for an argument that is a tensor with tensors inside."""
    return TraceError(
        f"stage {label} is given a {aval}, and tensors that contain tensors cannot be traced; give "
        f"it the local tensors, or {EAGERLY}"
    )


def check_function_modes(label: str) -> None:
    """Raise TraceError under a TorchFunctionMode of the user: the program would be under it
    again.
    """
    for mode in map(type, _get_current_function_mode_stack()):
        if not mode.__module__.startswith("torch."):
            raise TraceError(
                f"stage {label} is traced while {mode.__name__} is active, and a TorchFunctionMode "
                f"would change the program again when it runs; enter it inside of the stage, or "
                f"{EAGERLY}"
            )


def sparse_gradient_error(label: str, shape: Sequence[int]) -> TraceError:
    """The error for a function whose gradient of a parameter is a sparse tensor."""
    return TraceError(
        f"stage {label} has a sparse gradient of shape {list(shape)}, and gradients are added and "
        "sent as dense tensors; leave sparse=True out of its embedding"
    )


def write_error(what: str) -> TraceError:
    """The error for a stage that writes into what it shares with others."""
    return TraceError(
        f"a stage writes into {what} in place; stages are pure functions: return what changes "
        "(fpipe.Stage(fn, state=True) carries running statistics)"
    )


def captured_write_error(label: str, tensor: Tensor) -> TraceError:
    """The error for a stage that writes into a tensor of its closure."""
    return TraceError(
        f"stage {label} writes into a tensor of shape {list(tensor.shape)} that it closes over; "
        "stages are pure "
        "functions: return what changes (fpipe.Stage(fn, state=True) carries running statistics)"
    )


def seed_error(label: str) -> TraceError:
    """The error for a stage that seeds a random stream."""
    return TraceError(
        f"stage {label} seeds, sets or restores a random stream of torch (torch.manual_seed, "
        "torch.seed, torch.set_rng_state or torch.random.fork_rng), which a trace does not record: "
        "its draws would be other ones. Pass seed= to fpipe.pipeline or to the call, which makes "
        f"every draw a function of the seed, the stage and the microbatch; or {EAGERLY}"
    )


def captured_gradient_error(label: str, tensor: Tensor) -> TraceError:
    """The error for a stage that closes over a tensor that requires a gradient."""
    return TraceError(
        f"stage {label} closes over a tensor of shape {list(tensor.shape)} that requires a "
        "gradient, which it would silently not get; pass it in the stage's parameters, or close "
        "over tensor.detach(). A loss that a stage computes beside its output, as of a router, is "
        "fpipe.Stage(fn, aux_loss=True). A stage with like= may create leaves that are views of "
        "its input, and no others"
    )


def other_parameters_error(label: str, tensor: Tensor) -> TraceError:
    """The error for a backward that computes with a captured tensor that requires a gradient."""
    return TraceError(
        f"the backward of stage {label} computes with a tensor of shape {list(tensor.shape)} that "
        "requires a gradient and is no parameter of the stage: a module has the parameters that "
        "torch.func.functional_call passes during the call alone, and a checkpoint inside it runs "
        "again later, with others. Remove the checkpoint, and put fpipe.remat around the function "
        "that calls functional_call"
    )


#: Part of Python's message about a function with other arguments.
_ARITY = re.compile(r"TypeError: .*(positional|keyword-only) argument")
#: Part of torch's message about a parameter that is written into.
_IN_PLACE = "leaf Variable that requires grad is being used in an in-place operation"


# ---- instructions ----
#: Part of autograd's message, which concerns stages with engine="eager".
_CHANGED = "modified by an inplace operation"


def action_error(error: Exception, ins: Instruction, rank: int) -> ActionError:
    """The exception to raise for an error of an instruction on a rank."""
    specs = getattr(ins.op, "specs", ())
    from_tensors = "(" + ", ".join(map(str, specs)) + ")" if specs else ""
    what = (
        ins.kind
        if ins.action is None
        else f"each= after {ins.action}"
        if ins.kind == "EACH"
        else str(ins.action)
    )
    whose = f" ({ins.program.stage})" if ins.program is not None and ins.program.stage else ""
    kind = ""
    if not isinstance(error, FpipeError):
        kind = f" raised {type(error).__name__}{where(error)}"
    hint = (
        "; a tensor that a backward needs was changed in place: change a copy"
        if _CHANGED in str(error)
        else ""
    )
    if ins.kind == "EACH" and _ARITY.search(f"TypeError: {error}"):
        hint += "; each= is called with the microbatch's number, its output and its loss"
    if "same dtype" in str(error):
        hint += "; give both one dtype, as p.to(x.dtype) does: parameters of integers are constants"
    return ActionError(
        f"{what}{whose} on rank {rank}{kind}: {error} {from_tensors}".rstrip() + hint
    )


def check_gradient(stage: Stage, made: Programs, x: AbstractTree, request: Request) -> None:
    """Raise StageError for a stage of which no argument has a gradient, although its outputs depend
    on one that wants it.
    """
    if request.mode == "forward" or made.outputs.unused:
        return
    if made.outputs.y.structure == _NOTHING:
        raise StageError(
            f"stage {stage.label} returned None; return its output: is a return missing?"
        )
    program = getattr(made, "f", None)
    reads = any(name.startswith("p") for name in getattr(program, "inputs", ()))
    if made.outputs.y.avals and not reads and not x.wanted:
        return  # it has parameters that it does not use
    raise StageError(
        f"stage {stage.label} returns nothing that has a gradient, so it and the stages before it "
        "would get zeros; leave out detach(), no_grad() and item(), and return tensors that are "
        "computed from its parameters or its input. What should not be trained is named by "
        'frozen=["0.*"]'
    )


def located(text: str, trees: Sequence[AbstractTree], index: int | None) -> str:
    """A message that names the stage, or the loss, and where its arguments, ``trees``, come
    from.
    """
    text = text.replace("FakeTensor", "Tensor")
    params, x = trees[:2]
    if index is None:
        nothing = x.structure.num_children and x.structure.children()[0] == _NOTHING
        hint = " (the last stage returned None: is a return missing?)" if nothing else ""
        if "depends on data" in text:
            hint += " A loss returns a tensor: leave out item() and float()"
        if _ARITY.search(text):
            hint += "; a loss is called as loss(y, *targets), with the targets of the call"
        return text.replace("stage ", "the loss ", 1) + hint
    kinds = [leaf.type for leaf in params.leaves if not isinstance(leaf, Aval)]
    module = next((kind for kind in kinds if issubclass(kind, torch.nn.Module)), None)
    if module is not None:
        return (
            f"stage {index}: its parameters hold the module {module.__name__}, and "
            "parameters are tensors; pass dict(module.named_parameters()), and call the module "
            "with torch.func.functional_call(module, p, x), or use fpipe.from_module"
        )
    if x.structure == _NOTHING and index:
        text += f" (stage {index - 1} returned None: is a return missing?)"
    if "required keyword-only argument" in text:
        text += "; pass side inputs to the call by their names, as in mask=mask"
    elif _ARITY.search(text):
        text += "; a stage is called as fn(params, x), with state and carry before x if it has them"
    elif "'NoneType'" in text:
        text += "; the state of a stage with state=True is passed to the call, as in state=[...]"
    if _IN_PLACE in text:
        text += " A stage must not write into its parameters: compute a new tensor, as p * 2"
    hints = (
        ["its parameters are None: give params one entry per stage"]
        if params.structure == _NOTHING
        else []
    )
    if index:
        hints.append(f"its input is what stage {index - 1} returns")
    elif x.structure.type in (list, tuple):
        hints.append(
            f"its input is a {x.structure.type.__name__}: a list of microbatches is passed as "
            "fpipe.Microbatches([...]), and targets behind x"
        )
    return f"stage {index}: {text}" + (f" ({'; '.join(hints)})" if hints else "")


# ---- what a stage or a loss returned ----
def parts_error(label: str, names: Sequence[str], out: object) -> StageError:
    """The error for a stage that returned something else than these parts."""
    count = f" of {len(out)}" if isinstance(out, tuple) else ""
    return StageError(
        f"stage {label} must return ({', '.join(names)}), but it returned a "
        f"{type(out).__name__}{count}"
    )


def aux_error(result: object) -> StageError:
    """The error for a loss that returned more than a scalar, without has_aux=True."""
    text = type(result).__name__
    if isinstance(result, tuple):
        text = f"a tuple of {len(result)}"
    return StageError(
        f"the loss returned {text}, where it must return one scalar tensor; return the scalar "
        "alone, or (scalar, aux) and pass has_aux=True to fpipe.value_and_grad"
    )


def scalar_error(label: str, first: Aval | None) -> StageError:
    """The error for a loss whose first tensor is not one floating number."""
    if first is None or first.shape != ():
        return StageError(
            f"the loss {label} must return one scalar tensor (or, with has_aux=True, a scalar and "
            f"anything); it returned {'no tensor' if first is None else first}. A number, as "
            "item() and float() return, has no gradient"
        )
    return StageError(f"the loss {label} must be floating, not {first.dtype}; take .float() of it")
