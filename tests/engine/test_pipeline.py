"""The pipeline as API.md writes it: a function, its transforms, and what goes in and comes out of
them.
"""

from __future__ import annotations

from functools import partial, reduce
from pathlib import Path
from typing import Any, NamedTuple

import optree
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import fpipe
from common import layer, same, squared
from fpipe import testing

WIDTH, STAGES, PARTS = 3, 4, 4


@pytest.fixture
def params() -> list[Tensor]:
    torch.manual_seed(1)
    return [torch.randn(WIDTH, WIDTH) for _ in range(STAGES)]


@pytest.fixture
def x() -> Tensor:
    torch.manual_seed(2)
    return torch.randn(2 * PARTS, WIDTH)


@pytest.fixture
def t() -> Tensor:
    torch.manual_seed(3)
    return torch.randn(2 * PARTS, WIDTH)


def piped(fns: Any = None, schedule: Any = "ZBV", ranks: int = 2, **more: Any) -> fpipe.Pipeline:
    more = {"loss": squared, "microbatches": PARTS} | more
    return fpipe.pipeline(fns or [layer] * STAGES, schedule, group=fpipe.local(ranks), **more)


def parts(tree: Any, m: int = PARTS) -> list[Any]:
    flat, spec = optree.tree_flatten(tree, namespace="fpipe")
    columns = [leaf.chunk(m) if isinstance(leaf, Tensor) else [leaf] * m for leaf in flat]
    return [optree.tree_unflatten(spec, row) for row in zip(*columns, strict=True)]


def plain(
    fns: Any, params: Any, xs: Any, ts: Any, loss: Any = squared, shares: Any = None
) -> tuple[Tensor, Any]:
    """Loss and gradients by plain autograd, microbatch after microbatch."""
    flat, spec = optree.tree_flatten(params)
    flat = [
        leaf.detach().clone().requires_grad_() if leaf.is_floating_point() else leaf
        for leaf in flat
    ]
    leaves = optree.tree_unflatten(spec, flat)
    wrt = [leaf for leaf in flat if leaf.requires_grad]
    total, sums = [], []
    for m, y in enumerate(xs):
        for fn, p in zip(fns, leaves, strict=True):
            y = fn(p, y)
        value = loss(y, ts[m]) * (1.0 / len(xs) if shares is None else shares[m])
        grads = torch.autograd.grad(value, wrt, allow_unused=True)
        total.append(value.detach())
        sums.append(
            [torch.zeros_like(w) if g is None else g for w, g in zip(wrt, grads, strict=True)]
        )
    added = iter(reduce(lambda a, b: [u + v for u, v in zip(a, b, strict=True)], sums))
    grads = [next(added) if leaf.requires_grad else None for leaf in flat]
    return reduce(torch.add, total), optree.tree_unflatten(spec, grads)


def close(a: Any, b: Any) -> bool:
    pairs = zip(optree.tree_leaves(a), optree.tree_leaves(b), strict=True)
    return all(torch.allclose(u, v, atol=1e-6) for u, v in pairs)


# ---- the first page ----
def test_the_first_example_of_the_api():
    torch.manual_seed(0)

    def embed(p, tokens):
        return p["wte"][tokens]

    def block(p, x):
        return x + torch.tanh(x @ p["w1"]) @ p["w2"]

    def head(p, x):
        return x @ p["wte"].T

    def cross_entropy(logits, y):
        return F.cross_entropy(logits.flatten(0, -2), y.flatten())

    stages = [embed, *[block] * 6, head]
    wte = lambda: {"wte": torch.randn(7, 4)}
    params = [wte(), *({"w1": torch.randn(4, 5), "w2": torch.randn(5, 4)} for _ in range(6)), wte()]
    tokens, targets = torch.randint(7, (16, 3)), torch.randint(7, (16, 3))
    pipe = fpipe.pipeline(
        stages, schedule="ZBV", loss=cross_entropy, microbatches=8, group=fpipe.local(4)
    )
    true_loss, true = plain(stages, params, tokens.chunk(8), targets.chunk(8), cross_entropy)
    assert torch.equal(pipe(params, tokens, targets), true_loss)
    loss, grads = fpipe.value_and_grad(pipe)(params, tokens, targets)
    assert torch.equal(loss, true_loss) and same(grads, true)
    assert same(fpipe.grad(pipe)(params, tokens, targets), true)
    outputs = fpipe.pipeline(stages, schedule="ZBV", microbatches=8, group=fpipe.local(4))
    y, pullback = fpipe.vjp(outputs, params, tokens)
    dparams, dx = pullback(torch.ones_like(y))
    assert y.shape == (16, 3, 7) and len(dparams) == 8 and dx is None, "tokens have no gradient"


def test_nothing_of_the_users_is_touched(params: list[Tensor], x: Tensor, t: Tensor):
    mine = [torch.nn.Parameter(p.clone()) for p in params]
    copies = [v.clone() for v in (*mine, x, t)]
    versions = [v._version for v in (*mine, x, t)]
    state = torch.get_rng_state()
    loss, grads = fpipe.value_and_grad(piped(seed=3))(mine, x, t)
    assert all(p.grad is None for p in mine) and not loss.requires_grad
    assert not any(g.requires_grad for g in grads)
    assert all(torch.equal(a, b) for a, b in zip((*mine, x, t), copies, strict=True))
    assert versions == [v._version for v in (*mine, x, t)]
    assert torch.equal(state, torch.get_rng_state())
    assert torch.is_grad_enabled()


