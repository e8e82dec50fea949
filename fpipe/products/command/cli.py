# SPDX-License-Identifier: Apache-2.0
"""The command ``fpipe``: loads the commands of ``COMMANDS`` by name, and turns exceptions into one
message.

Exit status: 0 success, 1 a schedule is not valid, 2 a usage error or a failure of the command, 130
interrupted. Errors are one message on standard error, never a traceback (``FPIPE_TRACEBACK=1``
shows that of an internal error). Nothing here imports torch.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from difflib import get_close_matches
from importlib import import_module

import click

from ... import __version__
from ...errors import FpipeError, ScheduleError
from ...generators import schedule_names
from .options import INVALID, report_error

#: a command, its module and function, and its line in `fpipe --help`
_TABLE = """
draw       drawing:draw          Draw schedules by name or from files, and timelines.
check      checking:check        Check schedules in CSV files, or as text with brackets.
names      checking:names        List the schedules that have a name.
compare    checking:compare      Compare all schedules: time, bubble, memory, messages.
solve      checking:solve        Search for the best schedule for costs and memory.
plan       cluster_plan:plan     Plan a large run: layouts by predicted time and memory.
rehearse   rehearse:rehearse     Make the plans of ranks of a planned run, without GPUs.
explain    explain:explain       Explain a script's pipeline: what runs where, memory, idle time.
train      train:train           Train a small GPT on several processes, and check its gradients.
copies     copies:copies         Run a script as several copies, of which any may be lost.
checkpoint checkpoint:checkpoint Show, verify or convert checkpoints.
doctor     doctor:command        Probe this machine's backend; list remedies for its faults.
"""
#: name -> (module:function, line); a module is loaded when its command runs
COMMANDS = {
    name: (f"{__package__}.{function}", line)
    for name, function, line in (row.split(maxsplit=2) for row in _TABLE.strip().splitlines())
}

#: for each shell, the line that switches completion on
COMPLETION = """
Completion of commands, options and names of schedules:
  bash  eval "$(_FPIPE_COMPLETE=bash_source fpipe)"    in ~/.bashrc
  zsh   eval "$(_FPIPE_COMPLETE=zsh_source fpipe)"     in ~/.zshrc
  fish  _FPIPE_COMPLETE=fish_source fpipe | source    in config.fish
"""

USAGE = 2
INTERNAL = 70
INTERRUPTED = 130
PIPE = 141


class _Commands(click.Group):
    """The commands of ``COMMANDS``; suggests the nearest names for an unknown one."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        module, _, attribute = COMMANDS[cmd_name][0].partition(":")
        return getattr(import_module(module), attribute)

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        name = args[0]
        if name in COMMANDS or name.startswith("-"):
            return super().resolve_command(ctx, args)
        names = [schedule.lower() for schedule in ("ZBV", *schedule_names())]
        if near := get_close_matches(name.lower(), COMMANDS, n=3, cutoff=0.6):
            hint = f"did you mean {' or '.join(near)}?"
        elif name.lower() in names:
            hint = f"to draw the schedule: fpipe draw {name}"
        elif name in import_module("fpipe").__all__:
            hint = f"it is a name of the Python library: help(fpipe.{name})"
        else:
            hint = f"the commands are {', '.join(COMMANDS)}; for a demo, fpipe train or make demo"
        raise click.UsageError(f"there is no command {name!r}; {hint}", ctx)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, line) for name, (_, line) in COMMANDS.items()])
        formatter.write(COMPLETION)


@click.group(
    cls=_Commands,
    invoke_without_command=True,
    context_settings={
        "help_option_names": ["-h", "--help"],
        "max_content_width": 100,
        "show_default": True,
    },
)
@click.version_option(__version__, message="fpipe %(version)s")
@click.pass_context
def fpipe(ctx: click.Context) -> None:
    """Pipeline schedules as data: draw them, check them, compare them.

    \b
    fpipe draw ZBV --ranks 4 --microbatches 8     a schedule in the terminal
    fpipe compare --ranks 8 --microbatches 24     time and memory of all schedules
    """
    if ctx.invoked_subcommand is None:
        click.echo(ctx.get_help())


def main(args: Sequence[str] | None = None) -> int:
    """Run the command and return its exit status; ``args`` defaults to the arguments of the
    process.

    >>> main(["check", "no-such-file.csv"])
    2
    """
    try:
        status = fpipe.main(args, prog_name="fpipe", standalone_mode=False)
        sys.stdout.flush()
        return status or 0
    except click.UsageError as error:
        where = error.ctx.command_path if error.ctx else "fpipe"
        message = " ".join(_improved(error).format_message().split())
        return report_error(f"{message}  (see {where} --help)", USAGE)
    except click.ClickException as error:
        return report_error(error.format_message(), USAGE)
    except (click.Abort, KeyboardInterrupt):
        return report_error("interrupted", INTERRUPTED)
    except FpipeError as error:
        return report_error(str(error), INVALID if isinstance(error, ScheduleError) else USAGE)
    except BrokenPipeError:
        # the reader, say `head`, closed the pipe: nothing more may be flushed to it
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return PIPE
    except OSError as error:
        what = error.filename or "input or output"
        return report_error(f"{what}: {error.strerror or error}; give another path", USAGE)
    except Exception as error:
        missing = (getattr(error, "name", None) or "").partition(".")[0]
        if isinstance(error, ModuleNotFoundError) and missing != "fpipe":
            return report_error(
                f"this command needs {missing}, which is not installed: pip install {missing}",
                USAGE,
            )
        if os.environ.get("FPIPE_TRACEBACK"):
            raise
        return report_error(
            f"this is a bug in fpipe: {type(error).__name__}: {error}; FPIPE_TRACEBACK=1 shows the "
            "traceback",
            INTERNAL,
        )


def _improved(error: click.UsageError) -> click.UsageError:
    """An unknown option's error with the nearest option alone, where click names three, in
    alphabetical order; a missing option's error with all that are missing.
    """
    ctx = error.ctx
    if isinstance(error, click.NoSuchOption):
        near = get_close_matches(error.option_name, error.possibilities or (), n=1)
        return click.NoSuchOption(error.option_name, possibilities=near, ctx=ctx)
    if isinstance(error, click.MissingParameter) and ctx:
        missing = [
            param.get_error_hint(ctx)
            for param in ctx.command.params
            if param.required and param.name not in ctx.params
        ]
        return click.MissingParameter(ctx=ctx, param=error.param, param_hint=", ".join(missing))
    return error
