"""Prints the tables of README.md from the records: no number there is typed by hand.

    python benchmarks/table.py benchmarks/results/*.json
    python benchmarks/table.py --readme benchmarks/results/*.json    # rewrites README.md

A table a script, a row a claim, a cell a case. Of each case the newest record counts that has a
value; the goal is that of the newest record. Of a script that has goals, numbers without one stay
in the records.
"""

import argparse
import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from records import Number

README = Path(__file__).with_name("README.md")
BEGIN, END = "<!-- tables: begin, written by table.py -->", "<!-- tables: end -->"

Record = dict[str, Any]


def read_records(paths: Sequence[Path]) -> list[Record]:
    """Return the records of files, the oldest first; those of one day in the order of names."""
    records = [(path.name, json.loads(path.read_text())) for path in paths]
    return [record for _, record in sorted(records, key=lambda one: (one[1]["date"], one[0]))]


def tables(records: Sequence[Record]) -> str:
    """Return the tables of all scripts in Markdown.

    Args:
        records: contents of the files, the oldest first.
    """
    scripts = sorted({record["script"] for record in records})
    parts = [_table(s, [r for r in records if r["script"] == s]) for s in scripts]
    return "\n\n".join(part for part in parts if part)


def _table(script: str, records: Sequence[Record]) -> str:
    """Return one script's table; "" where its records have no numbers."""
    newest: dict[tuple[str, str], tuple[Record, Number]] = {}
    for record in records:
        for fields in record["numbers"]:
            number = Number(**fields)
            key = number.claim, number.case
            if number.value is None and key in newest:
                source, known = newest[key]
                newest[key] = source, replace(known, goal=number.goal, least=number.least)
            else:
                newest[key] = record, number
    judged = {key for key, (_, number) in newest.items() if number.goal is not None}
    rows: dict[tuple[str, str, str], list[str]] = {}
    for key, (record, number) in newest.items():
        if judged and key not in judged:
            continue
        where = "" if number.value is None else f"{_machine(record)}, {record['date']}"
        row = rows.setdefault((number.claim, record["command"], where), [])
        row.append(f"{number.case}: {number.text()}")
    if not rows:
        return ""
    head = f"| `{script}` | command | number (quartiles; goal) | machine, date |"
    lines = [
        f"| {claim} | `{command}` | {' · '.join(cells)} | {where} |"
        for (claim, command, where), cells in sorted(rows.items(), key=lambda row: row[0][0])
    ]
    return "\n".join([head, "|---|---|---|---|", *lines])


def _machine(record: Record) -> str:
    machine = record["machine"]
    parts = [machine["processor"], "AVX-512" if machine.get("avx512") else ""]
    parts += [machine.get("gpu", ""), f"{machine['cores']} cores"]
    return ", ".join(part for part in parts if part)


def with_tables(readme: str, content: str) -> str:
    """Return the text of README.md with its tables replaced.

    Raises:
        ValueError: the text has no marks around its tables.
    """
    before, begin, rest = readme.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"README.md has no tables between {BEGIN!r} and {END!r}; add both lines")
    return f"{before}{BEGIN}\n\n{content}\n\n{END}{after}"


def main() -> None:
    """Print the tables, or write them into README.md."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("records", type=Path, nargs="+", help="JSON files")
    parser.add_argument("--readme", action="store_true", help="write the tables into README.md")
    options = parser.parse_args()
    content = tables(read_records(options.records))
    if options.readme:
        README.write_text(with_tables(README.read_text(), content))
    else:
        print(content)


if __name__ == "__main__":
    main()
