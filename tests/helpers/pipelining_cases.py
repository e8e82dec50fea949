"""The cases of torch's own tests of ``torch.distributed.pipelining``, restated for gloo and two
processes, and more.

A case is a function; processes run all of them in one order. The oracle is plain autograd on the
whole model, and for CSV files torch's own classes.
"""

from __future__ import annotations

import copy
import tempfile
import traceback
from collections.abc import Callable
from inspect import signature
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import pipelining as peers
from torch.distributed.pipelining import schedules as peer_schedules
from torch.distributed.pipelining.microbatch import TensorChunkSpec
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import fpipe
from fpipe.interop import pipelining
from fpipe.interop.pipelining import PipelineStage, get_schedule_class
from fpipe.interop.pipelining.schedules import _PipelineScheduleRuntime, _ScheduleForwardOnly
from fpipe.interop.pipelining.stage import _GROUPS
from sample import covering

WIDTH, MICROBATCHES, RANKS = 6, 4, 2
CPU = torch.device("cpu")
SINGLE = ("GPipe", "1F1B")
MULTI = ("Interleaved1F1B", "LoopedBFS", "InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV")
CATALOGUE = ("Eager1F1B", "ZBH1", "ZBH2", "ZB1P", "VHalf", "VMin", "DualPipe", "Hanayo", "ZBV")
#: of these, the ones that run without ``--long``
SOME = ("ZBH1", "VMin", "DualPipe")
CASES: dict[str, Callable[[], None]] = {}


#: Cases that take seconds, and run with ``--long`` alone.
SLOW = {
    "compiled_modules[whole]",
    "compiled_modules[part]",
    "batch_sizes_that_every_rank_knows",
    "batch_sizes_that_a_rank_cannot_know",
    "buffers_that_count[1F1B]",
}


def case(*parameters: Any) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Register a function as one case, or one for each parameter."""

    def register(fn: Callable[..., None]) -> Callable[..., None]:
        for parameter in parameters or (None,):
            name = fn.__name__ if parameter is None else f"{fn.__name__}[{parameter}]"
            CASES[name] = fn if parameter is None else lambda p=parameter: fn(p)
        return fn

    return register


def chosen(long: bool) -> set[str]:
    """The cases that run: of the tables over schedules each schedule of torch, some others, and
    each function; of other functions one row.
    """
    if long:
        return set(CASES)
    rows = [tuple(name.rstrip("]").split("[")) for name in CASES if name.endswith("]")]
    table = [(fn, name) for fn, name in rows if name in (*SINGLE, *MULTI, *CATALOGUE)]
    others = set(CASES) - SLOW - {f"{fn}[{name}]" for fn, name in table}
    others = set({name.split("[")[0]: name for name in CASES if name in others}.values())
    table = [row for row in table if row[1] not in CATALOGUE or row[1] in SOME]
    return others | {f"{fn}[{name}]" for fn, name in covering(table)}


def run_cases(only: str = "", long: bool = True) -> dict[str, str]:
    """On each of two processes: the traceback of each case, by name, "" where it passes; a failure
    ends the run.
    """
    names = chosen(long)
    dist.init_process_group("gloo")
    assert dist.group.WORLD is not None
    _GROUPS[dist.group.WORLD] = fpipe.adopt(dist.group.WORLD, CPU, timeout=20)
    found: dict[str, str] = {}
    for name, run in CASES.items():
        if only in name and name in names:
            try:
                run()
                found[name] = ""
            except Exception:
                found[name] = traceback.format_exc()
            failed = torch.tensor(float(bool(found[name])))
            dist.all_reduce(failed)
            if failed:
                break
    return found


# ---- models, batches, one script ----
class MLP(nn.Module):
    """The module of torch's tests, with an argument that may be left out."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor, scale: Tensor | None = None, flip: bool = False) -> Tensor:
        y = self.down(self.up(x).relu())
        y = y if scale is None else y * scale
        return -y if flip else y


def model(stages: int, build: Callable[[], nn.Module] = MLP) -> list[nn.Module]:
    torch.manual_seed(0)
    return [build() for _ in range(stages)]


def batch(rows: int = 8) -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(1)
    return torch.randn(rows, WIDTH, generator=draw), torch.randn(rows, WIDTH, generator=draw)


def squared(y: Tensor, t: Tensor) -> Tensor:
    return (y - t).square().mean()


