"""The files that `fedsim init` writes, ready to run.

Without `--data` these are an experiment, a model, and tests of both. With a table as `--data`, only
an experiment is written (`tables.py`).
"""

import re
from collections.abc import Mapping
from importlib.resources import files
from pathlib import Path

from fedsim.core.errors import InputError

STARTER_FILES = {
    "experiment.yaml": "the federation: data, clients, training, privacy",
    "model.py": "the model, a torch module of your own",
    "test_model.py": "tests of both, for pytest",
}
_NAME = "my-federation"
_YAML_WORDS = {"null", "true", "false", "yes", "no", "on", "off"}


class StarterError(InputError):
    """Raised if `fedsim init` cannot write its files, because of the directory or the table."""


def write_starter(directory: Path) -> tuple[Path, ...]:
    """Write the starter files into a new or empty directory and return their paths.

    The experiment gets the directory's name if that is a valid experiment name.

    Raises:
        StarterError: the directory is not empty, or is a file.
    """
    check_directory(directory)
    name = experiment_name(directory)
    texts = {file: starter_text(file).replace(_NAME, name) for file in STARTER_FILES}
    return write_files(directory, texts)


def check_directory(directory: Path) -> None:
    """Check that a directory is new or empty.

    Raises:
        StarterError: the directory is a file, or is not empty.
    """
    if directory.exists() and not directory.is_dir():
        raise StarterError(f"{directory} is a file; name a new or empty directory")
    if directory.exists() and any(directory.iterdir()):
        raise StarterError(f"{directory} is not empty; name a new or empty directory")


def write_files(directory: Path, texts: Mapping[str, str]) -> tuple[Path, ...]:
    """Write files into a directory, which is created if necessary, and return their paths.

    Args:
        directory: the directory.
        texts: the content of each file by its name.
    """
    directory.mkdir(parents=True, exist_ok=True)
    for file, text in texts.items():
        (directory / file).write_text(text, encoding="utf-8")
    return tuple(directory / file for file in texts)


def starter_text(file: str) -> str:
    """Return the content of a file in this package's folder `files`."""
    return files(__name__).joinpath("files", file).read_text(encoding="utf-8")


def experiment_name(directory: Path) -> str:
    """Return the directory's name if it is a valid experiment name, otherwise `my-federation`."""
    name = directory.resolve().name
    is_name = re.fullmatch(r"[A-Za-z][\w-]{0,49}", name, re.ASCII) is not None
    return name if is_name and name.lower() not in _YAML_WORDS else _NAME
