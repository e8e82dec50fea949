"""Models of transformers: checkpoints under any cut, files that transformers reads, and files that
it wrote.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")

import transformers
from safetensors.torch import load_file, save_file

import fpipe
from common import same
from fpipe.errors import CheckpointError
from fpipe.interop import huggingface
from huggingface_decoders import decoder, tokens
from sample import also

CASES = [(family, tied) for family in ("llama", "qwen3-moe") for tied in (True, False)]
LAYOUTS = [("ZBV", 2, 4), ("1F1B", 2, 2), ("GPipe", 1, 1), ("DualPipe", 4, 4), ("ZBV", 4, 8)]


def cut(model: Any, schedule: str, ranks: int, stages: int) -> tuple[Any, Any]:
    made, params = huggingface.stages(model, stages)
    loss, group = huggingface.causal_loss, fpipe.local(ranks)
    return fpipe.pipeline(
        made, schedule, loss=loss, microbatches=4, group=group, engine="eager"
    ), params


def train(pipe: Any, params: Any, state: Any, steps: range) -> tuple[Any, Any]:
    tx = fpipe.adamw(1e-2)
    state = tx.init(params) if state is None else state
    for step in steps:
        x = tokens(4).roll(step, 1)
        _, grads = fpipe.value_and_grad(pipe)(params, x, x)
        updates, state = tx.update(grads, state, params)
        params = fpipe.apply_updates(params, updates)
    return params, state


def named(pipe: Any, params: Any, state: Any) -> list[dict[str, Any]]:
    return [dict(fpipe.stream(pipe, part)) for part in (params, state.m, state.v)]


@pytest.mark.parametrize("tied", [True, *also(False)])
@pytest.mark.parametrize("family", ["llama", *also("qwen3-moe")])
def test_any_cut_of_a_model_resumes_under_any_other(
    family: str, tied: bool, tmp_path: Path, long: bool
):
    model = decoder(
        family, layers=8 if long else 3, tie_word_embeddings=tied, output_router_logits=False
    )
    layouts = LAYOUTS if long else LAYOUTS[:3]
    pipe, params = cut(model, *layouts[0])
    middle = train(pipe, params, None, range(1))
    fpipe.save(tmp_path / "c", pipe, params=middle[0], state=middle[1], step=1)
    want = named(pipe, *train(pipe, *middle, range(1, 2)))
    for layout in layouts:
        other, _ = cut(model, *layout)
        params, state, step = fpipe.load(tmp_path / "c", other, "params", "state", "step")
        assert same(named(other, params, state), named(pipe, *middle))
        if layout[0] != "DualPipe" and not (
            tied and layout[0] == "GPipe"
        ):  # they add gradients in another order
            assert same(named(other, *train(other, params, state, range(step, 2))), want), layout


@pytest.fixture(
    params=[
        pytest.param(case, marks=pytest.mark.long) if case in CASES[1:3] else case for case in CASES
    ],
    ids=str,
)
def model(request: pytest.FixtureRequest) -> Any:
    family, tied = request.param
    return decoder(family, layers=2, tie_word_embeddings=tied)


def test_a_stream_becomes_files_that_transformers_reads(model: Any, tmp_path: Path):
    pipe, params = cut(model, "1F1B", 2, 2)
    params = [{name: leaf * 1.5 for name, leaf in part.items()} for part in params]
    save_file(dict(fpipe.stream(pipe, params)), tmp_path / "model.safetensors", {"format": "pt"})
    model.config.save_pretrained(tmp_path)
    read, report = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path, output_loading_info=True
    )
    assert not any(report.values()), report
    assert torch.equal(read(tokens(4)).logits, fpipe.to_module(model, params)(tokens(4)).logits)


def test_files_of_transformers_are_read_into_stages(model: Any, tmp_path: Path):
    model.save_pretrained(tmp_path, max_shard_size="5kB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 2
    with torch.device("meta"):
        empty = type(model)(model.config)
    with pytest.warns(UserWarning, match="device 'meta'|meta"):
        stages, _ = huggingface.stages(empty, 2)
    pipe = fpipe.pipeline(
        stages, loss=huggingface.causal_loss, microbatches=2, group=fpipe.local(2)
    )
    _, want = huggingface.stages(model, 2)
    assert same(huggingface.load(tmp_path, pipe), want)
    halved = tmp_path / "half"
    halved.mkdir()
    save_file(
        {name: leaf.half() for name, leaf in _all(tmp_path).items()}, halved / "model.safetensors"
    )
    with pytest.raises(CheckpointError, match=r"is float16\[.*takes float32"):
        huggingface.load(halved, pipe)
    loaded = huggingface.load(halved, pipe, dtype=torch.float32)
    assert same(
        loaded, [{name: leaf.half().float() for name, leaf in part.items()} for part in want]
    )
    next(tmp_path.glob("*.safetensors")).unlink()
    with pytest.raises(CheckpointError, match=r"of stage \d is missing"):
        huggingface.load(tmp_path, pipe)


def _all(folder: Path) -> dict[str, torch.Tensor]:
    return {
        name: leaf
        for file in folder.glob("*.safetensors")
        for name, leaf in load_file(file).items()
    }
