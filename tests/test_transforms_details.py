"""What single transforms promise beyond the table: bits, norms, skips, scales, memory, and gradients through them."""

from __future__ import annotations

import math
from typing import Any

import optree
import pytest
import torch
from torch import Tensor

import split_world
from fpipe import transforms as T
from test_transforms import STAGES, TIED, follow, gradients, model, same


# ---- norms ----------------------------------------------------------------------------------------------------------
def unlike() -> list[Any]:
    """Gradients of very different size, with two dtypes, an empty leaf, and a leaf larger than one thread's share."""
    tree = [[torch.randn(50) * 10.0 ** (stage - 3), torch.randn(3, 3).double()] for stage in range(STAGES)]
    tree[2].append(torch.randn(100_003) * 1e-3)
    tree[4] = [torch.zeros(0), torch.randn(7).bfloat16(), torch.randn(1030, 3).T]
    return tree


@pytest.mark.parametrize("p", [1.0, 2.0, 3.0, math.inf])
def test_exact_norm_has_one_value(p: float):
    torch.manual_seed(1)
    tree = unlike()
    found = set()
    for processes in (1, 2, 3, 4, 6):
        for how in ("loop", "V"):
            spread = split_world.owners(STAGES, processes, how=how)
            threads = torch.get_num_threads()
            try:
                torch.set_num_threads(1 + processes % 2)
                norms = split_world.run(
                    spread, STAGES, lambda over: T.global_norm(over.place(tree), over=over, p=p, exact=True)
                )
            finally:
                torch.set_num_threads(threads)
            found |= {norm.item().hex() for norm in norms}
    found.add(T.global_norm(tree, p=p, exact=True).item().hex())
    assert len(found) == 1
    flat = torch.cat([leaf.reshape(-1).double() for leaf in optree.tree_leaves(tree)])
    assert float.fromhex(found.pop()) == pytest.approx(torch.linalg.vector_norm(flat, p).item(), rel=1e-6)


def test_norm_counts_tied_once_wherever_the_copies_live():
    tree = [
        {"wte": torch.tensor([3.0])},
        *[None] * (STAGES - 2),
        {"w": torch.tensor([4.0]), "wte": torch.tensor([3.0])},
    ]
    for processes in (1, 2, 3):
        spread = split_world.owners(STAGES, processes)
        norm = lambda over: T.global_norm(over.place(tree), over=over).item()
        assert set(split_world.run(spread, STAGES, norm, tied=TIED)) == {5.0}
        assert split_world.run(spread, STAGES, norm) == [pytest.approx(34**0.5)] * processes
    assert T.global_norm({"a": torch.tensor([3.0]), "b": torch.tensor([4.0])}, tied=[("x", "b")]).item() == 3.0


def test_norm_counts_replicas_once():
    """As in DualPipe: both processes hold all stages, with the same gradients."""
    tree = gradients(1)[0]
    one = T.global_norm(tree)
    norms = split_world.run([range(STAGES), range(STAGES)], STAGES, lambda over: T.global_norm(tree, over=over))
    assert all(torch.equal(norm, one) for norm in norms)


@pytest.mark.parametrize("p", [1.0, 2.0, math.inf])
def test_norm_over_shards(p: float):
    whole = torch.randn(10)
    norms = split_world.run([[0], [0]], 1, lambda over: T.global_norm([whole.view(2, 5)[over.rank]], p=p, shards=over))
    assert all(norm.item() == pytest.approx(torch.linalg.vector_norm(whole, p).item()) for norm in norms)


def test_clip_tells_the_norm_and_keeps_small_gradients():
    tx = T.clip_by_global_norm(10.0)
    grads = [torch.tensor([3.0, 4.0])]
    after, state = tx.update(grads, tx.init(grads))
    assert state.norm.item() == 5.0
    assert torch.equal(after[0], grads[0])


def test_norm_needs_an_entry_per_stage():
    def process(over: split_world.Pretend) -> None:
        with pytest.raises(T._base.TransformError, match="3 entries for a pipeline of 6 stages"):
            T.global_norm([torch.ones(1)] * 3, over=over)
        with pytest.raises(T._base.TransformError, match="a dict for a pipeline of 6 stages"):
            T.global_norm({}, over=over)

    split_world.run([range(STAGES)], STAGES, process)


