"""Mistakes that a reader of the reference makes: each is one error of fpipe, at once, with the
value, the rule and the remedy, in less than 1,000 characters.
"""

from __future__ import annotations

import copy
import dataclasses
import inspect
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fpipe
from fpipe.errors import ActionError, ArgumentError, FpipeError, LaunchError, StageError, checked
from fpipe.products.command.cli import main
from fpipe.products.training.outcome import Report, results

WIDTH = 4
X = torch.linspace(-1, 1, 8 * WIDTH).reshape(8, WIDTH)
T = torch.zeros(8, WIDTH)
EYE = torch.eye(WIDTH)
PARAMS = [EYE, EYE]
COSTS = fpipe.Costs()
DATA = torch.utils.data.TensorDataset(X, T)

Mistakes = dict[str, tuple[Callable[[], Any], str]]


def layer(p: Tensor, x: Tensor) -> Tensor:
    return torch.tanh(x @ p)


def with_mask(p: Tensor, x: Tensor, *, mask: Tensor) -> Tensor:
    return layer(p, x) * mask


def carrying(p: Tensor, carry: Any, x: Tensor) -> Any:
    return layer(p, x), carry


def squared(y: Any, t: Tensor) -> Tensor:
    return (y - t).square().mean()


def piped(stages: Any = (layer, layer), schedule: Any = "1F1B", **options: Any) -> Any:
    given: dict[str, Any] = {"loss": squared, "microbatches": 2, "group": fpipe.local(2)}
    return fpipe.pipeline(stages, schedule, **given | options)


def step(x: Any = X, t: Any = T, params: Any = PARAMS, call: Any = None, **options: Any) -> Any:
    return fpipe.value_and_grad(piped(**options))(params, x, t, **call or {})


def sliced(fn: Any, x: Tensor, slices: int = 2) -> Any:
    stages = [fpipe.Stage(fn, carry=True, initial_carry=None)] * 2
    return step(x, x, stages=stages, schedule="Seq1F1B", slices=slices)


def pullback(dy: Any) -> Any:
    return fpipe.vjp(piped(loss=None), PARAMS, X)[1](dy)


def updated(tx: Any, grads: Any = PARAMS, params: Any = PARAMS) -> Any:
    return tx.update(grads, tx.init(params), params)


def loop(tx: Any = None, batch: Any = lambda step: (X, T), steps: Any = 1, **options: Any) -> Any:
    made = fpipe.Loop(options.pop("pipe", None) or piped(), tx or fpipe.sgd(0.1), **options)
    return made.run(PARAMS, batch, steps)


def bound() -> Any:
    return fpipe.interop.bind([nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)])


def saved(*names: Any) -> Any:
    path = Path("saved")
    if not path.exists():
        fpipe.save(path, piped(), params=PARAMS)
    return fpipe.load(path, piped(), *names)


def replicated() -> Any:
    schedule = fpipe.make_schedule("1F1B", ranks=4, microbatches=6, replicas=(3, 1))
    return piped(schedule=schedule, microbatches=6, group=fpipe.local(4))


SEQUENCE = torch.ones(4, 8, WIDTH)
MODEL = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))

