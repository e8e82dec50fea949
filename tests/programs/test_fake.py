"""What fpipe requires of torch's private tracing, tested directly: a torch version that differs
fails here first.
"""

from __future__ import annotations

import logging
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import fx
from torch.utils.checkpoint import checkpoint

import fpipe
from fpipe.errors import ActionError, TraceError
from fpipe.passes import operators
from fpipe.passes.explain import explain, leave_checkpoints, where
from fpipe.passes.sizes.symbols import SymbolicFake, Symbols, products_in_python
from fpipe.programs import internals, split as simplify
from fpipe.programs.internals import Fake, mutates, operator_of, pure_on_fakes
from fpipe.programs.tracing import make_graph
from fpipe.tree import Aval


def traced(fn, *shapes: tuple[int, ...]) -> fx.GraphModule:
    with Fake() as mode:
        fakes = [torch.empty(shape) for shape in shapes]
        with mode:
            graph = make_graph(fn, fakes)
    simplify.name_inputs(graph, [f"x{i}" for i in range(len(shapes))])
    operators.replace_writes_and_convolutions(graph)
    simplify.remove_identities(graph)
    return graph


def names(graph: fx.GraphModule) -> list[str]:
    return [node.target._opname for node in graph.graph.nodes if node.op == "call_function"]


def test_writes_become_values():
    def writes(x):
        h = x * 2
        h.view(-1)[1:3].add_(1)
        return (h,)

    graph = traced(writes, (2, 3))
    assert not any(op is not None and mutates(op) for op in map(operator_of, graph.graph.nodes))
    x = torch.randn(2, 3)
    assert torch.equal(graph(x)[0], writes(x)[0])


def test_identities_and_double_transposes_go():
    assert names(traced(lambda x: (x.detach().t().t().detach() * 2,), (2, 3))) == ["mul"]


def test_names_do_not_collide():
    """An operation may be called like an input: torch's ``t`` is one, and a state leaf ``t0``
    another.
    """
    graph = traced(lambda x, y: (x.t() @ y,), (2, 3), (2, 3))
    seen = [node.name for node in graph.graph.nodes]
    assert len(set(seen)) == len(seen) and seen[:2] == ["x0", "x1"]


def test_marks_are_carried_through_functionalization():
    def marked(x):
        with fx.traceback.annotate({"mark": "here"}):
            h = x.exp()
        h.add_(1)
        return (h,)

    graph = traced(marked, (2, 3))
    found = {
        node.target._opname: simplify.annotation(node, "mark")
        for node in graph.graph.nodes
        if node.op == "call_function"
    }
    assert found["exp"] == "here" and found["add"] is None


def test_views_lie_in_one_memory():
    graph = traced(lambda x: (x.view(-1), (x * 2).t(), x + 1), (2, 3))
    memory = simplify.storages(graph.graph.nodes)
    assert memory["view"].root == "x0" and memory["view"].given
    assert memory["t"].root == "mul" and not memory["t"].given and memory["t"].nbytes == 24
    assert memory["add"].root == "add"


def test_a_fake_run_changes_nothing_and_is_quiet(caplog: pytest.LogCaptureFixture):
    real = torch.ones(3)
    with caplog.at_level(logging.DEBUG), internals.quiet(), Fake():
        with pytest.raises(RuntimeError, match="broadcast"):
            torch.empty(2) + torch.empty(3)
        assert (torch.empty(3) + real).shape == (3,)
        with pure_on_fakes("stage"), pytest.raises(TraceError, match="closes over"):
            real.add_(torch.empty(3))
    assert torch.equal(real, torch.ones(3)) and not caplog.records


def test_batch_norm_keeps_no_secrets():
    """Its kernels write into running statistics that their schemas declare as plain inputs."""
    schema = torch.ops.aten.native_batch_norm.default._schema
    assert not schema.is_mutable, "torch declares the writes now: operators.spell_out can go"

    def norm(x, mean, var):
        y = torch.nn.functional.batch_norm(x, mean, var, training=True)
        return y, mean, var

    graph = traced(norm, (4, 3), (3,), (3,))
    operators.spell_out(graph)
    graph.recompile()
    x, mean, var = torch.randn(4, 3), torch.zeros(3), torch.ones(3)
    y, new_mean, new_var = graph(x, mean, var)
    assert torch.equal(mean, torch.zeros(3)) and torch.equal(var, torch.ones(3))
    assert all(
        torch.equal(a, b) for a, b in zip((y, new_mean, new_var), norm(x, mean, var), strict=True)
    )


def test_avals_are_built_as_they_were():
    strided = torch.randn(4, 6).t()[::2]
    with Fake():
        made = internals.empty(Aval.like(strided, grad=True))
    assert (made.shape, made.stride(), made.dtype, made.requires_grad) == (
        (3, 4),
        strided.stride(),
        torch.float32,
        True,
    )


def test_errors_are_distinguished():
    def raised_by(fn) -> Exception:
        with internals.quiet(), Fake():
            try:
                fn(torch.empty(2, 2))
            except Exception as error:
                return explain(error, "f", "(...)")
        raise AssertionError

    assert isinstance(raised_by(lambda x: bool(x.sum() > 0)), TraceError)
    assert isinstance(raised_by(lambda x: x.nonzero()), TraceError)
    assert isinstance(raised_by(lambda x: x.numpy()), TraceError)
    assert isinstance(raised_by(lambda x: x @ torch.ones(3)), ActionError)
    assert isinstance(raised_by(lambda x: {}["missing"]), ActionError)


