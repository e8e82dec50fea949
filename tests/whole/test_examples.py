"""Every example runs, with small settings; ``train.py`` prints the same to the last digit here and
under torchrun.
"""

from __future__ import annotations

import ast
import importlib.util
import json
import os
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from xml.etree import ElementTree

import pytest

import forked
import fpipe
from fpipe.generators.catalogue import ENTRIES

pytestmark = pytest.mark.docs
EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
sys.path.insert(
    0, str(EXAMPLES)
)  # as Python does for a script: some have a second file beside them

#: second file -> the example that imports it, and is run in its place
PARTS = {"moe_block": "moe", "rl_data": "rl_engine"}
#: example -> the test file that runs it, where that is not this one
ELSEWHERE = {"rl_engine": "test_trainers.py"}
#: example -> steps after which the loss has fallen
SMALL = {
    "slices": 30,
    "quickstart": 6,
    "module": 12,
    "contrastive": 6,
    "meta": 12,
    "large_vocabulary": 6,
    "lora": 10,
    "distillation": 15,
    "sam": 8,
    "multi_token": 10,
    "evaluation": 20,
    "uneven": 10,
    "tower": 20,
    "loggers": 10,
    "same_start": 10,
    "faults": 10,
    "data_loader": 18,
}
#: with the same losses on four processes
RECIPES = (
    "lora",
    "distillation",
    "sam",
    "multi_token",
    "evaluation",
    "uneven",
    "tower",
    "loggers",
    "same_start",
    "faults",
    "data_loader",
)
#: of these, the ones that run without ``--long``
SOME_RECIPES = ("evaluation", "uneven", "data_loader")
#: those that take arguments
EXPLAINED = ("moe", "zero")


