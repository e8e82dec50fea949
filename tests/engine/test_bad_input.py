"""A user's mistake raises a clear error at once, before anything runs where that is possible."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import Tensor

import fpipe
from common import layer, squared
from fpipe.lowering.instruction import Registers
from fpipe.passes.debugging import check_leaks

WIDTH, PARTS = 3, 4
SEEN: list[str] = []


def piped(fns: Any = None, **more: Any) -> fpipe.Pipeline:
    more = {
        "schedule": "ZBV",
        "loss": squared,
        "microbatches": PARTS,
        "group": fpipe.local(2),
    } | more
    return fpipe.pipeline(fns or [layer] * 4, **more)


def data() -> tuple[list[Tensor], Tensor, Tensor]:
    torch.manual_seed(0)
    return (
        [torch.randn(WIDTH, WIDTH) for _ in range(4)],
        torch.randn(8, WIDTH),
        torch.randn(8, WIDTH),
    )


PARAMS, X, T = data()


def compressed() -> torch.Tensor:
    with warnings.catch_warnings():  # torch calls this layout beta
        warnings.simplefilter("ignore")
        return torch.eye(3).to_sparse_csr()


def step(pipe: fpipe.Pipeline, params: Any = PARAMS, x: Any = X, *targets: Any, **side: Any) -> Any:
    return fpipe.value_and_grad(pipe)(params, x, *(targets or (T,)), **side)


# ---- building a pipeline ----
MADE_WRONG = {
    "wrong number of stages": (
        lambda: piped([layer] * 3),
        fpipe.errors.ScheduleError,
        "4 stages on 2 ranks, not 3; .*4 functions",
    ),
    "no stages": (lambda: fpipe.pipeline([], "1F1B"), fpipe.errors.StageError, "one at least"),
    "a stage that is no function": (
        lambda: piped([layer, 3, layer, layer]),
        fpipe.errors.StageError,
        "not int 3",
    ),
    "a module as a stage": (
        lambda: piped([torch.nn.Linear(4, 4)] * 4),
        fpipe.errors.StageError,
        "not the module Linear; .*from_module",
    ),
    "a module in place of stages": (
        lambda: piped(torch.nn.Linear(4, 4)),
        fpipe.errors.StageError,
        "one at least; .*from_module",
    ),
    "an unknown schedule": (
        lambda: piped(schedule="ZBW"),
        fpipe.errors.ScheduleError,
        "did you mean ZBV",
    ),
    "a schedule for other ranks": (
        lambda: piped(schedule=fpipe.make_schedule("1F1B", 3, 4)),
        fpipe.errors.StageError,
        "for 3 ranks, the group has 2",
    ),
    "a schedule for other stages": (
        lambda: piped(schedule=fpipe.make_schedule("1F1B", 2, 4)),
        fpipe.errors.StageError,
        "runs 2 stages, the pipeline has",
    ),
    "a schedule for other microbatches": (
        lambda: step(piped(schedule=fpipe.make_schedule("ZBV", 2, 3))),
        fpipe.errors.StageError,
        "for 3 microbatches, but 4",
    ),
    "a schedule that cannot run": (
        lambda: piped(
            [layer],
            schedule=fpipe.Schedule.parse("[0B0, 0F0]"),
            group=fpipe.local(1),
            microbatches=1,
        ),
        fpipe.errors.ScheduleError,
        "0B0",
    ),
    "no such file": (
        lambda: piped(schedule="nowhere.csv"),
        fpipe.errors.ScheduleError,
        "cannot read 'nowhere.csv'",
    ),
    "a schedule of another kind": (
        lambda: piped(schedule=7),
        fpipe.errors.StageError,
        "schedule=7",
    ),
    "an unknown reduction": (
        lambda: piped(reduction="max"),
        fpipe.errors.StageError,
        "reduction='max'",
    ),
    "unknown outputs": (lambda: piped(outputs="all"), fpipe.errors.StageError, "outputs='all'"),
    "a dtype of accumulation that is a string": (
        lambda: piped(accumulate="float32"),
        fpipe.errors.StageError,
        "give a floating dtype",
    ),
    "a seed that is a fraction": (
        lambda: piped(seed=1.5),
        fpipe.errors.StageError,
        "give an integer",
    ),
    "argnums": (lambda: fpipe.grad(piped(), argnums=2), fpipe.errors.StageError, "argnums=2"),
    "a gradient without a loss": (
        lambda: fpipe.grad(piped(loss=None)),
        fpipe.errors.StageError,
        "has no loss",
    ),
    "a gradient of a function": (
        lambda: fpipe.grad(layer),
        fpipe.errors.StageError,
        "not function",
    ),
    "a vjp of a loss": (
        lambda: fpipe.vjp(piped(), PARAMS, X),
        fpipe.errors.StageError,
        "without a loss",
    ),
    "a vjp of a loss with its targets": (
        lambda: fpipe.vjp(piped(), PARAMS, X, T),
        fpipe.errors.StageError,
        "without a loss",
    ),
    "a vjp of a function": (
        lambda: fpipe.vjp(layer, PARAMS, X),
        fpipe.errors.StageError,
        "not function",
    ),
    "argnums that are none": (
        lambda: fpipe.grad(piped(), argnums=None),
        fpipe.errors.StageError,
        "argnums=None",
    ),
    "argnums that are a fraction": (
        lambda: fpipe.grad(piped(), argnums=1.0),
        fpipe.errors.StageError,
        "argnums=1.0",
    ),
    "a loss that is no function": (
        lambda: piped(loss=3),
        fpipe.errors.StageError,
        "loss=3; give a function",
    ),
    "a group that is a number": (
        lambda: piped(group=4),
        fpipe.errors.GroupError,
        "group=4 .*fpipe.adopt",
    ),
    "copies that are a number": (
        lambda: piped(dp=4),
        fpipe.errors.GroupError,
        "dp=4 .*fpipe.adopt",
    ),
    "weights that are a number": (
        lambda: fpipe.weighted(3),
        fpipe.errors.StageError,
        "a function of the targets, not 3",
    ),
    "microbatches that are a number": (
        lambda: fpipe.Microbatches(3),
        fpipe.errors.BatchError,
        "takes a list.* not 3",
    ),
    "microbatches that are one batch": (
        lambda: fpipe.Microbatches({"x": X}),
        fpipe.errors.BatchError,
        "takes a list",
    ),
    "frozen as one text": (
        lambda: piped(frozen="0.*"),
        fpipe.errors.StageError,
        r"frozen='0\.\*'; give a list",
    ),
    "frozen stages by number": (
        lambda: piped(frozen=[0]),
        fpipe.errors.StageError,
        "has the int 0",
    ),
    "own as one text": (
        lambda: fpipe.copies(fpipe.local(1), own="0.*"),
        fpipe.errors.StageError,
        "own='0",
    ),
    "tied as one group": (
        lambda: piped(tied=("0.w", "1.w")),
        fpipe.errors.StageError,
        "in place of a group",
    ),
    "tied as a mapping": (
        lambda: piped(tied={"0.w": "1.w"}),
        fpipe.errors.StageError,
        "give a list of groups",
    ),
    "tied to itself": (
        lambda: piped(tied=[("0.w", "0.w")]),
        fpipe.errors.StageError,
        "fewer than two",
    ),
    "tied to a number": (
        lambda: piped(tied=[("0.w", 7)]),
        fpipe.errors.StageError,
        "has the int 7",
    ),
    "tied to a stage that is not there": (
        lambda: piped(tied=[("0.w", "9.w")]),
        fpipe.errors.StageError,
        "a stage below 4",
    ),
    "a Stage of a number": (lambda: fpipe.Stage(3), fpipe.errors.StageError, "not int 3"),
    "remat of a number": (
        lambda: fpipe.remat(3),
        fpipe.errors.StageError,
        "what remat takes must be a function.* not int 3",
    ),
    "an engine of a Stage": (
        lambda: fpipe.Stage(layer, engine="jit"),
        fpipe.errors.StageError,
        "engine='jit'; give one",
    ),
    "dynamic axes without a list": (
        lambda: fpipe.Stage(layer, dynamic={"x": 1}),
        fpipe.errors.StageError,
        "dynamic=",
    ),
    "dynamic leaves by number": (
        lambda: fpipe.Stage(layer, dynamic={0: (1,)}),
        fpipe.errors.StageError,
        "dynamic=",
    ),
    "dynamic axes as a text": (
        lambda: fpipe.Stage(layer, dynamic="x"),
        fpipe.errors.StageError,
        "dynamic='x'",
    ),
    "frozen leaves of a Stage as one text": (
        lambda: fpipe.Stage(layer, frozen="w"),
        fpipe.errors.StageError,
        "frozen='w'",
    ),
    "costs that are a number": (
        lambda: piped(schedule=fpipe.auto(costs=3)),
        fpipe.errors.ScheduleError,
        "costs=3; give fpipe.Costs",
    ),
}


@pytest.mark.parametrize("name", MADE_WRONG)
def test_made_wrong(name: str):
    make, kind, words = MADE_WRONG[name]
    with pytest.raises(kind, match=words):
        make()


@pytest.mark.parametrize("engine", ["trace", "eager"])
def test_parameters_that_torch_cannot_add_are_refused(engine: Any):
    pipe = piped(engine=engine)
    with pytest.raises(fpipe.errors.StageError, match=r"stage 0 is sparse.*to_dense"):
        step(pipe, [PARAMS[0].to_sparse(), *PARAMS[1:]])
    narrow = PARAMS[1].to(torch.float8_e4m3fn)
    with pytest.raises(fpipe.errors.StageError, match=r"stage 1 is trained.*float8.*frozen="):
        step(pipe, [PARAMS[0], narrow, *PARAMS[2:]])
    stages = [layer, lambda p, x: layer(p.float(), x), layer, layer]
    assert step(piped(stages, engine=engine, frozen=["1"]), [PARAMS[0], narrow, *PARAMS[2:]])


@pytest.mark.filterwarnings("ignore:.*nested tensors is in prototype")
@pytest.mark.parametrize("layout", [torch.jagged, torch.strided])
def test_nested_tensors_are_refused(layout: torch.layout):
    nested = torch.nested.nested_tensor([torch.ones(2, 3), torch.ones(1, 3)], layout=layout)
    for x in (nested, fpipe.Microbatches([nested, nested])):
        with pytest.raises(fpipe.errors.BatchError, match=r"x holds a nested tensor.*lengths"):
            step(piped(), PARAMS, x)
    with pytest.raises(fpipe.errors.BatchError, match="target 0 holds a nested tensor"):
        step(piped(), PARAMS, X, fpipe.Microbatches([nested, nested]))


@pytest.mark.parametrize(
    "tied",
    [[("0", "1"), ("3", "1")], [("0", "1", "3"), ("1", "3")], [("0", "1", "0", "3"), ["0", "1"]]],
)
def test_groups_of_tied_leaves_with_a_common_leaf_are_one_parameter(tied):
    params = [PARAMS[0], PARAMS[0].clone(), PARAMS[2], PARAMS[0].clone()]
    grads = fpipe.grad(piped())(params, X, T)
    together = fpipe.grad(piped(tied=tied))(params, X, T)
    for stage in (0, 1, 3):
        torch.testing.assert_close(together[stage], grads[0] + grads[1] + grads[3])
    assert torch.equal(together[2], grads[2])


# ---- as it is called ----
def with_side(p, x, *, mask):
    return layer(p, x) * mask


CALLED_WRONG = {
    "parameters of a missing stage": (
        lambda: step(piped(), PARAMS[:3]),
        fpipe.errors.StageError,
        "the 4 stages.*3 ent",
    ),
    "parameters that are no list": (
        lambda: step(piped(), {"w": 1}),
        fpipe.errors.StageError,
        "got a dict",
    ),
    "parameters that are None": (
        lambda: step(piped(), [None, *PARAMS[1:]]),
        fpipe.errors.StageError,
        "stage 0.*its parameters are None",
    ),
    "a batch that does not split": (
        lambda: step(piped(microbatches=3, schedule="GPipe", group=fpipe.local(4))),
        fpipe.errors.BatchError,
        "8 rows, which 3 microbatches do not divide",
    ),
    "a target that does not split": (
        lambda: step(piped(), PARAMS, X, T[:6]),
        fpipe.errors.BatchError,
        "target 0 has 6 rows",
    ),
    "a leaf without axes": (
        lambda: step(piped(), PARAMS, torch.tensor(1.0)),
        fpipe.errors.BatchError,
        "without axes",
    ),
    "no count of microbatches": (
        lambda: step(piped(microbatches=None)),
        fpipe.errors.BatchError,
        "how many microbatches",
    ),
    "counts that differ": (
        lambda: step(piped(), PARAMS, fpipe.Microbatches([X, X]), fpipe.Microbatches([T])),
        fpipe.errors.BatchError,
        r"\[1, 2\] microbatches",
    ),
    "no microbatches at all": (lambda: fpipe.Microbatches([]), fpipe.errors.BatchError, "empty"),
    "an output that does not fit the next stage": (
        lambda: step(piped(), [PARAMS[0], torch.randn(3, 4), *PARAMS[2:]]),
        fpipe.errors.StageError,
        r"stage 2: stage layer \(float32\[3, 3\]; float32\[2, 4\]\) raised .* what stage 1 returns",
    ),
    "an object that cannot be sent": (
        lambda: step(piped([layer, lambda p, x: (x, object()), layer, layer])),
        fpipe.errors.StageError,
        "stage 1: .* returns a object, which cannot be sent",
    ),
    "a loss that is no scalar": (
        lambda: step(piped(loss=lambda y, t: y - t)),
        fpipe.errors.StageError,
        r"one scalar tensor.*float32\[2, 3\]",
    ),
    "a loss that is a number": (
        lambda: step(piped(loss=lambda y, t: 1.0)),
        fpipe.errors.StageError,
        "returned no tensor",
    ),
    "a loss of integers": (
        lambda: step(piped(loss=lambda y, t: (y > t).sum())),
        fpipe.errors.StageError,
        "must be floating",
    ),
    "a loss without its target": (
        lambda: fpipe.grad(piped())(PARAMS, X),
        fpipe.errors.StageError,
        "squared.*missing",
    ),
    "a target without a loss": (
        lambda: piped(loss=None)(PARAMS, X, T),
        fpipe.errors.BatchError,
        "has no loss",
    ),
    "has_aux without aux": (
        lambda: fpipe.grad(piped(), has_aux=True)(PARAMS, X, T),
        fpipe.errors.StageError,
        "not Tensor",
    ),
    "a side input that nobody names": (
        lambda: step(piped([layer, with_side] * 2), maks=X),
        fpipe.errors.BatchError,
        "did you mean 'mask'",
    ),
    "a side input that is missing": (
        lambda: step(piped([layer, with_side] * 2)),
        fpipe.errors.StageError,
        "stage 1.*missing.*'mask'",
    ),
    "a weight for each row": (
        lambda: step(piped(reduction=fpipe.weighted(lambda t: t))),
        fpipe.errors.BatchError,
        "one number per microbatch",
    ),
    "a weight that is no number": (
        lambda: step(piped(reduction=fpipe.weighted(lambda t: None))),
        fpipe.errors.BatchError,
        "one number per microbatch",
    ),
    "a weight that cannot be computed": (
        lambda: step(piped(reduction=fpipe.weighted(lambda t: 1 // 0))),
        fpipe.errors.BatchError,
        "fpipe.weighted's function raised ZeroDivisionError for microbatch 0",
    ),
    "a seed that is a tensor": (
        lambda: fpipe.value_and_grad(piped())(PARAMS, X, T, seed=torch.tensor(3)),
        fpipe.errors.StageError,
        "give an integer",
    ),
    "state of another length": (
        lambda: step(piped([fpipe.Stage(lambda p, s, x: (x, s), state=True)] * 4), state=[None]),
        fpipe.errors.StageError,
        "each of the 4 stages",
    ),
    "a cotangent of another shape": (
        lambda: fpipe.vjp(piped(loss=None), PARAMS, X)[1](torch.ones(8, 4)),
        fpipe.errors.BatchError,
        r"shape \[8, 4\]",
    ),
    "no cotangent": (
        lambda: fpipe.vjp(piped(loss=None), PARAMS, X)[1](None),
        fpipe.errors.BatchError,
        "dy is None",
    ),
    "a compressed sparse parameter": (
        lambda: step(piped(), [compressed(), *PARAMS[1:]]),
        fpipe.errors.BatchError,
        "layout torch.sparse_csr",
    ),
    "compressed sparse microbatches": (
        lambda: step(piped(), PARAMS, fpipe.Microbatches([compressed()] * 4)),
        fpipe.errors.BatchError,
        "layout torch.sparse_csr",
    ),
    "a sparse batch": (
        lambda: step(piped(), PARAMS, X.to_sparse()),
        fpipe.errors.BatchError,
        "sparse_coo, which cannot be cut",
    ),
    "an unhashable leaf": (
        lambda: step(
            piped([lambda p, v: layer(p, v["x"]), layer, layer, layer]), PARAMS, {"x": X, "s": {1}}
        ),
        fpipe.errors.BatchError,
        r"^x\['s'\] is a set, neither a tensor nor hashable; pass numbers",
    ),
}

ARRAY = X.numpy()
ARRAYS = {
    "x": lambda: step(piped(), PARAMS, ARRAY),
    "x['deep'][1]": lambda: step(piped(), PARAMS, {"deep": [X, ARRAY]}),
    "x[2]": lambda: step(piped(), PARAMS, fpipe.Microbatches([X, X, ARRAY, X])),
    "target 0": lambda: fpipe.grad(piped(loss=lambda y, t: (y - t).sum()))(PARAMS, X, ARRAY),
    "params[1]": lambda: step(piped(), [PARAMS[0], PARAMS[1].detach().numpy(), *PARAMS[2:]], X),
    "side input 'mask'": lambda: step(
        piped([lambda p, v, *, mask: layer(p, v) * mask, layer, layer, layer]),
        PARAMS,
        X,
        mask=ARRAY,
    ),
}


@pytest.mark.parametrize("name", ARRAYS)
def test_an_array_of_numpy_is_refused_by_name(name: str):
    remedy = "pass torch.from_numpy(...) of it, which shares its memory"
    with pytest.raises(fpipe.errors.BatchError) as caught:
        ARRAYS[name]()
    said = f"{name} is a ndarray, neither a tensor nor hashable; {remedy}"
    assert str(caught.value) == said
    assert step(piped(), PARAMS, torch.from_numpy(ARRAY))[0] == step(piped(), PARAMS, X)[0]


def test_an_array_of_numpy_is_refused_by_trace():
    with pytest.raises(fpipe.errors.StageError, match=r"pass torch.from_numpy\(...\) of it"):
        fpipe.trace(layer, PARAMS[0], ARRAY)


@pytest.mark.parametrize("name", CALLED_WRONG)
def test_called_wrong(name: str):
    call, kind, words = CALLED_WRONG[name]
    with pytest.raises(kind, match=words) as caught:
        call()
    assert "FakeTensor" not in str(caught.value)


def test_a_stage_that_raises_while_it_runs_names_action_stage_and_shapes():
    """Only an index that is out of range waits for data to go wrong."""
    look_up = lambda p, x: layer(p, x) + p[(x * 0 + 9).long()[:, 0]]
    with pytest.raises(
        fpipe.errors.ActionError,
        match=r"^1F0 .*<lambda> .float32\[3, 3\]; float32\[2, 3\].* on rank 1",
    ) as caught:
        step(piped([layer, look_up, layer, layer]))
    assert isinstance(caught.value.__cause__, IndexError)


def test_after_an_error_the_next_call_works():
    look_up = lambda p, x: layer(p, x["h"]) + p[x["i"]]
    pipe = piped([look_up, layer, layer, layer])
    right, wrong = {"h": X, "i": torch.zeros(8, dtype=torch.long)}, {"h": X, "i": torch.arange(8)}
    before = step(pipe, PARAMS, right)
    with pytest.raises(fpipe.errors.ActionError):
        step(pipe, PARAMS, wrong)
    after = step(pipe, PARAMS, right)
    assert torch.equal(before[0], after[0])
    assert all(torch.equal(a, b) for a, b in zip(before[1], after[1], strict=True))


def test_a_deadlock_tells_what_every_rank_waits_for():
    """A schedule is checked before it runs, so this one is put where only checked ones are."""
    pipe = piped([layer] * 2, schedule="1F1B", microbatches=2)
    unchecked = fpipe.Schedule.parse("[0F0, 0B0, 0F1, 0B1]\n[1F1, 1B1, 1F0, 1B0]")
    vars(pipe.config)["schedule_for"] = lambda microbatches: unchecked
    with pytest.raises(fpipe.errors.DeadlockError) as caught:
        step(pipe, PARAMS[:2])
    assert "rank 0: waiting for 1B1's message from rank 1" in str(caught.value)
    assert "rank 1: waiting for 0F1's message from rank 0" in str(caught.value)


# ---- debug ----
class DividesByZero(torch.autograd.Function):
    """Right forward, infinite backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        return g / 0


