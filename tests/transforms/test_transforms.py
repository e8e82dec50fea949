"""One table of all transforms: split over processes they do what they do on the whole model, to the
bit, and what torch's optimizers or a few plain lines define.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any

import optree
import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import fake_processes
import fpipe
from common import same
from fpipe import transforms as T
from fpipe.errors import TransformError
from transform_table import STAGES, TABLE, TIED, follow, gradients, inputs


@pytest.mark.parametrize("name", [name for name, row in TABLE.items() if row.expected])
def test_does_what_it_says(name: str):
    row = TABLE[name]
    params, grads = inputs(row)
    after, _ = follow(row.make(None), params, grads)
    if row.tied:  # without a pipeline that names them, tied copies are two parameters
        after, _ = fake_processes.run(
            [range(STAGES)], STAGES, lambda over: follow(row.make(over), params, grads), tied=TIED
        )[0]
    assert row.expected
    expected = row.expected(optree.tree_leaves(params), [optree.tree_leaves(g) for g in grads])
    assert any(
        not torch.equal(p, q) for p, q in zip(optree.tree_leaves(params), expected, strict=True)
    )
    for got, wanted in zip(optree.tree_leaves(after), expected, strict=True):
        torch.testing.assert_close(got, wanted, rtol=row.close, atol=row.close)


@pytest.mark.parametrize(("processes", "how"), [(2, "V"), (4, "loop")])
@pytest.mark.parametrize("name", TABLE)
def test_split_is_whole(name: str, processes: int, how: str):
    """Parameters and state, stage by stage: the same bits for every placement of the stages."""
    row = TABLE[name]
    params, grads = inputs(row)
    spread = fake_processes.owners(STAGES, processes, how=how)

    def process(over: fake_processes.FakePipeline) -> tuple[Any, Any]:
        return follow(row.make(over), over.place(params), [over.place(g) for g in grads])

    whole, whole_state = fake_processes.run([range(STAGES)], STAGES, process, tied=TIED)[0]
    parts = fake_processes.run(spread, STAGES, process, tied=TIED)
    assert same(fake_processes.merge([after for after, _ in parts]), whole)
    for rank, (after, state) in enumerate(parts):
        assert [stage for stage, part in enumerate(after) if part is not None] == list(spread[rank])
        assert same(state, placed(whole_state, spread[rank]))


@pytest.fixture
def mesh() -> Iterator[DeviceMesh]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


@pytest.mark.covering
@pytest.mark.parametrize("mixed", [False, True])
@pytest.mark.parametrize("name", TABLE)
def test_dtensors(name: str, mixed: bool, mesh: DeviceMesh):
    """Alone, and beside plain tensors: the bits of plain tensors."""

    def split(tree: Any) -> Any:
        ways = {1: Replicate(), 2: Shard(0)}
        apart = lambda leaf: not mixed or leaf.dim() == 2
        return optree.tree_map(
            lambda leaf: distribute_tensor(leaf, mesh, [ways[leaf.dim()]]) if apart(leaf) else leaf,
            tree,
        )

    row = TABLE[name]
    params, grads = inputs(row)
    wanted, _ = follow(row.make(None), params, grads)
    after, _ = follow(row.make(None), split(params), [split(g) for g in grads])
    like = zip(optree.tree_leaves(after), optree.tree_leaves(split(params)), strict=True)
    assert all(type(mine) is type(theirs) for mine, theirs in like)
    whole = lambda leaf: leaf.full_tensor() if isinstance(leaf, DTensor) else leaf
    assert same(optree.tree_map(whole, after), wanted)


def test_a_norm_of_bfloat16_dtensors(mesh: DeviceMesh):
    """In float32, for which torch 2.11 has no kernel."""
    leaves = [torch.randn(4, 3).bfloat16() for _ in range(2)]
    split = [distribute_tensor(leaf, mesh, [Shard(0)]) for leaf in leaves]
    assert torch.equal(T.global_norm(split), T.global_norm(leaves))


def placed(state: Any, here: Any) -> Any:
    """A state without the entries of other ranks, in every list with one entry per stage."""
    listed = lambda node: isinstance(node, list) and len(node) == STAGES
    return optree.tree_map(
        lambda node: (
            [p if s in here else None for s, p in enumerate(node)] if listed(node) else node
        ),
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
    """A gradient of None, for a leaf or a stage, changes neither the parameter nor the others'
    updates' places.
    """
    row = TABLE[name]
    params, grads = inputs(row)
    for gradient in grads:
        gradient[1]["w"] = gradient[3] = None
    tx = row.make(None)
    after, state = follow(tx, params, grads)
    assert after[1]["w"] is params[1]["w"]
    assert all(after[3][key] is params[3][key] for key in ("b", "w"))
    assert not torch.equal(after[2]["w"], params[2]["w"])
    assert (
        optree.tree_structure(state) == optree.tree_structure(follow(tx, params, gradients())[1])
        or "torch" in name
    )


@pytest.mark.parametrize("name", TABLE)
def test_a_process_without_stages(name: str):
    """It has nothing to update and still takes part in the collectives."""
    row = TABLE[name]
    params, grads = inputs(row)

    def process(over: fake_processes.FakePipeline) -> tuple[Any, int]:
        after, _ = follow(row.make(over), over.place(params), [over.place(g) for g in grads])
        return after, over.sums

    (full, sums), (empty, others) = fake_processes.run(
        [range(STAGES), []], STAGES, process, tied=TIED
    )
    assert empty == [None] * STAGES
    assert sums == others
    assert same(full, fake_processes.run([range(STAGES)], STAGES, process, tied=TIED)[0][0])


def test_chain_checks_its_state():
    tx = T.chain(T.identity(), T.identity())
    with pytest.raises(TransformError, match="a state of 1 parts for a chain of 2"):
        tx.update([torch.ones(1)], ((),))


@pytest.mark.parametrize("tx", [T.adamw(0.1), T.chain(T.identity(), T.sgd(0.1, momentum=0.9))])
def test_a_state_of_none_is_named(tx: T.Transform):
    with pytest.raises(TransformError, match=r"None.*; pass th"):
        tx.update([torch.ones(1)], None, [torch.ones(1)])


def test_a_rate_that_is_text_is_refused():
    with pytest.raises(TransformError, match=r"lr='0\.1' of adamw"):
        T.adamw("0.1")  # type: ignore[arg-type]


def test_misfit_trees_are_reported():
    tx = T.adamw(0.1)
    params = [{"w": torch.ones(1)}, None]
    state = tx.init(params)
    with pytest.raises(
        TransformError, match=r"params has None where the gradients have a leaf: 0\.w"
    ):
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


def stepped(tx: T.Transform) -> Any:
    params = [torch.ones(1)]
    return tx.update(params, tx.init(params), params)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: T.clip_by_global_norm(0.0), "max_norm=0.0"),
        (lambda: T.clip_by_global_norm("1"), "max_norm='1'"),  # type: ignore[arg-type]
        (lambda: T.clip_by_global_norm(1.0, over=3), "over=3; give the pipeline"),  # type: ignore[arg-type]
        (lambda: T.skip_nonfinite(over=3), "over=3; give the pipeline"),  # type: ignore[arg-type]
        (lambda: T.chain(T.identity(), 3), "not 3"),  # type: ignore[arg-type]
        (lambda: T.masked(T.identity(), "0.*").init([torch.ones(1)]), r"mask='0\.\*'; give a list"),
        (lambda: T.adamw(0.1, mask="0.*").init([torch.ones(1)]), r"mask='0\.\*'; give a list"),
        (lambda: T.global_norm([torch.ones(1)], p=0.0), "p=0.0"),
        (lambda: T.adamw(0.1, betas=(0.9, 1.0)), r"betas=\(0.9, 1.0\)"),
        (lambda: T.adamw(0.1, weight_decay=-1.0), "weight_decay=-1.0"),
        (lambda: T.sgd(0.1, nesterov=True), "momentum > 0"),
        (lambda: T.sgd(0.1, -0.5), "momentum=-0.5"),
        (lambda: stepped(T.from_torch(torch.optim.Muon)), r"Muon, \): .*2D parameters"),
        (lambda: T.add_noise(-1.0), "eta=-1.0"),
        (lambda: T.dynamic_loss_scale(0.0), "init_scale=0.0"),
        (lambda: T.from_torch(torch.optim.LBFGS), "without a closure"),
        (lambda: T.from_torch("adamw"), "not a class"),  # type: ignore[arg-type]
        (lambda: T.from_torch(torch.optim.SGD, lrr=1), r"SGD, lrr=1\): .* argument 'lrr'"),
        (
            lambda: T.from_torch(torch.optim.AdamW, lr=-1.0),
            r"AdamW, lr=-1.0\): Invalid learning",
        ),
        (
            lambda: T.partition({"a": T.identity()}, {"*": "b"}).init([torch.ones(1)]),
            r"\['b'\] have no transform",
        ),
        (
            lambda: T.partition({"a": T.identity()}, {"9": "a"}).init([torch.ones(1)]),
            "no pattern of",
        ),
        (lambda: T.masked(T.identity(), [True]).init([torch.ones(1)] * 2), "labels do not fit"),
    ],
)
def test_mistakes_are_reported(make: Callable[[], Any], words: str):
    with pytest.raises(TransformError, match=words):
        make()


@pytest.mark.parametrize(
    "make",
    [
        lambda: T.masked(T.sgd(0.1), ["*.ww"]),
        lambda: T.partition({"a": T.sgd(0.1), "b": T.identity()}, {"*.ww": "a", "*": "b"}),
        lambda: T.masked(T.sgd(0.1), ["0.w", "*.ww"]),
        lambda: T.adamw(0.1, mask=["*.ww"]),
    ],
)
def test_a_pattern_that_fits_nothing_is_refused(make: Callable[[], T.Transform]):
    with pytest.raises(TransformError, match=r"'\*\.ww' matches no leaf; near names: .*0\.w"):
        make().init([{"w": torch.ones(2, 2)}, {"b": torch.ones(2, 2)}])
    elsewhere = [{"w": torch.ones(2, 2)}, None]  # the pattern may match a leaf of stage 1
    make().init(elsewhere)


def test_a_tied_name_of_a_norm_that_fits_nothing_is_refused():
    with pytest.raises(TransformError, match=r"'1\.ww' matches no leaf"):
        T.global_norm([{"w": torch.ones(1)}, {"w": torch.ones(1)}], tied=[("0.w", "1.ww")])


@pytest.mark.parametrize("scheduler", ["cosine", "linear"])
def test_learning_rates_are_those_of_torch(scheduler: str):
    """torch's own schedulers after a warm-up; the step of an optimizer is an int."""
    make = {"cosine": T.warmup_cosine, "linear": T.warmup_linear}[scheduler]
    optimizer = torch.optim.SGD([torch.zeros(1)], lr=2.0)
    if scheduler == "cosine":
        theirs: Any = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 10, eta_min=0.5)
    else:
        theirs = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.25, 10)
    rate = make(2.0, warmup=3, steps=13, end=0.5)
    assert [rate(step) for step in range(3)] == [0.5, 1.0, 1.5]
    for step in range(3, 13):
        assert rate(step) == pytest.approx(theirs.get_last_lr()[0])
        optimizer.step()
        theirs.step()
    assert rate(13) == rate(1000) == 0.5


