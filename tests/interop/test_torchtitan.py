"""torchtitan's configuration of pipelines, and its debug Llama trained under it."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import forked
import fpipe
from fpipe.interop import torchtitan
from torchtitan_models import (
    cross_entropy,
    debug_batch,
    debug_config,
    torchtitan_llama,
    trained_by_parts,
    whole_llama,
)


class Small(nn.Module):
    """The shape of torchtitan's models, for tests of the configuration alone."""

    def __init__(self, layers: int = 6):
        super().__init__()
        self.tok_embeddings = nn.Embedding(7, 4)
        self.layers = nn.ModuleDict({str(i): nn.Linear(4, 4) for i in range(layers)})
        self.norm, self.output = nn.LayerNorm(4), nn.Linear(4, 7)

    def forward(self, tokens: Tensor) -> Tensor:
        h = self.tok_embeddings(tokens)
        for layer in self.layers.values():
            h = layer(h)
        return self.output(self.norm(h))


def config(**changes: Any) -> Any:
    """A configuration of the same shape as theirs, with their defaults."""
    section = {
        "degree": 2,
        "schedule": "1F1B",
        "schedule_csv": "",
        "microbatch_size": 1,
        "layers_per_stage": None,
        "first_stage_less_layers": 1,
        "last_stage_less_layers": 1,
    }
    parts, batch = (
        changes.pop("module_fqns_per_model_part", None),
        changes.pop("local_batch_size", 4),
    )
    return SimpleNamespace(
        parallelism=SimpleNamespace(
            **{
                f"pipeline_parallel_{name}": value for name, value in {**section, **changes}.items()
            },
            module_fqns_per_model_part=parts,
        ),
        training=SimpleNamespace(local_batch_size=batch),
    )


@pytest.fixture(scope="module")
def package() -> Any:
    """torchtitan, which divides layers by its own rule."""
    return torchtitan_llama()


@pytest.mark.usefixtures("package")
@pytest.mark.parametrize(
    ("changes", "sizes"),
    [
        ({}, (3, 3)),  # layers of each stage
        ({"schedule": "DualPipeV"}, (1, 2, 2, 1)),
        ({"schedule": "Interleaved1F1B"}, (1, 2, 2, 1)),
        ({"schedule": "Interleaved1F1B", "layers_per_stage": 1}, (0, 1, 1, 1, 1, 1, 1, 0)),
        ({"first_stage_less_layers": 0, "last_stage_less_layers": 2}, (4, 2)),
        ({"degree": 4, "last_stage_less_layers": 0}, (1, 2, 2, 1)),
    ],
)
def test_layers_per_stage(changes: dict[str, Any], sizes: tuple[int, ...]):
    chosen = torchtitan.settings(Small(), config(**changes))
    assert tuple(sum(name.startswith("layers.") for name in part) for part in chosen.parts) == sizes
    assert chosen.schedule.stages == len(sizes)
    assert chosen.schedule.microbatches == 4


@pytest.mark.usefixtures("package")
def test_microbatches_and_a_schedule_from_a_file(tmp_path: Path):
    chosen = torchtitan.settings(Small(), config(local_batch_size=12, microbatch_size=4))
    assert chosen.schedule.microbatches == 3
    path = tmp_path / "mine.csv"
    mine = fpipe.make_schedule("ZBV", 2, 4)
    mine.to_csv(path)
    chosen = torchtitan.settings(Small(), config(schedule_csv=str(path)))
    assert chosen.schedule == mine
    assert len(chosen.parts) == 4


def test_names_of_parts():
    parts = (
        ("tok_embeddings", "layers.0"),
        ("layers.2", "layers.1"),
        ("layers.3", "layers.4", "layers.5"),
        ("output", "norm"),
    )
    chosen = torchtitan.settings(
        Small(), config(schedule="ZBV", module_fqns_per_model_part=list(map(list, parts)))
    )
    assert chosen.parts == parts


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"local_batch_size": 5, "microbatch_size": 2}, "local_batch_size=5 is no multiple of"),
        ({"layers_per_stage": 3}, "make 3 stages, which 2 ranks do not divide"),
        ({"schedule": "1G1B"}, "1G1B"),
        ({"module_fqns_per_model_part": [["tok_embeddings"], []]}, r"\[1\] is \[\]; name"),
        (
            {"module_fqns_per_model_part": [["tok_embeddings"], ["layers.9"]]},
            r"\[1\] is \['layers.9'\]; name submodules",
        ),
    ],
)
def test_mistakes(changes: dict[str, Any], message: str):
    with pytest.raises(fpipe.FpipeError, match=message):
        torchtitan.settings(Small(), config(**changes))


