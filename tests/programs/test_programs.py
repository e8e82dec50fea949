"""What a stage becomes: F, B, I and W of every kind of function in models, against plain
autograd.
"""

from __future__ import annotations

import gc
import os
import shutil
import subprocess
import sys
import weakref
from collections.abc import Callable, Iterator
from functools import lru_cache
from pathlib import Path
from typing import Any

import optree
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

import fpipe
from common import Count
from fpipe import trace
from fpipe.passes import identity, views
from fpipe.programs import cache
from fpipe.programs.program import Programs

torch.manual_seed(0)
EYE, WIDE, X = torch.randn(3, 3), torch.randn(4, 4), torch.randn(2, 3)
TOKENS = torch.randint(5, (2, 3))
CONSTANT = torch.randn(3)


# ---- the reference ----
def tensors(tree: Any) -> list[Tensor]:
    return [leaf for leaf in optree.tree_leaves(tree) if isinstance(leaf, Tensor)]


def wanted(tree: Any) -> Any:
    """Leaves with requires_grad, as torch.func would differentiate them."""
    return optree.tree_map(
        lambda v: (
            v.detach().clone().requires_grad_(v.is_floating_point() or v.is_complex())
            if isinstance(v, Tensor)
            else v
        ),
        tree,
    )


def reference(
    fn: Callable[..., Any], p: Any, x: Any, dys: list[Tensor], side: dict[str, Any]
) -> tuple[Any, list[Tensor]]:
    """Outputs and gradients (of p, then of x) by plain autograd."""
    params, start = wanted(p), wanted(x)
    inner = optree.tree_map(
        lambda v: v * 1 if isinstance(v, Tensor) and v.requires_grad else v, start
    )
    y = fn(params, inner, **side)
    ends = [(out, dy) for out, dy in zip(tensors(y), dys, strict=True) if out.requires_grad]
    wrt = [v for v in tensors(params) + tensors(start) if v.requires_grad]
    if not ends:
        return y, [torch.zeros_like(w) for w in wrt]
    grads = torch.autograd.grad([a for a, _ in ends], wrt, [b for _, b in ends], allow_unused=True)
    return y, [torch.zeros_like(w) if g is None else g for g, w in zip(grads, wrt, strict=True)]


def agree(fn: Callable[..., Any], p: Any, x: Any, **side: Any) -> Programs:
    """F, B, and I then W, against the reference, to the bit."""
    programs = trace(fn, p, x, **side)
    before = [t.clone() for t in tensors((p, x))]
    torch.manual_seed(3)
    y, saved = programs.forward(p, x, **side)
    dys = [
        torch.randn_like(t) if t.is_floating_point() or t.is_complex() else torch.zeros(())
        for t in tensors(y)
    ]
    dx, dp = programs.backward(saved, dys)
    only_dx, kept = programs.backward_input(saved, dys)
    only_dp = programs.backward_weight(kept)
    torch.manual_seed(3)
    out, grads = reference(fn, p, x, dys, side)
    for mine, true in zip(tensors(y), tensors(out), strict=True):
        assert mine.dtype == true.dtype and torch.equal(mine, true.detach())
    mine = tensors(dp) + tensors(dx)
    split = tensors(only_dp) + tensors(only_dx)
    assert len(mine) == len(grads) == len(split)
    for whole, parts, true in zip(mine, split, grads, strict=True):
        assert torch.equal(whole, parts), "B is not I then W"
        assert torch.equal(whole, true), f"off by {(whole - true).abs().max()}"
    assert all(torch.equal(a, b) for a, b in zip(tensors((p, x)), before, strict=True)), (
        "an argument was changed"
    )
    return programs


# ---- functions of every kind ----
def mutates_its_input(p, x):
    x.add_(p[0])
    return x * x


def mutates_views(p, x):
    h = x @ p
    h[:, 0] = 0
    h.view(-1)[1:3].mul_(3)
    return h


def autocast(p, x):
    with torch.autocast("cpu", torch.bfloat16):
        return (x @ p).float().tanh()


def no_grad_inside(p, x):
    with torch.no_grad():
        scale = (x @ p).norm()
    return x @ p / scale


def higher_order(p, x):
    h = x @ p
    with torch.enable_grad():
        (g,) = torch.autograd.grad(h.pow(3).sum(), h, create_graph=True)
    return g


def checkpoint_inside(p, x):
    return torch.utils.checkpoint.checkpoint(lambda v: torch.tanh(v @ p), x, use_reentrant=False)


def hook_inside(p, x):
    h = x * 1
    h.register_hook(lambda g: g * 2)
    return h @ p


def either(p, x):
    return torch.cond(x.sum() > 0, lambda v: v @ p, lambda v: v - 1, (x,))


def part_remat(p, x):
    return fpipe.remat(lambda v: torch.tanh(v @ p).exp())(x @ p) @ p