PIPELINES: Mistakes = {
    "stages and schedule swapped": (
        lambda: fpipe.pipeline("1F1B", [layer], group=fpipe.local(2)),  # type: ignore[call-overload]
        r"stages must be a list of functions fn\(params, x\)",
    ),
    "a stage that was called": (
        lambda: step(stages=[layer(EYE, X), layer]),
        r"must be a function fn\(params, x\), not Tensor",
    ),
    "a bound set of modules as a stage": (lambda: piped([bound()]), r"fn\(params, x\), not Bound"),
    "a stage of one argument": (
        lambda: step(stages=[lambda x: x, layer]),
        r"takes 1 positional argument.*; a stage is called as fn\(params, x\)",
    ),
    "no such option": (lambda: piped(micro_batches=2), "did you mean 'microbatches'"),
    "zero= without copies": (
        lambda: piped(zero=1),
        r"no option 'zero'; .*dp=fpipe\.copies\(group\.dp, zero=1\)",
    ),
    "has_aux= of a pipeline": (lambda: piped(has_aux=True), r"'has_aux'; .*value_and_grad\(pipe"),
    "ranks= of a pipeline": (lambda: piped(ranks=4), r"'ranks'; .*group=fpipe\.local\(4\)"),
    "a number as the group": (lambda: piped(group=2), r"group=2 is no group.*fpipe\.local\(ranks"),
    "microbatches of text": (
        lambda: step(microbatches="2"),
        "microbatches='2', but there must be a whole number",
    ),
    "a loss by name": (lambda: piped(loss="mse"), r"loss='mse'; give a function loss\(y,"),
    "a reduction by name": (lambda: piped(reduction="average"), "'mean', 'sum' or fpipe.weighted"),
    "a generator as the seed": (
        lambda: piped(seed=torch.Generator()),
        "seed=.*give an integer",
    ),
    "frozen= of text": (lambda: step(frozen="0"), r"frozen='0'; give a list of patterns"),
    "tied= of numbers": (lambda: step(tied=[(0, 1)]), "has the int 0; give texts"),
    "copies that are a number": (lambda: piped(dp=2), "dp=2 is no group of ranks; pass fpipe.init"),
    "an option of a stage misspelled": (
        lambda: piped([fpipe.Stage(layer, dynamic="x"), layer]),  # type: ignore[arg-type]
        "dynamic='x'; give True, False, axes",
    ),
    "a schedule as text": (
        lambda: piped(schedule="[0F0, 0B0]\n[1F0, 1B0]"),
        r"no schedule is called.*fpipe\.Schedule\.parse\(text\)",
    ),
    "auto, not called": (
        lambda: piped(schedule=fpipe.auto),
        r"schedule=fpipe\.auto is a function to be called; give fpipe\.auto\(\)",
    ),
    "a schedule for other microbatches": (
        lambda: step(schedule=fpipe.make_schedule("1F1B", 2, 4)),
        "for 4 microbatches, but 2 are run; say microbatches=",
    ),
    "a schedule without stages": (lambda: piped(schedule="ZBV"), "takes 4 stages on 2 ranks"),
    "more slices than tokens divide": (
        lambda: sliced(carrying, SEQUENCE, 3),
        "3 slices do not divide the 8 .*pad it to 9",
    ),
    "slices without a sequence": (
        lambda: sliced(carrying, torch.ones(4)),
        "no tensor of x has a second axis",
    ),
    "a carry that is not returned": (
        lambda: sliced(lambda p, carry, x: layer(p, x), SEQUENCE),
        r"carry=True, so it must return \(y, carry\)",
    ),
    "a carry that is not taken": (
        lambda: sliced(layer, SEQUENCE),
        "takes 2 positional arguments but 3 were given; a stage is called as .*carry before x",
    ),
    "rerouted without copies": (
        lambda: piped().rerouted(without=[1]),
        r"stage 1 is on no rank but 1.*make_schedule\(replicas=\)",
    ),
    "rerouted without a number": (lambda: replicated().rerouted(without=2), r"as in without=\[2\]"),
    "rerouted by position, twice": (
        lambda: replicated().rerouted([2], [3]),
        r"takes 2 positional arguments but 3 were given; give \(without",
    ),
}