def own_group() -> Any:
    """A process group that an error in a step may end."""
    group = dist.new_group()
    assert group is not None
    _GROUPS[group] = fpipe.adopt(group, CPU, timeout=20)
    return group


class Script:
    """What a user's script does on each rank, and the same on the whole model without a
    pipeline.
    """

    def __init__(
        self, schedule: Any, modules: list[nn.Module] | None = None, stages: int = 0, **options: Any
    ):
        name = schedule if isinstance(schedule, str) else ""
        cls = get_schedule_class(name) if name else schedule
        count = stages or (
            fpipe.make_schedule(name, RANKS, MICROBATCHES).stages if name else 2 * RANKS
        )
        self.whole = modules if modules is not None else model(count)
        self.parts = copy.deepcopy(self.whole)
        rank = dist.get_rank()
        rows = options.pop("rows", None)
        placed = rows or (
            [
                fpipe.make_schedule(name, RANKS, MICROBATCHES, count).placement.ranks_of(s)
                for s in range(count)
            ]
        )
        mine = [s for s in range(count) if rank in placed[s]]
        group = options.pop("group", None)
        self.stages = [PipelineStage(self.parts[s], s, count, CPU, group=group) for s in mine]
        self.first, self.last = 0 in mine, count - 1 in mine
        options = {"loss_fn": squared} | options
        single = issubclass(cls, pipelining.PipelineScheduleSingle)
        self.schedule = cls(self.stages[0] if single else self.stages, MICROBATCHES, **options)

    def args(
        self, x: Any, t: Any, losses: list[Tensor] | None = None
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The input on the first rank, the target on the last."""
        return (x,) if self.first else (), {"target": t, "losses": losses} if self.last else {}

    def step(self, x: Any, t: Any, losses: list[Tensor] | None = None, **kwargs: Any) -> Any:
        args, keywords = self.args(x, t, losses)
        return self.schedule.step(*args, **keywords, **kwargs)

    def eval(self, x: Any, t: Any, losses: list[Tensor] | None = None, **kwargs: Any) -> Any:
        args, keywords = self.args(x, t, losses)
        return self.schedule.eval(*args, **keywords, **kwargs)

    def forward(self, x: Any, **kwargs: Any) -> Any:
        """The whole model."""
        for module in self.whole:
            x = module(*x, **kwargs) if isinstance(x, tuple) else module(x, **kwargs)
        return x

    def backward(
        self, x: Tensor, t: Tensor, times: int = 1, mean: bool = True, **kwargs: Any
    ) -> list[Tensor]:
        """The gradients of the whole model, added up; the losses of the microbatches."""
        for _ in range(times):
            rows = zip(x.chunk(MICROBATCHES), t.chunk(MICROBATCHES), strict=True)
            losses = [squared(self.forward(a, **kwargs), b) for a, b in rows]
            total = torch.stack(losses).sum()
            (total / MICROBATCHES if mean else total).backward()
        return [loss.detach() for loss in losses]

    def check_grads(self) -> None:
        """Each parameter of this rank has the gradient of the whole model's."""
        seen = 0
        for stage in self.stages:
            pairs = zip(
                stage.submod.named_parameters(),
                self.whole[stage.stage_index].parameters(),
                strict=True,
            )
            for (name, a), b in pairs:
                assert (a.grad is None) == (b.grad is None) or not (
                    b.grad if a.grad is None else a.grad
                ).any(), name  # type: ignore[union-attr]
                if a.grad is not None and b.grad is not None:
                    torch.testing.assert_close(a.grad, b.grad, rtol=1e-4, atol=1e-6)
                    seen += 1
        assert seen


def trained(script: Script, times: int = 1, mean: bool = True) -> None:
    """Steps of the script against the whole model: outputs, losses, gradients."""
    x, t = batch()
    for _ in range(times):
        losses: list[Tensor] = []
        y = script.step(x, t, losses)
    want = script.backward(x, t, times, mean)
    script.check_grads()
    assert (y is not None) == script.last
    if script.last:
        torch.testing.assert_close(y, script.forward(x).detach())
        torch.testing.assert_close(torch.stack(losses), torch.stack(want))


# ---- gradients, losses, outputs ----
@case(*SINGLE, *MULTI)
def grad_with_manual(name: str) -> None:
    trained(Script(name))


@case(*SINGLE)
def stages_of_the_front_end_of_torch(name: str) -> None:
    """``build_stage`` of a whole model that torch traced and split."""
    script, (x, t) = Script(name), batch()
    split = {"1": peers.SplitPoint.BEGINNING}
    pipe = peers.pipeline(nn.Sequential(*script.parts), (x[:2],), split_spec=split)
    stage: Any = pipe.build_stage(dist.get_rank(), CPU)
    args, keywords = script.args(x, t)
    y = get_schedule_class(name)(stage, MICROBATCHES, squared).step(*args, **keywords)
    script.backward(x, t)
    whole = nn.Sequential(*script.whole)
    for parameter, p in stage.submod.named_parameters():
        want = whole.get_parameter(parameter).grad
        torch.testing.assert_close(p.grad, want, rtol=1e-4, atol=1e-6)
    assert y is None or torch.allclose(y, whole(x), atol=1e-6)


@case("Interleaved1F1B", "LoopedBFS", "InterleavedZeroBubble")
def grad_with_three_stages_on_a_rank(name: str) -> None:
    trained(Script(name, stages=6))


@case(*SINGLE, *MULTI)
def two_steps_without_zeroing(name: str) -> None:
    trained(Script(name), times=2)


@case("1F1B", "InterleavedZeroBubble", "DualPipeV")
def grads_are_not_scaled(name: str) -> None:
    trained(Script(name, scale_grads=False), mean=False)


@case(*SINGLE, *MULTI)
def kwargs_on_every_stage(name: str) -> None:
    """Each rank passes its own keyword arguments: tensors are split, other values are not."""
    script, (x, t), scale = Script(name), batch(), torch.arange(8.0).reshape(8, 1) / 4
    y = script.step(x, t, scale=scale, flip=True)
    rows = zip(x.chunk(MICROBATCHES), t.chunk(MICROBATCHES), scale.chunk(MICROBATCHES), strict=True)
    outputs = [script.forward(a, scale=s, flip=True) for a, _, s in rows]
    torch.stack(
        [squared(o, b) for o, b in zip(outputs, t.chunk(MICROBATCHES), strict=True)]
    ).mean().backward()
    script.check_grads()
    assert not script.last or torch.allclose(y, torch.cat(outputs), atol=1e-6)


@case("1F1B", "ZBVZeroBubble")
def kwargs_on_one_rank(name: str) -> None:
    script, (x, t) = Script(name), batch()
    y = script.step(x, t, **({"flip": True} if script.last else {}))
    assert not script.last or y.shape == x.shape


@case(*SINGLE, *MULTI)
def eval_between_steps(name: str) -> None:
    """eval leaves gradients alone and returns outputs and losses, under inference mode too."""
    script, (x, t) = Script(name), batch()
    script.step(x, t)
    script.backward(x, t)
    before = [
        p.grad.clone()
        for stage in script.stages
        for p in stage.submod.parameters()
        if p.grad is not None
    ]
    for inference in (False, True):
        losses: list[Tensor] = []
        with torch.inference_mode(inference):
            y = script.eval(x, t, losses)
        if script.last:
            torch.testing.assert_close(y, script.forward(x).detach())
            assert len(losses) == MICROBATCHES
    after = [p.grad for stage in script.stages for p in stage.submod.parameters()]
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))  # type: ignore[arg-type]
    script.step(x, t)
    script.backward(x, t)
    script.check_grads()


