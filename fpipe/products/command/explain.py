# SPDX-License-Identifier: Apache-2.0
"""``fpipe explain``: runs a script up to its first call of a pipeline, and prints its page."""

from __future__ import annotations

import runpy
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest.mock import patch

import click

from ... import Pipeline
from ...errors import FpipeError, StageError
from ...tree import Tree
from . import options
from .options import option


class _Reached(BaseException):
    """The first call of a pipeline, with its page; not an Exception, which a script may catch."""


@click.command(context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False})
@click.argument("script", metavar="FILE")
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED, metavar="[ARGUMENT]...")
@option("-o --out FILE", "Write .html or .txt.", type=options.ending_in(".html", ".txt"))
def explain(script: str, arguments: Sequence[str], out: str | None) -> None:
    """Explain the first call of a pipeline in a script: pipe.explain with its arguments.

    The FILE runs in one process up to that call, which is not made. It gets the ARGUMENTs behind
    its name, but for an --out at the end whose file ends in .html or .txt.

    \b
    fpipe explain examples/quickstart.py
    fpipe explain --out explain.html train.py --steps 10
    """
    if not out and arguments[-2:-1] == ("--out",) and arguments[-1].endswith((".html", ".txt")):
        *arguments, _, out = arguments
    page = first_page(script, arguments)
    if out:
        page.save(out)
        options.say_written(out)
    else:
        click.echo(page)


def first_page(script: str, arguments: Sequence[str]) -> Any:
    """The page of the first call of a pipeline in a script.

    Raises:
        StageError: the script ends, or raises, before it calls a pipeline.
    """
    if not Path(script).is_file():
        raise StageError(f"there is no file {script!r}; give a Python script")

    def call(
        pipe: Any, mode: str, params: Any, x: Tree, targets: Sequence[Tree], side: Any, **_: object
    ) -> None:
        raise _Reached(pipe.explain(params, x, *targets, **side))

    try:
        with (
            patch.object(sys, "argv", [script, *arguments]),
            patch.object(sys, "path", [str(Path(script).resolve().parent), *sys.path]),
            patch.object(Pipeline, "call", call),
        ):
            runpy.run_path(script, run_name="__main__")
    except _Reached as reached:
        return reached.args[0]
    except FpipeError:
        raise
    except Exception as error:
        raise StageError(
            f"{script} raised {type(error).__name__} before its first call of a pipeline: "
            f"{error!s:.500}; run it with python first"
        ) from error
    except SystemExit as end:
        raise StageError(
            f"{script} ended with status {end.code!r:.300} before it called a pipeline; give the "
            "arguments that it needs behind its name"
        ) from end
    raise StageError(
        f"{script} called no pipeline in this process; explain needs a call such as "
        "fpipe.value_and_grad(pipe)(params, x, y). Where fpipe.launch starts processes, call "
        "print(pipe.explain(params, x, y)) in the function that it runs"
    )