def test_gradients_alias_nothing(params: list[Tensor], x: Tensor, t: Tensor):
    tied = piped([lambda p, v: v + p[0] + p[1]] * STAGES)
    _, grads = fpipe.value_and_grad(tied)([(p[0], p[1]) for p in params], x, t)
    pointers = [g.data_ptr() for g in optree.tree_leaves(grads)]
    assert len(set(pointers)) == len(pointers)
    assert not {p.data_ptr() for p in (*params, x, t)} & set(pointers)


@pytest.mark.parametrize("schedule", ["ZBV", "1F1B"])
def test_two_leaves_with_one_gradient(schedule: str, x: Tensor, t: Tensor):
    """Both read the same value, and each adds into another sum."""
    both = lambda p, v: torch.tanh(v + p["a"] + p["b"])
    params = [{"a": torch.randn(2, WIDTH), "b": torch.randn(2, WIDTH)} for _ in range(STAGES)]
    ranks = 2 if schedule == "ZBV" else 4
    made = fpipe.value_and_grad(piped([both] * STAGES, schedule, ranks))(params, x, t)
    assert same(made, plain([both] * STAGES, params, parts(x), parts(t)))
    pointers = {g.data_ptr() for g in optree.tree_leaves(made[1])}
    assert len(pointers) == 2 * STAGES


@pytest.mark.parametrize("around", [torch.no_grad, torch.inference_mode])
def test_what_is_traced_first_under_another_grad_mode_is_traced_right(
    around: Any, params: list[Tensor], x: Tensor
):
    fresh = lambda p, v: torch.tanh(v @ p)  # it was not traced before
    loss = lambda y: y.square().mean()
    pipe = piped([fresh] * STAGES, "1F1B", 1, loss=loss)
    with around():
        fpipe.value_and_grad(pipe)(params, x)
    made = fpipe.value_and_grad(pipe)(params, x)
    assert same(
        made, plain([fresh] * STAGES, params, parts(x), [None] * PARTS, lambda y, _: loss(y))
    )


@pytest.mark.parametrize("around", [torch.no_grad, torch.inference_mode, torch.enable_grad])
def test_under_any_grad_mode(around: Any, params: list[Tensor], x: Tensor, t: Tensor):
    with around():
        made = fpipe.value_and_grad(piped())(params, x, t)
    assert same(made, plain([layer] * STAGES, params, parts(x), parts(t)))


def test_an_input_that_is_not_contiguous(params: list[Tensor], x: Tensor, t: Tensor):
    made = fpipe.value_and_grad(piped())(params, x.T.contiguous().T, t)
    assert same(made, plain([layer] * STAGES, params, parts(x.T.contiguous().T), parts(t)))


def test_params_may_be_a_tuple(params: list[Tensor], x: Tensor, t: Tensor):
    grads = fpipe.grad(piped())(tuple(params), x, t)
    assert isinstance(grads, tuple)
    assert isinstance(fpipe.grad(piped())(params, x, t), list)


def test_more_ranks_than_microbatches(params: list[Tensor], x: Tensor, t: Tensor):
    made = fpipe.value_and_grad(piped(schedule="1F1B", ranks=4, microbatches=2))(params, x, t)
    assert same(made, plain([layer] * STAGES, params, parts(x, 2), parts(t, 2)))


def test_place_and_here(params: list[Tensor]):
    pipe = piped()
    assert pipe.here == (0, 1, 2, 3)
    assert same(pipe.place(params), params)


@pytest.mark.parametrize("kind", ["name", "Schedule", "csv", "function"])
def test_a_schedule_is_a_name_a_value_a_file_or_a_function(
    kind: str, tmp_path: Any, params: Any, x: Any, t: Any
):
    schedule = fpipe.make_schedule("ZBV", 2, PARTS)
    schedule.to_csv(tmp_path / "plan.csv")
    given = {
        "name": "zbv",
        "Schedule": schedule,
        "csv": tmp_path / "plan.csv",
        "function": lambda ranks, microbatches: fpipe.make_schedule("ZBV", ranks, microbatches),
    }[kind]
    made = fpipe.value_and_grad(piped(schedule=given))(params, x, t)
    assert same(made, plain([layer] * STAGES, params, parts(x), parts(t)))


# ---- gradients of what ----
def test_argnums(params: list[Tensor], x: Tensor, t: Tensor):
    pipe = piped()
    loss, (dx, dp) = fpipe.value_and_grad(pipe, argnums=(1, 0))(params, x, t)
    leaf = x.clone().requires_grad_()
    y = [reduce(lambda v, p: layer(p, v), params, part) for part in leaf.chunk(PARTS)]
    true = torch.autograd.grad(
        sum(squared(a, b) / PARTS for a, b in zip(y, t.chunk(PARTS), strict=True)), leaf
    )[0]
    assert torch.equal(loss, pipe(params, x, t)) and torch.allclose(dx, true)
    assert same(dp, fpipe.grad(pipe)(params, x, t))
    assert torch.equal(fpipe.grad(pipe, argnums=1)(params, x, t), dx)
    xs, ts = fpipe.Microbatches(parts(x)), fpipe.Microbatches(parts(t))
    by_parts = fpipe.grad(pipe, argnums=1)(params, xs, ts)
    assert isinstance(by_parts, fpipe.Microbatches) and torch.equal(torch.cat(list(by_parts)), dx)


def test_gradient_of_a_tree_of_inputs(params: list[Tensor], x: Tensor, t: Tensor):
    first = lambda p, v: layer(p, v["a"]) * v["n"]
    given = {"a": x, "n": 2, "ids": torch.arange(8), "unused": x}
    dx = fpipe.grad(piped([first, layer, layer, layer]), argnums=1)(params, given, t)
    assert dx["n"] is None and dx["ids"] is None
    assert torch.equal(dx["unused"], torch.zeros_like(x)) and dx["a"].abs().sum() > 0


