"""How launched processes end."""

from __future__ import annotations

import multiprocessing as mp
import os
import runpy
from pathlib import Path
from typing import Any

import pytest

from fpipe.errors import LaunchError
from fpipe.products.training import launch


class Immortal:
    """A process that ends neither when it is asked nor when it is killed; ``joins`` are the bounds
    of the waits.
    """

    pid = 7

    def __init__(self, looks: int = 1000):
        self.joins: list[float | None] = []
        self.looks = looks

    def is_alive(self) -> bool:
        self.looks -= 1
        return self.looks > 0

    def join(self, timeout: float | None = None) -> None:
        self.joins.append(timeout)

    def terminate(self) -> None:
        """Ignored."""

    kill = terminate


def test_a_killed_process_that_does_not_end_is_left_with_a_warning():
    """The launcher waited for it without a bound."""
    process, (ours, _) = Immortal(), mp.Pipe()
    child: Any = launch._Child(process, ours)
    with pytest.warns(
        UserWarning, match=r"rank 0 \(process 7\) did not end within 10 s after it was killed"
    ):
        launch._end([child], {})
    assert len(process.joins) == 2 and all(process.joins)


def test_a_process_looks_at_its_launcher_again_and_again(monkeypatch: pytest.MonkeyPatch):
    parent = Immortal(looks=3)
    monkeypatch.setattr(mp, "parent_process", lambda: parent)
    codes: list[int] = []
    monkeypatch.setattr(os, "_exit", codes.append)
    launch._end_with_parent()
    assert parent.joins == [60.0, 60.0] and codes == [1]


def test_what_is_no_function_is_refused():
    with pytest.raises(LaunchError, match="a function that runs on each rank, not 3"):
        launch.launch(3, ranks=2)  # type: ignore[arg-type]


def test_a_script_without_a_guard_is_told_to_have_one(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
):
    """Each rank printed the traceback of multiprocessing, and "rank 0 ended by exit code 1"."""
    script = tmp_path / "script.py"
    script.write_text("import os, fpipe\nfpipe.launch(os.getpid, ranks=2)\n")
    with pytest.raises(LaunchError, match='put the call of launch under if __name__ == "__main__"'):
        runpy.run_path(str(script), run_name="__main__")
    assert capfd.readouterr().err == ""