# ---- steps that are left out ----------------------------------------------------------------------------------------
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_all_ranks_skip_together(bad: float):
    params, grads = model(), gradients(4)
    poisoned = [optree.tree_map(torch.clone, g) for g in grads]
    poisoned[1][3]["b"][2] = bad
    poisoned[2][0]["wte"][0, 0] = bad

    def process(over: split_world.Pretend) -> Any:
        tx = T.chain(T.skip_nonfinite(over=over), T.adamw(0.01))
        return follow(tx, over.place(params), [over.place(g) for g in poisoned])

    parts = split_world.run(split_world.owners(STAGES, 3), STAGES, process)
    expected, _ = follow(T.adamw(0.01), params, [grads[0], grads[3]])
    assert same(split_world.merge([after for after, _ in parts]), expected)
    for _, (skips, adam) in parts:
        assert (skips.skipped.item(), skips.in_a_row.item(), adam.step.item()) == (2, 0, 2)


def test_large_numbers_are_finite():
    assert T.all_finite([torch.full((3,), 1e300, dtype=torch.float64), torch.full((40_000,), 3e38)])
    assert T.all_finite([torch.full((40_000,), 6e4, dtype=torch.float16), None])


def test_loss_scale_does_as_torch_does():
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=2)
    tx = T.chain(T.dynamic_loss_scale(8.0, interval=2), T.sgd(0.5))
    p = torch.nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([p], 0.5)
    params, state = [torch.ones(2)], tx.init([torch.ones(2)])
    for factor in (1.0, 2.0, 3.0, math.inf, 1.0, math.nan, 1.0, 2.0, 0.5):
        optimizer.zero_grad()
        scaler.scale((factor * p * p).sum()).backward()
        assert p.grad is not None
        updates, state = tx.update([p.grad.clone()], state, params)
        params = T.apply_updates(params, updates)
        scaler.step(optimizer)
        scaler.update()
        assert state[0].scale.item() == scaler.get_scale()
        torch.testing.assert_close(params[0], p.detach())
    assert state[0].skipped.item() == 2


def test_accumulate_steps_at_every_kth_call_only():
    tx = T.chain(T.accumulate(3), T.sgd(1.0, 0.9))
    params = [torch.zeros(2)]
    state = tx.init(params)
    made = []
    for value in range(6):
        updates, state = tx.update([torch.full((2,), float(value))], state, params)
        made.append(updates)
    assert [updates is None for updates in made] == [True, True, False] * 2
    assert made[2][0][0].item() == -1.0
    assert made[5][0][0].item() == pytest.approx(-4.9)
    assert state[1].step.item() == 2


def test_apply_updates_without_updates():
    params = [torch.ones(1), None]
    assert T.apply_updates(params, None) is params
    assert T.apply_updates(params, None, donate=True) is params


# ---- several places, one gradient -----------------------------------------------------------------------------------
def test_mean_over_replicas():
    mine = lambda rank: [None, {"h": torch.full((2,), float(rank)).half(), "w": torch.full((2, 3), float(rank))}]
    for dtype in (None, torch.float64):
        found = split_world.run(
            [[0]] * 4, 1, lambda over, dtype=dtype: T.mean_over(over, dtype=dtype).update(mine(over.rank), ())[0]
        )
        wanted = [None, {"h": torch.full((2,), 1.5).half(), "w": torch.full((2, 3), 1.5)}]
        assert all(same(tree, wanted) for tree in found)


def test_three_copies_are_summed_in_one_order():
    tied = [("0.w", "2.w", "5.deep.0"), ("1", "4")]
    leaf = lambda seed: torch.randn(33, generator=torch.Generator().manual_seed(seed))
    params = [{"w": leaf(0)}, leaf(1), {"w": leaf(2)}, None, leaf(4), {"deep": [leaf(5)]}]
    first, second = (leaf(0) + leaf(2)) + leaf(5), leaf(1) + leaf(4)
    assert not torch.equal(first, leaf(0) + (leaf(2) + leaf(5)))  # else the order would not show
    wanted = [{"w": first}, second, {"w": first}, None, second, {"deep": [first]}]

    def process(over: split_world.Pretend) -> Any:
        mine = over.place(params)
        tx = T.sum_tied(over=over)
        return tx.update(mine, tx.init(mine))[0]

    for processes in (1, 2, 3, 4):
        parts = split_world.run(split_world.owners(STAGES, processes), STAGES, process, tied=tied)
        assert same(split_world.merge(parts), wanted)
    tx = T.sum_tied(tied)
    assert same(tx.update(params, tx.init(params))[0], wanted)


# ---- optimizers -----------------------------------------------------------------------------------------------------
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
    """State always; parameters without decay, which torch multiplies in and an update has to add."""
    params, grads = model(), gradients()
    tx = T.adamw(0.01, weight_decay=0.0, fused=False, donate=donate)
    after, state = follow(tx, params, grads)
    own, memory = torch_adamw(optree.tree_leaves(params), [optree.tree_leaves(g) for g in grads], 0.0)
    columns = zip(own, *map(optree.tree_leaves, (after, state.m, state.v)), strict=True)
    for p, mine, m, v in columns:
        assert torch.equal(mine, p)
        assert torch.equal(m, memory[p]["exp_avg"])
        assert torch.equal(v, memory[p]["exp_avg_sq"])