@case(*SINGLE, *MULTI)
def outputs_are_not_returned(name: str) -> None:
    script, (x, t), losses = Script(name), batch(), []
    assert script.step(x, t, losses, return_outputs=False) is None
    script.backward(x, t)
    script.check_grads()
    assert len(losses) == (MICROBATCHES if script.last else 0)
    assert script.eval(x, t, return_outputs=False) is None


@case("GPipe", "Interleaved1F1B", "ZBVZeroBubble")
def forward_only_without_a_loss(name: str) -> None:
    script, (x, _) = Script(name, loss_fn=None), batch()
    args = (x,) if script.first else ()
    y = script.schedule.step(*args)
    assert torch.allclose(y, script.forward(x)) if script.last else y is None
    assert all(p.grad is None for stage in script.stages for p in stage.submod.parameters())


@case("1F1B", "ZBVZeroBubble")
def the_last_stage_has_its_outputs(name: str) -> None:
    """Until the next step, or until they are cleared, as the stages of torch."""
    script, (x, t) = Script(name), batch()
    for returned in (False, True, False, True):
        y = script.step(x, t, return_outputs=returned)
        for stage in script.stages:
            kept = stage.output_chunks
            assert len(kept) == (MICROBATCHES if returned and stage.is_last else 0)
            assert not kept or torch.equal(torch.cat(kept), y)
            assert not stage.fwd_cache
    for stage in script.stages:
        stage.clear_runtime_states()
        assert not stage.output_chunks