@pytest.mark.usefixtures("package")
@pytest.mark.parametrize("changes", [{"degree": 9}, {"first_stage_less_layers": 9}])
def test_too_few_layers_are_refused_by_torchtitan(changes: dict[str, Any]):
    with pytest.raises(ValueError, match=r"greater than effective layers|minimum layers per stage"):
        torchtitan.settings(Small(), config(**changes))


def test_a_file_for_something_else(tmp_path: Path):
    path = tmp_path / "mine.csv"
    fpipe.make_schedule("1F1B", 3, 4).to_csv(path)
    with pytest.raises(
        fpipe.errors.StageError, match="is for pipeline_parallel_degree 3, the configuration says 2"
    ):
        torchtitan.settings(Small(), config(schedule_csv=str(path)))
    with pytest.raises(
        fpipe.errors.StageError, match=r"Linear has no `layers` as torchtitan's models have"
    ):
        torchtitan.settings(nn.Linear(2, 2), config())


# ---- torchtitan's own trainer ----
@pytest.mark.long
def test_parts_on_meta_train_as_the_whole_model(long: bool):
    """``pipelining_fn`` and then what the trainer does: ``to_empty``, ``init_weights``, steps on
    two processes.
    """
    found, names = (
        torchtitan_llama(),
        ["ZBVZeroBubble", "ZBH2", "1F1B", "Interleaved1F1B"][: 4 if long else 2],
    )
    ranks = forked.launch(torchtitan_llama, trained_by_parts, names, ranks=2, timeout=100)
    _, model_args = debug_config(found, "1F1B")
    model = whole_llama(found, model_args)
    optimizer, want, grads = torch.optim.SGD(model.parameters(), lr=0.1), [], {}
    for step in range(3):
        optimizer.zero_grad()
        tokens, labels = debug_batch(step)
        loss = cross_entropy(model(tokens), labels)
        loss.backward()
        want.append(float(loss.detach()))
        if not step:
            grads = {name: p.grad.clone() for name, p in model.named_parameters()}  # type: ignore[union-attr]
        optimizer.step()
    for (one, first), (two, second) in zip(*ranks, strict=True):
        torch.testing.assert_close(
            dict(sorted((first | second).items())), dict(sorted(grads.items()))
        )
        assert (one or two) == pytest.approx(want, rel=1e-5)
        assert not (one and two)


def test_axes_that_torchtitan_applies_inside_the_parts_are_refused():
    dims = SimpleNamespace(dp_shard=2)
    with pytest.raises(fpipe.errors.UnsupportedError, match="dp_shard is not supported"):
        torchtitan.pipelining_fn(
            Small(), dims, config(), torch.device("cpu"), None, lambda m, *_: m, nn.MSELoss()
        )


@pytest.mark.usefixtures("package")
def test_tied_embeddings_are_refused():
    """torchtitan's qwen3 ties within each part, where one of both is None: an AttributeError."""
    mesh = SimpleNamespace(get_local_rank=lambda: 0, get_group=lambda: None)
    dims, args = SimpleNamespace(get_mesh=lambda _: mesh), SimpleNamespace(enable_weight_tying=True)

    def parallelize(part: Any, *_: Any) -> nn.Module:
        part.output.weight = part.tok_embeddings.weight
        return part

    with pytest.raises(fpipe.errors.UnsupportedError, match=r"enable_weight_tying .*from_module"):
        torchtitan.pipelining_fn(
            Small(), dims, config(), torch.device("cpu"), args, parallelize, nn.MSELoss()
        )
