"""``fpipe checkpoint``: what it prints, what it finds, and conversion to the layout of Hugging Face
and back.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import fpipe
from checkpoint_model import Layout, adam, pipeline, steps
from common import same
from fpipe.products.command.cli import main

LAYOUT = Layout(8, "ZBV", 4)


@pytest.fixture
def saved(tmp_path: Path) -> tuple[Path, Any, Any, Any]:
    pipe, params = pipeline(LAYOUT)
    tx = adam(pipe)
    params, state, _ = steps(pipe, tx, params, tx.init(params), range(2))
    fpipe.save(tmp_path / "c", pipe, params=params, state=state, step=2)
    return tmp_path / "c", pipe, params, state


def test_show(saved: Any, capsys: pytest.CaptureFixture[str]):
    assert main(["checkpoint", "show", str(saved[0]), "--leaves"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith(f"{saved[0]}: 78 tensors, 9.4 KiB, 1 files, written by fpipe")
    assert lines[1] == "  params: 19 tensors, 2.3 KiB" and "  step: 2" in lines
    assert "    state.1.m/embed.wte  float32[11, 8]" in lines
    assert main(["checkpoint", "show", str(saved[0]), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["leaves"]["state.1.step"]["shape"] == []


def test_verify(saved: Any, capsys: pytest.CaptureFixture[str]):
    assert main(["checkpoint", "verify", str(saved[0])]) == 0
    assert "good: 78 tensors" in capsys.readouterr().out
    (file,) = saved[0].glob("*.safetensors")
    raw = file.read_bytes()
    file.write_bytes(raw[:-1] + bytes([raw[-1] ^ 1]))
    assert main(["checkpoint", "verify", str(saved[0])]) == 1
    assert "is damaged: the data of 'state." in capsys.readouterr().err
    assert main(["checkpoint", "verify", str(saved[0].parent)]) == 1
    assert main(["checkpoint", "show", str(saved[0].parent)]) == 2
    assert "has no manifest" in capsys.readouterr().err


@pytest.mark.parametrize("shard", ["100000000", "500"])
def test_convert_to_hugging_face(
    saved: Any, tmp_path: Path, shard: str, capsys: pytest.CaptureFixture[str]
):
    package = pytest.importorskip("safetensors.torch")
    path, pipe, params, state = saved
    out = tmp_path / "model"
    assert main(["checkpoint", "convert", str(path), str(out), "--shard", shard]) == 0
    assert "from_pretrained needs the config.json of the model there too" in capsys.readouterr().out
    tensors = {
        name: leaf
        for file in out.glob("*.safetensors")
        for name, leaf in package.load_file(file).items()
    }
    assert same(dict(sorted(tensors.items())), dict(sorted(fpipe.stream(pipe, params))))
    if shard == "500":
        index = json.loads((out / "model.safetensors.index.json").read_text())
        assert set(index["weight_map"]) == set(tensors) and len(list(out.glob("*.safetensors"))) > 2
        assert all((out / name).is_file() for name in index["weight_map"].values())
    assert same(fpipe.receive(pipe, out, like=params), params)
    assert (
        main(
            ["checkpoint", "convert", str(path), str(tmp_path / "ema"), "--tree", "state.2.average"]
        )
        == 0
    )
    averages = package.load_file(tmp_path / "ema" / "model.safetensors")
    assert torch.equal(averages["embed.wte"], state[2].average[0]["wte"])


def test_convert_refuses_what_is_no_model(
    saved: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    path = str(saved[0])
    assert main(["checkpoint", "convert", path, path]) == 2
    assert main(["checkpoint", "convert", path, str(tmp_path / "x"), "--tree", "state.5"]) == 2
    assert main(["checkpoint", "convert", str(tmp_path / "none"), str(tmp_path / "y")]) == 2
    error = capsys.readouterr().err
    assert "is not empty" in error and "no tree 'state.5'" in error and "is no folder" in error
    assert not (tmp_path / "y").exists()