CASES: dict[str, tuple[Callable[..., Any], Any, Any]] = {
    "mutation inside": (lambda p, x: x.mul(2).add_(p[0]).relu_(), EYE, X),
    "mutation of the input": (mutates_its_input, EYE, X),
    "mutation of views": (mutates_views, EYE, X),
    "outputs that alias": (lambda p, x: (x, x, x[0], x.view(-1), x @ p), EYE, X),
    "a parameter as output": (lambda p, x: (p, x), EYE, X),
    "identity": (lambda p, x: x, EYE, X),
    "a dict, a number and None": (
        lambda p, x: {"a": x["a"].split(1)[0] @ p, "b": x["b"], "n": 3, "z": None},
        EYE,
        {"a": X, "b": torch.ones(4)},
    ),
    "a number in the input": (lambda p, x: x["n"] * x["a"] @ p, EYE, {"n": 2.5, "a": X}),
    "tuples by items": (lambda p, x: torch.var_mean(x @ p, -1), EYE, X),
    "max and where": (lambda p, x: torch.max(x @ p, -1), EYE, X),
    "a captured constant": (lambda p, x: x * CONSTANT @ p, EYE, X),
    "constants made inside": (
        lambda p, x: x @ p + torch.arange(3) + torch.tensor([1.0, 2, 3]),
        EYE,
        X,
    ),
    "dropout": (lambda p, x: F.dropout(x @ p, 0.5) @ p, EYE, X),
    "draws": (lambda p, x: x @ p * torch.rand(3) + torch.randn_like(x), EYE, X),
    "a draw by gumbel": (lambda p, x: F.gumbel_softmax(x @ p), EYE, X),
    "rrelu": (lambda p, x: F.rrelu(x @ p, training=True), EYE, X),
    "attention": (
        lambda p, x: F.scaled_dot_product_attention(x @ p, x @ p, x, is_causal=True),
        WIDE,
        torch.randn(2, 2, 3, 4),
    ),
    "attention with dropout": (
        lambda p, x: F.scaled_dot_product_attention(x @ p, x, x, dropout_p=0.25),
        WIDE,
        torch.randn(2, 2, 3, 4),
    ),
    "embedding": (lambda p, x: F.embedding(x, p, padding_idx=0), torch.randn(5, 4), TOKENS),
    "indexing": (lambda p, x: p[x], torch.randn(5, 4), TOKENS),
    "layer norm": (lambda p, x: F.layer_norm(x, (3,), p[0], p[1]), EYE, X),
    "rms norm": (lambda p, x: F.rms_norm(x, (3,), p[0]), EYE, X),
    "batch norm": (lambda p, x: F.batch_norm(x, None, None, p[0], p[1], True), EYE, X),
    "convolution": (
        lambda p, x: F.conv2d(x, p["w"], p["b"], padding=1),
        {"w": torch.randn(4, 2, 3, 3), "b": torch.randn(4)},
        torch.randn(2, 2, 4, 4),
    ),
    "transposed convolution": (
        lambda p, x: F.conv_transpose1d(x, p["w"], p["b"]),
        {"w": torch.randn(2, 4, 3), "b": torch.randn(4)},
        torch.randn(2, 2, 4),
    ),
    "a linear layer that ends in a view": (
        lambda p, x: F.linear(x, p["w"], p["b"]).transpose(0, 1),
        {"w": WIDE, "b": torch.randn(4)},
        torch.randn(2, 3, 4),
    ),
    "an output with gaps": (lambda p, x: (x @ p)[:, ::2], EYE, X),
    "an expanded output": (lambda p, x: (x @ p).expand(3, 2, 3), EYE, X),
    "vmap": (lambda p, x: torch.func.vmap(lambda r: torch.tanh(r @ p))(x), EYE, X),
    "grad": (lambda p, x: torch.func.grad(lambda v: torch.tanh(v @ p).sum())(x), EYE, X),
    "vmap of grad": (
        lambda p, x: torch.func.vmap(torch.func.grad(lambda v: torch.tanh(v @ p).sum()))(x),
        EYE,
        X,
    ),
    "jvp": (lambda p, x: torch.func.jvp(lambda v: torch.tanh(v @ p), (x,), (x,))[1], EYE, X),
    "a gradient inside": (higher_order, EYE, X),
    "autocast": (autocast, EYE, X),
    "no_grad inside": (no_grad_inside, EYE, X),
    "detach": (lambda p, x: (x @ p).detach() * x, EYE, X),
    "torch's checkpoint": (checkpoint_inside, EYE, X),
    "a hook on a value": (hook_inside, EYE, X),
    "torch.cond": (either, EYE, X),
    "complex": (lambda p, x: x @ p, EYE.to(torch.complex64), X.to(torch.complex64)),
    "parameters only": (lambda p, x: p.sum() + torch.zeros(2), EYE, X),
    "no parameters": (lambda p, x: x * 2, None, X),
    "unused parameters": (lambda p, x: x * 2, EYE, X),
    "another dtype": (lambda p, x: (x.double() @ p.double()).bfloat16(), EYE, X),
    "remat of the whole": (
        fpipe.remat(lambda p, x: F.dropout(torch.tanh(x @ p).exp() @ p, 0.5)),
        EYE,
        X,
    ),
    "remat of a part": (part_remat, EYE, X),
}


#: torch itself warns, where a forward derivative is traced and where torch.cond compiles its
#: branches.
TORCH_WARNS = pytest.mark.filterwarnings("ignore:.*torch.jit.script", "ignore:The .grad attribute")


@TORCH_WARNS
@pytest.mark.parametrize("name", CASES)
def test_agrees_with_autograd(name: str):
    agree(*CASES[name])


def test_side_inputs():
    def attend(p, x, *, mask):
        return F.scaled_dot_product_attention(x @ p, x @ p, x, attn_mask=mask)

    agree(attend, WIDE, torch.randn(2, 2, 3, 4), mask=torch.ones(3, 3).tril().bool())


