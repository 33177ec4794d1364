"""Reading of a dataset's official files from disk: unpacked, compressed, or in their archive.

Nothing is written to disk and nothing is unpickled. Archive members are matched by file name only,
so a path in an archive cannot point elsewhere.
"""

import gzip
import tarfile
import zipfile
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import IO, TypeVar, cast

from fedsim.data.examples import DataError
from fedsim.data.files import readable

Content = TypeVar("Content")
Parser = Callable[[IO[bytes], str], Content]


@dataclass(frozen=True)
class OfficialFiles:
    """The places inside the user's folder where a dataset's official files may be.

    Attributes:
        source: where users can get the files, for error messages.
        subfolders: subfolders that may hold unpacked files; "" is the user's folder itself.
        archives: archives in the user's folder that may hold the files, .zip or .tar.gz.
    """

    source: str
    subfolders: tuple[str, ...]
    archives: tuple[str, ...] = ()

    def read(self, folder: Path, names: Sequence[str], parse: Parser[Content]) -> list[Content]:
        """Return the parsed content of files, in the order of `names`.

        Args:
            folder: the user's folder.
            names: names of the files; each file may also be compressed, with the suffix .gz.
            parse: function that returns the content of an open file; its second argument is the
                name of the file for error messages.

        Raises:
            DataError: a file is missing or cannot be read.
        """
        content = self.find(folder, names, parse)
        if content is None:
            raise DataError(
                f"data.args.path: {folder} has no {names[0]}; get the files from {self.source} "
                "and put them there as they are"
            )
        return content

    def find(
        self, folder: Path, names: Sequence[str], parse: Parser[Content]
    ) -> list[Content] | None:
        """Return the parsed content of files, in the order of `names`; None if no file exists.

        Args:
            folder: the user's folder.
            names: names of the files; each file may also be compressed, with the suffix .gz.
            parse: function that returns the content of an open file; its second argument is the
                name of the file for error messages.

        Raises:
            DataError: only some files exist, or a file cannot be read.
        """
        if not folder.is_dir():
            raise DataError(
                f"data.args.path: no such folder: {folder}; the path is relative to the "
                "experiment file"
            )
        for place in (folder / name for name in self.subfolders):
            present = {name: path for name in names if (path := _unpacked(place, name))}
            if present:
                _refuse_missing(place, names, present)
                return [_parse(path, parse) for path in present.values()]
        for archive in (folder / name for name in self.archives):
            content = _from_archive(archive, names, parse) if archive.is_file() else {}
            if content:
                _refuse_missing(archive, names, content)
                return [content[name] for name in names]
        return None


def _unpacked(folder: Path, name: str) -> Path | None:
    paths = (folder / name, folder / f"{name}.gz")
    return next((path for path in paths if path.is_file()), None)


def _refuse_missing(place: Path, names: Sequence[str], present: Mapping[str, object]) -> None:
    missing = [name for name in names if name not in present]
    if missing:
        raise DataError(
            f"data.args.path: {place} has {next(iter(present))} but no {missing[0]}; add the file"
        )


def _parse(path: Path, parse: Parser[Content]) -> Content:
    with readable(path), path.open("rb") as file:
        return parse(_decompressed(file, path.name), str(path))


def _decompressed(file: IO[bytes], name: str) -> IO[bytes]:
    return cast(IO[bytes], gzip.GzipFile(fileobj=file)) if name.endswith(".gz") else file


def _from_archive(path: Path, names: Sequence[str], parse: Parser[Content]) -> dict[str, Content]:
    with readable(path):
        contents: dict[str, Content] = {}
        for member, file in _members(path, {form for n in names for form in (n, f"{n}.gz")}):
            content = parse(_decompressed(file, member), f"{path}, {member}")
            contents[member.removesuffix(".gz")] = content
        return contents


def _members(path: Path, wanted: Collection[str]) -> Iterator[tuple[str, IO[bytes]]]:
    """Yield (name, open file) of the archive members whose file name is in `wanted`."""
    if path.suffix == ".zip":
        with zipfile.ZipFile(path) as archive:
            for member in archive.namelist():
                name = PurePosixPath(member).name
                if name in wanted:
                    with archive.open(member) as file:
                        yield name, file
        return
    with tarfile.open(path, "r:*") as archive:
        for member in archive:
            name = PurePosixPath(member.name).name
            file = archive.extractfile(member) if name in wanted and member.isfile() else None
            if file is not None:
                with file:
                    yield name, file
