"""The worked examples of CONTRIBUTING.md: each patch applies, touches few files, and works."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PATCHES = ROOT / "docs" / "patches"

SETUP = """
import torch, fpipe
layer = lambda p, x: torch.tanh(x @ p)
loss = lambda y, t: (y - t).square().mean()
params, x, t = [torch.randn(4, 4) for _ in range(2)], torch.randn(8, 4), torch.randn(8, 4)

def run(schedule, **options):
    options |= dict(loss=loss, microbatches=2, group=fpipe.local(2))
    pipe = fpipe.pipeline([layer] * 2, schedule, **options)
    value, grads = fpipe.value_and_grad(pipe)(params, x, t)
    return [value, *grads]

plain = run("1F1B")
"""
ACTION = """
from fpipe.passes.notes import TIMES
text = "[0F0, 0N0, 0F1, 0B0, 0B1, 0N1]\\n[1F0, 1B0, 1N0, 1F1, 1B1]"
schedule = fpipe.Schedule.parse(text).check()
assert str(schedule) == text
assert schedule.simulate(fpipe.Costs(N=1)).total > schedule.simulate(fpipe.Costs()).total
assert "<svg" in schedule._repr_html_()
assert all(map(torch.equal, run(schedule), plain))
assert sorted(TIMES) == ["0N0", "0N1", "1N0"] and TIMES["0N0"] < TIMES["0N1"]
try:
    fpipe.Schedule.parse("[0N0, 0F0, 0B0]").check()
except fpipe.errors.ScheduleError as error:
    assert "0N0" in str(error)
else:
    raise AssertionError("N needs F")
"""
OPTION = """
seen = []
assert all(map(torch.equal, run("1F1B", tick=seen.append), plain))
for row in fpipe.make_schedule("1F1B", 2, 2):
    actions = list(map(str, row))
    assert [name for name in seen if name in actions] == actions
for wrong, words in ({"tick": 3}, "tick=3; give a function"), ({"tock": 3}, "did you mean 'tick'?"):
    try:
        run("1F1B", **wrong)
    except fpipe.errors.StageError as error:
        assert words in str(error)
    else:
        raise AssertionError(wrong)
"""


@pytest.mark.skipif(shutil.which("git") is None, reason="applies patches with git")
@pytest.mark.parametrize(
    ("patch", "most", "code"),
    [
        pytest.param("new_action.patch", 4, ACTION, id="action"),
        pytest.param("new_option.patch", 2, OPTION, id="option", marks=pytest.mark.long),
    ],
)
def test_a_patch_of_contributing(patch: str, most: int, code: str, tmp_path: Path):
    files = re.findall(r"^\+\+\+ b/(.*)$", (PATCHES / patch).read_text(), re.M)
    assert len(files) <= most
    assert patch in (ROOT / "CONTRIBUTING.md").read_text()
    shutil.copytree(ROOT / "fpipe", tmp_path / "fpipe")  # with what is compiled
    apply = ["git", "apply", str(PATCHES / patch)]
    subprocess.run(apply, check=True, cwd=tmp_path, timeout=60)
    environment = os.environ | {"PYTHONPATH": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-c", SETUP + code],
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
        cwd=tmp_path,
        env=environment,
    )
    assert done.returncode == 0, done.stderr[-2000:]
