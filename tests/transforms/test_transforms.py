"""One table of all transforms: split over processes they do what they do on the whole model, to the bit, and what
torch's own optimizers or a few plain lines say they should do."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import optree
import pytest
import torch
from torch import Tensor

import split_world
from fpipe import transforms as T
from fpipe.errors import TransformError
from pieces import same

STAGES, STEPS = 8, 4
TIED = (("0.wte", "7.wte"),)


def model(seed: int = 0, dtype: torch.dtype = torch.float32, scale: float = 1.0) -> list[Any]:
    """Eight stages; the last one's embedding is the first one's."""
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> Tensor:
        return scale * torch.randn(shape, generator=generator, dtype=dtype)

    wte = draw(7, 4)
    middle = [{"b": draw(5), "deep": [{"w": draw(4, 5)}], "w": draw(5, 4)} for _ in range(STAGES - 2)]
    return [{"wte": wte}, *middle, {"norm": draw(4), "wte": wte.clone()}]


def gradients(steps: int = STEPS, scale: float = 0.3) -> list[list[Any]]:
    return [model(seed, scale=scale) for seed in range(100, 100 + steps)]


def follow(tx: T.Transform, params: Any, grads: list[Any]) -> tuple[Any, Any]:
    """Parameters and state after some steps."""
    state = tx.init(params)
    for gradient in grads:
        updates, state = tx.update(gradient, state, params)
        params = T.apply_updates(params, updates)
    return params, state


# ---- what each should do, on a flat list of leaves ------------------------------------------------------------------
Plain = Callable[[list[Tensor], list[list[Tensor]]], list[Tensor]]


def by_torch(optimizer: Callable[[Any], Any], before: Callable[[Any], Any] = lambda leaves: None) -> Plain:
    def steps(params: list[Tensor], grads: list[list[Tensor]]) -> list[Tensor]:
        own = [torch.nn.Parameter(p.clone()) for p in params]
        made = optimizer(own)
        for gradient in grads:
            for p, g in zip(own, gradient, strict=True):
                p.grad = g.clone()
            before(own)
            made.step()
        return [p.detach() for p in own]

    return steps


def by_hand(rule: Callable[..., tuple[Tensor, Any]], start: Callable[[Tensor], Any] = lambda p: None) -> Plain:
    """Each leaf alone, with ``rule(gradient, memory, t, param) -> (update, memory)``, t from 1."""

    def steps(params: list[Tensor], grads: list[list[Tensor]]) -> list[Tensor]:
        after = []
        for index, p in enumerate(params):
            memory = start(p)
            for t, gradient in enumerate(grads, 1):
                update, memory = rule(gradient[index], memory, t, p)
                p = p + update
            after.append(p)
        return after

    return steps


def lion_rule(g: Tensor, m: Tensor, t: int, p: Tensor) -> tuple[Tensor, Tensor]:
    return -0.02 * ((0.9 * m + 0.1 * g).sign() + 0.1 * p), 0.99 * m + 0.01 * g


def ema_rule(g: Tensor, m: Tensor, t: int, p: Tensor) -> tuple[Tensor, Tensor]:
    m = 0.8 * m + 0.2 * g
    return -m / (1 - 0.8**t), m


def clip(max_norm: float, p: float) -> Callable[[Any], Any]:
    return lambda own: torch.nn.utils.clip_grad_norm_(own, max_norm, p)


def sgd1(own: Any) -> Any:
    return torch.optim.SGD(own, lr=1.0)


def untied(rule: Plain) -> Plain:
    """The rule on a model in which the tied embedding is one parameter: the last stage's copy is left out."""

    def steps(params: list[Tensor], grads: list[list[Tensor]]) -> list[Tensor]:
        after = rule(params[:-1], [gradient[:-1] for gradient in grads])
        return [*after, after[0]]

    return steps


class Row(NamedTuple):
    make: Callable[[Any], T.Transform]
    expected: Plain | None
    close: float = 1e-6
    tied: bool = False  # gradients of tied copies are the same, as a pipeline gives them


def descend(*transforms: T.Transform) -> T.Transform:
    return T.chain(*transforms, T.scale(-1.0))


def warm(step: int) -> float:
    return 0.1 / (1 + step)


def clipping(p: float, exact: bool = False) -> Row:
    make = lambda over: descend(T.clip_by_global_norm(0.7, over=over, p=p, exact=exact))
    return Row(make, untied(by_torch(sgd1, clip(0.7, p))), tied=True)


