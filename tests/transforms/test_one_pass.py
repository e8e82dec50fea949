"""``Transform.step``: the bits of torch's fused AdamW, elsewhere those of update and
apply_updates.
"""

from __future__ import annotations

from typing import Any

import optree
import pytest
import torch
from torch import Tensor

import fake_processes
import fpipe
from common import same
from fpipe import transforms as T
from fpipe.errors import StageError, TransformError
from fpipe.transforms import foreach, optimizer as optimizer_module
from transform_table import STAGES, TABLE, TIED, follow, gradients, inputs, model
from written_transforms import accumulate

#: Rows that end in the fused kernel, or whose clipping does: their steps have torch's last bits,
#: not those of updates.
FUSED = {"adamw", "partition"}


def stepped(
    tx: T.Transform, params: Any, grads: list[Any], donate: bool = False
) -> tuple[Any, Any]:
    state = tx.init(params)
    for gradient in grads:
        params, state = tx.step(gradient, state, params, donate=donate)
    return params, state


def copied(tree: Any) -> Any:
    return optree.tree_map(
        lambda leaf: leaf.detach().clone() if isinstance(leaf, Tensor) else leaf, tree
    )


@pytest.mark.parametrize("donate", [False, True])
@pytest.mark.parametrize("name", TABLE)
def test_a_step_is_update_and_apply(name: str, donate: bool):
    row = TABLE[name]
    params, grads = inputs(row)
    wanted, got = (
        follow(row.make(None), params, grads),
        stepped(row.make(None), copied(params), grads, donate),
    )
    if name not in FUSED:
        assert same(got, wanted)
    for mine, theirs in zip(optree.tree_leaves(got[0]), optree.tree_leaves(wanted[0]), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    "name", ["adamw", "clip 2 exact", "from_torch muon", "partition", "master", "all together"]
)
def test_a_step_of_split_stages_is_that_of_all(name: str):
    """The same bits on two processes, whose blocks hold other leaves than those of one process."""
    row = TABLE[name]
    params, grads = inputs(row)
    spread = fake_processes.owners(STAGES, 2, how="V")
    process = lambda over: stepped(
        row.make(over), over.place(params), [over.place(g) for g in grads]
    )
    ((whole, _),) = fake_processes.run([range(STAGES)], STAGES, process, tied=TIED)
    parts = fake_processes.run(spread, STAGES, process, tied=TIED)
    assert same(fake_processes.merge([after for after, _ in parts]), whole)


@pytest.mark.parametrize("donate", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_adamw_has_the_bits_of_torchs_fused_adamw(
    dtype: torch.dtype, donate: bool, monkeypatch: pytest.MonkeyPatch
):
    """Parameters and averages, with decay on some leaves, in blocks of some leaves; sizes with and
    without a tail.
    """
    monkeypatch.setattr(optimizer_module, "_BLOCK", 20)
    params, grads = (
        model(dtype=dtype),
        [optree.tree_map(lambda g: g.to(dtype), g) for g in gradients()],
    )
    leaves = [leaf.clone() for leaf in optree.tree_leaves(params)]
    own = [torch.nn.Parameter(leaf) for leaf in leaves]
    decayed, others = [p for p in own if p.ndim == 2], [p for p in own if p.ndim != 2]
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, 0.01, (0.8, 0.95), 1e-6, fused=True)
    for gradient in grads:
        for p, g in zip(own, optree.tree_leaves(gradient), strict=True):
            p.grad = g.clone()
        optimizer.step()
    mask = lambda tree: optree.tree_map(lambda p: p.ndim == 2, tree)
    tx = T.adamw(0.01, (0.8, 0.95), 1e-6, 0.1, mask=mask, donate=donate)
    after, state = stepped(tx, params, grads, donate)
    for p, mine, m, v in zip(own, *map(optree.tree_leaves, (after, state.m, state.v)), strict=True):
        assert torch.equal(mine, p)
        assert torch.equal(m, optimizer.state[p]["exp_avg"])
        assert torch.equal(v, optimizer.state[p]["exp_avg_sq"])


