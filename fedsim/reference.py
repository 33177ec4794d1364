"""Generates docs/reference/keys.md from the code: keys, commands, files, exit codes.

    python -m fedsim.reference > docs/reference/keys.md

Keys come from the settings classes, commands from the command line, and the keys of output files
from a small run and a small comparison.
"""

import json
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import click

import fedsim
from fedsim.algorithms.catalog import algorithms
from fedsim.cli import EXIT_CODES, cli
from fedsim.cli.registry import FILES
from fedsim.comparison.settings import ComparisonSettings
from fedsim.data.catalog import DATASETS
from fedsim.experiment import Experiment
from fedsim.models.catalog import MODELS
from fedsim.setting_tables import SettingRow, rows_of

_HEAD = """\
# Reference

All keys, commands, output files and exit codes. This page is generated from the code by
`python -m fedsim.reference > docs/reference/keys.md`, and a test compares it. Explanations are in
[experiment_file.md](experiment_file.md), [comparison.md](comparison.md) and
[outputs.md](outputs.md). `fedsim validate` reports violated rules between several keys, each with
its fix. `NAME` stands for names of your own, `[]` for the elements of a list."""

# A lost update and a withdrawal put their keys into the files.
_SAMPLE: dict[str, Any] = {
    "name": "sample",
    "data": {"dataset": "digits", "partition": {"scheme": "iid", "num_clients": 3}},
    "model": {"name": "logistic"},
    "federation": {"rounds": 6},
    "local": {"steps": 4, "batch_size": 64},
    "privacy": {
        "noise_multiplier": 1.0,
        "delta": 1e-4,
        "max_grad_norm": 1.0,
        "on_exhausted": "withdraw",
        "clients": {"1": {"target_epsilon": 3.0}},
    },
    "faults": [{"kind": "dropout_after", "clients": [0], "rounds": [1]}],
}
_COMPARISON: dict[str, Any] = {
    "seeds": 2,
    "baseline": "plain",
    "client_metrics": True,
    "variants": {"plain": {"privacy": None}, "private": {}},
}
# Mappings whose keys are data, not part of the format.
_NAMES = frozenset({"packages", "timeline", "differences", "changes"})


def reference() -> str:
    """Return the page. This takes seconds: it makes a run and a comparison."""
    return "\n".join([_HEAD, *_settings(), *_commands(), *_files(), *_codes()]) + "\n"


def _settings() -> Iterator[str]:
    yield from _section("Keys of an experiment file", _key_table(rows_of(Experiment)))
    for args in dict.fromkeys(entry.args for entry in DATASETS.values()):
        names = "`, `".join(name for name, entry in DATASETS.items() if entry.args is args)
        if args.model_fields:
            title = f"`data.args` of `{names}`"
            yield from _section(title, _key_table(rows_of(args, "data.args")), level=3)
    for name, entry in MODELS.items():
        title = f"`model.args` of `{name}`"
        yield from _section(title, _key_table(rows_of(entry.args, "model.args")), level=3)
    for name, algorithm in algorithms().items():
        if algorithm.Options.model_fields:
            title = f"`federation.strategy` of `{name}`"
            rows = rows_of(algorithm.Options, "federation.strategy")
            yield from _section(title, _key_table(rows), level=3)
    yield from _section("Keys of a comparison file", _key_table(rows_of(ComparisonSettings)))
    for what, settings in FILES.items():
        yield from _section(f"Keys of {what}", _key_table(rows_of(settings)))


def _key_table(rows: Iterable[SettingRow]) -> Iterator[str]:
    table = []
    for row in rows:
        only = f"; only with `{'`, `'.join(row.only_with)}`" if row.only_with else ""
        table.append((f"`{row.key}`", row.values, row.default, row.meaning + only))
    yield from _table(("key", "values", "default", "meaning"), table)


def _commands() -> Iterator[str]:
    yield from _section("Commands", [])
    for name, command in cli.commands.items():
        context = click.Context(command, info_name=f"fedsim {name}")
        usage = " ".join([context.command_path, *command.collect_usage_pieces(context)])
        yield from _section(f"`{usage}`", [" ".join((command.help or "").split())], level=3)
        options = [one for one in command.params if isinstance(one, click.Option)]
        records = [one.get_help_record(context) for one in options]
        rows = [(f"`{record[0]}`", record[1]) for record in records if record is not None]
        yield from ["", *_table(("option", "meaning"), rows)] if rows else []
    rows = [(f"`{option}`", text) for option, text in _common().items()]
    yield from _section("Of every command", _table(("option", "meaning"), rows), level=3)


def _common() -> dict[str, str]:
    context = click.Context(cli, info_name="fedsim", help_option_names=["-h", "--help"])
    found = [one.get_help_record(context) for one in cli.get_params(context)]
    return dict(record for record in found if record is not None)


def _files() -> Iterator[str]:
    with tempfile.TemporaryDirectory() as directory:
        run = fedsim.run(_SAMPLE, out=Path(directory) / "run").path
        compared = fedsim.compare(
            {**_COMPARISON, "base": str(run / "experiment.yaml")}, out=Path(directory) / "compared"
        ).path
        yield from _section("Files of a run", _file_table(run))
        yield from _section("Files of a comparison", _file_table(compared, skip="runs/"))
        one = compared / "runs" / "plain" / "seed-0"
        new = {path.name for path in one.iterdir()} - {path.name for path in run.iterdir()}
        rows = [(f"`{name}`", _keys_of(one / name)) for name in sorted(new)]
        title = "Files that a comparison adds to each of its runs"
        yield from _section(title, _table(("file", "keys"), rows), level=3)


def _file_table(directory: Path, skip: str = "\0") -> Iterator[str]:
    names = sorted(
        path.relative_to(directory).as_posix() for path in directory.rglob("*") if path.is_file()
    )
    rows = [(f"`{name}`", _keys_of(directory / name)) for name in names if skip not in name]
    yield from _table(("file", "keys"), [row for row in rows if not row[0].startswith("`.")])


def _keys_of(path: Path) -> str:
    text = path.read_bytes()
    if path.suffix == ".json":
        keys = list(_paths(json.loads(text)))
    elif path.suffix == ".jsonl":
        lines = [json.loads(line) for line in text.splitlines()]
        keys = list(dict.fromkeys(key for line in lines for key in _paths(line)))
    elif path.suffix == ".csv":
        keys = text.decode().splitlines()[0].split(",")
    else:
        return ""
    return ", ".join(f"`{key}`" for key in keys)


def _paths(value: object, path: str = "") -> Iterator[str]:
    """Yield the paths of all keys; of a list, those of its first element, with `[]`."""
    if isinstance(value, list):
        yield from _paths(value[0], f"{path}[]") if value else ()
    if not isinstance(value, Mapping):
        return
    for key, inner in value.items():
        name = f"{path}.{key}" if path else key
        yield name
        if key not in _NAMES and not path.endswith(("values", "event")):
            yield from _paths(inner, name)


def _codes() -> Iterator[str]:
    rows = [(str(int(code)), meaning) for code, meaning in EXIT_CODES.items()]
    yield from _section("Exit codes", _table(("code", "meaning"), rows))


def _section(title: str, lines: Iterable[str], *, level: int = 2) -> Iterator[str]:
    yield from ["", f"{'#' * level} {title}"]
    body = list(lines)
    yield from ["", *body] if body else []


def _table(head: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> Iterator[str]:
    for row in (head, ("---",) * len(head), *rows):
        yield f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in row)} |"


if __name__ == "__main__":
    click.echo(reference(), nl=False)
