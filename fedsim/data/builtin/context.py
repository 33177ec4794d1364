"""What a built-in dataset is loaded with besides its arguments."""

from dataclasses import dataclass
from pathlib import Path

from fedsim.data.settings import ImageSettings


@dataclass(frozen=True)
class LoadContext:
    """The experiment that a dataset is loaded for.

    Attributes:
        seed: the experiment's seed.
        base: the directory in which relative paths start.
        images: `data.images` of the experiment.
        group: column of the data that divides them among clients; None for other partitions.
    """

    seed: int
    base: Path
    images: ImageSettings | None = None
    group: str | None = None

    def folder(self, path: str) -> Path:
        """Return the absolute path of a folder that the experiment names."""
        return self.base / Path(path).expanduser()