@pytest.mark.parametrize("schedule", ["GPipe", "ZBH1"])
@pytest.mark.parametrize(
    "fns",
    [
        [lambda p, v: v + p, lambda p, v: p],
        [lambda p, v: v + p, lambda p, v: v.detach() * p],
        [lambda p, v: (v * p, v + p), lambda p, v: v[0] * p],
    ],
    ids=["ignored", "detached", "one of two"],
)
def test_a_gradient_that_is_a_cotangent_which_nobody_gives(
    fns: Any, schedule: str, x: Tensor, t: Tensor
):
    params = [torch.randn(2, WIDTH) for _ in fns]
    found = fpipe.value_and_grad(piped(fns, schedule))(params, x, t)
    assert same(found, plain(fns, params, parts(x), parts(t)))


@pytest.mark.parametrize("engine", ["trace", "eager"])
@pytest.mark.parametrize("rows", [PARTS, 2 * PARTS])
def test_a_stage_that_sums_all_up_on_one_row_or_more(
    rows: int, engine: Any, params: list[Tensor], x: Tensor
):
    fns = [layer, lambda p, v: p[0, 0] + v.sum()]
    pipe = piped(fns, "GPipe", loss=lambda y: y * 2, engine=engine)
    found = fpipe.value_and_grad(pipe)(params[:2], x[:rows])
    assert same(
        found, plain(fns, params[:2], parts(x[:rows]), [None] * PARTS, loss=lambda y, _: y * 2)
    )


def test_a_default_device_is_not_where_a_pipeline_lives(params: list[Tensor], x: Tensor, t: Tensor):
    found = fpipe.value_and_grad(piped())(params, x, t)
    with torch.device("meta"):
        assert same(fpipe.value_and_grad(piped())(params, x, t), found)


@pytest.mark.parametrize("which", ["the parameters of stage 0", "x", "target 0"])
def test_numbers_that_are_not_there_are_refused(
    which: str, params: list[Tensor], x: Tensor, t: Tensor
):
    away = lambda name, value: value.to("meta") if name == which else value
    given = (
        [away("the parameters of stage 0", params[0]), *params[1:]],
        away("x", x),
        away("target 0", t),
    )
    with pytest.raises(fpipe.errors.BatchError, match=f"{which} is on meta and rank 0 is on cpu"):
        fpipe.value_and_grad(piped())(*given)


def test_a_tensor_without_axes_is_the_same_for_every_microbatch(
    params: list[Tensor], x: Tensor, t: Tensor
):
    heated = lambda p, v, *, heat: layer(p, v) * heat
    pipe = piped([heated, *[layer] * (STAGES - 1)])
    found = fpipe.value_and_grad(pipe)(params, x, t, heat=torch.tensor(0.5))
    assert same(found, fpipe.value_and_grad(pipe)(params, x, t, heat=0.5))


@pytest.mark.parametrize(
    ("make", "raised", "said"),
    [
        (
            lambda: piped(engine="jit"),
            fpipe.errors.StageError,
            "engine='jit'; give one of 'trace', 'eager'",
        ),
        (lambda: piped(microbatches=0), fpipe.errors.ScheduleError, "microbatches=0"),
        (
            lambda: fpipe.local(devices=["cpu", "cuda:99"]),
            fpipe.errors.GroupError,
            "device 'cuda:99' is not available",
        ),
        (
            lambda: fpipe.local(devices=["gpu"]),
            fpipe.errors.GroupError,
            "'gpu' is not a device; name a type",
        ),
    ],
)
def test_what_cannot_be_is_reported_before_anything_runs(
    make: Any, raised: type[Exception], said: str
):
    with pytest.raises(raised, match=said):
        make()


def test_a_scalar_without_a_total_to_join_is_refused(params: list[Tensor], x: Tensor):
    stages = [layer, fpipe.Stage(lambda p, v: (v @ p, p.sum()), aux_loss=True)]
    with pytest.raises(fpipe.errors.StageError, match="aux_loss=True, and without a loss"):
        fpipe.vjp(piped(stages, "GPipe", loss=None), params[:2], x)


def test_has_aux(params: list[Tensor], x: Tensor, t: Tensor):
    def loss(y, target):
        return squared(y, target), {
            "y": y,
            "target": target,
            "n": 3,
            "none": None,
            "mean": y.mean(),
        }

    (value, aux), grads = fpipe.value_and_grad(piped(loss=loss), has_aux=True)(params, x, t)
    true_loss, true = plain([layer] * STAGES, params, parts(x), parts(t))
    assert torch.equal(value, true_loss) and same(grads, true)
    assert isinstance(aux, list) and len(aux) == PARTS
    for k, one in enumerate(aux):
        y = reduce(lambda v, p: layer(p, v), params, parts(x)[k])
        assert same(one, {"y": y, "target": parts(t)[k], "n": 3, "none": None, "mean": y.mean()})
    grads, again = fpipe.grad(piped(loss=loss), has_aux=True)(params, x, t)
    assert same(grads, true) and same(again, aux)


def test_a_loss_that_passes_on_what_it_was_given(params: list[Tensor], x: Tensor):
    total = lambda p, v: (v @ p).sum()
    for ranks in (1, 2):
        pipe = piped(
            [layer, layer, layer, total], "1F1B" if ranks == 1 else "ZBV", ranks, loss=lambda y: y
        )
        made = fpipe.value_and_grad(pipe)(params, x)
        true = plain([layer, layer, layer, total], params, parts(x), [None] * PARTS, lambda y, _: y)
        assert same(made, true)


