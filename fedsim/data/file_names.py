"""The files that `data:` names; none is opened."""

import os
from glob import glob
from pathlib import Path

from fedsim.data.partitions.settings import FilesPartition
from fedsim.data.settings import DataSettings, FileDataset


def matching_files(pattern: str, base: Path) -> dict[str, Path]:
    """Return the files of a pattern by client name, sorted: their stems, or paths if stems repeat.

    Args:
        pattern: of shells, such as data/*.csv or data/*/train.csv.
        base: the directory in which relative paths start.
    """
    if "\0" in pattern:
        return {}
    found = glob(os.path.join(base, os.path.expanduser(pattern)), recursive=True)
    paths = [Path(one) for one in found if os.path.isfile(one)]
    names = [path.stem for path in paths]
    if len(set(names)) < len(names):
        top = os.path.commonpath([path.parent for path in paths])
        names = [path.with_suffix("").relative_to(top).as_posix() for path in paths]
    return dict(sorted(zip(names, paths, strict=True)))


def data_files(settings: DataSettings, base: Path) -> list[Path]:
    """Return the files that a run reads its examples from.

    Args:
        settings: `data:` of the experiment.
        base: the directory in which relative paths start.
    """
    dataset, division = settings.dataset, settings.partition
    if not isinstance(dataset, FileDataset):
        return []
    named = [base / Path(one).expanduser() for one in (dataset.path, dataset.test) if one]
    if isinstance(division, FilesPartition):
        named += matching_files(division.pattern, base).values()
    return named