CALLS: Mistakes = {
    "params of one stage": (lambda: step(params=EYE), "one pytree for each of the 2 stages"),
    "params and x swapped": (
        lambda: fpipe.value_and_grad(piped())(X, PARAMS, T),  # type: ignore[arg-type]
        "params must be a list .*got a Tensor",
    ),
    "x with an axis in front, and targets without": (
        lambda: step(X[None], T, microbatches=1),
        "x has 1 rows and target 0 has 8; give arguments of as many rows",
    ),
    "targets with an axis in front, and x without": (
        lambda: step(X, T[None], microbatches=1),
        "x has 8 rows and target 0 has 1; give arguments of as many rows",
    ),
    "the target is missing": (
        lambda: fpipe.value_and_grad(piped())(PARAMS, X),
        r"missing 1 required positional argument: 't'; a loss is called as loss\(y, \*targets\)",
    ),
    "one target too many": (
        lambda: fpipe.value_and_grad(piped())(PARAMS, X, T, T),
        r"takes 2 positional arguments but 3 were given; a loss is called as loss",
    ),
    "x and targets as one pair": (
        lambda: fpipe.value_and_grad(piped(loss=lambda y: y.sum()))(PARAMS, (X, T)),
        r"its input is a tuple: .*fpipe\.Microbatches\(\[\.\.\.\]\), and targets behind x",
    ),
    "a list of microbatches": (
        lambda: step(list(X.chunk(2)), list(T.chunk(2))),
        r"its input is a list: a list of microbatches is passed as fpipe\.Microbatches",
    ),
    "Microbatches of a tensor": (
        lambda: fpipe.Microbatches(X),
        r"takes a list with one pytree for each microbatch, not tensor.*x\.chunk\(8\)",
    ),
    "Microbatches of other numbers": (
        lambda: step(fpipe.Microbatches(X.chunk(4)), fpipe.Microbatches(T.chunk(2))),
        r"hold \[2, 4\] microbatches; give every argument the same",
    ),
    "a side input that is missing": (
        lambda: step(stages=[with_mask] * 2),
        "missing 1 required keyword-only argument: .mask.; pass side inputs to the call",
    ),
    "a side input of no stage": (
        lambda: step(call={"mask": X}),
        "no stage and no loss names a keyword-only argument 'mask'",
    ),
    "a loss scale of text": (
        lambda: step(call={"loss_scale": "1024"}),
        "loss_scale='1024'; give one number above 0",
    ),
    "value_and_grad with the arguments of the call": (
        lambda: fpipe.value_and_grad(piped(), PARAMS, X, T),  # type: ignore[call-overload]
        r"value_and_grad\(<fpipe pipeline.*but 4 were given; give \(pipe: Pipeline.*argnums",
    ),
    "value_and_grad of a function": (
        lambda: fpipe.value_and_grad(squared),  # type: ignore[call-overload]
        "takes what fpipe.pipeline returns, not function",
    ),
    "argnums of text": (
        lambda: fpipe.value_and_grad(piped(), argnums="params"),  # type: ignore[call-overload]
        "argnums='params'; 0 is the parameters and 1 the input",
    ),
    "vjp of a pipeline with a loss": (
        lambda: fpipe.vjp(piped(), PARAMS, X, T),  # type: ignore[call-overload]
        "vjp takes a pipeline without a loss; leave loss= out, or use value_and_grad",
    ),
    "a cotangent of another shape": (lambda: pullback(X[:4]), r"\[4, 4\] where the output is \[8,"),
    "a cotangent of another dtype": (lambda: pullback(X.double()), "float64.*output is float32"),
    "has_aux without aux": (
        lambda: fpipe.value_and_grad(piped(), has_aux=True)(PARAMS, X, T),
        r"must return \(scalar, aux\), not Tensor",
    ),
    "each= of two arguments": (
        lambda: fpipe.value_and_grad(piped(), each=lambda y, loss: y)(PARAMS, X, T),  # type: ignore[arg-type,misc]
        "each= is called with the microbatch's number, its output and its loss",
    ),
    "a loss for each element": (
        lambda: step(loss=lambda y, t: (y - t).square()),
        r"must return one scalar tensor .*it returned float32\[4, 4\]",
    ),
    "weights that are NaN": (
        lambda: step(reduction=fpipe.weighted(lambda t: float("nan"))),
        "returned nan for microbatch 0; it must return one number per microbatch, 0 or more",
    ),
    "weights below 0": (
        lambda: step(reduction=fpipe.weighted(lambda t: torch.tensor(-1.0))),
        "returned -1.0 for microbatch 0; it must return one number per microbatch, 0 or more",
    ),
    "a weight for each row": (
        lambda: step(reduction=fpipe.weighted(lambda t: t[:, 0])),
        r"returned a tensor of shape \[4\] for microbatch 0; it must return one number",
    ),
    "backward of the loss": (
        lambda: step()[0].backward(),
        r"loss of a pipeline has no graph.*value_and_grad\(pipe\).*add_grads\(grads\)",
    ),
    "backward of the loss of a call": (
        lambda: piped()([EYE.clone().requires_grad_()] * 2, X, T).backward(retain_graph=True),
        "loss of a pipeline has no graph",
    ),
    "a plan without the batch": (
        lambda: piped().plan(PARAMS),
        r"plan\(.*missing 1 required positional argument: 'x'; give \(params",
    ),
    "params for fewer stages": (lambda: piped().place([EYE]), "2 stages, in stage order; got 1"),
    "classes of another dtype": (
        lambda: step(t=T[:, 0], loss=F.cross_entropy),
        "the loss cross_entropy .*Expected dtype int32/int64",
    ),
}