def test_several_targets_and_trees_of_targets(params: list[Tensor], x: Tensor, t: Tensor):
    one = lambda y, a, b: (y - a).square().mean() + (y * b["w"]).mean() * b["k"]
    loss = fpipe.value_and_grad(piped(loss=one))(params, x, t, {"w": t, "k": 2})[0]
    two = lambda y, a: (y - a).square().mean() + (y * a).mean() * 2
    assert torch.equal(loss, plain([layer] * STAGES, params, parts(x), parts(t), two)[0])


@pytest.mark.parametrize("schedule", ["ZBV", "1F1B", "DualPipeV", "GPipe"])
def test_vjp_with_a_loss_over_the_whole_batch(schedule: str, params: list[Tensor], x: Tensor):
    """A contrastive loss: every row against every other, over all microbatches."""
    pipe = piped(schedule=schedule, loss=None)
    y, pullback = fpipe.vjp(pipe, params, x)

    def contrast(v):
        return (v @ v.T).logsumexp(1).sum()

    dparams, dx = pullback(torch.func.grad(contrast)(y))
    whole = lambda ps, v: contrast(reduce(lambda h, p: layer(p, h), ps, v))
    true = torch.func.grad(whole, argnums=(0, 1))(params, x)
    assert all(
        torch.allclose(a, b, atol=1e-5)
        for a, b in zip([*dparams, dx], [*true[0], true[1]], strict=True)
    )


def test_a_pullback_is_called_once_or_kept(params: list[Tensor], x: Tensor):
    y, pullback = fpipe.vjp(piped(loss=None), params, x)
    first = pullback(torch.ones_like(y), retain=True)
    second = pullback(2 * torch.ones_like(y))
    assert close(second, optree.tree_map(lambda v: 2 * v, first))
    with pytest.raises(fpipe.errors.StageError, match="retain=True"):
        pullback(torch.ones_like(y))


def test_vjp_of_microbatches_and_trees(params: list[Tensor]):
    last = lambda p, v: {"a": layer(p, v), "positive": v > 0, "n": 2}
    xs = [torch.randn(n, WIDTH) for n in (1, 4, 2)]
    y, pullback = fpipe.vjp(
        piped([layer, layer, layer, last], loss=None), params, fpipe.Microbatches(xs)
    )
    assert [part["a"].shape[0] for part in y] == [1, 4, 2] and y[0]["n"] == 2
    dparams, dx = pullback(fpipe.Microbatches([{**part, "a": part["a"] * 2} for part in y]))
    leaves = [p.clone().requires_grad_() for p in params]
    starts = [v.clone().requires_grad_() for v in xs]
    outs = [reduce(lambda h, p: layer(p, h), leaves, v) for v in starts]
    true = torch.autograd.grad(outs, [*leaves, *starts], [2 * part["a"] for part in y])
    assert close([*dparams, *dx], list(true))


def test_torch_func_agrees(params: list[Tensor], x: Tensor, t: Tensor):
    pipe = piped(fns=[layer, layer, lambda p, v, *, scale: layer(p, v) * scale, layer])
    grads = torch.func.grad(lambda p: pipe(p, x, t, scale=x))(params)
    assert close(grads, fpipe.grad(pipe)(params, x, t, scale=x))
    aux = piped(
        [fpipe.Stage(lambda p, v: (layer(p, v), v.square().mean()), aux_loss=True)] * STAGES
    )
    assert close(torch.func.grad(lambda p: aux(p, x, t))(params), fpipe.grad(aux)(params, x, t))
    each = torch.func.vmap(lambda v: pipe(params, v, t, scale=x))(torch.stack([x, 2 * x]))
    assert close(each, torch.stack([pipe(params, x, t, scale=x), pipe(params, 2 * x, t, scale=x)]))


# ---- microbatches, sides, reductions ----
def test_microbatches_of_other_shapes_and_counts_from_call_to_call(params: list[Tensor]):
    pipe = piped()
    step = fpipe.value_and_grad(pipe)
    for sizes in ((2, 2, 2, 2), (1, 5, 2), (3,), (1, 5, 2), (2, 2, 2, 2), (1, 1, 1, 1, 1, 1, 1)):
        xs = [torch.randn(n, WIDTH) for n in sizes]
        ts = [torch.randn(n, WIDTH) for n in sizes]
        made = step(params, fpipe.Microbatches(xs), fpipe.Microbatches(ts))
        assert same(made, plain([layer] * STAGES, params, xs, ts)), sizes
    assert len(pipe.cache.plans) == 4, "a signature was planned twice"


def test_microbatches_of_other_structure(params: list[Tensor], x: Tensor, t: Tensor):
    first = lambda p, v: layer(p, v["a"]) + v.get("b", 0)
    xs = [{"a": x[:2]}, {"a": x[2:4], "b": x[:2]}, {"a": x[4:6], "b": 3.0}]
    ts = [t[:2], t[2:4], t[4:6]]
    made = fpipe.value_and_grad(piped([first, layer, layer, layer]))(
        params, fpipe.Microbatches(xs), fpipe.Microbatches(ts)
    )
    assert same(made, plain([first, layer, layer, layer], params, xs, ts))


def plain_with_sides(
    params: Any, x: Tensor, t: Tensor, mask: Tensor, weight: Tensor | None, scale: float
) -> Tensor:
    masked = lambda p, v: layer(p, v) * mask * scale
    loss = squared if weight is None else lambda y, a: (squared(y, a) * weight).mean()
    return plain([layer, masked, layer, masked], params, [x], [t], loss, [1 / PARTS])[0]


