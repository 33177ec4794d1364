"""The parts of an experiment that loaders of built-in datasets receive."""

from dataclasses import dataclass
from pathlib import Path

from fedsim.data.settings import ImageSettings


@dataclass(frozen=True)
class LoadContext:
    """The parts of an experiment that the loader of a built-in dataset needs.

    Attributes:
        seed: the experiment's seed.
        base: the directory to which relative paths refer.
        images: the setting `data.images`.
        group: column of the data that divides the examples among clients; None for other
            partitions.
    """

    seed: int
    base: Path
    images: ImageSettings | None = None
    group: str | None = None

    def folder(self, path: str) -> Path:
        """Return the full path of a folder that the experiment names relative to `base`."""
        return self.base / Path(path).expanduser()