def test_an_optimizer_passes_an_int_to_its_learning_rate():
    seen = []
    tx = T.adamw(lambda step: seen.append(step) or 0.1)
    tx.update([torch.ones(1)], tx.init([torch.ones(1)]), [torch.ones(1)])
    assert seen == [0]
    assert type(seen[0]) is int


@pytest.mark.parametrize(
    ("make", "match"),
    [
        (lambda: T.warmup_cosine(1.0, warmup=5, steps=5), "steps=5 is not above warmup=5"),
        (lambda: T.warmup_linear(1.0, warmup=0.5, steps=5), "warmup=0.5; give a number of steps"),  # type: ignore[arg-type]
        (lambda: T.warmup_stable_decay(1.0, warmup=3, decay=3, steps=5), "do not fit into steps=5"),
    ],
)
def test_learning_rates_refuse_counts_that_do_not_fit(make: Any, match: str):
    with pytest.raises(TransformError, match=match):
        make()


SWAPPED = [{f"w{number}": torch.randn(8, 8) for number in range(50)} for _ in range(2)]
RATES = {
    "lr=-0.001 of adamw": lambda: fpipe.adamw(-1e-3),
    "lr=nan of sgd": lambda: fpipe.sgd(float("nan")),
    "lr=inf of adamw": lambda: fpipe.adamw(float("inf")),
    "factor=nan of scale": lambda: fpipe.scale(float("nan")),
    "the rate of step 0 is -1.0; a learning rate": lambda: _updated(fpipe.sgd(lambda step: -1.0)),
    "the rate of step 0 is nan; a learning rate": lambda: _updated(
        fpipe.adamw(lambda step: float("nan"))
    ),
    "the rate of step 0 is inf; a factor": lambda: _updated(
        fpipe.scale_by_schedule(lambda step: float("inf"))
    ),
    "in the order tx.update(grads, state, params)": lambda: _swapped(fpipe.adamw(1e-3)),
    "as in tx.update(grads, state, params)": lambda: _swapped(
        fpipe.chain(fpipe.clip_by_global_norm(1.0), fpipe.adamw(1e-3))
    ),
}


