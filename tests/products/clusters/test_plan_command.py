"""`fpipe plan`: its table, its file, and what it refuses."""

from __future__ import annotations

import json
import re
import tomllib
from pathlib import Path

import pytest

from fpipe.errors import PlanError
from fpipe.generators import make_schedule
from fpipe.products.clusters.layouts import search
from fpipe.products.clusters.plan_file import read_plan, tables
from fpipe.products.command import cli

CONFIG = {
    "model_type": "llama",
    "hidden_size": 1024,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "intermediate_size": 4096,
    "vocab_size": 32000,
}
LINE = "plan --model config.json --gpus 8 --gpu a100 --tokens 32K --seq 1K --memory 4GiB"


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    Path("config.json").write_text(json.dumps(CONFIG))


def printed(capsys: pytest.CaptureFixture[str], line: str) -> str:
    assert cli.main(line.split()) == 0
    return capsys.readouterr().out


def test_a_table_and_why(capsys: pytest.CaptureFixture[str]):
    out = printed(capsys, LINE + " --top 3")
    assert max(map(len, out.splitlines())) <= 80
    lines = re.sub(r"\n {10}|\n  (?!speed|time|bound|layers|memory)", " ", out).splitlines()
    assert lines[0].startswith(
        "llama 1024x8: 0.1914 billion parameters, 32 sequences of 1024 tokens, 8 a100 of 4 GiB"
    )
    assert lines[2].split()[:5] == ["tp", "pp", "dp", "zero", "schedule"]
    seconds = [float(line.split()[-2]) for line in lines[3:6]]
    assert seconds == sorted(seconds) and lines[6] == ""
    first = lines.index("the first layout")
    of_first = dict(line.split(maxsplit=1) for line in lines[first + 1 : first + 6])
    assert [*of_first] == ["speed", "time", "bound", "layers", "memory"]
    assert lines[first + 6] == ""
    assert sum(map(int, re.findall(r"\d+(?=[,\]])", of_first["layers"]))) == 8
    assert all(re.search(r" \d+\.\d{3} +\d+$", line) for line in lines[3:6])
    assert " TFLOP/s per GPU, " in of_first["speed"]
    legend = out.partition("\ntp, pp, dp: ")[2].partition("\n\n")[0].splitlines()[1:]
    named = [line.partition(": ")[0] for line in legend]  # a line for each, they were a paragraph
    assert named == ["zero", "stages", "recompute", "microbatches", "seconds"]
    shares = [float(part.split()[-1].rstrip("%")) for part in of_first["time"].split(", ")]
    assert sum(shares) == pytest.approx(100, abs=0.5) and shares == sorted(shares, reverse=True)


def test_the_best_without_a_pipeline(capsys: pytest.CaptureFixture[str]):
    """Whether a pipeline pays was not to be seen, then only at the end and without a share."""
    out = printed(capsys, LINE + " --only pp=4")
    [first] = re.findall(r"GiB\n.* ([\d.]+) +\d+\n", out)
    line = r"^best without a pipeline \(--only pp=1\): ([\d.]+) s, ([-+][\d.]+)% against"
    [(seconds, more)] = re.findall(line, out, re.M)
    assert float(more) == pytest.approx(100 * (float(seconds) / float(first) - 1), abs=1)
    assert out.index("best without") < out.index("\ntp, pp, dp: "), "below the table"
    alone = printed(capsys, LINE + " --only pp=1 --top 1")
    assert f" {seconds} " in alone and "without a pipeline" not in alone


def test_a_layout_that_leaves_memory_free_is_named(capsys: pytest.CaptureFixture[str]):
    """The first layout filled a GPU, and no sentence led to the one below it."""
    layouts = json.loads(printed(capsys, LINE + " --json"))["best"]
    line = r"^first of these with 10% less memory: ([\d.]+) s, \+([\d.]+)% against"
    [(seconds, more)] = re.findall(line, printed(capsys, LINE), re.M)
    times, fullest = zip(
        *((p["prediction"]["step"], max(p["prediction"]["memory"])) for p in layouts),
        strict=True,
    )
    place = next(k for k, nbytes in enumerate(fullest) if nbytes < 0.9 * fullest[0])
    assert float(seconds) == pytest.approx(times[place], abs=1e-3)
    assert float(more) == pytest.approx(100 * (times[place] / times[0] - 1), abs=0.1)
    assert "with 10% less memory" not in printed(capsys, LINE + " --top 1")


def test_figures_are_said_to_be_predicted(capsys: pytest.CaptureFixture[str]):
    assert printed(capsys, LINE).endswith(
        "times and memory are predicted, not measured: docs/howto/plan.md says how well\n"
    )


def test_a_stage_of_the_head_alone_is_explained(capsys: pytest.CaptureFixture[str]):
    """``0`` layers looked like a mistake."""
    line = LINE + " --only pp=8 --only schedule=1F1B --memory 80GiB"
    assert ", 0] (0: the head alone)\n" in printed(capsys, line)
    Path("config.json").write_text(json.dumps(CONFIG | {"vocab_size": 1000}))
    assert "the head alone" not in printed(capsys, line)


def test_the_widest_layouts_fit_80_columns(capsys: pytest.CaptureFixture[str]):
    only = " --only schedule=InterleavedZeroBubble --only recompute=selective --only pp=4"
    line = LINE.replace("--gpus 8", "--gpus 1024").replace("32K", "1M")
    out = printed(capsys, line + only)
    assert "InterleavedZeroBubble" in out and "selective" in out
    assert max(map(len, out.splitlines())) <= 80


