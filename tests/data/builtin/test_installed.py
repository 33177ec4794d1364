import hashlib
from pathlib import Path

import pytest

from fedsim.data.builtin import InstalledFile
from fedsim.data.examples import DataError

CONTENT = b"age,ill\n63,0\n"
DIGEST = hashlib.sha256(CONTENT).hexdigest()


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A package that fails when it is imported, with one data file."""
    folder = tmp_path / "fedsim_fake_tables"
    (folder / "data").mkdir(parents=True)
    (folder / "__init__.py").write_text("raise RuntimeError('imported')")
    (folder / "data" / "hospitals.csv").write_bytes(CONTENT)
    monkeypatch.syspath_prepend(tmp_path)
    return folder


def _file(path: str = "data/hospitals.csv", digest: str = DIGEST) -> InstalledFile:
    return InstalledFile("fedsim_fake_tables", "1.2.0", path, digest)


def test_file_of_a_package_is_read_without_importing_the_package(package: Path) -> None:
    assert _file().read("hospitals") == CONTENT


def test_another_file_is_refused_with_both_hashes_and_versions(package: Path) -> None:
    (package / "data" / "hospitals.csv").write_bytes(CONTENT + b"64,1\n")
    with pytest.raises(DataError, match="not the published file of hospitals") as caught:
        _file().read("hospitals")
    changed = hashlib.sha256(CONTENT + b"64,1\n").hexdigest()
    for part in (changed, DIGEST, "fedsim_fake_tables 1.2.0", "unknown version is installed"):
        assert part in str(caught.value)


def test_file_that_another_version_lacks_is_an_error_that_names_the_version(package: Path) -> None:
    with pytest.raises(DataError, match=r"data/schools\.csv.*fedsim_fake_tables==1\.2\.0"):
        _file("data/schools.csv").read("schools")


def test_missing_package_is_an_error_that_names_the_extra() -> None:
    with pytest.raises(DataError, match=r"not installed; pip install 'fedsim-dp\[data\]'"):
        InstalledFile("fedsim_no_package", "1.0", "a.csv", DIGEST).read("hospitals")