def test_side_inputs(params: list[Tensor], x: Tensor, t: Tensor):
    def masked(p, v, *, mask, scale=1.0):
        return layer(p, v) * mask * scale

    def loss(y, target, *, weight=None):
        return squared(y, target) if weight is None else (squared(y, target) * weight).mean()

    pipe = piped([layer, masked, layer, masked], loss=loss)
    mask, weight = (x > 0).float(), torch.rand(8)
    for scale, w in ((2.0, weight), (3.0, None)):
        given = {"mask": mask, "scale": scale} | ({} if w is None else {"weight": w})
        made = fpipe.value_and_grad(pipe)(params, x, t, **given)
        one = partial(plain_with_sides, params, scale=scale)
        shares = [None] * PARTS if w is None else parts(w)
        total = sum(map(one, parts(x), parts(t), parts(mask), shares))
        assert torch.equal(made[0], total)
    plan = pipe.plan(params, x, t, mask=mask, weight=weight)
    sent = [ins for rank in (0, 1) for ins in plan[rank].instructions if ins.kind == "SEND"]
    assert all(len(ins.reads) == 1 for ins in sent), "a side input was sent"


def test_reductions(params: list[Tensor], x: Tensor, t: Tensor):
    made = fpipe.value_and_grad(piped(reduction="sum"))(params, x, t)
    assert same(made, plain([layer] * STAGES, params, parts(x), parts(t), shares=[1.0] * PARTS))


def test_a_weighted_gradient_does_not_depend_on_the_cut(params: list[Tensor], x: Tensor):
    target = torch.tensor([1, -1, 2, 0, -1, -1, 2, 1])

    def tokens(y, a):
        return F.cross_entropy(y, a, ignore_index=-1, reduction="sum") / (a >= 0).sum().clamp(min=1)

    counted = fpipe.weighted(lambda a: (a >= 0).sum())
    whole = plain([layer] * STAGES, params, [x], [target], tokens)
    for sizes in ((8,), (4, 4), (1, 7), (2, 3, 3), (3, 1, 2, 2)):
        xs, ts = fpipe.Microbatches(x.split(sizes)), fpipe.Microbatches(target.split(sizes))
        made = fpipe.value_and_grad(piped(loss=tokens, reduction=counted))(params, xs, ts)
        assert close(made, whole), sizes


# ---- randomness ----
def test_draws_are_a_function_of_seed_stage_and_microbatch(
    params: list[Tensor], x: Tensor, t: Tensor
):
    noisy = lambda p, v: F.dropout(layer(p, v), 0.5)
    fns = [noisy] * STAGES
    first = fpipe.value_and_grad(piped(fns, "1F1B", 1, seed=5))(params, x, t)
    for schedule, ranks in (("GPipe", 4), ("1F1B", 2), ("ZBV", 2), ("DualPipeV", 2), ("Hanayo", 1)):
        assert same(
            fpipe.value_and_grad(piped(fns, schedule, ranks, seed=5))(params, x, t), first
        ), schedule
    assert not same(fpipe.value_and_grad(piped(fns, seed=6))(params, x, t), first)
    assert same(fpipe.value_and_grad(piped(fns, seed=6))(params, x, t, seed=5), first), (
        "a seed for one call"
    )
    assert torch.equal(piped(fns, seed=5)(params, x, t), first[0]), "forward alone draws the same"
    unseeded = piped(fns)
    assert not same(*(fpipe.value_and_grad(unseeded)(params, x, t) for _ in range(2)))


def test_a_loss_may_draw(params: list[Tensor], x: Tensor, t: Tensor):
    loss = lambda y, a: squared(F.dropout(y, 0.5), a)
    made = [
        fpipe.value_and_grad(piped(schedule=s, loss=loss, seed=1))(params, x, t)
        for s in ("ZBV", "DualPipeV")
    ]
    assert same(*made)


# ---- parameters ----
def test_frozen_leaves_get_none_and_cost_nothing(x: Tensor, t: Tensor):
    def affine(p, v):
        return torch.tanh(v @ p["w"] + p["norm"]["b"])

    params = [
        {"w": torch.randn(WIDTH, WIDTH), "norm": {"b": torch.randn(WIDTH)}} for _ in range(STAGES)
    ]
    _, true = plain([affine] * STAGES, params, parts(x), parts(t))
    grads = fpipe.grad(piped([affine] * STAGES, frozen=["0.*", "2.norm", "3.w"]))(params, x, t)
    assert grads[0] == {"w": None, "norm": {"b": None}}
    assert grads[2]["norm"] == {"b": None} and grads[3]["w"] is None
    assert same(grads[1], true[1])
    assert torch.equal(grads[2]["w"], true[2]["w"]) and torch.equal(
        grads[3]["norm"]["b"], true[3]["norm"]["b"]
    )
    plan = piped([affine] * STAGES, frozen=["0.*", "1.*"]).plan(params, x, t)
    backwards = [
        str(i.action)
        for r in (0, 1)
        for i in plan[r].instructions
        if i.program and i.program.name != "F"
    ]
    assert not any(word.startswith(("0", "1")) for word in backwards), (
        "a frozen stage below all others ran backward"
    )


def test_a_frozen_pattern_that_fits_nothing_is_reported(params: list[Tensor], x: Tensor, t: Tensor):
    with pytest.raises(fpipe.errors.StageError, match=r"frozen='9\.norm' matches no leaf"):
        fpipe.grad(piped(frozen=["9.norm"]))(params, x, t)


def test_copies_of_a_tied_parameter_are_frozen_together():
    """Otherwise one copy is trained and the other is not."""
    tied = [("0.w", "2.w")]
    with pytest.raises(
        fpipe.errors.StageError, match=r"0\.w is frozen and 2\.w is not, but they are tied"
    ):
        piped(frozen=["0.*"], tied=tied)
    piped(frozen=["0.*", "*.w"], tied=tied)