def test_adamw_without_the_fused_kernel_has_the_bits_of_updates():
    """fused=False, complex leaves, a state of another dtype."""
    complexes = [torch.randn(4, dtype=torch.complex64)]
    halves = [torch.randn(4).bfloat16()]
    for tx, params, grads in (
        (T.adamw(0.1, fused=False), model(), gradients()),
        (T.adamw(0.1), complexes, [complexes] * 3),
        (T.adamw(0.1, dtype=torch.float32), halves, [halves] * 3),
    ):
        assert same(stepped(tx, copied(params), grads, True), follow(tx, params, grads))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_leaves_without_axes_keep_their_dtype(dtype: torch.dtype):
    """A factor in a tensor of float64 would decide the dtype of such a leaf."""
    params, grads = (
        [torch.ones(2, dtype=dtype), torch.ones((), dtype=dtype)],
        [torch.ones(2), torch.ones(())],
    )
    for tx in (
        T.adamw(0.1),
        T.sgd(0.1),
        T.chain(T.clip_by_global_norm(0.1), T.adamw(0.1)),
    ):
        for after, _ in (follow(tx, params, [grads] * 2), stepped(tx, params, [grads] * 2)):
            assert {leaf.dtype for leaf in after} == {dtype}
            assert torch.equal(after[0][0], after[1])


@pytest.mark.parametrize("donate", [False, True])
def test_layouts(donate: bool):
    """Transposed leaves, leaves with gaps, and gradients of other strides: the kernel walks
    memory.
    """
    params = [torch.randn(7, 5).T, torch.randn(5, 14)[:, ::2], torch.randn(5, 7)]
    grads = [[torch.randn(5, 7), torch.randn(7, 5).T, torch.randn(5, 14)[:, ::2]]] * 2
    plain, _ = stepped(
        T.adamw(0.1), [p.contiguous() for p in params], [[g.contiguous() for g in grads[0]]] * 2
    )
    given = [p.as_strided(p.shape, p.stride()) for p in params]
    after, _ = stepped(T.adamw(0.1, donate=donate), given, grads, donate)
    assert same([leaf.contiguous() for leaf in after], plain)
    if donate:
        assert [leaf.data_ptr() for leaf in after] == [leaf.data_ptr() for leaf in params]


@pytest.mark.parametrize("name", TABLE)
def test_a_step_writes_nothing_that_is_not_given(name: str):
    row = TABLE[name]
    params, grads = inputs(row)
    tx = row.make(None)
    state = tx.init(params)
    for gradient in grads:
        before = copied((gradient, state, params))
        after = tx.step(gradient, state, params)
        assert same((gradient, state, params), before)
        params, state = after


def test_donated_parameters_and_state_stay_where_they_are():
    tx, params = T.chain(T.clip_by_global_norm(0.5), T.adamw(0.1, donate=True)), model()
    state = tx.init(params)
    places = lambda: [
        leaf.data_ptr() for leaf in optree.tree_leaves((params, state[1].m, state[1].v))
    ]
    start = places()
    for gradient in gradients():
        kept = copied(gradient)
        params, state = tx.step(gradient, state, params, donate=True)
        assert same(gradient, kept)
    assert places() == start
    assert same(
        (params, state),
        stepped(T.chain(T.clip_by_global_norm(0.5), T.adamw(0.1)), model(), gradients()),
    )


@pytest.mark.parametrize("max_norm", [0.5, 1e9])
@pytest.mark.parametrize(
    "make",
    [
        lambda: T.adamw(0.1),
        lambda: T.sgd(0.1, 0.9),
        lambda: T.partition({"a": T.sgd(0.1), "b": T.adamw(0.1)}, {"0": "a", "*": "b"}),
        lambda: T.master(T.adamw(0.1)),
        lambda: T.chain(T.scale(2.0), T.adamw(0.1)),
    ],
)
def test_clipping_in_the_pass_of_the_optimizer(make: Any, max_norm: float):
    """The bits of a step with clipped gradients; the norm is in the state."""
    clip, tx, params, grads = T.clip_by_global_norm(max_norm), make(), model(), gradients(1)[0]
    clipped, clip_state = clip.update(grads, clip.init(params), params)
    wanted = tx.step(clipped, tx.init(params), params)
    chained = T.chain(clip, tx)
    after, state = chained.step(grads, chained.init(params), params)
    assert same((after, state), (wanted[0], (clip_state, wanted[1])))


