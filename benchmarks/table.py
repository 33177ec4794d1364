"""Prints the tables of README.md from the records: no number there is typed by hand.

    python benchmarks/table.py benchmarks/results/*.json
    python benchmarks/table.py --readme benchmarks/results/*.json    # rewrites README.md

A table a script, under the first line of its text; a row a claim. Of each case and each maker of
processors the newest record counts that has a value; the goal is that of the newest record. Of a
script that has goals, numbers without one stay in the records. A script without any value has one
line that says so.
"""

import argparse
import ast
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
    newest: dict[_Key, tuple[Record, Number]] = {}
    goals: dict[tuple[str, str], Number] = {}
    for record in records:
        for fields in record["numbers"]:
            number = Number(**fields)
            goals[number.claim, number.case] = number
            kind = "" if number.value is None else _kind(record)
            newest[number.claim, number.case, kind] = record, number
    rows: dict[str, dict[tuple[str, str], list[str]]] = {}
    for (claim, case, kind), (record, number) in newest.items():
        goal = goals[claim, case]
        if not kind or (goal.goal is None and any(one.goal is not None for one in goals.values())):
            continue
        where = f"{_machine(record)}, {record['date']}"
        text = replace(number, goal=goal.goal, least=goal.least).text()
        cells = rows.setdefault(claim, {}).setdefault((record["command"], where), [])
        cells.append(f"{case}: {text}")
    if not rows:
        return f"`{script}` ({_purpose(script)}): not measured yet." if goals else ""
    head = f"| `{script}`: {_purpose(script)} | number (quartiles; goal), command, machine, date |"
    lines = []
    for claim, parts in sorted(rows.items()):
        found = [
            " · ".join(cells) + f" — `{command}`, {where}"
            for (command, where), cells in parts.items()
        ]
        lines.append(f"| {claim} | {'<br>'.join(found)} |")
    return "\n".join([head, "|---|---|", *lines])


_Key = tuple[str, str, str]  # claim, case and maker of the processor; "" for what is to be measured


def _purpose(script: str) -> str:
    """Return the first line of a script's text, without its full stop."""
    path = Path(__file__).with_name(script)
    text = ast.get_docstring(ast.parse(path.read_text())) if path.exists() else None
    first = (text or script).splitlines()[0].rstrip(".")
    return first[0].lower() + first[1:]


def _kind(record: Record) -> str:
    """Return the maker of the processor, which is its first word, and the GPU."""
    machine = record["machine"]
    return machine["processor"].split()[0] + machine.get("gpu", "")


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
