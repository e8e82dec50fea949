"""The heart: the files of fpipe that a plain pipeline touches, and the lines of them that run.

    python tests/helpers/heart.py           # figures, then each file
    python tests/helpers/heart.py --json    # what the layout test reads

A plain pipeline has two local ranks, ZBV, four equal stages and a loss, and no option. It is built
and called twice. Another pipeline ran before it, so no line counts that only an import runs.
"""

from __future__ import annotations

import json
import sys
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

from structure import Package

ROOT = Path(__file__).resolve().parents[2] / "fpipe"


def lines_run(fn: Callable[[], Any]) -> dict[str, set[int]]:
    """The lines that a call runs, by file of the package."""
    ran: dict[str, set[int]] = defaultdict(set)

    def on_line(frame: FrameType, event: str, arg: object) -> Any:
        if event == "line":
            ran[frame.f_code.co_filename].add(frame.f_lineno)
        return on_line

    def on_call(frame: FrameType, event: str, arg: object) -> Any:
        if not frame.f_code.co_filename.startswith(f"{ROOT}/"):
            return None
        ran[frame.f_code.co_filename].add(frame.f_lineno)
        return on_line

    sys.settrace(on_call)
    try:
        fn()
    finally:
        sys.settrace(None)
    return ran


def plain_pipeline() -> dict[str, set[int]]:
    """The lines that building a pipeline and its first two calls run."""
    import torch

    import fpipe

    torch.set_num_threads(1)
    x, y = torch.randn(8, 4), torch.randn(8, 4)

    def lines_of(
        layer: Callable[..., Any], weight: torch.Tensor, schedule: str, stages: int
    ) -> dict[str, set[int]]:
        def loss(out: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
            return (out - target).square().mean()

        pipes = []

        def build() -> None:
            group = fpipe.local(2)
            pipes.append(
                fpipe.pipeline(
                    [layer] * stages, schedule, loss=loss, microbatches=stages, group=group
                )
            )

        ran = lines_run(build)
        step = fpipe.value_and_grad(*pipes)  # types and checks of its arguments; not counted
        for _ in range(2):
            for name, lines in lines_run(lambda: step([weight] * stages, x, y)).items():
                ran[name] |= lines
        return ran

    lines_of(lambda p, x: x * p, torch.ones(()), "1F1B", 2)
    return lines_of(lambda p, x: x + torch.tanh(x @ p), torch.randn(4, 4), "ZBV", 4)


def measure() -> dict[str, Any]:
    """Files, tokens, lines and lines that run of the heart; each file with its figures."""
    modules = {str(module.path): module for module in Package(ROOT).modules.values()}
    files = {
        str(Path(name).relative_to(ROOT)): {
            "tokens": modules[name].tokens,
            "lines": modules[name].code_lines,
            "run": len(ran & modules[name].lines_of_code),
        }
        for name, ran in sorted(plain_pipeline().items())
    }
    totals = {key: sum(file[key] for file in files.values()) for key in ("tokens", "lines", "run")}
    return {"count": len(files), **totals, "files": files}


def main() -> None:
    """Print the figures."""
    figures = measure()
    if "--json" in sys.argv:
        print(json.dumps(figures))
        return
    share = figures["run"] / figures["lines"]
    print(f"{figures['count']} files, {figures['tokens']:,} tokens, {share:.0%} of lines run")
    for name, file in figures["files"].items():
        print(f"{file['tokens']:6,} tokens  {file['run']:4} of {file['lines']:4} lines  {name}")


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT.parent))
    main()
