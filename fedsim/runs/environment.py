"""Environment of a run: versions, platform, commit."""

import platform
import subprocess
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import fedsim
from fedsim.runs.files import SCHEMAS

_PACKAGES = ("torch", "flwr", "numpy", "scipy", "pydantic", "scikit-learn", "safetensors", "ray")


def describe_environment(*, seed: int) -> dict[str, object]:
    """Return the content of `environment.json`."""
    return {
        "fedsim": fedsim.__version__,
        "schema": SCHEMAS["environment.json"],
        "python": platform.python_version(),
        "platform": platform.platform(),
        "packages": {name: found for name in _PACKAGES if (found := _version(name))},
        "seed": seed,
        "commit": _commit(Path(fedsim.__file__).resolve().parent.parent),
    }


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _commit(directory: Path) -> str | None:
    """Return the commit of the checkout that fedsim runs from; None for an installed fedsim."""
    if not (directory / ".git").exists():
        return None
    try:
        head = _git(directory, "rev-parse", "HEAD")
        changed = _git(directory, "status", "--porcelain", "--untracked-files=no")
    except (OSError, subprocess.SubprocessError):
        return None
    return head + ("+changes" if changed else "")


def _git(directory: Path, *arguments: str) -> str:
    result = subprocess.run(
        ["git", "-C", str(directory), *arguments],
        capture_output=True,
        text=True,
        check=True,
        timeout=10,
    )
    return result.stdout.strip()