@case()
def forward_only_schedule() -> None:
    rank, modules = dist.get_rank(), model(2)
    schedule = _ScheduleForwardOnly(PipelineStage(modules[rank], rank, 2, CPU), MICROBATCHES)
    x, _ = batch()
    for _ in range(3):
        y = schedule.step(*((x,) if rank == 0 else ()))
    assert y is None if rank == 0 else torch.allclose(y, modules[1](modules[0](x)))


@case(*CATALOGUE)
def schedules_that_torch_does_not_have(name: str) -> None:
    script, (x, t) = Script(name), batch()
    script.step(x, t)
    script.backward(x, t)
    script.check_grads()


# ---- placements and files ----
V_SHAPED = {
    0: [
        "0F0",
        "0F1",
        "0F2",
        "0F3",
        "3F0",
        "3B0",
        "3F1",
        "3B1",
        "3F2",
        "3B2",
        "3F3",
        "3B3",
        "0B0",
        "0B1",
        "0B2",
        "0B3",
    ],
    1: [
        "1F0",
        "1F1",
        "1F2",
        "1F3",
        "2F0",
        "2F1",
        "2F2",
        "2F3",
        "2B0",
        "2B1",
        "2B2",
        "2B3",
        "1B0",
        "1B1",
        "1B2",
        "1B3",
    ],
}
UNBALANCED = {
    0: ["0F0", "0F1", "0F2", "0F3", "0B0", "0B1", "0B2", "0B3"],
    1: [
        f"{s}{op}{m}"
        for op, stages in (("F", (1, 2, 3)), ("B", (3, 2, 1)))
        for s in stages
        for m in range(4)
    ],
}
ORDERS = {
    "V": (V_SHAPED, [(0,), (1,), (1,), (0,)]),
    "unbalanced": (UNBALANCED, [(0,), (1,), (1,), (1,)]),
}


@case(*ORDERS)
def orders_in_memory(which: str) -> None:
    order, rows = ORDERS[which]
    script = Script(_PipelineScheduleRuntime, rows=rows)
    actions = {
        rank: [None, *(pipelining.orders.Action.from_str(a) for a in row)]
        for rank, row in order.items()
    }
    script.schedule._prepare_schedule_with_comms(actions)
    assert script.schedule.stage_index_to_group_rank == {
        s: ranks[0] for s, ranks in enumerate(rows)
    }
    trained(script)


@case("loaded", "in memory", "set")
def orders_with_messages_scale_where_they_say_so(how: str) -> None:
    """torch scales gradients in REDUCE_GRAD alone, which an order with messages may lack."""
    plain = Script("Interleaved1F1B")
    for mean in (False, True):
        order = dict(plain.schedule.pipeline_order_with_comms)
        if mean:
            reduce = pipelining.orders.Action.from_str
            for rank, row in order.items():
                order[rank] = [*row, reduce(f"{rank}REDUCE_GRAD"), reduce(f"{rank + 2}REDUCE_GRAD")]
        script = Script(_PipelineScheduleRuntime, stages=4, rows=[[0], [1], [0], [1]])
        if how == "set":
            script.schedule.pipeline_order_with_comms = order
        elif how == "in memory":
            script.schedule._prepare_schedule_with_comms(order, format="compute_comms")
        else:
            with tempfile.TemporaryDirectory() as folder:
                file = Path(folder, "order.csv")
                rows = [",".join(map(str, row)) for row in order.values()]
                file.write_text("\n".join(rows) + "\n", encoding="utf-8")
                script.schedule._load_csv(str(file), format="compute_comms")
        trained(script, mean=mean)


@case(*ORDERS)
def orders_of_a_subclass(which: str) -> None:
    order, rows = ORDERS[which]

    class Custom(pipelining.PipelineScheduleMulti):
        def __init__(self, *args: Any, **kwargs: Any):
            super().__init__(*args, **kwargs)
            for rank, row in order.items():
                self.pipeline_order[rank] = [pipelining.orders.Action.from_str(a) for a in row]

    trained(Script(Custom, rows=rows))


