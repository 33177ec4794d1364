"""What several tests of data share."""

from collections.abc import Callable
from pathlib import Path

import pytest

from fedsim.data.examples import Dataset
from fedsim.data.files import read_files
from fedsim.data.settings import FileDataset, ImageSettings


@pytest.fixture(scope="session")
def read_file() -> Callable[..., Dataset]:
    """Read the dataset in a file: `(path, target, *, tokens=False, images=None)`."""

    def read(
        path: Path, target: str, *, tokens: bool = False, images: ImageSettings | None = None
    ) -> Dataset:
        settings = FileDataset(target=target)
        return read_files({path.stem: path}, settings, tokens=tokens, images=images)

    return read
