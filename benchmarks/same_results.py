"""Whether two checkouts of fedsim give the same results, to the last bit.

    python benchmarks/same_results.py ../fedsim-before .
    python benchmarks/same_results.py ../fedsim-before . cnn votes
    python benchmarks/same_results.py . --save today.json
    python benchmarks/same_results.py . --against today.json

Each checkout performs the experiments of its own `benchmarks/same/`, or of this one where it has
none, in a process of its own on one thread. A part of an experiment is a file of its run, the text
in the terminal, or the messages of a second run, in which a grid sees them. A line for each
experiment says "equal" or shows the first difference; the exit code is 1 if anything differs. Not
compared: what `LEFT_OUT` in `same/texts.py` names, `noise: secure`, which no seed repeats, and
messages between processes of Ray. Products of floats differ between processors, so saved digests
hold on the machine that made them.
"""

import argparse
import hashlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

from same.texts import SETTINGS_PART

Digests = dict[str, dict[str, str]]
"""SHA-256 of each part of each experiment."""

_FIRST = ("model.safetensors", "messages", "ledger.jsonl", "privacy.json", "clients.csv")
_HERE = Path(__file__).resolve().parent
_SHOWN = 50  # characters of a line that differs


def perform(checkout: Path, names: Sequence[str], folder: Path) -> Digests:
    """Have a checkout perform its experiments, and return their digests.

    Args:
        checkout: its root.
        names: of experiments; none: all.
        folder: an empty one, which gets a folder of text files for each experiment.

    Raises:
        SystemExit: a run failed.
    """
    root = checkout.resolve()
    benchmarks = next(one for one in (root / "benchmarks", _HERE) if (one / "same").is_dir())
    texts, work, started = folder / "texts", folder / "work", time.monotonic()
    work.mkdir(parents=True)
    texts.mkdir()
    one_thread = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "COLUMNS": "100"}
    places = {"PYTHONPATH": f"{root}{os.pathsep}{benchmarks}", "XDG_STATE_HOME": f"{folder}/state"}
    command = [sys.executable, "-P", "-m", "same.perform", str(root), str(texts), *names]
    if subprocess.run(command, cwd=work, env={**os.environ, **one_thread, **places}).returncode:
        raise SystemExit(f"{checkout}: not all experiments could be performed")
    print(f"{checkout}: {time.monotonic() - started:.0f} s", flush=True)
    return digests_of(texts)


def digests_of(texts: Path) -> Digests:
    """Return the digests of the text files of experiments."""
    return {
        one.name: {
            path.relative_to(one).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest()
            for path in sorted(one.rglob("*"))
            if path.is_file()
        }
        for one in sorted(texts.iterdir())
    }


def differing(before: Mapping[str, str], after: Mapping[str, str]) -> list[str]:
    """Return the parts that differ or are on one side alone, values and charges first."""
    parts = [part for part in before.keys() | after.keys() if before.get(part) != after.get(part)]
    return sorted(parts, key=lambda part: (_FIRST.index(part) if part in _FIRST else 9, part))


def first_difference(before: Path, after: Path) -> str:
    """Return the number of the first line in which two text files differ, and both lines."""
    if not (before.exists() and after.exists()):
        return f"only {'before' if before.exists() else 'after'}"
    lines = [path.read_text().splitlines() for path in (before, after)]
    pairs = zip(*lines, strict=False)
    found = next((n for n, (one, other) in enumerate(pairs) if one != other), min(map(len, lines)))
    one, other = (own[found] if found < len(own) else "(no line)" for own in lines)
    start = next((n for n, pair in enumerate(zip(one, other, strict=False)) if len({*pair}) > 1), 0)
    part = slice(max(0, start - _SHOWN // 2), start + _SHOWN // 2)
    return f"line {found + 1}: {one[part]!r} became {other[part]!r}"


def compare(before: Digests, after: Digests, texts: Sequence[Path] = (), *, renamed: bool) -> bool:
    """Print a line for each experiment, and return whether all are equal.

    Args:
        before: digests of one side.
        after: digests of the other.
        texts: folders of their text files, if they are there.
        renamed: settings have other names; see `--renamed`.
    """
    names = [*before, *(name for name in after if name not in before)]
    equal = bool(names)
    for name in names:
        if name not in before or name not in after:
            print(f"{name}: only {'before' if name in before else 'after'}")
            equal = False
            continue
        parts = differing(before[name], after[name])
        if renamed and SETTINGS_PART in parts:
            parts.remove(SETTINGS_PART)
        if not parts:
            print(f"{name}: equal")
            continue
        equal = False
        where = first_difference(*(one / name / parts[0] for one in texts)) if texts else "differs"
        more = f"; also {', '.join(parts[1:])}" if parts[1:] else ""
        print(f"{name}: {parts[0]}, {where}{more}")
    return equal


def main() -> None:
    """Compare what the command line names."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("words", nargs="+", metavar="CHECKOUT|NAME", help="checkouts, then names")
    parser.add_argument("--save", type=Path, help="write the digests of one checkout")
    parser.add_argument("--against", type=Path, help="compare one checkout with saved digests")
    parser.add_argument(
        "--renamed", action="store_true", help="leave out digests over the text of settings"
    )
    options = parser.parse_intermixed_args()
    count = 1 if options.save or options.against else 2
    checkouts, names = [Path(word) for word in options.words[:count]], options.words[count:]
    if len(checkouts) < count or not all((one / "fedsim").is_dir() for one in checkouts):
        parser.error(f"the first {count} must be checkouts of fedsim")
    saved: Digests = json.loads(options.against.read_text()) if options.against else {}
    with TemporaryDirectory() as folder:
        folders = [Path(folder) / str(number) for number in range(count)]
        sides = [perform(*side) for side in zip(checkouts, [names] * count, folders, strict=True)]
        if options.save:
            options.save.write_text(json.dumps(sides[0], indent=1))
        equal = True
        if options.against:
            before = {name: saved[name] for name in saved if not names or name in names}
            equal = compare(before, sides[0], renamed=options.renamed)
        elif not options.save:
            texts = [one / "texts" for one in folders]
            equal = compare(sides[0], sides[1], texts, renamed=options.renamed)
    if not equal:
        sys.exit(1)


if __name__ == "__main__":
    main()