@case(*MULTI)
def csv_of_torch(name: str) -> None:
    """torch's own runtime writes a CSV with messages, ours reads it; and the other way round."""
    rank, count = dist.get_rank(), fpipe.make_schedule(name, RANKS, MICROBATCHES).stages
    placement = fpipe.make_schedule(name, RANKS, MICROBATCHES).placement
    rows = [placement.ranks_of(s) for s in range(count)]
    mine = [s for s in range(count) if rank in rows[s]]
    theirs = [peers.PipelineStage(nn.Linear(1, 1), s, count, CPU) for s in mine]
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "torch.csv")
        runtime = peer_schedules._PipelineScheduleRuntime(theirs, MICROBATCHES)
        known = peer_schedules.get_schedule_class(name)(theirs, MICROBATCHES, squared)
        runtime._prepare_schedule_with_comms(known.pipeline_order)
        runtime._dump_csv(str(file))
        script = Script(_PipelineScheduleRuntime, model(count), stages=count, rows=rows)
        script.schedule._load_csv(str(file), format="compute_comms")
        trained(script)
        ours = Path(folder, "ours.csv")
        waits = "finalize_gradients" in signature(known.step).parameters
        for form in (
            ("compute_only",) if waits else ("compute_only", "compute_comms")
        ):  # torch 2.15 asks for waits
            script.schedule._dump_csv(str(ours), format=form)
            again = peer_schedules._PipelineScheduleRuntime(theirs, MICROBATCHES)
            again._load_csv(str(ours), format=form)
            assert (
                form == "compute_only" or name == "DualPipeV" or again._simulate()
            )  # which torch cannot for these
        compute = [[a for a in row if a is not None] for row in known.pipeline_order.values()]
        assert [list(map(str, row)) for row in script.schedule.pipeline_order.values()] == [
            list(map(str, row)) for row in compute
        ]


# ---- models that torch's classes get wrong or refuse ----
class Unused(MLP):
    def __init__(self) -> None:
        super().__init__()
        self.never = nn.Linear(2, 2)


@case("InterleavedZeroBubble", "ZBVZeroBubble", "Interleaved1F1B")
def unused_parameters(name: str) -> None:
    trained(Script(name, model(4, Unused)))


@case("InterleavedZeroBubble", "ZBVZeroBubble")
def a_frozen_first_stage(name: str) -> None:
    modules = model(4)
    modules[0].requires_grad_(False)
    trained(Script(name, modules))


@case("1F1B")
def parameters_frozen_and_released_between_steps(name: str) -> None:
    script, (x, t) = Script(name), batch()
    for frozen in (False, True, False, True):
        for modules in (script.whole, script.parts):
            for module in modules:
                module.up.requires_grad_(not frozen)  # type: ignore[union-attr]
                module.zero_grad()
        script.step(x, t)
        script.backward(x, t)
        script.check_grads()
        assert all((s.submod.up.weight.grad is None) == frozen for s in script.stages)  # type: ignore[union-attr]


@case("1F1B")
def parameters_released_that_were_frozen_at_first(name: str) -> None:
    modules = model(2)
    for module in modules:
        module.up.requires_grad_(False)  # type: ignore[union-attr]
    script, (x, t) = Script(name, modules), batch()
    script.step(x, t)
    script.backward(x, t)
    for module in (*script.whole, *script.parts):
        module.up.requires_grad_(True)  # type: ignore[union-attr]
    script.step(x, t)
    script.backward(x, t)
    script.check_grads()


class Checkpointed(MLP):
    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        return checkpoint(super().forward, x, use_reentrant=False)  # type: ignore[return-value]


@case("InterleavedZeroBubble", "ZBVZeroBubble")
def checkpointed_modules(name: str) -> None:
    trained(Script(name, model(4, Checkpointed)))


@case("whole", "part")
def compiled_modules(which: str) -> None:
    """Under a schedule that splits the backward: what was compiled is traced, and the programs are
    compiled.
    """
    modules = model(4)
    script = Script("ZBVZeroBubble", modules)
    for stage in script.stages:
        if which == "whole":
            stage.submod = torch.compile(stage.submod)  # type: ignore[assignment]
        else:
            stage.submod.up.compile()  # type: ignore[operator, union-attr]
    trained(script)


