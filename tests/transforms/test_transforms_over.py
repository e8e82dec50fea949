"""What transforms over all stages promise beyond the table: norms with one value, steps left out by
all, sums.
"""

from __future__ import annotations

import math
from typing import Any

import optree
import pytest
import torch

import fake_processes
from common import same
from fpipe import transforms as T
from fpipe.errors import GroupError, TransformError
from fpipe.testing import run
from fpipe.transforms import finite
from transform_table import STAGES, TIED, follow, gradients, model
from written_transforms import accumulate


# ---- norms ----
def unlike() -> list[Any]:
    """Gradients of very different size, with two dtypes, an empty leaf, and a leaf larger than one
    thread's share.
    """
    tree = [
        [torch.randn(50) * 10.0 ** (stage - 3), torch.randn(3, 3).double()]
        for stage in range(STAGES)
    ]
    tree[2].append(torch.randn(100_003) * 1e-3)
    tree[4] = [torch.zeros(0), torch.randn(7).bfloat16(), torch.randn(1030, 3).T]
    return tree


@pytest.mark.parametrize("p", [1.0, 2.0, 3.0, math.inf])
def test_exact_norm_has_one_value(p: float):
    torch.manual_seed(1)
    tree = unlike()
    found = set()
    for processes in (1, 2, 3, 4, 8):
        for how in ("loop", "V"):
            spread = fake_processes.owners(STAGES, processes, how=how)
            threads = torch.get_num_threads()
            try:
                torch.set_num_threads(1 + processes % 2)
                norms = fake_processes.run(
                    spread,
                    STAGES,
                    lambda over: T.global_norm(over.place(tree), over=over, p=p, exact=True),
                )
            finally:
                torch.set_num_threads(threads)
            found |= {norm.item().hex() for norm in norms}
    found.add(T.global_norm(tree, p=p, exact=True).item().hex())
    assert len(found) == 1
    flat = torch.cat([leaf.reshape(-1).double() for leaf in optree.tree_leaves(tree)])
    assert float.fromhex(found.pop()) == pytest.approx(
        torch.linalg.vector_norm(flat, p).item(), rel=1e-6
    )


def test_norm_counts_tied_once_wherever_the_copies_live():
    tree = [
        {"wte": torch.tensor([3.0])},
        *[None] * (STAGES - 2),
        {"w": torch.tensor([4.0]), "wte": torch.tensor([3.0])},
    ]
    for processes in (1, 2, 3):
        spread = fake_processes.owners(STAGES, processes)
        norm = lambda over: T.global_norm(over.place(tree), over=over).item()
        assert set(fake_processes.run(spread, STAGES, norm, tied=TIED)) == {5.0}
        assert fake_processes.run(spread, STAGES, norm) == [pytest.approx(34**0.5)] * processes
    assert (
        T.global_norm(
            {"a": torch.tensor([3.0]), "b": torch.tensor([4.0])}, tied=[("x", "b")]
        ).item()
        == 3.0
    )


def test_norm_counts_replicas_once():
    """As in DualPipe: both processes hold all stages, with the same gradients."""
    tree = gradients(1)[0]
    one = T.global_norm(tree)
    norms = fake_processes.run(
        [range(STAGES), range(STAGES)], STAGES, lambda over: T.global_norm(tree, over=over)
    )
    assert all(torch.equal(norm, one) for norm in norms)


@pytest.mark.parametrize("p", [1.0, 2.0, math.inf])
def test_norm_over_shards(p: float):
    whole = torch.randn(10)
    norms = fake_processes.run(
        [[0], [0]], 1, lambda over: T.global_norm([whole.view(2, 5)[over.rank]], p=p, shards=over)
    )
    assert all(
        norm.item() == pytest.approx(torch.linalg.vector_norm(whole, p).item()) for norm in norms
    )


def test_clip_tells_the_norm_and_keeps_small_gradients():
    tx = T.clip_by_global_norm(10.0)
    grads = [torch.tensor([3.0, 4.0])]
    after, state = tx.update(grads, tx.init(grads))
    assert state.norm.item() == 5.0
    assert torch.equal(after[0], grads[0])