SCHEDULES: Mistakes = {
    "name and ranks swapped": (
        lambda: fpipe.make_schedule(4, "1F1B", 8),  # type: ignore[arg-type]
        "ranks='1F1B', but there must be a whole number of ranks",
    ),
    "half a microbatch": (lambda: fpipe.make_schedule("1F1B", 2, 4.5), "microbatches=4.5, but"),  # type: ignore[arg-type]
    "an odd number of ranks": (lambda: fpipe.make_schedule("DualPipe", 3, 8), "take 2 or 4"),
    "text without brackets": (lambda: fpipe.Schedule.parse("0F0, 0B0"), r"expected a '\['"),
    "communication in a text": (
        lambda: fpipe.Schedule.parse("[0F0, 0SEND_F0, 0B0]"),
        r"expected only compute here \(lowering adds communication\)",
    ),
    "rows of tuples": (
        lambda: fpipe.Schedule([[(0, "F", 0)]]),  # type: ignore[list-item]
        r"is not an action; give Action\(stage, op, microbatch\)",
    ),
    "a backward that is missing": (
        lambda: fpipe.Schedule.parse("[0F0, 0F1, 0B0]").check(),
        "0B1 .* is missing.*put it on rank 0",
    ),
    "costs in a dict": (
        lambda: fpipe.make_schedule("1F1B", 2, 4).simulate({"F": 1}),  # type: ignore[arg-type]
        r"costs={'F': 1}; give fpipe\.Costs\(F=",
    ),
    "costs of other stages": (
        lambda: fpipe.make_schedule("1F1B", 2, 4).simulate(fpipe.Costs(F=[1, 2, 3])),
        "F has 3 numbers, but there are 2 stages; give one number, or 2",
    ),
    "a picture of no kind": (
        lambda: fpipe.make_schedule("1F1B", 2, 4).simulate().save("x.bmp"),
        r"no picture is written as '\.bmp'.*use \.svg",
    ),
    "a schedule with a name": (
        lambda: fpipe.register_schedule("mine", fpipe.make_schedule("1F1B", 2, 4)),  # type: ignore[arg-type]
        r"'mine' needs a function \(ranks, microbatches\)",
    ),
    "a name that is taken": (
        lambda: fpipe.register_schedule("1F1B", lambda ranks, microbatches: None),  # type: ignore[arg-type,return-value]
        "built in .*register another name",
    ),
    "copies on other ranks": (
        lambda: fpipe.make_schedule("1F1B", 4, 12, replicas=(2, 1)),
        r"replicas=\(2, 1\) are 3 ranks, not 4; give ranks=3",
    ),
    "solve without costs": (
        lambda: fpipe.solve(2, 4),  # type: ignore[call-arg,arg-type]
        r"solve\(2, 4\) raised TypeError: .*'microbatches'; give \(costs: Costs, ranks: int",
    ),
    "solve with little memory": (
        lambda: fpipe.solve(COSTS, 2, 4, memory=0.1),
        "more than its limit of 0.1; give more memory",
    ),
    "a placement of no kind": (
        lambda: fpipe.solve(COSTS, 2, 4, placement="zigzag"),  # type: ignore[arg-type]
        "placement='zigzag'; give 'one', 'loop'",
    ),
    "memory in apples": (lambda: fpipe.auto(memory="60 apples"), "no limit; give .*'60GB'"),
    "a cost that is a number": (
        lambda: fpipe.pack([3, 5, 4, 1], microbatches=2, cost=2),  # type: ignore[arg-type]
        r"pack\(\[3, 5, 4, 1\], microbatches=2, cost=2\) .*not callable; give \(lengths:",
    ),
    "lengths that are tensors": (
        lambda: fpipe.pack([X, T], microbatches=2),  # type: ignore[list-item]
        r"pack\(\[tensor.*give \(lengths: Sequence\[int\]",
    ),
    "fewer sequences than microbatches": (
        lambda: fpipe.pack([3, 5], microbatches=4),
        "2 sequences cannot fill microbatches=4; give between 1 and 2",
    ),
    "tensors to pad": (
        lambda: fpipe.pad(torch.ones(2, 3), multiple=4),
        r"takes a list with one pytree for each microbatch, not tensor.*chunk",
    ),
    "padding that is a number": (
        lambda: fpipe.pad([{"x": X}], multiple=4, values=1),  # type: ignore[arg-type]
        r"pad\(\[.*values=1\) raised TypeError: .*; give \(microbatches",
    ),
}

