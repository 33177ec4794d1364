"""The `fedsim` command line: the list of commands, the exit codes, and error messages.

Data goes to stdout, messages to stderr. No slow library is imported before a command needs it, so
`--help` answers at once.
"""

import os
import sys
from io import StringIO, TextIOWrapper
from itertools import chain
from typing import TextIO

import click

import fedsim
from fedsim.cli.options import say
from fedsim.cli.registry import COMMANDS
from fedsim.core.commands import ByName, Interruption
from fedsim.core.errors import ExitCode, FedsimError, describe_os_error
from fedsim.core.plugin_errors import contained_os_exit

SECTIONS = {
    "Experiments": ("init", "validate", "plan", "curve", "run", "compare"),
    "Results": ("report", "predict", "verify", "totals"),
    "Attack": ("audit",),
    "Deployment": ("deploy", "node-policy", "client-key", "helper-key"),
    "Reference": ("list", "schema"),
}
_MODULES = {
    "fedsim.cli.experiments": ("init", "validate", "plan", "run", "list", "schema"),
    "fedsim.cli.compare": ("compare",),
    "fedsim.cli.results": ("report", "predict", "verify"),
}
_PLACES = COMMANDS | {
    name: f"{module}:{name}_command" for module, names in _MODULES.items() for name in names
}


class GroupedCommands(click.Group):
    """A click group of commands whose help page has a section for each purpose."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Parse arguments, and refuse those with a NUL character, which no path may have."""
        for argument in args:
            if "\0" in argument:
                rule = f"{argument!r:.80} has a NUL character; no path has one"
                raise click.UsageError(rule, ctx)
        return super().parse_args(ctx, args)

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Return the names of the commands, in the order of the help page's sections."""
        return list(self.commands)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the sections of the help page, with the commands of each."""
        width = max(map(len, self.commands))
        limit = formatter.width - 6 - width
        for title, names in SECTIONS.items():
            helps = {name: self.commands[name].get_short_help_str(limit) for name in names}
            with formatter.section(title):
                formatter.write_dl([(f"{name:<{width}}", text) for name, text in helps.items()])


EXIT_CODES = {
    ExitCode.DONE: "done",
    ExitCode.FAILED: "failed: a run, a run of a comparison, or a check of `verify` or `audit`",
    ExitCode.WRONG_INPUT: "the command or the file is wrong; nothing was run",
    ExitCode.BUDGET_FORBIDS: "a privacy budget forbids it",
    ExitCode.INTERRUPTED: "interrupted; to continue, repeat `compare`, or `run` with `--resume`",
    ExitCode.TERMINATED: "terminated by SIGTERM; to continue, as after 130",
}


@click.group(
    cls=GroupedCommands,
    commands=ByName[click.Command]({name: _PLACES[name] for name in chain(*SECTIONS.values())}),
    context_settings={"help_option_names": ["-h", "--help"]},
)
@click.version_option(fedsim.__version__, prog_name="fedsim")
def cli() -> None:
    """Federated learning with local differential privacy, simulated from one YAML file."""


def main() -> None:
    """Run the `fedsim` command, and print a message, not a traceback, for a user's mistake."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper) and stream.errors == "strict":
            stream.reconfigure(errors="replace")  # a terminal without ε shows ?
    was_open = sys.stdout is not None
    interruption = Interruption()
    with interruption.handling(), contained_os_exit():
        code = _exit_code(interruption)
        if unsaid := _output_error(was_open=was_open):
            sys.stdout = open(os.devnull, "w")  # noqa: SIM115  Python flushes it again at its end
            say(f"standard output: {unsaid}")
            code = code or ExitCode.FAILED
    if interruption.received is not None:
        code = interruption.exit_code
    if code:
        sys.exit(code)


def _output_error(*, was_open: bool = True) -> str | None:
    """Return why printed output could not be written; None if it was, or if its reader left."""
    try:
        stream: TextIO | None = sys.stdout
        is_closed = was_open and (stream is None or stream.closed)
        if stream is not None and not is_closed:
            stream.flush()
    except OSError as error:  # a full disk, or a reader that left
        return describe_os_error(error)
    except ValueError:  # without its buffer
        is_closed = True
    if is_closed:
        return "a plug-in closed it; the files that the command wrote are whole"
    return None


def _exit_code(interruption: Interruption) -> int:
    """Run the command on the command line, and return its exit code."""
    try:
        cli.main(standalone_mode=False, obj=interruption)
    except click.ClickException as error:
        error.show(shown := StringIO())
        say(shown.getvalue().rstrip("\n"))
        return error.exit_code
    except (click.Abort, KeyboardInterrupt):
        say(interruption.reason)
        return ExitCode.INTERRUPTED
    except FedsimError as error:
        say(str(error))
        return error.exit_code
    except OSError as error:
        say(describe_os_error(error))
        return ExitCode.FAILED
    except ValueError:
        if sys.stdout is None or _output_error() is None:
            raise
        return ExitCode.FAILED
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else int(end.code is not None)
    return ExitCode.DONE