def test_fused_kernel_sees_strides():
    """The fused kernels walk memory: a transposed gradient would be read in the wrong order, without a word."""
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
        lambda donate: T.lion(0.1, donate=donate),
        lambda donate: T.masked(T.muon(0.1, donate=donate), lambda tree: optree.tree_map(lambda p: p.ndim == 2, tree)),
        lambda donate: T.ema(0.9, donate=donate),
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


def test_half_precision_parameters_with_a_full_state():
    params = [torch.randn(8).bfloat16(), torch.randn(3)]
    grads = [torch.randn(8).bfloat16(), torch.randn(3)]
    tx = T.adamw(0.1, dtype=torch.float32)
    updates, state = tx.update(grads, tx.init(params), params)
    assert {leaf.dtype for leaf in optree.tree_leaves((updates, state.m, state.v))} == {torch.float32}
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
        T.accumulate(2),
        T.ema(0.9, of="params"),
    ):
        state = tx.init(params)
        updates, state = tx.update([{"table": None, "w": torch.ones(3)}], state, params)
        assert T.apply_updates(params, updates)[0]["table"] is params[0]["table"]


def test_one_call_a_dtype(monkeypatch: pytest.MonkeyPatch):
    calls = []
    for name in ("_fused_adam_", "_foreach_add", "_foreach_mul", "_foreach_norm"):
        real = getattr(torch, name)
        monkeypatch.setattr(torch, name, lambda *a, name=name, real=real, **k: calls.append(name) or real(*a, **k))
    params = [[torch.randn(4) for _ in range(20)], [torch.randn(4).double() for _ in range(20)]]
    tx = T.chain(T.clip_by_global_norm(1.0), T.adamw(0.1, mask=["0"]))
    updates, _ = tx.update(params, tx.init(params), params)
    T.apply_updates(params, updates)
    assert sorted(calls) == sorted(
        ["_foreach_norm"] * 2 + ["_foreach_mul"] * 2 + ["_fused_adam_"] * 2 + ["_foreach_add"] * 2
    )


def test_muon_does_not_see_which_stages_are_neighbours():
    """Matrices of one shape are stacked, and a batched product may round otherwise for another batch."""
    tx = T.muon(0.1)
    params = [[torch.randn(6, 4) for _ in range(3)] for _ in range(STAGES)]
    whole = tx.update(params, tx.init(params), params)[0]
    for stage in range(STAGES):
        alone = [part if s == stage else None for s, part in enumerate(params)]
        assert same(tx.update(alone, tx.init(alone), alone)[0][stage], whole[stage])


@pytest.mark.parametrize("adjust", ["original", "match_rms_adamw"])
def test_muon_adjusts_as_torch(adjust: Any):
    p, g = torch.randn(12, 5), torch.randn(12, 5)
    own = torch.nn.Parameter(p.clone())
    own.grad = g
    torch.optim.Muon([own], 0.1, nesterov=False, adjust_lr_fn=adjust).step()
    after, _ = follow(T.muon(0.1, nesterov=False, adjust=adjust), [p], [[g]])
    torch.testing.assert_close(after[0], own.detach())


def test_rates_may_depend_on_the_step():
    grads = [[torch.ones(2)]] * 3
    for make in (T.sgd, lambda lr: T.adamw(lr, weight_decay=0.0), lambda lr: T.lion(lr, weight_decay=0.0)):
        tx = make(lambda step: 0.1 * (step + 1))
        state, params = tx.init([torch.zeros(2)]), [torch.zeros(2)]
        for step, gradient in enumerate(grads):
            updates, state = tx.update(gradient, state, params)
            torch.testing.assert_close(updates[0], torch.full((2,), -0.1 * (step + 1)))


def test_ema_of_params_follows_the_parameters():
    params, grads = model(), gradients()
    _, (_, state) = follow(T.chain(T.sgd(0.1), T.ema(0.75, of="params", dtype=torch.float64)), params, grads)
    average = optree.tree_map(torch.Tensor.double, params)
    p = params
    for gradient in grads:
        p = optree.tree_map(lambda x, g: x - 0.1 * g, p, gradient)
        average = optree.tree_map(lambda a, x: 0.75 * a + 0.25 * x.double(), average, p)
    for got, wanted in zip(optree.tree_leaves(state.average), optree.tree_leaves(average), strict=True):
        torch.testing.assert_close(got, wanted)