def test_norm_needs_an_entry_per_stage():
    def process(over: fake_processes.FakePipeline) -> None:
        with pytest.raises(TransformError, match="3 entries for a pipeline of 8 stages"):
            T.global_norm([torch.ones(1)] * 3, over=over)
        with pytest.raises(TransformError, match="a dict for a pipeline of 8 stages"):
            T.global_norm({}, over=over)

    fake_processes.run([range(STAGES)], STAGES, process)


# ---- steps that are left out ----
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_all_ranks_skip_together(bad: float):
    params, grads = model(), gradients(4)
    poisoned = [optree.tree_map(torch.clone, g) for g in grads]
    poisoned[1][3]["b"][2] = bad
    poisoned[2][0]["wte"][0, 0] = bad

    def process(over: fake_processes.FakePipeline) -> Any:
        tx = T.chain(T.skip_nonfinite(over=over), T.adamw(0.01))
        return follow(tx, over.place(params), [over.place(g) for g in poisoned])

    parts = fake_processes.run(fake_processes.owners(STAGES, 3), STAGES, process)
    expected, _ = follow(T.adamw(0.01), params, [grads[0], grads[3]])
    assert same(fake_processes.merge([after for after, _ in parts]), expected)
    for _, (skips, adam) in parts:
        assert (skips.skipped.item(), skips.in_a_row.item(), adam.step.item()) == (2, 0, 2)


def test_large_numbers_are_finite():
    assert finite.all_finite(
        [torch.full((3,), 1e300, dtype=torch.float64), torch.full((40_000,), 3e38)]
    )
    assert finite.all_finite([torch.full((40_000,), 6e4, dtype=torch.float16), None])


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


def test_a_chain_waits_for_a_transform_that_makes_no_step():
    tx = T.chain(accumulate(3), T.sgd(1.0, 0.9))
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


# ---- several places, one gradient ----
def test_mean_over_replicas():
    mine = lambda rank: [
        None,
        {"h": torch.full((2,), float(rank)).half(), "w": torch.full((2, 3), float(rank))},
    ]
    for dtype in (None, torch.float64):
        found = run(
            lambda group, dtype=dtype: T.mean_over(group, dtype=dtype).update(mine(group.rank), ())[
                0
            ],
            ranks=4,
        )
        wanted = [None, {"h": torch.full((2,), 1.5).half(), "w": torch.full((2, 3), 1.5)}]
        assert all(same(tree, wanted) for tree in found)
    with pytest.raises(GroupError, match="mean_over=3 is no group"):
        T.mean_over(3)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "tx", [T.clip_by_global_norm(1.0), T.skip_nonfinite(), T.dynamic_loss_scale()]
)
def test_stages_of_one_process_without_over_are_refused(
    tx: T.Transform, monkeypatch: pytest.MonkeyPatch
):
    """Several processes, and a tree with the stages of one of them: its norm is not that of the
    model.
    """
    grads = [torch.ones(2), None]
    tx.update(grads, tx.init(grads), grads)  # one process
    monkeypatch.setattr("torch.distributed.is_initialized", lambda: True)
    monkeypatch.setattr("torch.distributed.get_world_size", lambda: 2)
    with pytest.raises(TransformError, match="only stages 0 of 2 are here, and over= is missing"):
        tx.update(grads, tx.init(grads), grads)


@pytest.mark.parametrize("order", [(("0.w", "2.w"),), (("2.w", "0.w", "0.v"),)])
def test_copies_of_a_tied_parameter_get_the_same_noise(order: Any):
    grads = [
        {"w": torch.zeros(3), "v": torch.zeros(3)},
        {"w": torch.zeros(3)},
        {"w": torch.zeros(3)},
    ]

    def noise(over: Any) -> Any:
        tx = T.add_noise(0.04, seed=1, over=over)
        mine = [part if stage in over.here else None for stage, part in enumerate(grads)]
        return tx.update(mine, tx.init(mine))[0]

    ((whole, _),) = fake_processes.run([range(3)], 3, lambda over: (noise(over), 0), tied=order)
    names = dict(zip(optree.tree_paths(whole), optree.tree_leaves(whole), strict=True))
    by_name = {".".join(map(str, path)): leaf for path, leaf in names.items()}
    first, *others = order[0]
    assert all(torch.equal(by_name[first], by_name[other]) for other in others)
    assert not torch.equal(by_name["1.w"], by_name[first])
    parts = fake_processes.run([[0], [1, 2]], 3, noise, tied=order)
    assert same([parts[0][0], *parts[1][1:]], whole)