TRAINING: Mistakes = {
    "state of another optimizer": (
        lambda: fpipe.sgd(0.1, momentum=0.9).update(PARAMS, fpipe.adamw(0.1).init(PARAMS), PARAMS),
        r"the state of sgd is .*AdamState.*; pass that of tx\.init\(params\)",
    ),
    "a number to add up": (
        lambda: piped().all_sum(3.0),
        r"all_sum got 3\.0; give a tensor",
    ),
    "a mode by name": (lambda: piped().train("no"), "training='no'; give True or False"),
    "debugging by name": (
        lambda: fpipe.debug("off"),  # type: ignore[arg-type]
        "on='off'; give True or False",
    ),
    "a target by name": (
        lambda: step(call={"target": T}),
        "names a keyword-only argument 'target'.*targets come behind x without names",
    ),
    "cast to integers": (
        lambda: fpipe.transforms.cast(torch.int64),
        r"dtype=torch\.int64; give a floating dtype",
    ),
    "mean in a dtype by name": (
        lambda: fpipe.mean_over(fpipe.local(1), dtype="float32"),  # type: ignore[arg-type]
        "dtype='float32'; give a floating dtype",
    ),
    "stream integers": (
        lambda: list(fpipe.stream(piped(), PARAMS, dtype=torch.int8)),
        r"dtype=torch\.int8; give a floating dtype",
    ),
    "receive in a dtype by name": (
        lambda: fpipe.receive(piped(), {}, dtype="bf16"),  # type: ignore[arg-type]
        "dtype='bf16'; give a floating dtype",
    ),
    "batch before the first": (
        lambda: fpipe.Epochs(DATA, rows=4, shuffle=False)(-1),
        "step=-1; steps count from 0",
    ),
    "no step to measure": (
        lambda: fpipe.measure_costs(piped(), PARAMS, X, T, steps=0),
        "steps=0; give 1 or more",
    ),
    "a run continued with another optimizer": (
        lambda: [
            fpipe.Loop(piped(), tx, path="run", every=1).run(PARAMS, lambda _: (X, T), steps)
            for tx, steps in ((fpipe.adamw(0.1), 1), (fpipe.sgd(0.1, momentum=0.9), 2))
        ],
        "the state of sgd is .*AdamState",
    ),
    "save with pipe and path swapped": (
        lambda: fpipe.save(piped(), "folder", params=PARAMS),  # type: ignore[arg-type]
        r"save\(<fpipe pipeline.*give \(path: .*, pipe: ",
    ),
    "save of nothing": (lambda: fpipe.save("nothing", piped()), "nothing to save; give params="),
    "save by position": (
        lambda: fpipe.save("folder", piped(), PARAMS),  # type: ignore[misc]
        r"takes 2 positional arguments but 3 were given; give .*params: ",
    ),
    "load from no folder": (
        lambda: fpipe.load("none", piped(), "params"),
        "none is no folder; load a complete checkpoint",
    ),
    "load without a name": (lambda: saved(), "has 'params', not 'nothing'; name what to load"),
    "load of values": (
        lambda: saved(PARAMS),
        r"has 'params', not \[tensor.*name what to load, as in fpipe\.load",
    ),
    "stream with arguments swapped": (
        lambda: fpipe.stream(PARAMS, piped()),  # type: ignore[arg-type]
        r"stream\(\[tensor.*give \(pipe: ",
    ),
    "a bucket of text": (
        lambda: fpipe.stream(piped(), PARAMS, bucket_bytes="1GB"),  # type: ignore[arg-type]
        r"bucket_bytes='1GB'\) raised TypeError.*bucket_bytes: int",
    ),
    "receive of a list": (
        lambda: fpipe.receive(piped(), PARAMS),  # type: ignore[arg-type]
        r"receive\(<fpipe pipeline.*give \(pipe: ",
    ),
    "receive of a part": (lambda: fpipe.receive(piped(), {"0": EYE}), "no tensor '1' for stage 1"),
    "an optimizer of torch": (
        lambda: loop(torch.optim.SGD([EYE.clone()], lr=0.1)),
        r"tx= is of type SGD; give a transform such as fpipe\.adamw",
    ),
    "data in place of a function": (lambda: loop(batch=(X, T)), "must be a function of the step"),
    "a batch of x alone": (lambda: loop(batch=lambda step: X), r"is a Tensor; return \(x, \*"),
    "a batch without a step": (
        lambda: loop(batch=lambda: (X, T)),
        r"takes 0 positional arguments but 1 was given; give .*batch: Batches, steps: int",
    ),
    "a checkpoint every 0 steps": (lambda: loop(every=0), "every=0, .*; give whole numbers"),
    "a log that is a path": (lambda: loop(log="log.jsonl"), "log='log.jsonl'.*is a function of a"),
    "elastic that is a flag": (lambda: loop(elastic=True), r"elastic=True; .*fpipe\.elastic\(\)"),
    "elastic without time": (lambda: fpipe.elastic(timeout=-1), "timeout=-1; give seconds above 0"),
    "half a step": (lambda: loop(steps=1.5), "steps=1.5; give the number of steps in all"),
    "a rate of text": (lambda: fpipe.adamw("1e-3"), "lr='1e-3' of adamw; give a number"),  # type: ignore[arg-type]
    "one beta": (
        lambda: fpipe.adamw(1e-3, betas=0.9),  # type: ignore[arg-type]
        r"adamw\(0\.001, betas=0\.9\) .*not iterable; give \(lr: .*betas: tuple\[float, float\]",
    ),
    "a decay that is NaN": (
        lambda: fpipe.adamw(1e-3, weight_decay=float("nan")),
        "weight_decay=nan; adamw needs betas in",
    ),
    "a momentum that is NaN": (
        lambda: fpipe.sgd(0.1, momentum=float("nan")),
        "momentum=nan, weight_decay=0.0; sgd needs both",
    ),
    "clipping with the pipeline in front": (
        lambda: fpipe.clip_by_global_norm(piped(), 1.0),  # type: ignore[misc,arg-type]
        r"takes 1 positional argument but 2 were given; give \(max_norm: float, \*, over",
    ),
    "a list of transforms": (
        lambda: fpipe.chain([fpipe.sgd(0.1)]),  # type: ignore[arg-type]
        r"chain takes transforms such as fpipe\.adamw\(3e-4\), not",
    ),
    "a mask that is misspelled": (
        lambda: updated(fpipe.adamw(1e-3, mask=["*.weigth"]), *[[{"weight": EYE}]] * 2),
        r"'\*\.weigth' matches no leaf; near names: 0\.weight",
    ),
    "what a step returned as gradients": (
        lambda: updated(fpipe.adamw(1e-3), step()),
        "does not have the form of the gradients.*pass the trees of one pipeline",
    ),
    "gradients of another shape": (
        lambda: updated(fpipe.adamw(1e-3, weight_decay=0.0), [EYE, EYE[0]]),
        r"the state has shape \[4, 4\] at '1', and the gradient \[4\]; pass the gradients of these",
    ),
    "updates of another shape": (
        lambda: fpipe.apply_updates([EYE, EYE], [EYE, EYE[0]]),
        r"has shape \[4, 4\] at '1', and the gradient \[4\]",
    ),
    "gradients that are text": (
        lambda: updated(fpipe.sgd(0.1, momentum=0.9), "grads"),
        r"update\('grads', .*give \(grads, state, params=None\)",
    ),
    "a step with the state in front": (
        lambda: fpipe.adamw(1e-3).step(fpipe.adamw(1e-3).init(PARAMS), PARAMS, PARAMS),
        r"in the order tx\.update\(grads, state, params\)",
    ),
    "gradients and value to modules": (
        lambda: bound().add_grads((X.sum(), [None, None])),
        r"add_grads\(.*give \(grads: ",
    ),
    "gradients of one stage": (lambda: bound().add_grads([None]), "1 entries .* for 2 stages"),
    "functions to bind": (lambda: fpipe.interop.bind([layer]), "takes one module"),  # type: ignore[list-item]
    "cuts that are a number": (lambda: fpipe.from_module(MODEL, cuts=2), "cuts=2; give a list of"),  # type: ignore[arg-type]
    "cuts that are not there": (
        lambda: fpipe.from_module(MODEL, cuts=["layers.1"]),
        r"'layers\.1', which is no submodule of Sequential",
    ),
    "a batch of no rows": (lambda: fpipe.Epochs(DATA, 0), "rows=0 of 8 for 1 copy"),
    "a group of no ranks": (lambda: fpipe.local(0), "ranks=0; give a whole number of ranks"),
    "a group to adopt that is a number": (lambda: fpipe.adopt(4), "adopt takes a ProcessGroup"),  # type: ignore[arg-type]
    "a rank that is not here": (lambda: fpipe.testing.run(lambda: 1, 2), "takes 0 positional"),  # type: ignore[arg-type,misc]
    "logits for hidden states": (
        lambda: fpipe.chunked_cross_entropy(torch.ones(3, 7), torch.tensor([1, 2, 3]), EYE),
        r"give hidden \(\.\.\., width\), weight \(vocabulary, width\)",
    ),
}