def test_leaves_that_are_no_floats_are_frozen(x: Tensor, t: Tensor):
    fn = lambda p, v: layer(p["w"], v) * p["n"] + p["i"]
    params = [{"w": torch.randn(WIDTH, WIDTH), "n": 2, "i": torch.tensor(1)} for _ in range(STAGES)]
    grads = fpipe.grad(piped([fn] * STAGES))(params, x, t)
    assert all(g["n"] is None and g["i"] is None and g["w"] is not None for g in grads)


def test_requires_grad_says_nothing(params: list[Tensor], x: Tensor, t: Tensor):
    mixed = [p.clone().requires_grad_(k % 2 == 0) for k, p in enumerate(params)]
    assert same(fpipe.grad(piped())(mixed, x, t), fpipe.grad(piped())(params, x, t))


@pytest.mark.parametrize("schedule", ["ZBV", "1F1B", "DualPipe"])
def test_tied_parameters(schedule: str, params: list[Tensor], x: Tensor, t: Tensor):
    ranks = 2 if schedule != "1F1B" else 4
    stages = 2 if schedule == "DualPipe" else STAGES
    mine = [*params[: stages - 1], params[0].clone()]
    pipe = piped([layer] * stages, schedule, ranks, tied=[("0.", f"{stages - 1}.")])
    grads = fpipe.grad(pipe)(mine, x, t)
    _, true = plain([layer] * stages, mine, parts(x), parts(t))
    assert torch.equal(grads[0], grads[-1]) and grads[0] is not grads[-1]
    assert torch.allclose(grads[0], true[0] + true[-1])
    assert close(grads[1:-1], true[1:-1])


@pytest.mark.parametrize("processes", [False, True])
def test_tied_leaves_that_differ_are_refused(
    processes: bool, params: list[Tensor], x: Tensor, t: Tensor
):
    """In the first call, on every rank; and the pipeline can be used after that."""
    differ = r"tied parameters 0 and 3 have different values.*one parameter.*equal copies"
    odd = params[0].clone()
    odd[0, 0] = torch.nan  # which is equal to itself

    def on_rank(group: Any) -> Any:
        pipe = fpipe.pipeline(
            [layer] * STAGES, loss=squared, microbatches=4, group=group, tied=[("0.", "3")]
        )
        with pytest.raises(fpipe.errors.StageError, match=differ):
            fpipe.grad(pipe)(pipe.place(params), x, t)
        fpipe.grad(pipe)(pipe.place([odd, *params[1:3], odd.clone()]), x, t)
        grads = fpipe.grad(pipe)(pipe.place([*params[:3], params[0]]), x, t)
        return [g for g in grads if g is not None]

    if processes:
        first, *_, last = testing.run(on_rank, ranks=STAGES, order="buffered", seed=0)
        assert same(first, last)
    else:
        assert len(on_rank(fpipe.local(STAGES))) == STAGES


def test_copies_refuse_tied_leaves_that_differ_in_one(params: list[Tensor], x: Tensor, t: Tensor):
    def on_copy(dp: Any) -> None:
        copies = fpipe.copies(dp)
        pipe = piped([layer] * STAGES, "1F1B", STAGES, tied=[("0.", "3.")], dp=copies)
        mine = [*params[:3], params[0] if dp.here[0] else params[3]]
        fpipe.grad(pipe)(mine, x, t)

    with pytest.raises(fpipe.errors.StageError, match="tied parameters 0 and 3 have different"):
        testing.run(on_copy, ranks=2, order="buffered", seed=0)


def test_tied_names_are_checked(params: list[Tensor], x: Tensor, t: Tensor):
    with pytest.raises(fpipe.errors.StageError, match=r"'stage\.leaf'"):
        piped(tied=[("wte", "3.wte")])
    with pytest.raises(fpipe.errors.StageError, match="has no such leaf"):
        fpipe.grad(piped(tied=[("0.wte", "3.wte")]))(params, x, t)
    other = [*params[:3], torch.randn(WIDTH, WIDTH + 1)]
    fns = [layer, layer, layer, lambda p, v: layer(p, v)[:, :WIDTH]]
    with pytest.raises(fpipe.errors.StageError, match=r"tied.*shape"):
        fpipe.grad(piped(fns, tied=[("0.", "3.")]))(other, x, t)


def test_accumulation_in_a_wider_dtype(params: list[Tensor], x: Tensor, t: Tensor):
    narrow = [p.bfloat16() for p in params]
    grads = fpipe.grad(piped(accumulate=torch.float32))(narrow, x.bfloat16(), t.bfloat16())
    assert all(g.dtype is torch.float32 for g in grads)
    each = [
        plain([layer] * STAGES, narrow, [a], [b], shares=[1 / PARTS])[1]
        for a, b in zip(parts(x.bfloat16()), parts(t.bfloat16()), strict=True)
    ]
    true = [reduce(torch.add, [one[s].float() for one in each]) for s in range(STAGES)]
    assert same(grads, true)
    assert all(
        g.dtype is torch.bfloat16 for g in fpipe.grad(piped())(narrow, x.bfloat16(), t.bfloat16())
    )


def test_auxiliary_losses_join_the_total(params: list[Tensor], x: Tensor, t: Tensor):
    balanced = fpipe.Stage(lambda p, v: (layer(p, v), 0.5 * v.square().mean()), aux_loss=True)
    loss, grads = fpipe.value_and_grad(piped([layer, balanced, layer, balanced]))(params, x, t)

    def total(p, v, target):
        h = [v]
        for q in p:
            h.append(layer(q, h[-1]))
        return squared(h[-1], target) + 0.5 * h[1].square().mean() + 0.5 * h[3].square().mean()

    whole = lambda p: sum(total(p, a, b) / PARTS for a, b in zip(parts(x), parts(t), strict=True))
    true, true_loss = torch.func.grad_and_value(whole)(params)
    assert torch.allclose(loss, true_loss) and close(grads, true)


