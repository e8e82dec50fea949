"""Calls that a type checker must report; ``test_typing.py`` runs pyright on this file.

A comment at the end of a line is the rule that is reported there, and a part of the message where
it says more.
"""

from __future__ import annotations

from torch import Tensor

import fpipe
from fpipe import Pipeline


def layer(p: Tensor, x: Tensor) -> Tensor:
    """A stage."""
    return x @ p


def loss_of(y: Tensor, target: Tensor) -> Tensor:
    """A loss."""
    return (y - target).square().mean()


def of_options() -> None:
    """Options that do not exist, or have no such value."""
    fpipe.pipeline([layer], loss=loss_of, reduction="summ")  # error: "Literal['summ']"
    fpipe.pipeline([layer], outputs="first")  # error: "Literal['first']"
    fpipe.pipeline([layer], engine="jit")  # error: "Literal['jit']"
    fpipe.copies(fpipe.local(1), zero=4)  # error: "Literal[4]"
    fpipe.copies(fpipe.local(1), reduction="max")  # error: "Literal['max']"
    fpipe.pipeline([layer], overlap="wave")  # error: "Literal['wave']"
    fpipe.pipeline([layer], microbatch=4)  # error: reportCallIssue
    fpipe.pipeline(layer)  # error: reportArgumentType
    fpipe.pipeline([3])  # error: "list[int]"
    fpipe.Stage(layer, engine="lazy")  # error: "Literal['lazy']"
    fpipe.make_schedule("ZBV", ranks="4", microbatches=8)  # error: "Literal['4']"
    fpipe.testing.run(lambda group: None, ranks=2, order="random")  # error: "Literal['random']"


def of_calls(
    pipe: Pipeline[Tensor, Tensor], outputs: Pipeline[Tensor, None], params: list[Tensor], x: Tensor
) -> None:
    """Transforms of the wrong kind of pipeline, and results of the wrong kind."""
    fpipe.value_and_grad(layer)  # error: "(p: Tensor, x: Tensor) -> Tensor"
    fpipe.value_and_grad(pipe, argnums=2)  # error: "Literal[2]"
    fpipe.vjp(pipe, params, x)  # error: "Pipeline[Tensor, Tensor]"
    fpipe.value_and_grad(pipe)(params)  # error: reportCallIssue
    outputs(params, x).backward_all()  # error: backward_all
    loss, grads = fpipe.value_and_grad(pipe)(params, x, x)
    grads.w  # error: Attribute "w"  # noqa: B018
    _, dx = fpipe.value_and_grad(pipe, 1)(params, x, x)
    dx.norm()  # error: reportOptionalMemberAccess
    fpipe.adamw("fast")  # error: "Literal['fast']"
    fpipe.chain(fpipe.adamw)  # error: "Transform"
    fpipe.apply_updates(params, grads)["w"]  # error: "Literal['w']"
    del loss