# ---- the cut ----
def tanh_layer(p, x):
    return torch.tanh(x @ p["w"] + p["b"])


LAYER = {"w": torch.randn(3, 3), "b": torch.randn(3)}


def operations(program: Any) -> list[str]:
    return [
        getattr(node.target, "_opname", str(node.target)) for node in program.program.operations
    ]


def test_trees_of_another_structure_are_refused():
    programs = trace(lambda p, x: x @ p["w"] + p["b"], {"w": EYE, "b": CONSTANT}, X)
    with pytest.raises(fpipe.errors.StageError, match=r"params has .*'w'.* were traced for .*'b'"):
        programs.forward({"w": EYE}, X)


def by_hand_mistakes() -> dict[str, tuple[Callable[[Any, Any, Any], object], str]]:
    other = trace(lambda p, x: x * p, EYE, torch.ones(3, 3))
    return {
        "other sizes": (lambda p, s, k: p.forward(EYE, torch.ones(4, 3)), r"x has float32\[4, 3\]"),
        "another dtype": (lambda p, s, k: p.forward(EYE.double(), X), "params has float64"),
        "another device": (lambda p, s, k: p.forward(EYE, X.to("meta")), "on meta, where"),
        "another structure": (lambda p, s, k: p.forward(EYE, [X]), "x has PyTreeSpec"),
        "other sizes of dy": (lambda p, s, k: p.backward(s, torch.ones(4, 3)), "dy has float32"),
        "saved of nothing": (lambda p, s, k: p.backward_input((), X), "not tuple; pass saved"),
        "kept of nothing": (lambda p, s, k: p.backward_weight(None), "and kept of backward_input"),
        "saved for kept": (lambda p, s, k: p.backward_weight(s), "not that of others"),
        "saved of others": (lambda p, s, k: other.backward(s, torch.ones(3, 3)), "that of others"),
    }


@pytest.mark.parametrize("name", by_hand_mistakes())
@pytest.mark.parametrize("engine", ["trace", "eager"])
def test_programs_by_hand_refuse_what_they_were_not_traced_for(engine: Any, name: str):
    """A number of the trace, such as the length of an axis, gave silently wrong results."""
    call, message = by_hand_mistakes()[name]
    stage = fpipe.Stage(lambda p, x: x @ p / x.shape[0], engine=engine)
    programs = trace(stage, EYE, X)
    y, saved = programs.forward(EYE, X)
    _, kept = programs.backward_input(saved, y)
    _, saved = programs.forward(EYE, X)
    with pytest.raises(fpipe.errors.StageError, match=message):
        call(programs, saved, kept)


def test_a_graph_of_autograd_runs_backward_once():
    programs = trace(fpipe.Stage(lambda p, x: x @ p, engine="eager"), EYE, X)
    y, saved = programs.forward(EYE, X)
    programs.backward(saved, y)
    with pytest.raises(fpipe.errors.StageError, match="call forward again"):
        programs.backward(saved, y)


def test_i_does_only_what_the_input_gradient_needs():
    programs = trace(tanh_layer, LAYER, X)
    assert (
        operations(programs.forward).count("mm") + operations(programs.forward).count("addmm") == 1
    )
    assert operations(programs.backward_input).count("mm") == 1
    assert operations(programs.backward_weight).count("mm") == 1
    assert "tanh_backward" in operations(programs.backward_input)
    assert "tanh_backward" not in operations(programs.backward_weight), (
        "W computes again what I computed"
    )
    both = operations(programs.backward_input) + operations(programs.backward_weight)
    assert sorted(both) == sorted(operations(programs.backward)), "I then W is not the work of B"


def test_a_convolution_is_cut_too():
    """Its backward is one operation for both gradients; each program runs it for one of them."""
    fn, p, x = CASES["convolution"]
    programs = trace(fn, p, x)
    assert operations(programs.backward_input).count("convolution_backward") == 1
    assert operations(programs.backward_weight).count("convolution_backward") == 1
    assert set(programs.kept) <= {"dy0", "x0", "p0", "p1"}


def test_what_hangs_on_no_input_is_made_anew_and_not_saved():
    programs = trace(lambda p, x: x @ p * torch.arange(3.0).exp(), EYE, X)
    assert set(programs.saved) == {"x0", "p0"}
    assert operations(programs.backward_input).count("arange") == 1
    agree(lambda p, x: x @ p * torch.arange(3.0).exp(), EYE, X)


def test_w_holds_only_what_it_needs():
    """The output of tanh is saved for I, which needs it, and not kept for W, which does not."""
    programs = trace(tanh_layer, LAYER, X)
    y, saved = programs.forward(LAYER, X)
    probe = weakref.ref(next(v for name, v in saved.values.items() if v is y))
    _, kept = programs.backward_input(saved, [torch.ones_like(y)])
    del saved, y
    gc.collect()
    assert probe() is None
    assert set(programs.backward_weight.program.inputs) <= set(kept.values)


def held(values: Any, apart: Any) -> int:
    """Bytes of the storages of some values, but for those of others."""
    known = {t.untyped_storage().data_ptr() for t in tensors(apart)}
    sizes = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in values}
    return sum(size for pointer, size in sizes.items() if pointer not in known)


