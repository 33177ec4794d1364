"""The files that `fedsim init` writes: an experiment, a model and tests, ready to run."""

import re
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
    """Error of a directory into which `fedsim init` cannot write its files."""


def write_starter(directory: Path) -> tuple[Path, ...]:
    """Write the starter files into a new or empty directory and return their paths.

    The experiment gets the name of the directory, if it is a valid name of an experiment.

    Raises:
        StarterError: the directory is not empty, or is a file.
    """
    if directory.exists() and not directory.is_dir():
        raise StarterError(f"{directory} is a file; name a new or empty directory")
    if directory.exists() and any(directory.iterdir()):
        raise StarterError(f"{directory} is not empty; name a new or empty directory")
    directory.mkdir(parents=True, exist_ok=True)
    name = directory.resolve().name
    written = []
    for file in STARTER_FILES:
        text = files(__name__).joinpath("files", file).read_text(encoding="utf-8")
        if _is_name(name):
            text = text.replace(_NAME, name)
        path = directory / file
        path.write_text(text, encoding="utf-8")
        written.append(path)
    return tuple(written)


def _is_name(name: str) -> bool:
    """Whether a directory's name is one for an experiment, and stays text in YAML."""
    return re.fullmatch(r"[A-Za-z][\w-]{0,49}", name, re.ASCII) is not None and (
        name.lower() not in _YAML_WORDS
    )
