"""Norms per example over all stages, and gradients of scaled examples, beside torch.func on the
unsplit model.
"""

from __future__ import annotations

from typing import Any

import optree
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import fpipe
from fpipe.errors import StageError
from language_model import ROWS, WIDTH, WORDS, data, language
from models import cross_entropy, embed

LIMIT = 2.0


def block(p: Any, x: Tensor, *, gain: Tensor) -> tuple[Tensor, Tensor]:
    h = F.layer_norm(x, (WIDTH,), p["norm"])
    return x + torch.tanh(h @ p["w"]) * gain[:, None, None], 0.1 * x.square().mean()


def head(p: Any, x: Tensor) -> Tensor:
    return x @ p["w"]


def parameters() -> list[Any]:
    draw = torch.Generator().manual_seed(0)
    normal = lambda *shape: torch.randn(*shape, generator=draw)
    middle = [{"norm": normal(WIDTH), "w": normal(WIDTH, WIDTH), "step": 3} for _ in "ab"]
    return [{"wte": normal(WORDS, WIDTH)}, *middle, {"w": normal(WIDTH, WORDS)}]


def example(params: list[Any], x: Tensor, t: Tensor, gain: Tensor) -> Tensor:
    """The loss of one row, in one piece."""
    y, aux = embed(params[0], x[None]), torch.zeros(())
    for p in params[1:3]:
        y, more = block(p, y, gain=gain[None])
        aux = aux + more
    return cross_entropy(head(params[3], y), t[None]) + aux


def expected(frozen: bool = False) -> tuple[Tensor, list[Any], Tensor]:
    """Value, clipped gradients and norms by vmap of grad."""
    leaves, spec = optree.tree_flatten(parameters())
    live = [
        i for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor) and not (frozen and i == 0)
    ]

    def loss(*args: Any) -> Tensor:
        full = list(leaves)
        for i, leaf in zip(live, args, strict=False):
            full[i] = leaf
        return example(optree.tree_unflatten(spec, full), *args[len(live) :])  # type: ignore[arg-type]

    both = torch.func.grad_and_value(loss, tuple(range(len(live))))
    dims = (*[None] * len(live), 0, 0, 0)
    each, values = torch.vmap(both, dims)(*(leaves[i] for i in live), *data())
    norms = sum(g.flatten(1).square().sum(1) for g in each).sqrt()
    factors = (LIMIT / norms).clamp(max=1)
    return values.mean(), [torch.einsum("r,r...->...", factors, g) / ROWS for g in each], norms


def compute(group: Any, schedule: str, **options: Any) -> tuple[Tensor, Any, Tensor]:
    pipe = language(block, head, group, schedule, **options)
    x, t, gain = data()
    return fpipe.per_example(pipe, LIMIT)(pipe.place(parameters()), x, t, gain=gain)


def close(got: Any, want: Any) -> None:
    value, grads, norms = got
    found = [g for g in optree.tree_leaves(grads) if isinstance(g, Tensor)]
    assert len(found) == len(want[1])
    assert want[2].min() < LIMIT < want[2].max()
    for one, other in zip([value, *found, norms], [want[0], *want[1], want[2]], strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({}, id="whole", marks=pytest.mark.long),  # as on two ranks
        pytest.param({"frozen": ["0"]}, id="frozen"),
        pytest.param({"engine": "eager"}, id="eager"),
    ],
)
def test_on_a_local_group(options: Any):
    close(compute(fpipe.local(4), "ZB1P", **options), expected("frozen" in options))


def on_a_process() -> Any:
    return compute(fpipe.init(timeout=60), "ZBV")


def test_on_two_ranks():
    found = fpipe.launch(on_a_process, ranks=2, timeout=100)
    assert torch.equal(found[0][2], found[1][2])
    grads = [part if part is not None else found[1][1][s] for s, part in enumerate(found[0][1])]
    close((found[1][0], grads, found[0][2]), expected())


@pytest.mark.long
def test_other_scales_and_parts():
    """Without a scale the gradients are plain ones; a function decides otherwise; microbatches may
    differ in rows.
    """
    pipe = language(block, head, fpipe.local(2), "Interleaved1F1B", reduction="sum")
    x, t, gain = data()
    params, cut = parameters(), [1, 3, 1, 3]
    parts = [fpipe.Microbatches(part.split(cut)) for part in (x, t)]
    sides = {"gain": fpipe.Microbatches(gain.split(cut))}
    value, _, norms = fpipe.per_example(pipe, lambda n: (n > LIMIT).float())(
        params, *parts, **sides
    )
    want = expected()
    torch.testing.assert_close(value, want[0] * ROWS, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(norms, want[2], rtol=1e-5, atol=1e-6)
    grads = fpipe.per_example(pipe)(params, *parts, **sides)[1]
    total = lambda p: sum(
        example([{"wte": p}, *params[1:]], *row) for row in zip(x, t, gain, strict=True)
    )  # type: ignore[arg-type]
    torch.testing.assert_close(
        grads[0]["wte"], torch.func.grad(total)(params[0]["wte"]), rtol=1e-5, atol=1e-5
    )


def test_refusals():
    pipe = language(block, head, fpipe.local(2), "Interleaved1F1B")
    with pytest.raises(StageError, match="above 0"):
        fpipe.per_example(pipe, 0.0)
    with pytest.raises(StageError, match="tied"):
        fpipe.per_example(
            fpipe.pipeline(
                [head, head], loss=cross_entropy, group=fpipe.local(2), tied=[("0.w", "1.w")]
            )
        )
    with pytest.raises(StageError, match="need a loss"):
        fpipe.per_example(fpipe.pipeline([head], group=fpipe.local(1)))
    x, t, gain = data()
    with pytest.raises(StageError, match="one for each"):
        fpipe.per_example(pipe, lambda norms: norms[:1])(parameters(), x, t, gain=gain)