def logs(p, x):
    return torch.log(x @ p)


def roots(p, x):
    return layer(p, x) + torch.nn.functional.dropout(torch.sqrt(x), 0.5)


def wrong_backward(p, x):
    return layer(p, DividesByZero.apply(x))


WRONG = {
    "forward": (
        [layer, logs, layer, layer],
        PARAMS,
        X,
        r"^1F0 .the forward of logs .*, microbatch 0.* NaN in log",
    ),
    "with draws": (
        [layer, roots, layer, layer],
        PARAMS,
        X,
        r"^1F0 .*first NaN in sqrt .operation \d+ of \d+., given",
    ),
    "input gradient": (
        [layer, wrong_backward, layer, layer],
        PARAMS,
        X,
        r"^1I0 .the input gradient of wrong_back",
    ),
    "batch": (
        [layer] * 4,
        PARAMS,
        torch.cat([X[:6], X[6:] * torch.nan]),
        r"^0F3 .*handed input leaf 0",
    ),
    "parameter": (
        [layer] * 4,
        [*PARAMS[:2], PARAMS[2] * torch.inf, PARAMS[3]],
        X,
        r"^2F0 .*handed parameter leaf 0",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_debug_names_the_first_action_that_made_a_nan(name: str):
    fns, params, x, words = WRONG[name]
    pipe = piped(fns, seed=1)
    with fpipe.debug(), pytest.raises(fpipe.errors.ActionError, match=words):
        step(pipe, params, x)
    step(pipe, params, x)  # without debug it runs


def test_debug_sees_losses_and_added_gradients():
    with fpipe.debug():
        with pytest.raises(fpipe.errors.ActionError, match=r"^3F0 .*made infinity"):
            step(piped(loss=lambda y, t: squared(y, t) / 0))
        later = lambda p, x: (
            x["h"] * p.pow(x["e"]).sum()
        )  # 0 ** -0.5 has an infinite gradient, from microbatch 2 on
        fns = [lambda p, x: {"h": layer(p, x["h"]), "e": x["e"]}, later, layer, layer]
        exponent = torch.tensor([1.0, 1.0, 1.0, 1.0, 0.5, 0.5, 1.0, 1.0])[:, None, None]
        zeros = [PARAMS[0], torch.zeros(1), *PARAMS[2:]]
        with pytest.raises(fpipe.errors.ActionError, match=r"^1[BW]2 .*made"):
            step(piped(fns, schedule="1F1B", group=fpipe.local(4)), zeros, {"h": X, "e": exponent})


def test_debug_leaves_masks_alone_and_changes_nothing():
    infinite = torch.zeros(2, 2).masked_fill(torch.ones(2, 2).triu(1).bool(), -torch.inf)
    masked = lambda p, x: torch.softmax((x @ p) @ x.T + infinite, -1) @ x
    pipe = piped([layer, masked, layer, layer], seed=2)
    plainly = step(pipe)
    with fpipe.debug():
        checked = step(pipe)
        piped(loss=None)(PARAMS, X, each=lambda number, output: None)
        y, pullback = fpipe.vjp(piped(loss=None), PARAMS, X)
        pullback(y)
        assert pipe(PARAMS, X, T) == plainly[0]
    assert torch.equal(plainly[0], checked[0])
    assert all(torch.equal(a, b) for a, b in zip(plainly[1], checked[1], strict=True))


def test_debug_is_a_flag_and_a_context():
    from fpipe.engine.execute import DEBUGGING

    assert not DEBUGGING.get()
    with fpipe.debug():
        with fpipe.debug(False):
            assert not DEBUGGING.get()
        assert DEBUGGING.get()
    assert not DEBUGGING.get()
    fpipe.debug()
    assert DEBUGGING.get()
    fpipe.debug(False)
    assert not DEBUGGING.get()


def test_debug_finds_what_a_run_forgot_to_free():
    plan = piped().plan(PARAMS, X, T)[0]
    registers = Registers([None] * plan.slots, None)
    check_leaks(plan, registers)
    forgotten = next(
        s for s in range(plan.slots) if s not in {*plan.feeds.values(), *plan.results.values()}
    )
    registers.slots[forgotten] = X
    with pytest.raises(fpipe.FpipeError, match=rf"slots \[{forgotten}\]"):
        check_leaks(plan, registers)
    registers = Registers([None] * plan.slots, None)
    registers.receives[1, 0] = None  # type: ignore[assignment]
    with pytest.raises(fpipe.FpipeError, match=r"receives \[\(1, 0\)\]"):
        check_leaks(plan, registers)


@pytest.mark.parametrize("name", fpipe.schedule_names())
def test_no_schedule_leaks(name: str):
    stages = fpipe.make_schedule(name, 2, PARTS).stages
    params = [torch.randn(WIDTH, WIDTH) for _ in range(stages)]
    with fpipe.debug():
        step(piped([layer] * stages, schedule=name), params)


@pytest.mark.parametrize("mode", ["call", "grad", "plan"])
@pytest.mark.parametrize(
    ("x", "targets", "side", "text"),
    [
        (X[:4], (T,), {}, "x has 4 rows and target 0 has 8"),
        (X, (T[:4],), {}, "x has 8 rows and target 0 has 4"),
        ({"a": X, "b": X[:4]}, (T,), {}, "x has 4 rows and x has 8"),
        (X, (T,), {"mask": X[:4]}, "x has 8 rows and side input 'mask' has 4"),
        (fpipe.Microbatches([X[:2]] * 4), (T,), {"mask": X[:4]}, "target 0 has 8 rows and side"),
    ],
)
def test_arguments_of_other_numbers_of_rows_are_refused(
    x: Any, targets: Any, side: Any, text: str, mode: str
):
    SEEN.clear()

    def first(p: Any, x: Any, *, mask: Any = None) -> Any:
        SEEN.append("ran")
        return layer(p, x["a"] if isinstance(x, dict) else x)

    pipe = piped([first, layer, layer, layer])
    run = {"call": pipe, "grad": fpipe.grad(pipe), "plan": pipe.plan}[mode]
    with pytest.raises(fpipe.errors.BatchError, match=text):
        run(PARAMS, x, *targets, **side)
    assert not SEEN


def test_scalars_and_microbatches_have_no_common_number_of_rows():
    def first(p: Any, x: Any, *, by: Any, mask: Any) -> Any:
        return layer(p, x) * by + mask.sum()

    pipe = piped([first, layer, layer, layer])
    masks = fpipe.Microbatches([torch.ones(n + 1) for n in range(PARTS)])
    loss = pipe(PARAMS, X, T, by=torch.tensor(2.0), mask=masks)
    again = pipe(PARAMS, X, T, by=2.0, mask=masks)
    assert torch.equal(loss, again)


@pytest.mark.parametrize("name", ["x", "params", "self", "pipe", "targets", "mode"])
def test_a_side_input_may_have_the_name_of_a_positional_argument(name: str):
    namespace: dict[str, Any] = {}
    exec(f"def stage(a, b, *, {name}): return a * b * {name}", namespace)
    stages = [namespace["stage"]] * 2
    params, x, side = [torch.tensor(1.0)] * 2, torch.arange(4.0), {name: torch.full((4,), 2.0)}
    options: dict[str, Any] = {"microbatches": 2, "group": fpipe.local(2)}
    pipe = fpipe.pipeline(stages, loss=torch.sum, **options)
    assert pipe(params, x, **side).item() == 12.0
    assert [g.item() for g in fpipe.grad(pipe)(params, x, **side)] == [12.0] * 2
    assert fpipe.value_and_grad(pipe)(params, x, **side)[0].item() == 12.0
    pipe.plan(params, x, **side)
    y, _ = fpipe.vjp(fpipe.pipeline(stages, **options), params, x, **side)
    assert torch.equal(y, 4 * x)
    programs = fpipe.trace(stages[0], params[0], x, **side)
    assert torch.equal(programs.forward(params[0], x, **side)[0], 2 * x)


@pytest.mark.parametrize("where", ["stage", "loss", "weights"])
@pytest.mark.parametrize("name", ["seed", "each", "has_aux", "loss_scale", "state", "_value"])
def test_names_of_options_of_a_call_are_reserved(name: str, where: str):
    namespace: dict[str, Any] = {}
    exec(f"def stage(a, b, *, {name}): return b\ndef count(t, *, {name}): return 1", namespace)
    stage, count = namespace["stage"], namespace["count"]
    more = {
        "stage": {"fns": [stage] * 4},
        "loss": {"loss": stage},
        "weights": {"reduction": fpipe.weighted(count)},
    }
    with pytest.raises(fpipe.errors.StageError, match=f"'{name}' cannot be a side input"):
        piped(**more[where])