@TORCH_WARNS
@pytest.mark.parametrize("name", CASES)
def test_saved_and_kept_bytes_are_what_is_held(name: str):
    fn, p, x = CASES[name]
    programs = trace(fn, p, x)
    y, saved = programs.forward(p, x)
    dys = [
        torch.randn_like(t) if t.is_floating_point() or t.is_complex() else torch.zeros(())
        for t in tensors(y)
    ]
    _, kept = programs.backward_input(saved, dys)
    assert held(tensors(list(saved.values.values())), p) == programs.saved_bytes
    assert held(tensors(list(kept.values.values())), p) == programs.kept_bytes


@pytest.mark.parametrize("x", [TOKENS, {"ids": TOKENS, "n": 3}], ids=["tokens", "dict"])
def test_i_is_empty_where_the_input_has_no_gradient(x: Any):
    programs = trace(
        lambda p, v: F.embedding(v if isinstance(v, Tensor) else v["ids"], p) @ p.T,
        torch.randn(5, 3),
        x,
    )
    assert operations(programs.backward_input) == []
    assert operations(programs.backward_weight) == operations(programs.backward)


def test_constants_are_shared_and_not_copied():
    captured = torch.ones(3)
    programs = trace(lambda p, x: x * captured @ p, EYE, X)
    before, _ = programs.forward(EYE, X)
    captured.mul_(2)
    after, _ = programs.forward(EYE, X)
    assert torch.equal(after, 2 * before)
    assert any(value is captured for value in programs.f.constants.values())


def test_random_draws_are_saved_and_not_replayed():
    programs = trace(lambda p, x: F.dropout(x @ p, 0.5), EYE, X)
    assert programs.f.random and not (programs.b.random or programs.i.random or programs.w.random)
    state = torch.get_rng_state()
    y, saved = programs.forward(EYE, X)
    torch.manual_seed(99)
    dx, _ = programs.backward(saved, [torch.ones_like(y)])
    torch.set_rng_state(state)
    dropped = F.dropout(torch.ones(2, 3), 0.5)
    assert torch.equal(dx, dropped @ EYE.T)


@lru_cache
def seeded() -> Any:
    """An operation whose backward is given the state of its draws, and has the tag of a draw, as
    the fused attention of a GPU.
    """
    library = torch.library
    tags = (torch.Tag.nondeterministic_seeded, torch.Tag.pt2_compliant_tag)
    library.define("fpipe_test::seeded", "(Tensor x) -> (Tensor, Tensor)", tags=tags)
    text = "(Tensor dy, Tensor philox_seed, float dropout_p=0.5) -> Tensor"
    library.define("fpipe_test::seeded_backward", text, tags=tags)

    def forward(x: Tensor) -> tuple[Tensor, Tensor]:
        seed = torch.randint(1, 9, (), device=x.device)
        return x * seed, seed

    def back(dy: Tensor, philox_seed: Tensor, dropout_p: float = 0.5) -> Tensor:
        return dy * philox_seed

    for name, run in (("seeded", forward), ("seeded_backward", back)):
        library.impl(f"fpipe_test::{name}", "CPU")(run)
        library.register_fake(f"fpipe_test::{name}")(run)
    ops = torch.ops.fpipe_test
    library.register_autograd(
        "fpipe_test::seeded",
        lambda ctx, dy, _: ops.seeded_backward(dy, *ctx.saved_tensors),
        setup_context=lambda ctx, inputs, output: ctx.save_for_backward(output[1]),
    )
    return lambda p, x: ops.seeded(x @ p)[0]


def test_a_backward_that_is_given_its_draws_is_no_draw():
    programs = trace(seeded(), EYE, X)
    assert programs.f.random and not (programs.b.random or programs.i.random or programs.w.random)
    assert "cotangent" not in {programs.roles.get(name, ("",))[0] for name in programs.f.inputs}
    y, saved = programs.forward(EYE, X)
    dx, _ = programs.backward(saved, [torch.ones_like(y)])
    factor = (y / (X @ EYE))[0, 0]
    torch.testing.assert_close(dx, factor * torch.ones_like(y) @ EYE.T)


def test_attention_draws_only_with_dropout():
    """So its stage costs no seed, and ``remat`` computes it again."""
    x, w = torch.randn(2, 2, 3, 4), torch.randn(4, 4)
    of = lambda p: lambda w, x: F.scaled_dot_product_attention(x @ w, x, x, dropout_p=p)
    assert not trace(of(0.0), w, x).f.random and trace(of(0.25), w, x).f.random
    again = trace(fpipe.remat(lambda w, x: of(0.0)(w, x) @ w), w, x)
    assert again.saved == ("x0", "p0")


def test_code_can_be_read():
    programs = trace(tanh_layer, LAYER, X)
    for program, letter in zip(
        (programs.forward, programs.backward, programs.backward_input, programs.backward_weight),
        "FBIW",
        strict=True,
    ):
        assert program.code.startswith(f"def {letter}(box):")
        compile(program.code, "x", "exec")
    assert "tanh" in programs.forward.code


# ---- custom functions and collectives ----
class OldStyle(torch.autograd.Function):
    """forward and backward that share ctx, as torch.func would refuse it."""

    backwards = 0

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor) -> Tensor:
        ctx.save_for_backward(x, w)
        return x @ w

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, Tensor]:
        OldStyle.backwards += 1
        x, w = ctx.saved_tensors
        return g @ w.t(), x.t() @ g


