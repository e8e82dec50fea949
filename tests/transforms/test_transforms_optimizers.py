"""Optimizers and small transforms: torch's bits, memory that is given away, dtypes, masks,
gradients through a step.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import optree
import pytest
import torch
from torch import Tensor

from common import same
from fpipe import transforms as T
from fpipe.errors import TransformError
from transform_table import STAGES, follow, gradients, model
from written_transforms import accumulate, average_params


# ---- optimizers ----
def torch_adamw(params: list[Tensor], grads: list[list[Tensor]], decay: float) -> tuple[Any, Any]:
    own = [torch.nn.Parameter(p.clone()) for p in params]
    made = torch.optim.AdamW(own, 0.01, weight_decay=decay, foreach=True)
    for gradient in grads:
        for p, g in zip(own, gradient, strict=True):
            p.grad = g.clone()
        made.step()
    return own, made.state


@pytest.mark.parametrize("donate", [False, True])
def test_adamw_has_torchs_bits(donate: bool):
    """State always; parameters without decay, which torch multiplies in and an update has to
    add.
    """
    params, grads = model(), gradients()
    tx = T.adamw(0.01, weight_decay=0.0, fused=False, donate=donate)
    after, state = follow(tx, params, grads)
    own, memory = torch_adamw(
        optree.tree_leaves(params), [optree.tree_leaves(g) for g in grads], 0.0
    )
    columns = zip(own, *map(optree.tree_leaves, (after, state.m, state.v)), strict=True)
    for p, mine, m, v in columns:
        assert torch.equal(mine, p)
        assert torch.equal(m, memory[p]["exp_avg"])
        assert torch.equal(v, memory[p]["exp_avg_sq"])


def test_fused_kernel_sees_strides():
    """The fused kernels walk memory: a transposed gradient would be read in the wrong order,
    without a word.
    """
    params = [torch.randn(5, 7), torch.randn(7, 5).T]
    grads = [torch.randn(7, 5).T, torch.randn(5, 14)[:, ::2]]
    slow, _ = follow(T.adamw(0.1, fused=False), params, [grads] * 2)
    for donate in (False, True):
        fast, _ = follow(T.adamw(0.1, fused=True, donate=donate), params, [grads] * 2)
        torch.testing.assert_close(fast, slow)


@pytest.mark.parametrize(
    "make",
    [
        lambda donate: T.adamw(0.1, donate=donate),
        lambda donate: T.adamw(0.1, fused=False, donate=donate),
        lambda donate: T.sgd(0.1, 0.9, donate=donate),
    ],
)
def test_donated_state_has_the_same_bits_in_the_old_memory(make: Any):
    plain = follow(make(False), model(), gradients())
    tx, params = make(True), model()
    state, start = tx.init(params), None
    for gradient in gradients():
        kept = optree.tree_map(torch.clone, gradient)
        updates, state = tx.update(gradient, state, params)
        params = T.apply_updates(params, updates, donate=True)
        assert same(gradient, kept)
        memory = {leaf.data_ptr() for leaf in optree.tree_leaves((state[1], params))}
        assert start in (None, memory)
        start = memory
    assert same((params, state), plain)


def test_shared_memory_is_not_written_twice():
    wte = torch.ones(3)
    params, updates = (
        [{"wte": wte}, None, {"wte": wte.view(1, 3)}],
        [{"wte": wte}, None, {"wte": wte.view(1, 3)}],
    )
    with pytest.raises(TransformError, match=r"'0\.wte' and '2\.wte' are in the same memory"):
        T.apply_updates(params, updates, donate=True)
    assert wte.sum() == 3
    assert T.apply_updates(params, updates)[2]["wte"].sum() == 6


def test_half_precision_parameters_with_a_full_state():
    params = [torch.randn(8).bfloat16(), torch.randn(3)]
    grads = [torch.randn(8).bfloat16(), torch.randn(3)]
    tx = T.adamw(0.1, dtype=torch.float32)
    updates, state = tx.update(grads, tx.init(params), params)
    assert {leaf.dtype for leaf in optree.tree_leaves((updates, state.m, state.v))} == {
        torch.float32
    }
    after = T.apply_updates(params, updates)
    assert after[0].dtype == torch.bfloat16
    assert torch.equal(after[0], (params[0].float() + updates[0]).bfloat16())
    assert same(T.apply_updates(optree.tree_map(torch.clone, params), updates, donate=True), after)


def test_complex_parameters():
    p, g = torch.randn(4, dtype=torch.complex64), torch.randn(4, dtype=torch.complex64)
    after, _ = follow(T.adamw(0.01), [p], [[g]] * 3)
    own, _ = torch_adamw([p], [[g]] * 3, 0.01)
    torch.testing.assert_close(after[0], own[0].detach())


def test_integer_leaves_have_no_state():
    params = [{"table": torch.arange(3), "w": torch.ones(3)}]
    for tx in (
        T.adamw(0.1),
        T.sgd(0.1, 0.9),
        T.from_torch(torch.optim.AdamW),
    ):
        state = tx.init(params)
        updates, state = tx.update([{"table": None, "w": torch.ones(3)}], state, params)
        assert T.apply_updates(params, updates)[0]["table"] is params[0]["table"]


def test_one_call_a_dtype(monkeypatch: pytest.MonkeyPatch):
    calls = []
    for name in ("_fused_adamw_", "_foreach_add", "_foreach_mul", "_foreach_norm"):
        real = getattr(torch, name)
        monkeypatch.setattr(
            torch, name, lambda *a, name=name, real=real, **k: calls.append(name) or real(*a, **k)
        )
    params = [[torch.randn(4) for _ in range(20)], [torch.randn(4).double() for _ in range(20)]]
    tx = T.chain(T.clip_by_global_norm(1.0), T.adamw(0.1, mask=["0"]))
    updates, _ = tx.update(params, tx.init(params), params)
    T.apply_updates(params, updates)
    wanted = {
        "_foreach_norm": 2,
        "_foreach_mul": 2 + 1 + 2 * 2,
        "_fused_adamw_": 2,
        "_foreach_add": 2,
    }  # clip, decay and copies of two moments, step, apply
    assert Counter(calls) == wanted


def test_rates_may_depend_on_the_step():
    grads = [[torch.ones(2)]] * 3
    for make in (T.sgd, lambda lr: T.adamw(lr, weight_decay=0.0)):
        tx = make(lambda step: 0.1 * (step + 1))
        state, params = tx.init([torch.zeros(2)]), [torch.zeros(2)]
        for step, gradient in enumerate(grads):
            updates, state = tx.update(gradient, state, params)
            torch.testing.assert_close(updates[0], torch.full((2,), -0.1 * (step + 1)))


def test_noise_has_its_variance_and_changes():
    tx = T.add_noise(0.04, gamma=1.0, seed=1)
    zero = [torch.zeros(20_000), torch.zeros(20_000)]
    first, state = tx.update(zero, tx.init(zero))
    second, _ = tx.update(zero, state)
    assert first[0].std().item() == pytest.approx(0.2, rel=0.03)
    assert second[0].std().item() == pytest.approx(0.2 / 2**0.5, rel=0.03)
    assert abs(torch.corrcoef(torch.stack([first[0], first[1], second[0]])).triu(1)).max() < 0.03
    assert not torch.equal(T.add_noise(0.04, seed=2).update(zero, tx.init(zero))[0][0], first[0])


def test_masks_of_weight_decay():
    params = [{"b": torch.ones(2), "w": torch.ones(2)}, torch.ones(2)]
    zero = optree.tree_map(torch.zeros_like, params)
    wanted = [{"b": 0.0, "w": 1.0}, 1.0]
    for mask in (
        ["*.w", "1"],
        [{"b": False, "w": True}, True],
        lambda tree: [{"b": False, "w": True}, True],
    ):
        tx = T.adamw(0.5, weight_decay=1.0, mask=mask)
        after = tx.update(zero, tx.init(params), params)[0]
        assert optree.tree_map(lambda x: -2 * x[0].item(), after) == wanted


def test_masked_and_partition_hold_no_state_for_the_others():
    params = model()
    labels = ["a", "b", "b", {"b": "a", "deep": "b", "w": "b"}, *["b"] * (STAGES - 4)]
    tx = T.partition({"a": T.adamw(0.1), "b": T.identity()}, labels)
    state = tx.init(params)
    assert len(optree.tree_leaves(state[0].m)) == 2
    assert len(optree.tree_leaves(T.masked(T.adamw(0.1), ["0.*"]).init(params).m)) == 1


def test_a_part_may_skip_alone():
    tx = T.partition(
        {"often": T.sgd(1.0), "seldom": T.chain(accumulate(2), T.sgd(1.0))}, ["often", "seldom"]
    )
    params = [torch.zeros(1), torch.zeros(1)]
    updates, state = tx.update([torch.ones(1)] * 2, tx.init(params), params)
    assert updates[1] is None
    after = T.apply_updates(params, updates)
    assert (after[0].item(), after[1] is params[1]) == (-1.0, True)
    assert tx.update([torch.ones(1)] * 2, state, after)[0][1].item() == -1.0


# ---- gradients through a step ----
ONE_STEP: dict[str, Any] = {
    "sgd": lambda: T.sgd(0.1, 0.9, nesterov=True, weight_decay=0.1),
    "adamw": lambda: T.adamw(0.1, eps=1e-3),
    "adamw donate": lambda: T.adamw(0.1, eps=1e-3, donate=True),
    "clip": lambda: T.chain(T.clip_by_global_norm(0.5), T.sgd(0.1)),
    "clip exact": lambda: T.chain(T.clip_by_global_norm(0.5, exact=True), T.sgd(0.1)),
    "clip 3": lambda: T.chain(T.clip_by_global_norm(0.5, p=3.0), T.sgd(0.1)),
    "partition": lambda: T.partition(
        {"a": T.adamw(0.1, eps=1e-3), "b": T.sgd(0.1)}, ["a", "b", "a"]
    ),
}


def of_several(ps: list[Tensor]) -> Tensor:
    """A loss in which every leaf meets every other."""
    return (
        torch.cat([p.sin().flatten() for p in ps]) * torch.arange(1.0, 10.0, dtype=ps[0].dtype)
    ).sum().square() / 9


@pytest.mark.parametrize("name", ONE_STEP)
def test_derivatives_through_a_step(name: str):
    """Of loss(p - step(grad loss(p))) by p, for leaves of several shapes: backwards, forwards, and
    for many at once.

    torch's kernels for lists raise here, or leave tangents out without a word.
    """

    def after_a_step(ps: list[Tensor]) -> Tensor:
        tx = ONE_STEP[name]()
        updates, _ = tx.update(torch.func.grad(of_several)(ps), tx.init(ps), ps)
        return of_several(T.apply_updates(ps, updates))

    draw = torch.Generator().manual_seed(1)
    ps, v = (
        [torch.randn(s, generator=draw, dtype=torch.float64) for s in ((2, 2), (3,), (2,))]
        for _ in "pv"
    )
    moved = lambda h: after_a_step([p + h * along for p, along in zip(ps, v, strict=True)])
    numeric = (moved(1e-6) - moved(-1e-6)) / 2e-6
    assert numeric.abs() > 1e-2
    backwards = sum(
        (g * along).sum() for g, along in zip(torch.func.grad(after_a_step)(ps), v, strict=True)
    )
    torch.testing.assert_close(backwards, numeric, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(
        torch.func.jvp(after_a_step, (ps,), (v,))[1], numeric, rtol=1e-6, atol=1e-6
    )
    many = torch.vmap(after_a_step)(
        [torch.stack([p, p + along]) for p, along in zip(ps, v, strict=True)]
    )
    torch.testing.assert_close(many, torch.stack([moved(0.0), moved(1.0)]))


def test_parameters_that_require_a_gradient_keep_no_graph():
    params = optree.tree_map(lambda leaf: torch.nn.Parameter(leaf), model())
    after, state = follow(
        T.chain(T.clip_by_global_norm(1.0), T.adamw(0.1), average_params(0.9)),
        params,
        gradients(2),
    )
    assert not any(leaf.requires_grad for leaf in optree.tree_leaves((after, state)))
    T.apply_updates(params, gradients(1)[0], donate=True)


def test_any_kind_of_tree():
    """Without a pipeline a transform takes what optree takes."""
    tree = {"a": (torch.ones(2), [torch.ones(1)]), "b": None}
    for tx in (
        T.adamw(0.1),
        T.clip_by_global_norm(1.0, exact=True),
        T.add_noise(1.0),
        T.masked(T.adamw(0.1), ["a.0"]),
    ):
        updates, _ = tx.update(tree, tx.init(tree), tree)
        assert optree.tree_structure(updates) == optree.tree_structure(tree)


# ---- master weights and bits ----
def test_small_updates_of_bfloat16_parameters_are_not_lost():
    params = [torch.ones(4, dtype=torch.bfloat16)]
    tx = T.master(T.sgd(1e-3))
    state = tx.init(params)
    for _ in range(8):
        updates, state = tx.update([torch.full((4,), -1.0, dtype=torch.bfloat16)], state, params)
        params = T.apply_updates(params, updates)
    assert torch.equal(params[0], torch.full((4,), 1.0078125, dtype=torch.bfloat16))


@pytest.mark.parametrize("donate", [False, True])
@pytest.mark.parametrize("half", [torch.bfloat16, torch.float16])
def test_parameters_are_their_masters_rounded(half: torch.dtype, donate: bool):
    """Of half precision alone; signs change, and updates are much larger than what remains."""
    torch.manual_seed(0)
    start = [
        {"a": torch.randn(500).to(half), "b": torch.randn(5), "frozen": torch.randn(3).to(half)},
        None,
    ]
    params = start
    plain = {"a": start[0]["a"].float(), "b": start[0]["b"].clone()}
    tx, wide = T.master(T.adamw(0.05), donate=donate), T.adamw(0.05)
    state, other = tx.init(params), wide.init([plain])
    for _ in range(40):
        grads = {"a": torch.randn(500).to(half), "b": torch.randn(5)}
        updates, state = tx.update([{**grads, "frozen": None}, None], state, params)
        params = T.apply_updates(params, updates)
        steps, other = wide.update([{"a": grads["a"].float(), "b": grads["b"]}], other, [plain])
        (plain,) = T.apply_updates([plain], steps)
        assert torch.equal(state.master[0]["a"], plain["a"])
        assert torch.equal(params[0]["a"], plain["a"].to(half))
        assert torch.equal(params[0]["b"], plain["b"])
    assert params[0]["frozen"] is start[0]["frozen"]
    assert state.master[0]["b"] is None
    assert state.inner.m[0]["a"].dtype == torch.float32


def test_master_passes_on_a_step_that_is_skipped():
    params = [torch.ones(2, dtype=torch.bfloat16)]
    tx = T.master(T.chain(accumulate(2), T.sgd(1.0)))
    updates, state = tx.update([torch.ones(2, dtype=torch.bfloat16)], tx.init(params), params)
    assert updates is None
    assert torch.equal(state.master[0], torch.ones(2))


@pytest.mark.parametrize("decay", [0.0, 0.1])
def test_the_bits_of_torch_that_the_docs_promise(decay: float):
    """Averages to the bit; parameters under adamw(fused=False) without decay, else nearly."""
    torch.manual_seed(0)
    start, grads = torch.randn(33, 17), [torch.randn(33, 17) for _ in range(20)]
    for tx, make, names in (
        (
            T.sgd(0.1, 0.9),
            lambda own: torch.optim.SGD(own, 0.1, 0.9, foreach=True),
            {"momentum": "momentum_buffer"},
        ),
        (
            T.adamw(0.1, weight_decay=decay, fused=False),
            lambda own: torch.optim.AdamW(own, 0.1, weight_decay=decay, foreach=True),
            {"m": "exp_avg", "v": "exp_avg_sq"},
        ),
    ):
        params, own = [start], torch.nn.Parameter(start.clone())
        state, optimizer = tx.init(params), make([own])
        for grad in grads:
            updates, state = tx.update([grad], state, params)
            params, own.grad = T.apply_updates(params, updates), grad.clone()
            optimizer.step()
        for ours, theirs in names.items():
            assert torch.equal(getattr(state, ours)[0], optimizer.state[own][theirs])
        torch.testing.assert_close(params[0], own.detach(), rtol=1e-5, atol=1e-5)
        if "m" in names and not decay:
            assert torch.equal(params[0], own.detach())