def test_a_users_file_in_a_folder_called_fpipe_is_the_users(tmp_path: Path):
    """A clone of this repository is such a folder: no error there had its line."""
    file = tmp_path / "fpipe" / "torch" / "user.py"
    names: dict[str, Any] = {}
    exec(compile("def stage(p, x):\n    raise KeyError(p)\n", str(file), "exec"), names)
    with pytest.raises(KeyError) as caught:
        checkpoint(names["stage"], 1, torch.ones(1), use_reentrant=False)
    leave_checkpoints(caught.value)
    assert f" at {file}:2 " in where(caught.value)


def test_an_error_in_a_checkpoint_does_not_reach_later_functions():
    """Before torch 2.13 the hooks of the checkpoint stay while the traceback exists."""

    def stage(p: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(inner, p, x, use_reentrant=False)

    def inner(p: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(broken, p * x, use_reentrant=False)

    def broken(x: torch.Tensor) -> torch.Tensor:
        raise ValueError("broken")

    for engine in ("trace", "eager"):
        run = lambda fn, engine=engine: fpipe.grad(
            fpipe.pipeline(
                [fn], loss=torch.sum, microbatches=1, group=fpipe.local(1), engine=engine
            )
        )([torch.ones(2)], torch.full((1, 2), 3.0))
        with pytest.raises(fpipe.errors.ActionError, match="broken") as caught:
            run(stage)
        assert run(lambda p, x: x * p * p)[0].tolist() == [6.0, 6.0], caught


def divided(x: torch.Tensor) -> torch.Tensor:
    y = x * 2
    return y.div_(3).add_(1)


def written_through_a_view(x: torch.Tensor) -> torch.Tensor:
    y = x * 2
    y[:, :1].mul_(5)
    return y


def widened(x: torch.Tensor) -> torch.Tensor:
    y = (x * 2).to(torch.float16)
    return y.add_(x.double())


def expanded(x: torch.Tensor) -> torch.Tensor:
    y = (x * 2).t()
    return y.mul_(torch.ones(3, 2)).t()


def powers(x: torch.Tensor) -> torch.Tensor:
    y = x.abs() + 1
    return y.pow_(1.5)


@pytest.mark.parametrize("fn", [divided, powers, written_through_a_view, widened, expanded])
def test_writes_into_temporaries_become_new_tensors(fn: Any):
    graph = traced(fn, (2, 3))
    assert not any(op is not None and mutates(op) for op in map(operator_of, graph.graph.nodes))
    x = torch.randn(2, 3)
    found, wanted = graph(x), fn(x)
    assert torch.equal(found, wanted)
    assert (found.dtype, found.stride()) == (wanted.dtype, wanted.stride())


def test_a_loss_whose_gradient_is_computed_in_place_has_the_bits_of_autograd():
    """Torch's own removal of writes replaces the kernel of this loss by its parts, which have other
    last bits.
    """
    for seed in range(20):
        torch.manual_seed(seed)
        x, target = torch.randn(7, 5), torch.rand(7, 5)
        loss = torch.nn.functional.binary_cross_entropy_with_logits
        pipe = fpipe.pipeline([lambda p, x: x * p], loss=loss, microbatches=1, group=fpipe.local(1))
        value, (grad,) = fpipe.value_and_grad(pipe)([torch.ones(5)], x, target)
        p = torch.ones(5, requires_grad=True)
        plain = loss(x * p, target)
        plain.backward()
        assert torch.equal(value, plain.detach())
        assert torch.equal(grad, p.grad)


def test_a_composite_on_the_device_meta_has_its_derivative_for_symbolic_sizes():
    """Before torch 2.13 the Python dispatcher finds none once torch's rules for meta tensors are
    loaded.
    """
    import torch._meta_registrations

    symbols = Symbols()
    with products_in_python(), SymbolicFake(shape_env=symbols):
        x = torch.empty(symbols.new(6), 3, device="meta", requires_grad=True)
        loss = torch.nn.functional.nll_loss(
            x, torch.empty(x.shape[0], dtype=torch.int64, device="meta")
        )
        (grad,) = torch.autograd.grad(loss, [x])
    assert grad.shape == x.shape


TRACES_IN_THREADS = """
import sys, threading, torch, fpipe

def work(number):
    pipe = fpipe.pipeline([lambda w, x: w * x + number], microbatches=1, group=fpipe.local(1))
    sys.stdout.write(f"{pipe([torch.ones(1)], torch.ones(1)).item() - number} ")

for _ in range(4):
    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
"""


@pytest.mark.skipif(torch.version.cuda is None, reason="torch is built for the CPU")
def test_the_first_trace_may_be_in_a_thread_that_ends():
    """Torch 2.11 built for CUDA, without a device, ended the process in a later one."""
    ended = subprocess.run(
        [sys.executable, "-c", TRACES_IN_THREADS], capture_output=True, text=True, check=False
    )
    assert ended.stdout.split() == ["1.0"] * 16, ended