TABLE = {
    "identity": Row(lambda over: descend(T.identity()), by_hand(lambda g, m, t, p: (-g, m))),
    "scale": Row(lambda over: T.scale(-0.5), by_hand(lambda g, m, t, p: (-0.5 * g, m))),
    "scale_by_schedule": Row(
        lambda over: descend(T.scale_by_schedule(warm)), by_hand(lambda g, m, t, p: (-warm(t - 1) * g, m))
    ),
    "cast": Row(
        lambda over: descend(T.cast(torch.bfloat16)), by_hand(lambda g, m, t, p: (-g.bfloat16().float(), m)), 1e-6
    ),
    "clip 2": clipping(2.0),
    "clip 2 exact": clipping(2.0, exact=True),
    "clip 1": clipping(1.0),
    "clip 3 exact": clipping(3.0, exact=True),
    "clip inf": clipping(math.inf),
    "clip inf exact": clipping(math.inf, exact=True),
    "clip_by_value": Row(
        lambda over: descend(T.clip_by_value(0.2)), by_hand(lambda g, m, t, p: (-g.clamp(-0.2, 0.2), m))
    ),
    "weight_decay": Row(lambda over: descend(T.weight_decay(0.1)), by_hand(lambda g, m, t, p: (-(g + 0.1 * p), m))),
    "add_noise": Row(lambda over: descend(T.add_noise(0.01, seed=5)), None),
    "skip_nonfinite": Row(
        lambda over: T.chain(T.skip_nonfinite(over=over), T.sgd(0.1)), by_torch(lambda own: torch.optim.SGD(own, 0.1))
    ),
    "dynamic_loss_scale": Row(
        lambda over: T.chain(T.dynamic_loss_scale(4.0, over=over), T.sgd(1.0)),
        by_hand(lambda g, m, t, p: (-g / 4, m)),
    ),
    "accumulate": Row(
        lambda over: T.chain(T.accumulate(2), T.sgd(1.0)),
        by_hand(lambda g, m, t, p: (-(m + g) / 2, 0) if t % 2 == 0 else (0 * g, g), lambda p: 0),
    ),
    "accumulate sum": Row(
        lambda over: T.chain(T.accumulate(3, reduction="sum"), T.sgd(1.0)),
        by_hand(lambda g, m, t, p: (-(m + g), 0) if t % 3 == 0 else (0 * g, m + g), lambda p: 0),
    ),
    "ema": Row(lambda over: descend(T.ema(0.8)), by_hand(ema_rule, torch.zeros_like)),
    "ema of params": Row(
        lambda over: descend(T.ema(0.8, of="params")), by_hand(lambda g, m, t, p: (-g, m), torch.zeros_like)
    ),
    "sgd": Row(lambda over: T.sgd(0.1), by_torch(lambda own: torch.optim.SGD(own, 0.1))),
    "sgd momentum": Row(
        lambda over: T.sgd(0.1, 0.9, dampening=0.3, weight_decay=0.05),
        by_torch(lambda own: torch.optim.SGD(own, 0.1, 0.9, 0.3, 0.05)),
    ),
    "sgd nesterov": Row(
        lambda over: T.sgd(0.1, 0.9, nesterov=True),
        by_torch(lambda own: torch.optim.SGD(own, 0.1, 0.9, nesterov=True)),
    ),
    "adamw": Row(lambda over: T.adamw(0.01), by_torch(lambda own: torch.optim.AdamW(own, 0.01, foreach=True))),
    "adamw options": Row(
        lambda over: T.adamw(0.02, (0.8, 0.9), 1e-3, 0.2, fused=False),
        by_torch(lambda own: torch.optim.AdamW(own, 0.02, (0.8, 0.9), 1e-3, 0.2, foreach=True)),
    ),
    "lion": Row(lambda over: T.lion(0.02, weight_decay=0.1), by_hand(lion_rule, torch.zeros_like)),
    "muon": Row(
        lambda over: T.masked(T.muon(0.02), matrices),
        lambda params, grads: [
            after[0] if p.ndim == 2 else p + sum(gradient[i] for gradient in grads)
            for i, p in enumerate(params)
            for after in [
                by_torch(lambda own: torch.optim.Muon(own, 0.02))([p], [[g[i]] for g in grads]) if p.ndim == 2 else [p]
            ]
        ],
    ),
    "masked": Row(lambda over: T.chain(T.masked(T.scale(3.0), ["1", "*.b"]), T.scale(-1.0)), None),
    "partition": Row(
        lambda over: T.partition(
            {
                "matrix": T.chain(T.clip_by_global_norm(0.5, over=over, exact=True), T.muon(0.02)),
                "other": T.chain(T.clip_by_global_norm(0.5, over=over, exact=True), T.adamw(0.01)),
            },
            lambda params: optree.tree_map(lambda p: "matrix" if p.ndim == 2 else "other", params),
        ),
        None,
    ),
    "from_torch": Row(
        lambda over: T.from_torch(torch.optim.RMSprop, lr=0.01, momentum=0.9),
        by_torch(lambda own: torch.optim.RMSprop(own, lr=0.01, momentum=0.9)),
    ),
    "from_torch adamw": Row(
        lambda over: T.from_torch(torch.optim.AdamW, lr=0.01), by_torch(lambda own: torch.optim.AdamW(own, 0.01))
    ),
    "sum_tied": Row(lambda over: descend(T.sum_tied(TIED, over=over)), None),
    "all together": Row(
        lambda over: T.chain(
            T.skip_nonfinite(over=over),
            T.clip_by_global_norm(0.7, over=over, exact=True),
            T.accumulate(2),
            T.adamw(warm, mask=["*.w"]),
            T.ema(0.9, of="params"),
        ),
        None,
        tied=True,
    ),
}


