"""Steps of pipelines, whose results are compared between devices bit for bit.

A case is a function of the devices of its ranks; it returns tensors of the host. Knows no fault and
no seed of delays.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

import optree
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

import fpipe
from fpipe.devices import kinds
from models import MODELS, SEED
from random_schedules import random_case
from schedule_table import Case

from .loader import NAME, load


def host(*trees: Any) -> list[torch.Tensor]:
    """The tensors of trees, on the CPU."""
    leaves = optree.tree_leaves(trees, namespace="fpipe")  # type: ignore[arg-type]
    return [leaf.detach().cpu() for leaf in leaves if isinstance(leaf, torch.Tensor)]


def step(
    case: Case, devices: Sequence[str], model: str = "mlp", engine: str = "trace", **options: Any
) -> list[torch.Tensor]:
    """Loss and gradients of one step, whose batch is on the host."""
    return prepared(case, devices, model, engine, **options)()


def prepared(
    case: Case, devices: Sequence[str], model: str = "mlp", engine: str = "trace", **options: Any
) -> Callable[[], list[torch.Tensor]]:
    """A step, which may run many times."""
    made = MODELS[model]
    stages, params, state = made.make(case.stages)
    x, t = made.batch(case.microbatches)
    pipe = fpipe.pipeline(
        stages,
        case.make(),
        loss=made.loss,
        group=fpipe.local(devices=list(devices)),
        seed=SEED,
        tied=made.tied(case.stages),
        engine=engine,  # type: ignore[arg-type]
        **options,
    )
    side = {} if state is None else {"state": pipe.place(state)}
    argnums = (0, 1) if x.is_floating_point() else (0,)
    function = fpipe.value_and_grad(pipe, argnums, has_aux=made.has_aux)
    params = pipe.place(params)

    def run() -> list[torch.Tensor]:
        with sdpa_kernel([SDPBackend.MATH]):  # the CPU's fused kernel has other bits
            return host(*function(params, x, t, **side))

    return run


# ---- more than a step ----
WIDTH = 16


def layer(p: Any, x: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.dropout(torch.tanh(x @ p["w"] + p["b"]), 0.5)


def squared(y: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
    return (y - t).square().mean()


def network(stages: int) -> tuple[list[Any], torch.Tensor, torch.Tensor]:
    """Parameters and a batch."""
    draw = torch.Generator().manual_seed(stages)
    normal = lambda *size: torch.randn(*size, generator=draw)
    params = [{"w": normal(WIDTH, WIDTH) / 4, "b": normal(WIDTH)} for _ in range(stages)]
    return params, normal(16, WIDTH), normal(16, WIDTH)


def training(devices: Sequence[str], donate: bool, engine: str = "trace") -> list[torch.Tensor]:
    """Three steps of an optimizer."""
    params, x, t = network(4)
    group = fpipe.local(devices=list(devices))
    pipe = fpipe.pipeline(
        [layer] * 4, "ZBV", loss=squared, microbatches=4, group=group, seed=3, engine=engine
    )  # type: ignore[arg-type]
    tx = fpipe.chain(
        fpipe.skip_nonfinite(over=pipe),
        fpipe.clip_by_global_norm(1.0, over=pipe, exact=True),
        fpipe.adamw(0.01, donate=donate, fused=donate),  # the default depends on the device
    )
    params = pipe.place(params)
    state = tx.init(params)
    losses = []
    for number in range(3):
        loss, grads = fpipe.value_and_grad(pipe)(params, x, t, seed=number)
        losses.append(loss)
        if number < 2:
            updates, state = tx.update(grads, state, params)
            params = fpipe.apply_updates(params, updates, donate=donate)
        else:
            params, state = tx.step(grads, state, params, donate=donate)
    return host(losses, params)


def saved(devices: Sequence[str]) -> list[torch.Tensor]:
    """A checkpoint, read for another pipeline, and whole weights as a stream."""
    params, x, t = network(4)
    group = fpipe.local(devices=list(devices))
    first = fpipe.pipeline([layer] * 4, "ZBV", loss=squared, microbatches=4, group=group, seed=3)
    second = fpipe.pipeline([layer] * 4, "GPipe", loss=squared, microbatches=2, group=group, seed=4)
    params = first.place(params)
    loss, grads = fpipe.value_and_grad(first)(params, x, t)
    with tempfile.TemporaryDirectory() as folder:
        fpipe.save(Path(folder) / "one", first, params=params, grads=grads)
        params, grads = fpipe.load(Path(folder) / "one", second, "params", "grads")
    return host(
        loss,
        grads,
        fpipe.value_and_grad(second)(params, x, t),
        [value for _, value in fpipe.stream(second, params)],
    )


def attention(p: Any, carry: Any, x: torch.Tensor) -> tuple[torch.Tensor, Any]:
    k, v = x @ p["k"], x @ p["v"]
    if carry is not None:
        k, v = torch.cat([carry["k"], k], 1), torch.cat([carry["v"], v], 1)
    weights = torch.softmax((x @ p["q"]) @ k.transpose(1, 2), -1)
    return x + torch.tanh(weights @ v @ p["o"]), {"k": k, "v": v}


def sliced(devices: Sequence[str], name: str = "SeqZBH1", engine: str = "trace") -> Any:
    """A step in slices, whose carries stay on their rank."""
    draw = torch.Generator().manual_seed(0)
    normal = lambda *size: torch.randn(*size, generator=draw)
    stages = [fpipe.Stage(attention, carry=True, initial_carry=None)] * len(devices)
    pipe = fpipe.pipeline(
        stages,
        name,
        slices=3,
        loss=squared,
        microbatches=2,
        group=fpipe.local(devices=list(devices)),
        engine=engine,
    )  # type: ignore[arg-type]
    params = [{key: normal(4, 4) / 2 for key in "qkvo"} for _ in stages]
    x, t = normal(2, 6, 4), normal(2, 6, 4)
    return host(fpipe.value_and_grad(pipe, (0, 1))(pipe.place(params), x, t))


def outputs(devices: Sequence[str]) -> list[torch.Tensor]:
    """Outputs without a loss, their pullback, and forward alone; what a stage computes again."""
    params, x, t = network(4)
    pipe = fpipe.pipeline(
        [fpipe.remat(layer)] * 4, "1F1B", microbatches=4, group=fpipe.local(devices=list(devices)),
        seed=5,
    )  # fmt: off
    params = pipe.place(params)
    y, pullback = fpipe.vjp(pipe, params, x)
    return host(y, pullback(t.to(y.device)), pipe(params, x))


def ready(devices: Sequence[str]) -> list[torch.Tensor]:
    """Actions as they become ready, with accumulation in another dtype and weights."""
    params, x, t = network(4)
    pipe = fpipe.pipeline(
        [layer] * 4,
        "1F1B",
        loss=squared,
        microbatches=8,
        group=fpipe.local(devices=list(devices)),
        reduction=fpipe.weighted(lambda t: t.abs().sum()),
        accumulate=torch.float64,
        order="ready",
        seed=1,
    )
    return host(fpipe.value_and_grad(pipe)(pipe.place(params), x, t))


def random_ready(seed: int, devices: Sequence[str]) -> list[torch.Tensor]:
    """A random schedule of four stages, whose actions run as they become ready."""
    schedule, order = random_case(seed, ranks=(len(devices),))
    params, x, t = network(4)
    pipe = fpipe.pipeline(
        [layer] * 4,
        schedule,
        loss=squared,
        group=fpipe.local(devices=list(devices)),
        order=order,
        seed=1,
    )
    return host(fpipe.value_and_grad(pipe)(pipe.place(params), x, t))


def profiled(devices: Sequence[str]) -> list[torch.Tensor]:
    """A step that is measured; its times are checked here."""
    params, x, t = network(4)
    pipe = fpipe.pipeline(
        [layer] * 4, "ZBV", loss=squared, microbatches=4,
        group=fpipe.local(devices=list(devices)), seed=3,
    )  # fmt: off
    params = pipe.place(params)
    step = fpipe.profile(fpipe.value_and_grad(pipe))
    result = step(params, x, t)
    assert str(step)
    return host(result)


def mixed(devices: Sequence[str]) -> list[torch.Tensor]:
    """Ranks on a device and on the CPU."""
    return step(Case("ZBVZeroBubble", 2, 4, 4), [devices[0], "cpu"])


def captured(devices: Sequence[str]) -> list[torch.Tensor]:
    """Steps as a graph of kernels, on one device that is not the current one."""
    device = devices[-1]
    plain = lambda p, x: torch.tanh(x @ p["w"] + p["b"])
    pipe = fpipe.pipeline(
        [plain] * 4, "ZBV", loss=squared, microbatches=4, group=fpipe.local(devices=[device] * 2)
    )
    if device != "cpu":
        pipe = pipe.captured()
    params, x, t = network(4)
    params = pipe.place(params)
    found = []
    for number in range(4):
        result = fpipe.value_and_grad(pipe)(params, x + number, t)
        params = fpipe.apply_updates(params, result[1])
        found += host(result)
    return found


#: By name, functions of the devices of the ranks.
MORE: dict[str, Callable[[Sequence[str]], list[torch.Tensor]]] = {
    "training": partial(training, donate=False),
    "training in place": partial(training, donate=True),
    "training on autograd": partial(training, donate=True, engine="eager"),
    "checkpoint": saved,
    "slices": sliced,
    "slices on autograd": partial(sliced, engine="eager", name="Seq1F1B"),
    "outputs": outputs,
    "ready": ready,
    "profile": profiled,
    "mixed": mixed,
    "captured": captured,
}


def of_model(row: tuple[Case, str, str]) -> Callable[[Sequence[str]], list[torch.Tensor]]:
    """The case of a schedule, a model and an engine."""
    case, model, engine = row
    made: dict[tuple[str, ...], Callable[[], list[torch.Tensor]]] = {}

    def run(devices: Sequence[str]) -> list[torch.Tensor]:
        key = tuple(devices)
        if key not in made:
            made[key] = prepared(case, devices, model, engine)
        return made[key]()

    return run


def wrong(
    run: Callable[[Sequence[str]], list[torch.Tensor]],
    ranks: int,
    seeds: Sequence[int],
    **delays: Any,
) -> list[str]:
    """What differs from the CPU, by seed of delays; on two devices, then on one for each rank."""
    device = load()
    row = kinds.DeviceKind(NAME, "gloo", double=True)  # sums in float64, as the CPU
    kinds.KINDS = MappingProxyType({**kinds.KINDS, NAME: row})
    device.set_delays(-1)
    expected = run(["cpu"] * ranks)
    found = []
    for seed in seeds:
        device.set_delays(seed, **delays)
        try:
            got = run([f"{NAME}:{rank % (2, ranks)[seed % 2]}" for rank in range(ranks)])
        except Exception as error:
            found.append(f"seed {seed}: {error!r}"[:500])
            continue
        same = [torch.equal(a, b) for a, b in zip(got, expected, strict=True)]
        if not all(same):
            found.append(f"seed {seed}: results {[n for n, s in enumerate(same) if not s]} differ")
    device.set_delays(-1)
    return found