class Through(torch.autograd.Function):
    """A function without setup_context, which torch.func refuses."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.sin()

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Tensor:  # type: ignore[override]
        return dy * ctx.saved_tensors[0].cos()


class Custom(MLP):
    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        return super().forward(Through.apply(x))  # type: ignore[arg-type]


@case("1F1B", "ZBVZeroBubble")
def custom_autograd_functions(name: str) -> None:
    trained(Script(name, model(2 if name == "1F1B" else 4, Custom)))


class Looking(MLP):
    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        return super().forward(x) if float(x.detach().norm()) > 0 else x


@case("1F1B", "InterleavedZeroBubble")
def modules_that_look_at_their_data(name: str) -> None:
    """They cannot be traced; the ranks agree to run them on autograd."""
    count = 2 if name == "1F1B" else 4
    trained(Script(name, [*model(count - 1), *model(1, Looking)]))


@case()
def a_loss_that_looks_at_its_data() -> None:
    def loss(y: Tensor, t: Tensor) -> Tensor:
        return squared(y, t) * (1 if float(y.detach().norm()) > 0 else 2)

    trained(Script("1F1B", loss_fn=loss))


class Counting(MLP):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("tokens", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        self.tokens.add_(len(x))
        return super().forward(x)


@case("1F1B")
def buffers_that_count(name: str) -> None:
    script = Script(name, model(2, Counting))
    trained(script)
    assert all(float(stage.submod.tokens) == 8 for stage in script.stages)  # type: ignore[arg-type]


class Normed(MLP):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(WIDTH)

    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        return self.norm(super().forward(x))


@case("1F1B", "Interleaved1F1B")
def running_statistics(name: str) -> None:
    """Counted once per microbatch in training, not at all in evaluation, where they are used."""
    script, (x, t) = Script(name, model(2 if name == "1F1B" else 4, Normed)), batch()
    script.step(x, t)
    script.backward(x, t)
    script.check_grads()
    for modules in (script.whole, script.parts):
        for module in modules:
            module.eval()
    y = script.eval(x, t)
    assert not script.last or torch.allclose(y, script.forward(x), atol=1e-5)
    for stage in script.stages:
        norm, want = stage.submod.norm, script.whole[stage.stage_index].norm
        assert int(norm.num_batches_tracked) == MICROBATCHES  # type: ignore[arg-type, union-attr]
        torch.testing.assert_close(norm.running_var, want.running_var)  # type: ignore[union-attr]


@case()
def dropout_follows_the_mode() -> None:
    modules = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Dropout(1.0)) for _ in range(2)]
    script, (x, t) = Script("1F1B", modules), batch()
    y = script.eval(x, t)
    assert not script.last or not y.any()
    for module in script.parts:
        module.eval()
    y = script.eval(x, t)
    whole = nn.Sequential(*script.whole).eval()
    want = torch.cat([whole(part) for part in x.chunk(MICROBATCHES)])
    assert not script.last or torch.equal(y, want.detach())


@case("ZBVZeroBubble")
def one_parameter_in_two_stages_of_a_rank(name: str) -> None:
    modules = model(4)
    modules[3].up.weight = modules[0].up.weight  # type: ignore[union-attr]
    trained(Script(name, modules))


class Recorded(nn.Module):
    """Writes a buffer, and looks at its data."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("seen", torch.zeros(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x)
        self.seen.add_(y.detach().sum(0))
        return y * (2.0 if max(x.detach().flatten().tolist()) > 1e6 else 1.0)


@case("1F1B", "GPipe")
def stages_and_a_loss_that_look_at_data(name: str) -> None:
    """torchtitan's deepseek_v3: each process and the loss need something else than a trace."""
    modules = [Recorded() for _ in range(RANKS)]

    def loss(y: Tensor, t: Tensor) -> Tensor:
        return squared(y, t) * (1.0 if y.abs().max().item() < 1e6 else 2.0)

    script = Script(name, modules, loss_fn=loss)
    trained(script, times=2)
    for stage in () if script.last else script.stages:  # there the oracle ran once more
        want = script.whole[stage.stage_index].seen
        torch.testing.assert_close(stage.submod.seen, want, rtol=1e-4, atol=1e-4)


class Pair(nn.Module):
    def __init__(self, first: bool, last: bool):
        super().__init__()
        self.linear, self.first, self.last = nn.Linear(WIDTH, WIDTH), first, last

    def forward(self, x: Tensor, skip: Tensor | None = None) -> Any:
        y = self.linear(x)
        if self.last:
            return y + skip
        return [y, x if skip is None else skip]