def matrices(params: Any) -> Any:
    return optree.tree_map(lambda p: p.ndim == 2, params)


def inputs(row: Row) -> tuple[list[Any], list[list[Any]]]:
    grads = gradients()
    if row.tied:
        for gradient in grads:
            gradient[-1]["wte"] = gradient[0]["wte"].clone()
    return model(), grads


@pytest.mark.parametrize("name", [name for name, row in TABLE.items() if row.expected])
def test_does_what_it_says(name: str):
    row = TABLE[name]
    params, grads = inputs(row)
    after, _ = follow(row.make(None), params, grads)
    if row.tied:  # without a pipeline that names them, tied copies are two parameters
        after, _ = split_world.run(
            [range(STAGES)], STAGES, lambda over: follow(row.make(over), params, grads), tied=TIED
        )[0]
    assert row.expected
    expected = row.expected(optree.tree_leaves(params), [optree.tree_leaves(g) for g in grads])
    assert any(not torch.equal(p, q) for p, q in zip(optree.tree_leaves(params), expected, strict=True))
    for got, wanted in zip(optree.tree_leaves(after), expected, strict=True):
        torch.testing.assert_close(got, wanted, rtol=row.close, atol=row.close)


@pytest.mark.parametrize(("processes", "how"), [(2, "V"), (4, "loop")])
@pytest.mark.parametrize("name", TABLE)
def test_split_is_whole(name: str, processes: int, how: str):
    """Parameters and state, stage by stage: the same bits wherever the stages live."""
    row = TABLE[name]
    params, grads = inputs(row)
    spread = split_world.owners(STAGES, processes, how=how)

    def process(over: split_world.Pretend) -> tuple[Any, Any]:
        return follow(row.make(over), over.place(params), [over.place(g) for g in grads])

    whole, whole_state = split_world.run([range(STAGES)], STAGES, process, tied=TIED)[0]
    parts = split_world.run(spread, STAGES, process, tied=TIED)
    assert same(split_world.merge([after for after, _ in parts]), whole)
    for rank, (after, state) in enumerate(parts):
        assert [stage for stage, part in enumerate(after) if part is not None] == list(spread[rank])
        assert same(state, placed(whole_state, spread[rank]))


def placed(state: Any, here: Any) -> Any:
    """A state with what lives elsewhere taken out: wherever it has a list with one entry per stage."""
    listed = lambda node: isinstance(node, list) and len(node) == STAGES
    return optree.tree_map(
        lambda node: [p if s in here else None for s, p in enumerate(node)] if listed(node) else node,
        state,
        is_leaf=listed,
    )


@pytest.mark.parametrize("name", TABLE)
def test_leaves_its_arguments_alone(name: str):
    row = TABLE[name]
    params, grads = inputs(row)
    tx = row.make(None)
    state = tx.init(params)
    for gradient in grads:
        before = optree.tree_map(torch.clone, (gradient, state, params))
        updates, after = tx.update(gradient, state, params)
        T.apply_updates(params, updates)
        assert same((gradient, state, params), before)
        state = after


@pytest.mark.parametrize("name", TABLE)
def test_frozen_leaves(name: str):
    """A gradient of None, for a leaf or a stage, changes neither the parameter nor the others' updates' places."""
    row = TABLE[name]
    if "tied" in name:
        return
    params, grads = inputs(row)
    for gradient in grads:
        gradient[1]["w"] = gradient[3] = None
    tx = row.make(None)
    after, state = follow(tx, params, grads)
    assert after[1]["w"] is params[1]["w"]
    assert all(after[3][key] is params[3][key] for key in ("b", "w"))
    assert not torch.equal(after[2]["w"], params[2]["w"])
    assert optree.tree_structure(state) == optree.tree_structure(follow(tx, params, gradients())[1]) or "torch" in name