def old_style(p, x):
    return OldStyle.apply(x, p).tanh()


def test_old_style_function_runs_its_backward_once():
    OldStyle.backwards = 0
    programs = trace(old_style, EYE, X)
    assert OldStyle.backwards == 1
    y, saved = programs.forward(EYE, X)
    _, kept = programs.backward_input(saved, [y])
    programs.backward_weight(kept)
    assert OldStyle.backwards == 1
    assert (
        operations(programs.backward_input).count("mm")
        == operations(programs.backward_weight).count("mm")
        == 1
    )
    agree(old_style, EYE, X)


@pytest.fixture
def process_group() -> Iterator[Any]:
    import torch.distributed as dist

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield dist.group.WORLD
    dist.destroy_process_group()


@pytest.mark.filterwarnings("ignore")
def test_functional_collectives_trace(process_group: Any):
    from torch.distributed import _functional_collectives as fc

    def exchange(p, x):
        there = fc.all_to_all_single_autograd(x @ p, None, None, process_group)
        return torch.tanh(fc.all_gather_tensor_autograd(there, 0, process_group)) @ p

    programs = trace(exchange, EYE, X)
    assert operations(programs.forward).count("wait_tensor") == 2
    assert "reduce_scatter_tensor" in operations(programs.backward_input)
    assert not {"all_to_all_single", "wait_tensor"} & set(operations(programs.backward_weight)), (
        "a collective ran twice"
    )
    agree(exchange, EYE, X)


# ---- remat ----
def test_one_recompute_serves_input_and_weight_gradients():
    depth = 4

    def deep(p, x):
        for w in p:
            x = torch.tanh(x @ w).exp()
        return x

    p = [torch.randn(3, 3) for _ in range(depth)]
    programs = trace(fpipe.remat(deep), p, X)
    assert set(programs.saved) <= {"x0", *(f"p{i}" for i in range(depth)), *programs.ys}
    runs = []
    for step in ("forward", "backward_input", "backward_weight"):
        with Count("tanh") as count:
            if step == "forward":
                y, held_ = programs.forward(p, X)
            elif step == "backward_input":
                _, held_ = programs.backward_input(held_, [torch.ones_like(y)])
            else:
                programs.backward_weight(held_)
        runs.append(count.times)
    assert runs == [depth, depth, 0]


def test_remat_of_a_part_saves_the_rest():
    def half(p, x):
        return torch.sigmoid(fpipe.remat(lambda v: torch.tanh(torch.tanh(v @ p)))(x) @ p)

    programs = trace(half, EYE, X)
    remade = operations(programs.backward_input)
    # the second tanh is what leaves the part: the product that follows needs it saved, as the
    # checkpoint of torch does
    assert (remade.count("tanh"), remade.count("sigmoid")) == (1, 0)
    assert operations(programs.backward_weight).count("tanh") == 0


def test_remat_keeps_its_draws():
    programs = trace(fpipe.remat(lambda p, x: F.dropout(x @ p, 0.5).exp() @ p), EYE, X)
    assert programs.f.random and not (programs.b.random or programs.i.random or programs.w.random)


# ---- what is refused ----
def experts_that_were_hit(p, x):
    out = torch.zeros_like(x)
    for expert in (x > 0).any(0).nonzero().flatten():
        out = out + p[expert]
    return out