def test_state_goes_from_microbatch_to_microbatch_and_from_call_to_call(
    params: list[Tensor], x: Tensor, t: Tensor
):
    def counting(p, state, v):
        return layer(p, v) + state["n"], {"n": state["n"] + 1}

    start = {"n": torch.zeros(())}
    pipe = piped([fpipe.Stage(counting, state=True, initial_state=start), layer, layer, layer])
    (_, state), _ = fpipe.value_and_grad(pipe)(params, x, t)
    assert state[0]["n"] == PARTS and state[1:] == [None] * 3 and start["n"] == 0
    (_, state), _ = fpipe.value_and_grad(pipe)(params, x, t, state=state)
    assert state[0]["n"] == 2 * PARTS
    loss, after = pipe(params, x, t, state=state)
    assert after[0]["n"] == 3 * PARTS and loss.shape == ()
    outputs = fpipe.pipeline(pipe.config.functions, "ZBV", microbatches=PARTS, group=fpipe.local(2))
    (y, after), pullback = fpipe.vjp(outputs, params, x, state=state)
    assert after[0]["n"] == 3 * PARTS and pullback(y)[0][0].shape == (WIDTH, WIDTH)


# ---- outputs ----
@pytest.mark.parametrize("mode", ["zeros", "everywhere", "last"])
def test_outputs(mode: Any, params: list[Tensor], x: Tensor):
    y = piped(loss=None, outputs=mode)(params, x)
    assert torch.equal(y, reduce(lambda v, p: layer(p, v), params, x))


def test_outputs_of_any_kind(params: list[Tensor], x: Tensor):
    last = lambda p, v: (v.sum(), {"y": v @ p, "n": 7, "none": None})
    total, more = piped([layer, layer, layer, last], loss=None)(params, x)
    assert (
        total.shape == (PARTS,)
        and more["y"].shape == x.shape
        and more["n"] == 7
        and more["none"] is None
    )


@pytest.mark.parametrize("schedule", fpipe.schedule_names())
def test_forward_alone(schedule: str, x: Tensor):
    count = fpipe.make_schedule(schedule, 2, PARTS).stages
    params = [torch.randn(WIDTH, WIDTH) for _ in range(count)]
    pipe = piped([layer] * count, schedule, loss=None)
    assert torch.equal(pipe(params, x), reduce(lambda v, p: layer(p, v), params, x))
    (cached,) = pipe.cache.plans.values()
    assert not any(
        ins.kind in "BIW" for plan in cached.prepared.plans.values() for ins in plan.instructions
    )


# ---- what goes between stages ----
class Carried(NamedTuple):
    """A pytree of every kind of leaf."""

    h: Tensor
    skip: Tensor
    n: int
    none: None = None


@optree.dataclasses.dataclass(namespace="fpipe")
class Registered:
    """A dataclass registered with optree."""

    h: Tensor
    scale: float


TREES = {
    "named tuple": [
        lambda p, v: Carried(layer(p, v), v * 2, 3),
        lambda p, c: Carried(layer(p, c.h) * c.n, c.skip, c.n + 1),
        lambda p, c: c._replace(h=layer(p, c.h) * c.n),
        lambda p, c: c.h @ p + c.skip,
    ],
    "dataclass": [
        lambda p, v: Registered(layer(p, v), 2.5),
        lambda p, d: Registered(layer(p, d.h) * d.scale, d.scale + 1),
        lambda p, d: Registered(layer(p, d.h), d.scale),
        lambda p, d: layer(p, d.h) * d.scale,
    ],
    "dict, list and None": [
        lambda p, v: {"h": [layer(p, v)], "more": (None, v)},
        lambda p, d: {"h": [layer(p, d["h"][0])], "more": d["more"]},
        lambda p, d: [layer(p, d["h"][0]) + d["more"][1], None],
        lambda p, d: layer(p, d[0]),
    ],
    "integers and masks": [
        lambda p, v: (layer(p, v), v > 0, torch.arange(3)),
        lambda p, d: (torch.where(d[1], layer(p, d[0]), 0.0) + d[2], d[1], d[2]),
        lambda p, d: (layer(p, d[0]), d[1].sum()),
        lambda p, d: layer(p, d[0]) * d[1],
    ],
    "views": [
        lambda p, v: layer(p, v).view(-1),
        lambda p, v: layer(p, v.view(-1, WIDTH)).t(),
        lambda p, v: layer(p, v.t())[None],
        lambda p, v: layer(p, v[0]),
    ],
    "one leaf twice": [
        lambda p, v: (lambda h: (h, h))(layer(p, v)),
        lambda p, d: layer(p, d[0]) + d[1],
        layer,
        layer,
    ],
    "swapped": [
        lambda p, v: (layer(p, v), v @ p),
        lambda p, d: (d[1], d[0]),
        lambda p, d: (d[1], layer(p, d[0])),
        lambda p, d: layer(p, d[0]) + d[1],
    ],
    "skip": [
        lambda p, v: (layer(p, v), v @ p),
        lambda p, d: (layer(p, d[0]), d[1]),
        lambda p, d: (layer(p, d[0]), d[1]),
        lambda p, d: layer(p, d[0]) + d[1],
    ],
    "skip used on the way": [
        lambda p, v: (layer(p, v), v @ p),
        lambda p, d: (layer(p, d[0]) * d[1], d[1]),
        lambda p, d: (d[1], layer(p, d[0]), d[1]),
        lambda p, d: layer(p, d[1]) + d[0] * d[2],
    ],
    "skip that nobody uses": [
        lambda p, v: (layer(p, v), v @ p),
        lambda p, d: (layer(p, d[0]), d[1]),
        lambda p, d: (layer(p, d[0]), d[1]),
        lambda p, d: layer(p, d[0]),
    ],
    "skip of the input": [
        lambda p, v: (layer(p, v), v),
        lambda p, d: (layer(p, d[0]) * d[1], d[1]),
        lambda p, d: (layer(p, d[0]), d[1]),
        lambda p, d: layer(p, d[0]) + d[1],
    ],
    "skip of a parameter": [
        lambda p, v: (layer(p, v), p),
        lambda p, d: (layer(p, d[0]), d[1]),
        lambda p, d: layer(p @ d[1], d[0]),
        layer,
    ],
    "stages that do nothing": [lambda p, v: v, layer, lambda p, v: v, layer],
    "a stage that stops gradients": [layer, lambda p, v: layer(p, v.detach()), layer, layer],
}


