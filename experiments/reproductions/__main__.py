"""Measure published results again: `python -m experiments.reproductions --help`."""

import sys
from datetime import UTC, datetime
from pathlib import Path

import click
from rich.console import Console
from rich.table import Table

import fedsim
from experiments.reproductions.records import PAGE, Record, read_records, render_page, write_record
from experiments.reproductions.study import Setup, Size, Study, find_studies
from fedsim.core.errors import FedsimError

_DIFFERS = 1
_STYLES = {"agrees": "green", "differs": "red", "unclear": "yellow", "context": "dim"}


@click.command(context_settings={"max_content_width": 100})
@click.argument("names", nargs=-1)
@click.option(
    "--size", type=click.Choice(["reduced", "full"]), default="reduced", show_default=True
)
@click.option("--seeds", metavar="N", help="number of seeds, or a list: 3,7; default: the study's")
@click.option(
    "--data",
    type=click.Path(path_type=Path),
    default=Path("data"),
    show_default=True,
    help="directory of files that you bring",
)
@click.option(
    "--out",
    type=click.Path(path_type=Path),
    default=Path("runs/reproductions"),
    show_default=True,
    help="directory of the runs; finished ones are used again",
)
@click.option("--workers", type=click.IntRange(min=1), help="processes; default: one per processor")
@click.option("--write", is_flag=True, help="write the records and docs/reproductions.md")
@click.option("--only-page", is_flag=True, help="write the page from the records, measure nothing")
@click.option("--list", "only_list", is_flag=True, help="print the studies and end")
def main(
    names: tuple[str, ...],
    *,
    size: Size,
    seeds: str | None,
    data: Path,
    out: Path,
    workers: int | None,
    write: bool,
    only_page: bool,
    only_list: bool,
) -> None:
    """Measure the published results of the studies NAMES (all) and print both side by side.

    A study whose files are missing is skipped with a line that names them. The exit code is 1 where
    a result differs from the published one.
    """
    studies = find_studies()
    unknown = sorted(set(names) - set(studies))
    if unknown:
        raise click.UsageError(f"no study {', '.join(unknown)}; there are {', '.join(studies)}")
    chosen = seeds_of(seeds)
    if only_list:
        for name, study in studies.items():
            click.echo(f"{name}: {study.title}. {study.source}")
        return
    differs = False
    for name in () if only_page else names or studies:
        study = studies[name]
        missing = study.missing_files(data)
        if missing:
            files = ", ".join(str(data / one.path) for one in missing)
            origins = "; ".join(sorted({one.origin for one in missing}))
            click.echo(f"{name}: skipped, it needs {files} ({origins})", err=True)
            continue
        setup = Setup(
            size=size,
            seeds=chosen or range(study.seeds[size]),
            out=out / f"{name}-{size}",
            data=data,
            workers=workers,
        )
        record = measure(name, study, setup)
        print_record(record, study)
        differs |= any(row.verdict == "differs" for row in record.rows)
        if write:
            write_record(record)
    if write or only_page:
        PAGE.write_text(render_page(PAGE.read_text(), studies, read_records()))
    if differs:
        sys.exit(_DIFFERS)


def seeds_of(text: str | None) -> list[int] | None:
    """Return the seeds of `--seeds`: 3 is 0, 1 and 2; a list is itself.

    Raises:
        click.UsageError: it is neither.
    """
    if text is None:
        return None
    parts = text.split(",")
    if not all(part.strip().isdigit() for part in parts) or text.strip() == "0":
        raise click.UsageError(
            f"--seeds must be a number of seeds, or a list such as 3,7, got {text!r}"
        )
    return list(range(int(text))) if len(parts) == 1 else [int(part) for part in parts]


def measure(name: str, study: Study, setup: Setup) -> Record:
    """Measure a study and return its record.

    Args:
        name: the study's module.
        study: the study.
        setup: size, seeds and directories.
    """
    rows = study.measure(setup)
    command = f"python -m experiments.reproductions {name} --size {setup.size}"
    seeds = list(setup.seeds)
    is_usual = seeds == list(range(study.seeds[setup.size]))
    listed = f"{len(seeds)}" if seeds == list(range(len(seeds))) else ",".join(map(str, seeds))
    return Record(
        name=name,
        size=setup.size,
        date=datetime.now(UTC).date().isoformat(),
        version=fedsim.__version__,
        command=command if is_usual else f"{command} --seeds {listed}",
        rows=tuple(rows),
    )


def print_record(record: Record, study: Study) -> None:
    """Print the settings of a study and the rows of its record."""
    console = Console(width=None if sys.stdout.isatty() else 140)
    console.print(f"{study.source}. {study.settings}", markup=False, highlight=False)
    table = Table(title=f"{record.name} ({record.size}, {record.date}): {study.title}")
    for column in ("result", "published", "measured", "agrees within", "verdict"):
        table.add_column(column, overflow="fold")
    for row in record.rows:
        style = _STYLES[row.verdict]
        table.add_row(
            row.what, row.published, row.measured, row.tolerance, row.verdict, style=style
        )
    console.print(table)


if __name__ == "__main__":
    try:
        main(prog_name="python -m experiments.reproductions")
    except FedsimError as error:
        sys.exit(f"error: {error}")