def test_noise_has_its_variance_and_changes():
    tx = T.add_noise(0.04, gamma=1.0, seed=1)
    zero = [torch.zeros(20_000), torch.zeros(20_000)]
    first, state = tx.update(zero, tx.init(zero))
    second, _ = tx.update(zero, state)
    assert first[0].std().item() == pytest.approx(0.2, rel=0.03)
    assert second[0].std().item() == pytest.approx(0.2 / 2**0.5, rel=0.03)
    assert abs(torch.corrcoef(torch.stack([first[0], first[1], second[0]])).triu(1)).max() < 0.03
    assert not torch.equal(T.add_noise(0.04, seed=2).update(zero, tx.init(zero))[0][0], first[0])


def test_weight_decay_masks():
    params = [{"b": torch.ones(2), "w": torch.ones(2)}, torch.ones(2)]
    zero = optree.tree_map(torch.zeros_like, params)
    wanted = [{"b": 0.0, "w": 1.0}, 1.0]
    for mask in (["*.w", "1"], [{"b": False, "w": True}, True], lambda tree: [{"b": False, "w": True}, True]):
        after = T.weight_decay(1.0, mask).update(zero, (), params)[0]
        assert optree.tree_map(lambda x: x[0].item(), after) == wanted
        tx = T.adamw(0.5, weight_decay=1.0, mask=mask)
        after = tx.update(zero, tx.init(params), params)[0]
        assert optree.tree_map(lambda x: -2 * x[0].item(), after) == wanted


def test_masked_and_partition_hold_no_state_for_the_others():
    params = model()
    tx = T.partition(
        {"a": T.adamw(0.1), "b": T.identity()}, ["a", "b", "b", {"b": "a", "deep": "b", "w": "b"}, "b", "b"]
    )
    state = tx.init(params)
    assert len(optree.tree_leaves(state[0].m)) == 2
    assert len(optree.tree_leaves(T.masked(T.adamw(0.1), ["0.*"]).init(params).m)) == 1


def test_a_part_may_skip_alone():
    tx = T.partition({"often": T.sgd(1.0), "seldom": T.chain(T.accumulate(2), T.sgd(1.0))}, ["often", "seldom"])
    params = [torch.zeros(1), torch.zeros(1)]
    updates, state = tx.update([torch.ones(1)] * 2, tx.init(params), params)
    assert updates[1] is None
    after = T.apply_updates(params, updates)
    assert (after[0].item(), after[1] is params[1]) == (-1.0, True)
    assert tx.update([torch.ones(1)] * 2, state, after)[0][1].item() == -1.0


# ---- gradients through a step ---------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    "make",
    [
        lambda: T.sgd(0.1, 0.9, nesterov=True, weight_decay=0.1),
        lambda: T.adamw(0.1, eps=1e-3),
        lambda: T.chain(T.clip_by_global_norm(0.5), T.sgd(0.1)),
        lambda: T.chain(T.ema(0.9), T.scale(-0.1)),
    ],
)
def test_meta_gradients(make: Any):
    """d loss(p - step(grad loss(p))) / dp, against finite differences."""

    def loss(p: Tensor) -> Tensor:
        return (p.sin() * torch.arange(1.0, 5.0, dtype=p.dtype)).sum() + p.prod()

    def after_a_step(p: Tensor) -> Tensor:
        tx = make()
        gradient = torch.func.grad(loss)(p)
        updates, _ = tx.update([gradient], tx.init([p]), [p])
        return loss(T.apply_updates([p], updates)[0])

    p = torch.tensor([0.3, -0.4, 0.5, 1.2], dtype=torch.float64)
    meta = torch.func.grad(after_a_step)(p)
    step = 1e-6 * torch.eye(4, dtype=torch.float64)
    numeric = torch.stack([(after_a_step(p + h) - after_a_step(p - h)) / 2e-6 for h in step])
    torch.testing.assert_close(meta, numeric, rtol=1e-6, atol=1e-6)


def test_parameters_that_require_a_gradient_keep_no_graph():
    params = optree.tree_map(lambda leaf: torch.nn.Parameter(leaf), model())
    after, state = follow(
        T.chain(T.clip_by_global_norm(1.0), T.adamw(0.1), T.ema(0.9, of="params")), params, gradients(2)
    )
    assert not any(leaf.requires_grad for leaf in optree.tree_leaves((after, state)))
    T.apply_updates(params, gradients(1)[0], donate=True)


def test_any_kind_of_tree():
    """Without a pipeline a transform takes what optree takes."""
    tree = {"a": (torch.ones(2), [torch.ones(1)]), "b": None}
    for tx in (T.adamw(0.1), T.clip_by_global_norm(1.0, exact=True), T.add_noise(1.0), T.masked(T.adamw(0.1), ["a.0"])):
        updates, _ = tx.update(tree, tx.init(tree), tree)
        assert optree.tree_structure(updates) == optree.tree_structure(tree)
