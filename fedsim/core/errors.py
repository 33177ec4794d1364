"""Base classes of fedsim's errors, exit codes, and texts of file errors."""

from collections.abc import Iterator
from contextlib import contextmanager
from enum import IntEnum


class ExitCode(IntEnum):
    """Exit codes of the command line."""

    DONE = 0
    FAILED = 1
    WRONG_INPUT = 2
    BUDGET_FORBIDS = 3
    INTERRUPTED = 130
    TERMINATED = 143


class FedsimError(Exception):
    """Base class of all fedsim errors; the command line prints the message without a traceback.

    Attributes:
        exit_code: the exit code of a command that ends with the error.
    """

    exit_code: ExitCode = ExitCode.FAILED


class InputError(FedsimError, ValueError):
    """Raised for a mistake in a command, an input file or a plug-in; the message has the fix."""

    exit_code = ExitCode.WRONG_INPUT


@contextmanager
def raised_as(kind: type[FedsimError], prefix: str = "") -> Iterator[None]:
    """Raise an `InputError` of the `with` block as an error of another class.

    Args:
        kind: class of the raised error.
        prefix: text before the message, such as the name of a file and a colon.

    Raises:
        FedsimError: the block raised an `InputError`; the class is `kind`.
    """
    try:
        yield
    except InputError as error:
        raise kind(f"{prefix}{error}") from error


class StorageError(FedsimError, OSError):
    """Raised if reading or writing a file fails; the message says which content is kept."""


def one_line(error: Exception) -> str:
    """Return the message of an error as one line, or its class if it has no message."""
    return " ".join(str(error).split()) or type(error).__name__


def follows_interrupt(error: BaseException | None) -> bool:
    """Whether an error follows from Ctrl-C: some libraries raise one of their own in its place."""
    seen = set[int]()  # an error may be its own cause, as after `raise error from error`
    while error is not None and id(error) not in seen:
        if isinstance(error, KeyboardInterrupt):
            return True
        seen.add(id(error))
        error = error.__context__ if error.__cause__ is None else error.__cause__
    return False


def os_error_text(error: OSError) -> str:
    """Return the operating system's text for an error, without error number and file name."""
    return error.strerror or str(error) or type(error).__name__


def describe_os_error(error: OSError) -> str:
    """Return an operating system error as one line that names the file."""
    if isinstance(error, StorageError):
        return str(error)
    names = " -> ".join(str(name) for name in (error.filename, error.filename2) if name is not None)
    return f"{names}: {os_error_text(error)}" if names else os_error_text(error)