@pytest.mark.parametrize("name", TABLE)
def test_a_process_without_stages(name: str):
    """It has nothing to update and still takes part in what all ask each other."""
    row = TABLE[name]
    params, grads = inputs(row)

    def process(over: split_world.Pretend) -> tuple[Any, int]:
        after, _ = follow(row.make(over), over.place(params), [over.place(g) for g in grads])
        return after, over.sums

    (full, sums), (empty, others) = split_world.run([range(STAGES), []], STAGES, process, tied=TIED)
    assert empty == [None] * STAGES
    assert sums == others
    assert same(full, split_world.run([range(STAGES)], STAGES, process, tied=TIED)[0][0])


def test_chain_checks_its_state():
    tx = T.chain(T.identity(), T.identity())
    with pytest.raises(TransformError, match="a state of 1 parts for a chain of 2"):
        tx.update([torch.ones(1)], ((),))


def test_misfit_trees_are_told():
    tx = T.adamw(0.1)
    params = [{"w": torch.ones(1)}, None]
    state = tx.init(params)
    with pytest.raises(TransformError, match=r"params has None where the gradients have a leaf: 0\.w"):
        tx.update([{"w": torch.ones(1)}, None], state, [{"w": None}, None])
    with pytest.raises(TransformError, match="the state does not have the form of the gradients"):
        tx.update([{"v": torch.ones(1)}, None], state, params)
    with pytest.raises(TransformError, match="the state does not have the form") as caught:
        tx.update(params, state._replace(m=[torch.ones(999)]), params)
    assert "tensor" not in str(caught.value)
    with pytest.raises(TransformError, match="needs the parameters"):
        tx.update([{"w": torch.ones(1)}, None], state)
    with pytest.raises(TransformError, match="params does not have the form"):
        T.apply_updates([torch.ones(1)], [torch.ones(1), None])


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: T.clip_by_global_norm(0.0), "max_norm=0.0"),
        (lambda: T.global_norm([torch.ones(1)], p=0.0), "p=0.0"),
        (lambda: T.clip_by_value(1.0, -1.0), "nothing lies in"),
        (lambda: T.accumulate(0), r"accumulate\(0\)"),
        (lambda: T.accumulate(2, reduction="max"), "reduction='max'"),  # type: ignore[arg-type]
        (lambda: T.ema(1.5), "decay=1.5"),
        (lambda: T.ema(0.5, of="grads"), "of='grads'"),  # type: ignore[arg-type]
        (lambda: T.adamw(0.1, betas=(0.9, 1.0)), r"betas=\(0.9, 1.0\)"),
        (lambda: T.lion(0.1, weight_decay=-1.0), "weight_decay=-1.0"),
        (lambda: T.sgd(0.1, nesterov=True), "momentum > 0"),
        (lambda: T.sgd(0.1, -0.5), "momentum=-0.5"),
        (lambda: T.muon(0.1, steps=0), "steps=0"),
        (lambda: T.muon(0.1, adjust="x"), "adjust='x'"),  # type: ignore[arg-type]
        (lambda: T.muon(0.1).init([{"b": torch.ones(3)}]), r"0.b \(3,\)"),
        (lambda: T.add_noise(-1.0), "eta=-1.0"),
        (lambda: T.dynamic_loss_scale(0.0), "init_scale=0.0"),
        (lambda: T.sum_tied(), "needs groups of names"),
        (lambda: T.sum_tied([("0.x", "1.w")]).init([{"w": torch.ones(1)}] * 2), "'0.x': 0"),
        (lambda: T.from_torch(torch.optim.LBFGS), "without a closure"),
        (lambda: T.from_torch("adamw"), "not a class"),  # type: ignore[arg-type]
        (lambda: T.partition({"a": T.identity()}, {"*": "b"}).init([torch.ones(1)]), r"\['b'\] have no transform"),
        (lambda: T.partition({"a": T.identity()}, {"9": "a"}).init([torch.ones(1)]), "no pattern of"),
        (lambda: T.masked(T.identity(), [True]).init([torch.ones(1)] * 2), "labels do not fit"),
    ],
)
def test_mistakes_are_told(make: Callable[[], Any], words: str):
    with pytest.raises(TransformError, match=words):
        make()