@pytest.mark.covering
@pytest.mark.parametrize(
    ("schedule", "ranks"), [("1F1B", 4), ("GPipe", 1), ("ZBV", 2), ("DualPipeV", 2)]
)
@pytest.mark.parametrize("name", TREES)
def test_pytrees_between_stages(
    name: str, schedule: str, ranks: int, params: list[Tensor], x: Tensor, t: Tensor
):
    made = fpipe.value_and_grad(piped(TREES[name], schedule, ranks))(params, x, t)
    assert same(made, plain(TREES[name], params, parts(x), parts(t)))


def test_a_skip_goes_straight_from_its_maker_to_its_user(
    params: list[Tensor], x: Tensor, t: Tensor
):
    """Between ranks 1 and 2 only the layers' output travels; the skip goes from rank 0 to rank 3,
    and straight back.
    """
    plan = piped(TREES["skip"], "GPipe", 4).plan(params, x, t)
    sent = {
        (r, ins.op.peer): 0 for r in range(4) for ins in plan[r].instructions if ins.kind == "SEND"
    }
    for rank in range(4):
        for ins in plan[rank].instructions:
            if ins.kind == "SEND":
                sent[rank, ins.op.peer] += len(ins.reads)
    once = dict.fromkeys([(0, 1), (1, 2), (2, 3), (0, 3), (3, 2), (2, 1), (1, 0), (3, 0)], PARTS)
    assert sent == once


# ---- plans ----
def test_a_plan_prints(params: list[Tensor], x: Tensor, t: Tensor):
    plan = piped().plan(params, x, t)
    text = str(plan)
    assert "peak bytes" in text and "SEND to 1" in text and set(plan.peak) == {0, 1}
    assert all(peak > 0 for peak in plan.peak.values())
    for rank in (0, 1):
        freed = [slot for ins in plan[rank].instructions for slot in ins.frees]
        assert freed, "nothing is ever freed"
    assert list(plan) == [plan[0], plan[1]]  # was KeyError: 2


def test_sends_and_receives_have_one_order(x: Tensor):
    for name in fpipe.schedule_names():
        count = fpipe.make_schedule(name, 4, 6).stages
        params = [torch.randn(WIDTH, WIDTH) for _ in range(count)]
        plan = piped([layer] * count, name, 4, microbatches=2).plan(params, x, x)
        for a in range(4):
            for b in range(4):
                sends = [
                    i.op.specs for i in plan[a].instructions if i.kind == "SEND" and i.op.peer == b
                ]
                receives = [
                    i.op.specs for i in plan[b].instructions if i.kind == "WAIT" and i.op.peer == a
                ]
                assert sends == receives, (name, a, b)


def test_a_narrow_sum_is_rounded_after_each_microbatch():
    """``accumulate=`` in bfloat16: what is rounded when, as docs/howto/precision.md says."""
    draw = torch.Generator().manual_seed(3)
    params = [torch.randn(3, 3, generator=draw) for _ in "ab"]
    x = torch.randn(8, 3, generator=draw)
    pipe = fpipe.pipeline(
        [lambda p, x: torch.tanh(x @ p)] * 2,
        loss=lambda y: y.square().mean(),
        microbatches=4,
        group=fpipe.local(2),
        accumulate=torch.bfloat16,
    )
    _, grads = fpipe.value_and_grad(pipe)(params, x)
    sums: list[torch.Tensor] = []
    for rows in x.split(2):
        leaves = [p.clone().requires_grad_() for p in params]
        y = torch.tanh(torch.tanh(rows @ leaves[0]) @ leaves[1])
        parts = torch.autograd.grad(y.square().mean() * 0.25, leaves)
        before = [part.to(torch.bfloat16) for part in parts]
        if sums:
            before = [(s.float() + g).to(torch.bfloat16) for s, g in zip(sums, parts, strict=True)]
        sums = before
    assert all(map(torch.equal, grads, sums))


def test_a_file_says_how_many_microbatches_there_are(tmp_path: Path):
    """Without ``microbatches=`` a path was refused, where its ``Schedule`` was not."""
    path = tmp_path / "plan.csv"
    fpipe.make_schedule("1F1B", ranks=2, microbatches=6).to_csv(path)
    for source in (path, str(path)):
        pipe = fpipe.pipeline([torch.mul] * 2, source, loss=torch.sum, group=fpipe.local(2))
        grads = fpipe.grad(pipe)([torch.tensor(2.0)] * 2, torch.ones(12))
        assert [grad.item() for grad in grads] == [4.0, 4.0]