def load(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"example_{name}", EXAMPLES / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("name", SMALL)
def test_loss_falls(name: str):
    losses = load(name).main(steps=SMALL[name])
    assert losses[-1] < 0.8 * losses[0]


def test_huggingface_loss_falls():
    pytest.importorskip("transformers")
    losses = load("huggingface").main(steps=4)
    assert losses[-1] < losses[0]


@pytest.mark.long
def test_a_killed_run_resumes_with_the_same_losses(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    pytest.importorskip("transformers")
    from resume import main  # its processes import it

    resumed, alone = main(str(tmp_path), steps=4)
    assert resumed == alone and len(alone) == 4
    printed = capsys.readouterr().out
    assert "continued on one process from step-000000002" in printed
    assert "largest difference of logits: 0.0" in printed


@pytest.mark.parametrize("name", EXPLAINED)
def test_loss_falls_in_one_process(name: str):
    losses = load(name).main(["--steps", "8"])
    assert losses[-1] < losses[0]


def test_evaluation_keeps_the_best_parameters(capsys: pytest.CaptureFixture[str]):
    load("evaluation").main()
    *rows, kept = capsys.readouterr().out.splitlines()
    held = [row.split("held-out loss ")[1].split()[0] for row in rows]
    assert held[0] > min(held) < held[-1]  # it falls, and rises again
    assert kept.endswith(min(held))


def test_uneven_cut_leaves_ranks_less_idle(capsys: pytest.CaptureFixture[str]):
    load("uneven").main(steps=1)
    bubbles = [
        int(line.split("bubble ")[1].rstrip("%"))
        for line in capsys.readouterr().out.splitlines()
        if "bubble" in line
    ]
    assert len(bubbles) == 2 and bubbles[1] < bubbles[0]


def test_loggers_write_what_is_installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Each record goes to Weights & Biases, here a stand-in, and to a file of TensorBoard."""
    rows: list[int] = []
    run = SimpleNamespace(log=lambda record, step: rows.append(step))
    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(init=lambda **_: run))
    load("loggers").main(steps=3, folder=str(tmp_path))
    assert rows == [1, 2, 3]
    if importlib.util.find_spec("tensorboard"):
        assert list(tmp_path.glob("events.out.tfevents.*"))


def test_loggers_run_without_what_is_not_installed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    for name in ("wandb", "torch.utils.tensorboard"):
        monkeypatch.setitem(sys.modules, name, None)
    assert len(load("loggers").main(steps=3)) == 3
    out, err = capsys.readouterr()
    assert out.startswith("logs: bar in ") and "3/3" in err


def test_injected_faults_raise_the_errors_that_the_example_says():
    made = load("faults")
    tests = [test for name, test in vars(made).items() if name.startswith("test_")]
    assert len(tests) == 4
    for test in tests:
        test()


def test_per_example_runs(capsys: pytest.CaptureFixture[str]):
    load("per_example").main()
    assert capsys.readouterr().out.strip()


def test_custom_schedule_holds_what_it_says(tmp_path: Path):
    timeline = load("custom_schedule").main(str(tmp_path / "capped.svg"))
    assert timeline.peak == (3, 3, 2, 1)
    assert (tmp_path / "capped.svg").read_text().startswith("<svg")
    del ENTRIES["capped"]


def test_contrastive_gradient_is_that_of_the_whole_batch():
    """One microbatch sees the same rows as eight."""
    import torch

    made = load("contrastive")
    torch.manual_seed(1)
    params = [{"in": torch.randn(4, 4), "out": torch.randn(4, 4)} for _ in range(2)]
    x, found = torch.randn(8, 4), []
    for parts in (1, 4):
        encoder = fpipe.pipeline([made.layer] * 2, "1F1B", microbatches=parts, group=fpipe.local(2))
        z, pullback = fpipe.vjp(encoder, params, x)
        dz = torch.func.grad(made.info_nce)(z)
        found.append(pullback(dz)[0])
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


def test_notebook_runs():
    book = json.loads((EXAMPLES / "notebook.ipynb").read_text(encoding="utf-8"))
    names: dict[str, Any] = {}
    shown = []
    for cell in book["cells"]:
        if cell["cell_type"] == "code":
            assert not cell["outputs"], "keep what was printed out of the repository"
            *lines, last = ast.parse("".join(cell["source"])).body
            if isinstance(
                last, ast.Expr
            ):  # as a notebook does: the value of the last line is shown
                exec(compile(ast.Module(lines, []), "cell", "exec"), names)
                value = eval(compile(ast.Expression(last.value), "cell", "eval"), names)
                shown += [] if value is None else [(type(value).__name__, value._repr_html_())]
            else:
                exec(compile(ast.Module([*lines, last], []), "cell", "exec"), names)
    assert [kind for kind, _ in shown] == ["Schedule", "Timeline", "Pipeline", "Profile", "Plans"]
    for _, html in shown:
        ElementTree.fromstring(f"<div>{html}</div>")


def _on_four(recipes: tuple[str, ...]) -> dict[str, list[float]]:
    os.environ["TORCHELASTIC_RUN_ID"] = "examples"  # what torchrun sets besides
    return {
        "quickstart": load("quickstart").main(steps=2),
        **{name: load(name).main(steps=2) for name in recipes},
        "moe": load("moe").main(["--steps", "2"]),
        "sequential": load("moe").main(["--steps", "2", "--overlap", "sequential"]),
        "zero": load("zero").main(["--steps", "2"]),
        "whole": load("zero").main(["--steps", "2", "--zero", "0"]),
    }


def _large_vocabulary() -> list[float]:
    os.environ["TORCHELASTIC_RUN_ID"] = "examples"  # what torchrun sets besides
    return load("large_vocabulary").main(steps=2)


def test_large_vocabulary_on_two_processes():
    alone = load("large_vocabulary").main(steps=2)
    assert fpipe.launch(_large_vocabulary, ranks=2, timeout=100) == [alone, alone]


@pytest.mark.timeout(240)
def test_on_four_processes(long: bool):
    """A pipeline of four, and two copies of a pipeline of two with experts spread over them, or
    parameters.
    """
    recipes = RECIPES if long else SOME_RECIPES
    found = fpipe.launch(_on_four, recipes, ranks=4, timeout=200)
    for name in ("quickstart", *recipes):
        assert found[0][name] == load(name).main(steps=2)
    alone = load("zero").main(["--steps", "2"])
    for here in found:
        assert here["quickstart"] == found[0]["quickstart"]
        assert here["moe"] == here["sequential"]
        assert here["zero"] == here["whole"] == pytest.approx(alone, rel=1e-5)


def _torchrun(arguments: list[str], out: str) -> None:
    """What the command torchrun does, in a process that has imported torch."""
    from torch.distributed.run import main

    with open(out, "wb") as file:
        os.dup2(file.fileno(), 1)
    main(arguments)


def test_train_prints_the_same_to_the_last_digit_under_torchrun(
    capfd: pytest.CaptureFixture[str], tmp_path: Path, long: bool
):
    ranks, out = 4 if long else 2, tmp_path / "out.txt"  # interpreters that start
    losses = load("train").main(steps=3, ranks=ranks, width=16)
    here = capfd.readouterr().out
    arguments = [
        "--nproc-per-node",
        str(ranks),
        "--rdzv-backend",
        "c10d",
        "--rdzv-endpoint",
        "127.0.0.1:0",
        str(EXAMPLES / "train.py"),
        "--steps",
        "3",
        "--width",
        "16",
        "--ranks",
        str(ranks),
    ]
    done = forked.PROCESSES.Process(target=_torchrun, args=(arguments, str(out)))
    done.start()
    done.join(110)
    done.terminate()  # it is late
    assert done.exitcode == 0, capfd.readouterr().err[-3000:]
    assert out.read_text() == here
    assert [float(line.split()[-1]) for line in here.splitlines()] == losses


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.py")), ids=lambda p: p.name)
def test_is_short_and_is_run(path: Path):
    """Under a hundred lines, a docstring that states the command, and a test that runs it."""
    text = path.read_text(encoding="utf-8")
    assert text.count("\n") < 100
    main = PARTS.get(path.stem, path.stem)
    assert f"examples/{main}.py" in text.split('"""')[1]
    if main != path.stem:
        assert f"from {path.stem} import" in (EXAMPLES / f"{main}.py").read_text(encoding="utf-8")
    tests = (Path(__file__).parent / ELSEWHERE.get(main, "test_examples.py")).read_text(
        encoding="utf-8"
    )
    assert (
        main in (*SMALL, *EXPLAINED)
        or f'load("{main}").main' in tests
        or f"from {main} import" in tests
    )


def test_notebook_is_short():
    """As many lines of code as any example has."""
    book = json.loads((EXAMPLES / "notebook.ipynb").read_text(encoding="utf-8"))
    assert sum(len(cell["source"]) for cell in book["cells"] if cell["cell_type"] == "code") < 100