def _updated(tx: fpipe.Transform) -> Any:
    params = [torch.ones(2)]
    return tx.update(params, tx.init(params), params)


def _swapped(tx: fpipe.Transform) -> object:
    return tx.update(tx.init(SWAPPED), SWAPPED, SWAPPED)


@pytest.mark.parametrize("message", RATES)
def test_rates_and_swapped_arguments_are_refused_in_short(message: str):
    with pytest.raises(TransformError, match=re.escape(message)) as caught:
        RATES[message]()
    assert len(str(caught.value)) < 300


def test_a_negative_factor_is_allowed():
    assert fpipe.scale(-0.5).update([torch.ones(1)], ())[0] == [torch.tensor([-0.5])]
    assert _updated(fpipe.scale_by_schedule(lambda step: -0.5))[0][0].tolist() == [-0.5, -0.5]


def test_transforms_print_the_call_that_makes_them():
    tx = fpipe.chain(fpipe.clip_by_global_norm(1.0), fpipe.adamw(3e-4), fpipe.scale(0.5))
    parts = "fpipe.clip_by_global_norm(1.0), fpipe.adamw(0.0003), fpipe.scale(0.5)"
    assert repr(tx) == f"fpipe.chain({parts})"
    assert repr(fpipe.sgd(lambda step: 1.0)) == "fpipe.sgd(<lambda>)"
    assert "transform of fpipe" in repr(fpipe.transforms.identity())