def test_a_plan_is_written_and_read(capsys: pytest.CaptureFixture[str]):
    out = printed(capsys, LINE + " --out plan.toml")
    assert "wrote plan.toml; try: fpipe rehearse plan.toml" in out and "fpipe.make_schedule" in out
    read = read_plan("plan.toml")
    best = search(read.job).best[0]
    assert read.layout.counts(read.job.model) == best.layout.counts(best.job.model)
    assert (read.step, read.memory) == (best.step, best.memory)
    raw = tomllib.loads(Path("plan.toml").read_text())
    assert raw == json.loads(json.dumps(tables(best)))
    assert raw["prediction"]["memory"] == [round(memory.total) for memory in best.memory]
    assert make_schedule(**raw["schedule"]).stages == best.layout.stages


def test_json(capsys: pytest.CaptureFixture[str]):
    found = json.loads(
        printed(
            capsys,
            LINE + " --json --only schedule=1F1B --only pp=2 --only pp=4 --only recompute=none",
        )
    )
    assert {
        (each["layout"]["schedule"], each["layout"]["recompute"]) for each in found["best"]
    } == {("1F1B", "none")}
    assert {each["layout"]["pp"] for each in found["best"]} == {2, 4}
    assert found["layouts"] >= found["possible"] >= found["predicted"] >= len(found["best"])


def test_without_out_nothing_is_written(capsys: pytest.CaptureFixture[str]):
    printed(capsys, LINE)
    assert [path.name for path in Path().iterdir()] == ["config.json"]


REFUSED = [
    ("plan config.json", "Missing option '--model', '--gpus', '--gpu', '--tokens', '--seq'."),
    (LINE.replace("--gpu a100", ""), "Missing option '--gpu'. Choose from: a100"),
    (
        LINE.replace("a100", "a10"),
        "'a10' is not one of 'a100', 'h100', 'h200', 'b200'",
    ),
    (
        LINE.replace("--tokens 32K", "--tokens 1000"),
        "1000 are not whole sequences of 1024; give 1024 or 2048",
    ),
    (
        LINE.replace("--tokens 32K", "--tokens many"),
        "'many' is no whole number above 0, such as 4194304 or 4M",
    ),
    (LINE.replace("4GiB", "lots"), "'lots' is no number above 0 with a unit"),
    (LINE.replace("4GiB", "100MiB"), "no layout fits 0.0977 GiB; nearest is tp "),
    (LINE.replace("--gpus 8", "--gpus 10000000000"), "gpus is 10000000000, and must be from 1"),
    (LINE + " --only schedule=Seq*", "--only schedule=Seq*: no layout has it; there are 1F1B, Int"),
    (LINE + " --only tp=16", "--only tp=16: no layout has it; there are 1, 2,"),
    (LINE + " --only tp=4 --only pp=4", "leave out some of them"),
    (LINE + " --only stages=16", "--only stages=16: give one of schedule, tp, pp"),
    (LINE + " --out plan.txt", "ends in .toml"),
    (LINE.replace("config.json", "nowhere.json"), "nowhere.json: No such file"),
]


@pytest.mark.parametrize(("line", "words"), REFUSED, ids=[words[:30] for _, words in REFUSED])
def test_refusals_are_one_error(line: str, words: str, capsys: pytest.CaptureFixture[str]):
    assert cli.main(line.split()) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.startswith("error: ") and err.count("error:") == 1
    assert words in err


def test_files_that_are_no_plan(capsys: pytest.CaptureFixture[str]):
    printed(capsys, LINE + " --out plan.toml")
    text = Path("plan.toml").read_text()
    for wrong, message in (
        ("", r"has no table \[model\]"),
        ("tp = ", "give a file that fpipe plan wrote"),
        (
            text.replace("hidden = 1024", "hidden = 'wide'"),
            r"\[model\] hidden = 'wide' does not belong there",
        ),
        (text.replace("hidden = 1024\n", ""), r"\[model\] lacks hidden"),
        (text.replace("gpus = 8", "gpus = 9"), "must be the 9 GPUs"),
        # these were KeyError, ZeroDivisionError, RecursionError and other sizes without a word
        (
            re.sub('recompute = ".*"', 'recompute = "some"', text),
            "recompute is 'some', and",
        ),
        (re.sub("tp = [0-9]+", "tp = -1", text), "tp is -1, and must be from 1 to"),
        (re.sub("microbatch = [0-9]+", "microbatch = 0", text), "microbatch is 0, and must be"),
        (re.sub("zero = [0-9]+", "zero = 7", text), "zero is 7, and must be from 0 to 3"),
        (re.sub("layers = .*]", "layers = ['a']", text), "layers is 'a', and must be from 0 to 8"),
        (re.sub("node = [0-9]+", "node = 0", text), "gpu a100: node is 0, and must be a number"),
        (re.sub("flops = .*", "flops = nan", text, count=1), "flops is nan, and must be a number"),
        ("a = " + "[" * 5000, "give a file that fpipe plan wrote"),
    ):
        Path("plan.toml").write_text(wrong)
        with pytest.raises(PlanError, match=message):
            read_plan("plan.toml")


def test_a_rehearsal_without_an_end_is_refused(capsys: pytest.CaptureFixture[str]):
    printed(capsys, LINE + " --only pp=2 --only tp=1 --out plan.toml")
    text = Path("plan.toml").read_text()
    Path("plan.toml").write_text(text.replace("batch = 32\n", "batch = 8388608\n"))
    assert cli.main(["rehearse", "plan.toml", "--ranks", "0"]) == 2
    assert "can be rehearsed; plan with fewer --tokens" in capsys.readouterr().err


def test_the_command_needs_no_torch():
    """Checked in one process: what the command loads."""
    import subprocess
    import sys

    code = (
        "import sys; from fpipe.products.command.cluster_plan import plan; "
        "print({'torch', 'rich'} & "
        "set(sys.modules))"
    )
    run = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60
    )
    assert run.stdout == "set()\n"