def test_clipped_gradients_are_never_all_in_memory(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(optimizer_module, "_BLOCK", 40)
    seen, real = [], torch._foreach_mul
    monkeypatch.setattr(
        torch, "_foreach_mul", lambda xs, *rest: seen.append(len(xs)) or real(xs, *rest)
    )
    params, grads = model(), gradients(1)[0]
    tx = T.chain(T.clip_by_global_norm(0.5), T.adamw(0.1, donate=True))
    tx.step(grads, tx.init(params), params, donate=True)
    assert sum(seen) == len(optree.tree_leaves(params))
    assert max(seen) < 10 < sum(seen)


def test_a_skipped_step_returns_its_arguments():
    params = model()
    bad = optree.tree_map(lambda g: g * float("nan"), gradients(1)[0])
    tx = T.chain(T.skip_nonfinite(), T.clip_by_global_norm(1.0), T.adamw(0.1))
    before = tx.init(params)
    after, state = tx.step(bad, before, params)
    assert after is params
    assert (state[0].skipped.item(), state[1:] == before[1:]) == (1, True)
    masters = [torch.ones(2, dtype=torch.bfloat16)]
    tx = T.master(T.chain(accumulate(2), T.sgd(1.0)))
    assert tx.step(masters, tx.init(masters), masters)[0][0] is not None


@pytest.mark.parametrize("given", [(False, False), (False, True), (True, False), (True, True)])
@pytest.mark.parametrize("half", [torch.bfloat16, torch.float16])
def test_a_step_rounds_its_masters(half: torch.dtype, given: tuple[bool, bool]):
    """Beside a float32 leaf and a frozen one; memory is written only where it is given."""
    (give_masters, give_params), draw = given, torch.Generator().manual_seed(0)
    random = lambda n: torch.randn(n, generator=draw)
    start = [{"a": random(50).to(half), "b": random(5), "frozen": random(3).to(half)}, None]
    params, plain = copied(start), {"a": start[0]["a"].float(), "b": start[0]["b"].clone()}
    tx, wide = T.master(T.adamw(0.05), donate=give_masters), T.adamw(0.05)
    state, other = tx.init(params), wide.init([plain])
    for _ in range(5):
        grads = {"a": random(50).to(half), "b": random(5)}
        before, kept = (params, state.master), copied((params, state.master))
        params, state = tx.step(
            [{**grads, "frozen": None}, None], state, params, donate=give_params
        )
        assert give_params or same(before[0], kept[0])
        assert give_masters or same(before[1], kept[1])
        (plain,), other = wide.step([{"a": grads["a"].float(), "b": grads["b"]}], other, [plain])
        assert torch.equal(state.master[0]["a"], plain["a"])
        assert torch.equal(params[0]["a"], plain["a"].to(half))
        assert torch.equal(params[0]["b"], plain["b"])
    assert torch.equal(params[0]["frozen"], start[0]["frozen"])
    assert state.master[0]["b"] is None


def test_derivatives_through_a_step_in_one_pass():
    """As through update and apply_updates, although memory is given."""
    tx = T.chain(T.clip_by_global_norm(0.5), T.adamw(0.1, eps=1e-3, donate=True))

    def by_step(ps: list[Tensor]) -> Tensor:
        return tx.step([p.sin() for p in ps], tx.init(ps), ps)[0][0].sum()

    def by_update(ps: list[Tensor]) -> Tensor:
        return T.apply_updates(ps, tx.update([p.sin() for p in ps], tx.init(ps), ps)[0])[0].sum()

    ps = [torch.randn(3, dtype=torch.float64), torch.randn(2, dtype=torch.float64)]
    slope = torch.func.grad(by_step)(ps)
    assert same(slope, torch.func.grad(by_update)(ps))
    assert slope[1].abs().sum() > 0


def test_mistakes_of_a_step():
    grads, wte = [torch.ones(3)], torch.ones(3)
    for tx in (T.sgd(0.1), T.master(T.sgd(0.1)), T.masked(T.sgd(0.1), ["0"])):
        with pytest.raises(TransformError, match="needs the parameters"):
            tx.step(grads, tx.init(grads), None)
    for tx in (
        T.adamw(0.1),
        T.partition({"a": T.sgd(0.1), "b": T.adamw(0.1)}, {"0": "a", "1": "b"}),
    ):
        params = [wte, wte.view(3)]
        with pytest.raises(TransformError, match="are in the same memory"):
            tx.step([torch.ones(3)] * 2, tx.init(params), params, donate=True)
        assert torch.equal(wte, torch.ones(3))


def test_one_kernel_for_all_leaves_that_are_given(monkeypatch: pytest.MonkeyPatch):
    calls, real = [], foreach.fused_adamw
    monkeypatch.setattr(
        foreach,
        "fused_adamw",
        lambda columns, *rest: calls.append(len(columns[0][0])) or real(columns, *rest),
    )
    monkeypatch.setattr(optimizer_module, "_BLOCK", 20)
    params = model()
    for donate in (False, True):
        tx = T.adamw(0.1, donate=donate)
        calls.clear()
        params, _ = tx.step(gradients(1)[0], tx.init(params), params, donate=donate)
        assert (len(calls) == 1) == donate
        assert sum(calls) == len(optree.tree_leaves(params))


@pytest.mark.parametrize("given", [False, True])
def test_a_fused_step_counts_its_writes(given: bool):
    """A pullback sees that the parameters which it needs were changed, as after any other step."""
    stages = [lambda p, x: torch.tanh(x @ p)] * 2
    pipe = fpipe.pipeline(stages, microbatches=2, group=fpipe.local(2))
    params, tx = [torch.eye(3), torch.ones(3, 3)], T.adamw(0.5, donate=True)
    y, pullback = fpipe.vjp(pipe, params, torch.ones(4, 3))
    state = tx.init(params)
    versions = [moment._version for moment in (*state.m, *state.v)]
    _, state = tx.step([torch.ones(3, 3)] * 2, state, params, donate=given)
    after = [moment._version for moment in (*state.m, *state.v)]
    assert all(new > old for new, old in zip(after, versions, strict=True))
    if given:
        with pytest.raises(StageError, match="was changed in place since"):
            pullback(torch.ones_like(y))
    else:
        pullback(torch.ones_like(y))


def test_a_float16_parameter_returns_from_an_overflow():
    """Its copy is beyond 65504 for one step; a step and an update have the same bits."""
    tx = T.master(T.sgd(1.0))
    params = stepped = [torch.tensor([60000.0, -60000.0]).half()]
    state = other = tx.init(params)
    for gradient, want in ((-1e4, 65504), (2e4, 49984), (0.0, 49984)):
        grads = [torch.tensor([gradient, -gradient]).half()]
        updates, state = tx.update(grads, state, params)
        params = T.apply_updates(params, updates)
        stepped, other = tx.step(grads, other, stepped)
        assert params[0].tolist() == stepped[0].tolist() == [want, -want]
    updates, _ = tx.update([torch.tensor([torch.inf, torch.nan]).half()], state, params)
    assert not T.apply_updates(params, updates)[0].isfinite().any(), "this is no overflow"


@pytest.mark.parametrize("half", [torch.bfloat16, torch.float16])
def test_a_step_of_masters_multiplies_gradients_as_an_update_does(half: torch.dtype):
    for make in (T.clip_by_global_norm, T.scale):
        tx = T.chain(make(0.3), T.master(T.sgd(0.1)))
        params, grads = [torch.randn(1000).to(half)], [torch.randn(1000).to(half)]
        updates, state = tx.update(grads, tx.init(params), params)
        after, other = tx.step(grads, tx.init(params), params)
        assert same(after, T.apply_updates(params, updates))
        assert same(other[1].master, state[1].master)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_memory_that_overlaps_is_not_given(dtype: torch.dtype):
    """Elements of two parameters, or of one at two places. Parameters that lie side by side, or in
    the gaps of another one, are stepped.
    """
    flat = lambda: torch.zeros(6, dtype=dtype)
    overlapping = (
        [(0, (4,), (1,)), (2, (4,), (1,))],
        [(0, (3,), (0,))],
        [(0, (3, 3), (1, 1))],
        [(0, (3,), (2,)), (3, (2,), (1,))],
    )
    apart = (
        [(0, (2, 2), (1, 2)), (4, (2,), (1,))],
        [(0, (3,), (2,)), (1, (3,), (2,))],
        [(0, (0,), (1,)), (0, (6,), (1,))],
    )
    for rows, refused in [*((rows, True) for rows in overlapping), *((r, False) for r in apart)]:
        for tx in (T.sgd(1.0), T.adamw(0.1), T.master(T.sgd(1.0)), T.scale(-1.0)):
            memory = flat()
            params = [memory.as_strided(shape, strides, at) for at, shape, strides in rows]
            grads = [torch.ones(p.shape, dtype=dtype) for p in params]
            if refused:
                with pytest.raises(TransformError, match="are in the same memory"):
                    tx.step(grads, tx.init(params), params, donate=True)
                assert not memory.any()
            else:
                tx.step(grads, tx.init(params), params, donate=True)
                assert memory.unique().numel() == 1, "each element got one update"