COMMANDS = {
    "draw ZBX": "no schedule is called 'ZBX'; did you mean ZBV",
    "draw 1F1B --costs F:1": "'F:1' is not name=number: the names are F, I, W",
    "draw 1F1B --out x.bmp": "give a file that ends in .svg",
    "draw ZBV --ranks 4 --stages 6": "takes 8 stages on 4 ranks, not 6; give stages=8",
    "draw 1F1B --rank 4": "No such option '--rank'. Did you mean '--ranks'?",
    "check 1F1B": "there is no file '1F1B'; give the path of a CSV or of text",
    "check two.csv --ranks 4": "the schedule has 2 ranks, not 4; give --ranks 2, or another file",
    "solve --memory lots": "memory='lots' is no limit; give a number above 0",
    "solve --costs nowhere.json": "nowhere.json: No such file or directory; give another path",
    "solve --costs broken.json": "these costs are not JSON",
    "solve --out plan.svg": "give a file that ends in .csv",
    "plan --model empty.json --gpus 8 --gpu h100 --tokens 1M --seq 1K": "give the nearest of them",
    "plan --model empty.json --gpus 8 --gpu v100 --tokens 1M --seq 1K": "'v100' is not one of",
    "rehearse broken.toml --ranks 0": "has no table [model]; give a file that fpipe plan wrote",
    "checkpoint show nowhere": "nowhere is no folder; load a complete checkpoint",
    "explain script.py": "called no pipeline in this process; explain needs a call such as",
    "compare --only XX*": "no schedule is called 'XX*'; fpipe names lists them",
    "simulate 1F1B": "there is no command 'simulate'; the commands are draw, check",
}

