"""The context in which a built-in dataset is loaded."""

from dataclasses import dataclass
from pathlib import Path

from fedsim.data.settings import ImageSettings


@dataclass(frozen=True)
class LoadContext:
    """The parts of an experiment that the loader of a built-in dataset needs.

    Attributes:
        seed: the experiment's seed.
        base: the directory in which relative paths start.
        images: the setting `data.images`.
        group: column of the data that divides the examples among clients; None for other
            partitions.
    """

    seed: int
    base: Path
    images: ImageSettings | None = None
    group: str | None = None

    def folder(self, path: str) -> Path:
        """Return the path of a folder that the experiment names, starting at `base`."""
        return self.base / Path(path).expanduser()