REFUSED = {
    "item": lambda p, x: x @ p * (2 if x.sum().item() > 0 else 1),
    "branch": lambda p, x: x if (x > 0).all() else x @ p,
    "mask": lambda p, x: x[x > 0].sum() * p,
    "loop": experts_that_were_hit,
    "tolist": lambda p, x: sum(x.detach().tolist()[0]) * p,
    "numpy": lambda p, x: torch.from_numpy(x.detach().numpy()) @ p,
    "unique": lambda p, x: torch.unique(x) + p.sum(),
    "split": lambda p, x: torch.tensor_split(x @ p, torch.tensor([1]))[0],
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_depends_on_data_is_refused(name: str):
    with pytest.raises(fpipe.errors.TraceError, match=r'engine="eager"') as caught:
        trace(REFUSED[name], EYE, X)
    begins = "for expert in" if name == "loop" else f'"{name}":'
    lines = Path(__file__).read_text().splitlines()
    line = next(n for n, text in enumerate(lines, 1) if text.strip().startswith(begins))
    assert f"{__file__}:{line}" in str(caught.value)
    assert "float32[2, 3]" in str(caught.value)
    assert caught.value.__cause__ is not None


@pytest.mark.parametrize("engine", ["trace", "eager"])
def test_a_sparse_gradient_is_refused(engine: Any):
    stage = fpipe.Stage(
        lambda p, x: torch.nn.functional.embedding(x, p, sparse=True), engine=engine
    )
    pipe = fpipe.pipeline([stage], loss=lambda y: y.sum(), microbatches=2, group=fpipe.local(1))
    with pytest.raises(
        fpipe.errors.StageError, match=r"sparse gradient of shape \[4, 2\].*leave sparse=True out"
    ):
        fpipe.value_and_grad(pipe)([torch.ones(4, 2)], torch.arange(4))


def test_an_ordinary_mistake_is_reported_with_its_line():
    with pytest.raises(
        fpipe.errors.ActionError, match=r"RuntimeError at .*test_programs\.py:\d+"
    ) as caught:
        trace(lambda p, x: x @ p, torch.ones(4, 4), X)
    assert isinstance(caught.value.__cause__, RuntimeError)


@pytest.mark.parametrize("leaf", [True, False])
def test_a_captured_tensor_that_wants_a_gradient_is_refused(leaf: bool):
    weight = torch.randn(3, 3, requires_grad=True)
    captured = weight if leaf else weight * 2
    with pytest.raises(
        fpipe.errors.TraceError,
        match=r"closes over a tensor of shape \[3, 3\] that requires a gradient",
    ):
        trace(lambda p, x: x @ captured @ p, EYE, X)


def test_a_write_into_a_captured_tensor_is_refused_before_it_happens():
    captured, norm = torch.zeros(3), torch.nn.BatchNorm1d(3)
    norm_params = {name: v.detach() for name, v in norm.named_parameters()}

    def whole(p, x):
        captured.add_(1)
        return x @ p

    def view(p, x):
        captured[:2].mul_(2)
        return x @ p

    def statistics(p, x):
        return torch.func.functional_call(norm, p, (x,))

    for fn, p in ((whole, EYE), (view, EYE), (statistics, norm_params)):
        with pytest.raises(fpipe.errors.TraceError, match=r"closes over.*state=True"):
            trace(fn, p, X)
    hidden = lambda p, x: F.batch_norm(x, captured, captured, p[0], None, True)
    with pytest.raises(fpipe.errors.TraceError, match=r"closes over.*state=True"):
        trace(hidden, EYE, X)
    assert torch.equal(captured, torch.zeros(3))
    assert norm.num_batches_tracked == 0 and torch.equal(norm.running_mean, torch.zeros(3))


def test_a_write_into_a_parameter_is_refused():
    def scales(p, x):
        p.data.mul_(2)
        return x @ p

    before = EYE.clone()
    with pytest.raises(fpipe.errors.TraceError, match="parameter in place"):
        trace(scales, EYE, X)
    assert torch.equal(EYE, before)


@pytest.mark.parametrize(
    ("made", "word"),
    [
        (object(), "object"),
        ({1, 2}, "set"),
        (torch.ones(2).to_sparse(), "sparse"),
        ([lambda: 1], "function"),
    ],
)
def test_what_cannot_be_sent_is_refused(made: Any, word: str):
    with pytest.raises(fpipe.errors.StageError, match=rf"returns a .*{word}.*cannot be sent"):
        trace(lambda p, x: {"y": x, "more": made}, EYE, X)


def test_state_of_numbers_is_refused():
    with pytest.raises(fpipe.errors.StageError, match=r"returns 1 in its state"):
        trace(fpipe.Stage(lambda p, s, x: (x, s + 1), state=True), EYE, X, state=0)


@pytest.mark.parametrize(
    ("fn", "message"),
    [
        (lambda p, x: x, "must return .y, scalar., but it returned"),
        (lambda p, x: (x, x), "floating tensor without axes"),
        (lambda p, x: (x, 1.0), "floating tensor without axes"),
        (lambda p, x: (x, x.sum(), 1), "tuple of 3"),
    ],
)
def test_an_auxiliary_loss_that_is_none_is_refused(fn: Any, message: str):
    with pytest.raises(fpipe.errors.StageError, match=message):
        trace(fpipe.Stage(fn, aux_loss=True), EYE, X)


# ---- traces are made once ----
def test_one_trace_serves_all_stages_and_calls():
    runs = 0

    def counted(p, x):
        nonlocal runs
        runs += 1
        return torch.tanh(x @ p)

    loss = lambda y, t: (y - t).square().mean()
    pipe = fpipe.pipeline([counted] * 8, "ZBV", loss=loss, microbatches=4, group=fpipe.local(4))
    params, x = [torch.randn(3, 3) for _ in range(8)], torch.randn(8, 3)
    fpipe.value_and_grad(pipe)(params, x, x)
    # one for the first stage, whose input needs no gradient, and one for the others; each twice on
    # fake tensors
    assert runs == 4
    fpipe.value_and_grad(pipe)(params, x, x)
    fpipe.value_and_grad(
        fpipe.pipeline([counted] * 4, "GPipe", loss=loss, microbatches=4, group=fpipe.local(4))
    )(params[:4], x, x)
    assert runs == 4
    fpipe.value_and_grad(pipe)(params, x[:4], x[:4])
    assert runs == 8, "another shape is another trace"


def test_numbers_are_part_of_the_signature():
    fn = lambda p, x: x["a"] @ p * x["n"]
    for n in (2, 3, 2.5, True):
        y, _ = trace(fn, EYE, {"a": X, "n": n}).forward(EYE, {"a": X, "n": n})
        assert torch.equal(y, X @ EYE * n)
    assert trace(fn, EYE, {"a": X, "n": 2}) is trace(fn, EYE, {"a": X, "n": 2})
    assert trace(fn, EYE, {"a": X, "n": 1}) is not trace(fn, EYE, {"a": X, "n": True})
    assert trace(fn, EYE, {"a": X, "n": 0.0}) is not trace(fn, EYE, {"a": X, "n": -0.0})


def test_traces_of_a_number_that_never_stays_do_not_pile_up(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(cache, "MOST_TRACES", 4)
    fn = lambda p, x, *, heat: x @ p * heat
    made = [trace(fn, EYE, X, heat=heat) for heat in (1.0, 0.9, 0.8, 0.7, 0.6)]
    assert trace(fn, EYE, X, heat=0.9) is made[1]
    assert trace(fn, EYE, X, heat=1.0) is not made[0], "the oldest went"


def test_a_plain_trace_loads_no_pass():
    code = """
import sys, torch, fpipe
stage = lambda p, x: x + torch.tanh(x @ p)
pipe = fpipe.pipeline([stage] * 2, "GPipe", loss=lambda y, t: (y - t).sum(), microbatches=2,
                      group=fpipe.local(2))
x = torch.ones(4, 3)
fpipe.value_and_grad(pipe)([torch.eye(3)] * 2, x, x)
print([name for name in sys.modules if name.startswith("fpipe.passes.")])
"""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=60
    )
    # a torch that was built for CUDA needs a mode of torch entered where there is no device
    without_device = torch.version.cuda is not None and not torch.cuda.is_available()
    loaded = ["fpipe.passes.first_mode"] if without_device else []
    assert (done.stdout.strip(), done.stderr) == (str(loaded), "")


def test_traces_go_with_their_function():
    def make() -> tuple[Any, Any]:
        fn = lambda p, x: x @ p
        return weakref.ref(fn), weakref.ref(trace(fn, EYE, X))

    function, programs = make()
    gc.collect()
    assert function() is None and programs() is None


def test_functions_without_weak_references_are_forgotten(monkeypatch: pytest.MonkeyPatch):
    """Their traces were kept for ever: a new object in each step filled the memory."""

    class Layer:
        __slots__ = ("scale",)

        def __init__(self, scale: float):
            self.scale = scale

        def __call__(self, p: Tensor, x: Tensor) -> Tensor:
            return x @ p * self.scale

    of_three = lru_cache(maxsize=3)(identity.traces_of.__wrapped__)
    monkeypatch.setattr(identity, "traces_of", of_three)
    layers = [Layer(float(n)) for n in range(5)]
    first = trace(layers[0], EYE, X)
    others = []
    for layer in layers[1:4]:
        others.append(trace(layer, EYE, X))
        assert trace(layers[0], EYE, X) is first, "it is in use"
    assert of_three.cache_info().currsize == 3
    assert [trace(layers[n], EYE, X) is others[n - 1] for n in (3, 2, 1)] == [True, True, False]


def test_a_loss_and_its_batch_do_not_stay_alive():
    pipe = fpipe.pipeline([lambda p, x: x @ p] * 2, "1F1B", microbatches=2, group=fpipe.local(2))

    def step() -> list[Any]:
        target = torch.randn(4, 3)

        def loss(y: Tensor) -> Tensor:
            return (y.sum() - target.sum()).square()

        fpipe.value_and_grad(
            fpipe.pipeline(
                [lambda p, x: x @ p] * 2, "1F1B", loss=loss, microbatches=2, group=pipe.group
            )
        )([EYE] * 2, torch.ones(4, 3))
        return [weakref.ref(loss), weakref.ref(target)]

    references = step()
    for _ in range(2):  # the traces of the loss, which hold the batch, go after the loss
        gc.collect()
    assert [reference() for reference in references] == [None, None]


def test_a_trace_leaves_no_fake_tensors_to_the_collector():
    """Graphs are cycles, so values of their nodes stayed; torch's own tests count them as leaks."""

    def loss(y: Tensor, t: Tensor) -> Tensor:
        return F.mse_loss(y.t().t(), t)  # of whose joint graph nodes are removed

    trace(F.mse_loss, X, X)  # torch keeps frames of the first trace
    gc.collect()
    gc.disable()
    gc.set_debug(gc.DEBUG_SAVEALL)
    try:
        trace(loss, X, X)
        gc.collect()
        assert gc.garbage
        assert not [found for found in gc.garbage if type(found) is FakeTensor]
    finally:
        gc.set_debug(0)
        gc.garbage.clear()
        gc.enable()


def test_autocast_around_a_trace_is_part_of_it():
    fn = lambda p, x: x @ p
    plain = trace(fn, EYE, X).forward(EYE, X)[0]
    with torch.autocast("cpu", torch.bfloat16):
        cast = trace(fn, EYE, X).forward(EYE, X)[0]
    assert plain.dtype is torch.float32 and cast.dtype is torch.bfloat16


def half_precise(p, x):
    """Part of it under the autocast around, part without, as loss functions often are."""
    h = x @ p
    with torch.autocast("cpu", enabled=False):
        return torch.tanh(h.float() @ p)


def test_casts_of_autocast_are_not_repeated_where_a_write_is_removed():
    def fn(p, x):
        with torch.autocast("cpu", enabled=False):
            y = x @ p
        written = y * 1.5
        written[:, 0] = x[:, 1]
        return written

    x = torch.randn(3, 3, generator=torch.Generator().manual_seed(0))
    with torch.autocast("cpu", torch.bfloat16):
        y, _ = fpipe.trace(fn, EYE * 0.3, x).forward(EYE * 0.3, x)
        assert torch.equal(y, fn(EYE * 0.3, x))


@pytest.mark.parametrize("engine", ["trace", "eager"])
def test_autocast_around_a_pipeline_is_applied_once_and_not_to_backwards(engine: Any):
    params, x = [torch.randn(3, 3) for _ in range(2)], torch.randn(4, 3)
    pipe = fpipe.pipeline(
        [half_precise] * 2,
        "1F1B",
        loss=lambda y: (y @ y.T).sum(),
        microbatches=2,
        group=fpipe.local(2),
        engine=engine,
    )
    leaves = [p.clone().requires_grad_() for p in params]
    total, sums = 0, [0, 0]
    for part in x.chunk(2):
        with torch.autocast("cpu", torch.bfloat16):
            y = half_precise(leaves[1], half_precise(leaves[0], part))
            loss = (y @ y.T).sum()
        grads = torch.autograd.grad(loss * 0.5, leaves)
        total, sums = total + loss.detach() * 0.5, [a + b for a, b in zip(sums, grads, strict=True)]
    with torch.autocast("cpu", torch.bfloat16):
        value, made = fpipe.value_and_grad(pipe)(params, x)
    assert torch.equal(value, total)
    assert all(torch.equal(a, b) for a, b in zip(made, sums, strict=True))


# ---- strides ----
def test_strides_other_than_the_fakes_were():
    """A kernel may lay out its result as its fake does not (the backward of softplus): no view may
    rely on that.
    """
    stage = lambda p, x: F.softplus(x @ p).transpose(1, 2).cumsum(-1)
    p, x = torch.randn(4, 3, requires_grad=True), torch.randn(2, 5, 4, requires_grad=True)
    own = trace(stage, p.detach(), x.detach())
    y, saved = own.forward(p.detach(), x.detach())
    dy = torch.randn_like(y)
    dx, kept = own.backward_input(saved, [dy])
    found = tensors((*own.backward(saved, [dy]), dx, own.backward_weight(kept)))
    dx, dp = torch.autograd.grad(stage(p, x), (x, p), dy)
    assert all(torch.equal(a, b) for a, b in zip(found, (dx, dp, dx, dp), strict=True))


# ---- compilers ----
def compiles(backend: str) -> None:
    stage = fpipe.Stage(tanh_layer, compile=backend)
    plain, made = trace(tanh_layer, LAYER, X), trace(stage, LAYER, X)
    y, saved = made.forward(LAYER, X)
    true, true_saved = plain.forward(LAYER, X)
    assert torch.allclose(y, true)
    dx, kept = made.backward_input(saved, [true])
    true_dx, true_dp = plain.backward(true_saved, [true])
    for a, b in zip(
        tensors((dx, made.backward_weight(kept))), tensors((true_dx, true_dp)), strict=True
    ):
        assert torch.allclose(a, b)


@pytest.mark.filterwarnings("ignore")
def test_compile_by_aot_eager():
    compiles("aot_eager")


@pytest.mark.filterwarnings("ignore")
@pytest.mark.skipif("FPIPE_SLOW" not in os.environ, reason="takes a minute: set FPIPE_SLOW=1")
@pytest.mark.skipif(
    not any(map(shutil.which, ("c++", "g++", "clang++"))), reason="no C++ compiler on this machine"
)
def test_compile_by_inductor():
    compiles("inductor")


def test_an_unknown_compiler_is_reported():
    with pytest.raises(fpipe.errors.StageError, match="compile='inductr' is no compiler"):
        fpipe.Stage(tanh_layer, compile="inductr")
    with pytest.raises(fpipe.errors.StageError, match="compile='inductr' is no compiler"):
        fpipe.pipeline([tanh_layer], compile="inductr", group=fpipe.local(1))


# ---- shortening ----
SHORTENED = {
    "gelu": lambda p, x: F.linear(F.gelu(F.linear(x, p["up"], p["b"])), p["down"]),
    "gated": lambda p, x: F.linear(
        F.silu(F.linear(x, p["up"], p["b"])) * F.linear(x, p["up"] + 1), p["down"]
    ),
    "used twice": lambda p, x: (
        (h := F.gelu(F.linear(x, p["up"], p["b"]))).sum((1, 2)) + F.linear(h, p["down"])[:, 0, 0]
    ),
}


@pytest.mark.parametrize("name", SHORTENED)
def test_views_there_and_back_are_left_out_in_the_same_bits(
    name: str, monkeypatch: pytest.MonkeyPatch
):
    stage = SHORTENED[name]
    p = {"up": torch.randn(8, 4), "b": torch.randn(8), "down": torch.randn(4, 8)}
    x = torch.randn(2, 3, 4)
    own = trace(lambda p, x: stage(p, x), p, x)
    monkeypatch.setattr(views, "remove_views", lambda graph: None)
    plain = trace(lambda p, x: stage(p, x), p, x)
    count = lambda programs: sum(
        "shape(" in line for q in (programs.f, programs.b) for line in q.code.splitlines()
    )
    assert count(own) < count(plain)
    assert not any("sum(" in line and "True" in line for line in own.b.code.splitlines()), (
        "a bias's sum keeps no axis"
    )
    dy = torch.randn_like(stage(p, x))
    found = []
    for programs in (own, plain):
        y, saved = programs.forward(p, x)
        dx, kept = programs.backward_input(saved, [dy])
        found.append(
            tensors((y, dx, programs.backward_weight(kept), programs.backward(saved, [dy])))
        )
    leaves = {k: v.clone().requires_grad_() for k, v in p.items()}
    wrt = x.clone().requires_grad_()
    true = torch.autograd.grad(stage(leaves, wrt), (wrt, *leaves.values()), dy, allow_unused=True)
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))
    assert torch.equal(found[0][1], true[0])