MISTAKES = PIPELINES | CALLS | SCHEDULES | TRAINING


@pytest.mark.parametrize("name", MISTAKES)
def test_is_one_short_error_of_fpipe(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    made, message = MISTAKES[name]
    with pytest.raises(FpipeError, match=f"(?s){message}") as caught:
        made()
    assert len(str(caught.value)) < 1000


#: Public classes whose values fpipe makes, and the base of its exceptions.
NOT_CALLED = {"FpipeError", "Pipeline", "Programs", "Solved", "Timeline"}
#: What a plain pipeline calls, where a check would run too: the message is that of Python, which
#: names the argument.
OF_PYTHON = {"Action", "Fused", "Placement", "Schedule", "local", "pipeline", "debug"}


@pytest.mark.parametrize("name", sorted(set(fpipe.__all__) - NOT_CALLED - OF_PYTHON))
def test_arguments_that_are_unknown_missing_or_too_many(name: str):
    """Each is the error of fpipe that names what the class or the function takes."""
    public = getattr(fpipe, name)
    if not callable(public):  # a module
        return
    takes = inspect.signature(public).parameters.values()
    several = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    calls = [lambda: public(not_an_argument=1)]
    if name != "Stage":  # copies of a stage begin as Stage.__new__(Stage)
        if any(p.default is p.empty and p.kind not in several for p in takes):
            calls.append(public)
        if all(p.kind is not p.VAR_POSITIONAL for p in takes):
            calls.append(lambda: public(*range(40)))
    for call in calls:
        with pytest.raises(FpipeError) as caught:
            call()
        text = str(caught.value)
        assert len(text) < 1000
        if isinstance(caught.value, ArgumentError):
            assert text.startswith(f"{name}(") and "; give (" in text, text


@pytest.mark.parametrize(
    ("name", "made", "message"),
    [
        (
            "carry",
            lambda: fpipe.Stage(layer, cary=True),
            r"Stage\(cary=True.*; did you mean 'carry'",
        ),  # type: ignore[call-arg]
        ("every", lambda: loop(evry=1), r"Loop\(.*evry=1.*; did you mean 'every'\?$"),
        ("comm", lambda: fpipe.Costs(com=1), r"Costs\(com=1\).*; did you mean 'comm'\?$"),  # type: ignore[call-arg]
        ("lr", lambda: fpipe.sgd(ler=1), r"; did you mean 'lr'\?$"),  # type: ignore[call-arg]
        ("ranks", lambda: fpipe.launch(print, rank=1), r"launch\(.*did you mean 'ranks'\?$"),  # type: ignore[call-arg]
    ],
)
def test_an_unknown_name_has_a_near_one(name: str, made: Callable[[], Any], message: str):
    with pytest.raises(ArgumentError, match=f"(?s){message}"):
        made()


def test_a_class_whose_calls_are_checked_stays_the_same():
    stage = fpipe.Stage(layer, carry=True)
    assert pickle.loads(pickle.dumps(stage)) == stage
    assert dataclasses.replace(stage, carry=False) == fpipe.Stage(layer)
    assert next(iter(inspect.signature(fpipe.Stage).parameters)) == "fn"
    assert copy.deepcopy(stage) == stage
    late = fpipe.Microbatches(iter([X]), count=1)
    assert isinstance(late, fpipe.Microbatches) and len(late) == 1
    part = fpipe.Slice(3, 1, of=2)
    assert pickle.loads(pickle.dumps(part)) == part


def test_an_error_of_another_process_stays_as_it_is():
    """``launch`` raises it here, without the frames that say whose it is."""
    reports = {0: Report(TypeError("of the user"), "on rank 0: ...")}
    with pytest.raises(TypeError, match="of the user") as caught:
        checked(results)(reports, 1, None)
    assert type(caught.value) is TypeError


@pytest.mark.parametrize("line", COMMANDS)
def test_a_command_ends_with_one_short_error(
    line: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
):
    monkeypatch.chdir(tmp_path)
    fpipe.make_schedule("1F1B", 2, 4).to_csv("two.csv")
    for name, text in {
        "broken.json": "{",
        "empty.json": "{}",
        "broken.toml": "a = 1",
        "script.py": "x = 1",
    }.items():
        (tmp_path / name).write_text(text)
    assert main(line.split()) in (1, 2)
    error = capsys.readouterr().err
    assert error.startswith("error: ") and COMMANDS[line] in error and len(error) < 1000


@pytest.mark.parametrize(
    "value", [list(range(50_000)), "t" * 5000, torch.ones(900, 1), {"a": X.tolist()}], ids=type
)
def test_no_value_makes_a_message_long(value: Any):
    for made in (
        lambda: piped(loss=value),
        lambda: fpipe.adamw(value),
        lambda: fpipe.make_schedule("1F1B", value, 4),
        lambda: fpipe.pack(value, microbatches=value),
        lambda: fpipe.value_and_grad(piped(), value),
    ):
        with pytest.raises(FpipeError) as caught:
            made()
        assert len(str(caught.value)) < 1000


def test_a_long_message_keeps_its_beginning_and_its_end():
    text = str(StageError("loss=" + "x" * 5000 + "; give a function"))
    assert text.startswith("loss=x") and text.endswith("x; give a function") and " ... " in text
    assert len(str(LaunchError("line\n" * 1000))) == 5000  # the traceback of a rank
    again = pickle.loads(pickle.dumps(StageError("y" * 2000)))
    assert str(again) == str(StageError("y" * 2000))


def test_an_error_of_a_function_of_the_user_stays_as_it_is():
    def rate(number: int) -> float:
        return number + "1"  # type: ignore[operator]

    with pytest.raises(TypeError, match="unsupported operand") as caught:
        updated(fpipe.sgd(rate))
    assert not isinstance(caught.value, FpipeError)

    @checked
    def failing(path: str) -> None:
        raise StageError(path)

    with pytest.raises(StageError, match=r"^here$"):
        failing("here")
    with pytest.raises(ArgumentError, match=r"failing\(\) raised TypeError: .*give \(path: str\)"):
        failing()  # type: ignore[call-arg]


def test_a_loss_is_a_tensor_as_any_other(tmp_path: Path):
    loss, _ = step()
    torch.save({"loss": loss}, tmp_path / "loss.pt")
    for again in (
        torch.load(tmp_path / "loss.pt")["loss"],
        pickle.loads(pickle.dumps(loss)),
        copy.deepcopy(loss),
        loss.clone(),
    ):
        assert type(again) is Tensor and torch.equal(again, loss)
    weight = torch.ones((), requires_grad=True)
    (loss * weight).backward()
    assert torch.equal(weight.grad, loss)  # type: ignore[arg-type]


def test_a_side_input_of_one_row_is_for_all_rows():
    mask = torch.full((1, WIDTH), 2.0)
    expected = squared(2 * layer(EYE, 2 * layer(EYE, X)), T)
    loss, _ = step(stages=[with_mask] * 2, microbatches=1, call={"mask": mask})
    torch.testing.assert_close(loss, expected)


def test_code_of_a_stage_that_calls_wrongly_is_located():
    def wrong(p: Tensor, x: Tensor) -> Tensor:
        return layer(x)  # type: ignore[call-arg]

    with pytest.raises(ActionError, match=r"raised TypeError at .*layer\(x\)") as caught:
        step(stages=[wrong, layer])
    assert "a stage is called" not in str(caught.value)