@case("1F1B", "ZBVZeroBubble")
def several_outputs_and_a_skip(name: str) -> None:
    count = 2 if name == "1F1B" else 4
    script, (x, t) = Script(name, [Pair(s == 0, s == count - 1) for s in range(count)]), batch()
    for module in (*script.whole, *script.parts):
        nn.init.constant_(module.linear.weight, 0.1)  # type: ignore[union-attr, arg-type]
        nn.init.constant_(module.linear.bias, 0.2)  # type: ignore[union-attr, arg-type]

    def forward(x: Any, **_: Any) -> Tensor:
        for module in script.whole:
            x = module(*x) if isinstance(x, list) else module(x)
        return x

    script.forward = forward  # type: ignore[method-assign]
    y = script.step(x, t)
    script.backward(x, t)
    script.check_grads()
    assert not script.last or torch.allclose(y, forward(x), atol=1e-6)


@case()
def modules_materialized_after_the_schedule_was_built() -> None:
    script, (x, t) = Script("1F1B"), batch()
    for part, stage in zip(script.parts, range(2), strict=True):
        part.to("meta")
        part.to_empty(device="cpu").load_state_dict(script.whole[stage].state_dict())
    script.step(x, t)
    script.backward(x, t)
    script.check_grads()


@case()
def an_optimizer_and_a_scheduler_of_torch() -> None:
    script, (x, t) = Script("Interleaved1F1B"), batch()
    lists = [script.whole, [stage.submod for stage in script.stages]]
    optimizers = [
        torch.optim.AdamW(nn.ModuleList(modules).parameters(), lr=0.1) for modules in lists
    ]
    schedulers = [torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5) for optimizer in optimizers]
    for _ in range(3):
        for optimizer in optimizers:
            optimizer.zero_grad()
        script.step(x, t)
        script.backward(x, t)
        for optimizer, scheduler in zip(optimizers, schedulers, strict=True):
            optimizer.step()
            scheduler.step()
    y = script.eval(x, t)
    assert not script.last or torch.allclose(y, script.forward(x), atol=1e-4)


# ---- microbatches ----
@case("1F1B", "ZBVZeroBubble")
def batches_that_are_split_already(name: str) -> None:
    """As in torch 2.15: a list of arguments, keyword arguments and targets, of several lengths."""
    script, (x, t) = Script(name), batch(10)
    sizes = [1, 4, 3, 2]
    rows = list(zip(x.split(sizes), t.split(sizes), strict=True))
    keywords: dict[str, Any] = {"kwarg_mbs": [{"flip": False}] * MICROBATCHES}
    keywords |= {"arg_mbs": [(a,) for a, _ in rows]} if script.first else {}
    losses: list[Tensor] = []
    keywords |= {"target_mbs": [b for _, b in rows], "losses": losses} if script.last else {}
    y = script.schedule.step(**keywords)
    torch.stack([squared(script.forward(a), b) for a, b in rows]).mean().backward()
    script.check_grads()
    assert not script.last or (
        torch.allclose(y, script.forward(x), atol=1e-6) and len(losses) == MICROBATCHES
    )


@case()
def rows_that_microbatches_do_not_divide() -> None:
    script, (x, t) = Script("1F1B"), batch(10)
    y = script.step(x, t)
    rows = zip(
        torch.tensor_split(x, MICROBATCHES), torch.tensor_split(t, MICROBATCHES), strict=True
    )
    torch.stack([squared(script.forward(a), b) for a, b in rows]).mean().backward()
    script.check_grads()
    assert not script.last or torch.allclose(y, script.forward(x), atol=1e-6)


@case()
def another_axis_is_split() -> None:
    modules = [nn.Sequential(nn.Linear(WIDTH, WIDTH)) for _ in range(2)]
    spec = {"args_chunk_spec": (TensorChunkSpec(1),), "output_merge_spec": TensorChunkSpec(1)}
    script = Script(
        "1F1B", modules, loss_fn=lambda y, t: (y.transpose(0, 1) - t).square().mean(), **spec
    )
    x, t = batch(24)
    x, t = x.reshape(3, 8, WIDTH), t.reshape(8, 3, WIDTH)
    y = script.step(x, t)
    assert not script.last or torch.allclose(y, script.forward(x), atol=1e-6)


