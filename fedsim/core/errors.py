"""The base of all errors that fedsim raises, and the exit codes of the command line."""

from enum import IntEnum


class ExitCode(IntEnum):
    """The exit codes of the command line."""

    DONE = 0
    FAILED = 1
    WRONG_INPUT = 2
    BUDGET_FORBIDS = 3
    INTERRUPTED = 130
    TERMINATED = 143


class FedsimError(Exception):
    """Base of fedsim's own errors; the command line prints the message without a traceback.

    `exit_code` is the exit code of a command that ends with the error.
    """

    exit_code: ExitCode = ExitCode.FAILED


class InputError(FedsimError, ValueError):
    """A mistake in a command, an input file, or a plug-in; the message says how to fix it."""

    exit_code = ExitCode.WRONG_INPUT