@case()
def values_that_are_not_tensors() -> None:
    script, (x, t) = Script("1F1B"), batch()
    y = script.schedule.step(
        *((x, None, True) if script.first else ()), **({"target": t} if script.last else {})
    )
    want = script.whole[1](script.whole[0](x, None, True))
    assert not script.last or torch.allclose(y, want, atol=1e-6)


@case()
def keyword_arguments_of_the_loss() -> None:
    def loss(y: Tensor, t: Tensor, *, weight: float, shift: Tensor) -> Tensor:
        return weight * squared(y + shift, t)

    script, (x, t) = Script("1F1B", loss_fn=loss), batch()
    losses: list[Tensor] = []
    for weight in (2.0, 3.0):
        script.step(x, t, losses, loss_kwargs={"weight": weight, "shift": torch.ones(WIDTH)})
        if script.last:
            rows = zip(x.chunk(MICROBATCHES), t.chunk(MICROBATCHES), strict=True)
            want = [weight * squared(script.forward(a) + 1, b) for a, b in rows]
            torch.testing.assert_close(torch.stack(losses), torch.stack(want).detach())


@case()
def batch_sizes_that_every_rank_knows() -> None:
    """A rank without the first and the last stage passes the arguments too: their shapes may differ
    in each step.
    """
    script = Script("ZBVZeroBubble")
    for rows in (8, 12, 8):
        x, t = batch(rows)
        script.schedule.step(x, target=t)
        script.backward(x, t)
    script.check_grads()


@case()
def batch_sizes_that_a_rank_cannot_know() -> None:
    script = Script("ZBVZeroBubble", group=own_group())
    script.step(*batch(8))
    with pytest.raises(fpipe.errors.MismatchError, match="disagree"):
        script.step(*batch(12))


# ---- copies ----
@case()
def modules_under_ddp() -> None:
    """Two copies of a pipeline of one process with two stages."""
    alone = [dist.new_group([rank]) for rank in range(RANKS)][dist.get_rank()]
    whole = model(2)
    parts = [DistributedDataParallel(module) for module in copy.deepcopy(whole)]
    stages = [PipelineStage(part, s, 2, CPU, group=alone) for s, part in enumerate(parts)]
    schedule = pipelining.ScheduleInterleaved1F1B(stages, 2, loss_fn=squared)
    x, t = batch()
    rank = dist.get_rank()
    schedule.step(x.chunk(2)[rank], target=t.chunk(2)[rank])
    squared(nn.Sequential(*whole)(x), t).backward()
    for part, module in zip(parts, whole, strict=True):
        for a, b in zip(part.parameters(), module.parameters(), strict=True):
            torch.testing.assert_close(a.grad, b.grad)


# ---- mistakes ----
@case()
def a_step_without_gradients_enabled() -> None:
    script, (x, t) = Script("1F1B"), batch()
    with torch.no_grad(), pytest.raises(RuntimeError, match=r"Please call eval\(\) instead"):
        script.step(x, t)


MISTAKES: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "target": ({"target": None}, ValueError, "got no target"),
    "losses": ({"losses": ()}, TypeError, "losses must be a list"),
    "target_mbs": (
        {"target": None, "target_mbs": [1, 2]},
        ValueError,
        "Expecting 4 target_mbs but got 2",
    ),
    "target_mbs type": (
        {"target": None, "target_mbs": (1,) * 4},
        TypeError,
        "target_mbs must be a list",
    ),
    "both": ({"target_mbs": [1] * 4}, ValueError, "or the whole batch, not both"),
}


@case(*MISTAKES)
def a_mistake_on_one_rank(which: str) -> None:
    """The rank raises what torch raises, the others learn of it at once, and all can go on."""
    wrong, kind, match = MISTAKES[which]
    script, (x, t) = Script("1F1B"), batch()
    args, keywords = script.args(x, t)
    with pytest.raises(kind if script.last else fpipe.errors.PeerError, match=match):
        script.schedule.step(*args, **(keywords | wrong if script.last else keywords))
    trained(script)


@case()
def stages_that_the_schedule_has_elsewhere() -> None:
    rank = dist.get_rank()
    stages = [
        PipelineStage(module, s, 4, CPU) for s, module in enumerate(model(4)) if s % 2 == rank
    ]
    schedule = pipelining.ScheduleZBVZeroBubble(stages, MICROBATCHES, squared)
    with pytest.raises(fpipe.errors.ScheduleError, match=f"rank {rank} has stages .* and got"):
        schedule.step(batch()[0], target=batch()[1])
