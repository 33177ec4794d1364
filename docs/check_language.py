"""Finds turns of phrase that docs/style.md rules out.

    python docs/check_language.py [FILE...]

Without files: all pages and all code. One line for each finding, with its place and its fix; exit
code 1 if there is one. Fenced blocks, names in backticks, generated pages and decision records
are left out.
"""

import re
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parent.parent
_CODE = ("fedsim", "clients", "server", "accountant")
_LEFT_OUT = ("docs/style.md", "docs/reference/keys.md", "docs/check_language.py", "docs/_build/")
_RECORDS = "docs/decisions/"

EVERYWHERE = {
    r"what came of": "name the result",
    r"what (?:\w+ )?\w+ comes? to": "name the quantity: 'ε of the ledger'",
    r"it and the other": "name both things",
    r"as they come": "state the order",
    r"mend(?:s|ed)?": "fix",
    r"whose \w+ is asked for": "requested",
    r"(?:utili[sz]e|leverage)[sd]?|in order to|seamless(?:ly)?": "use a plain word",
}
PAGES = {
    r"somebody|whoever|the one who": "name the party: the server, an adversary, a client",
    r"its part": "name the part",
    r"(?<!a )(?<!\*)lots?": "batch",
    r"cohorts?": "the clients of a round, or a block",
    r"roll call": "node registration",
    r"go(?:es)? on with": "continue with",
    r"hands? (?:on|over)": "pass, send or share",
    r"turns? out": "state the fact",
}
_TWO_SEMICOLONS = re.compile(r";[^;]*;")


def problems(path: Path) -> Iterator[str]:
    """Yield the findings of a page or a module, one line each."""
    name = path.relative_to(ROOT).as_posix()
    if name.startswith(_LEFT_OUT):
        return
    is_page = path.suffix == ".md" and not name.startswith(_RECORDS)
    patterns = EVERYWHERE | (PAGES if is_page else {})
    text = _prose(path.read_text(encoding="utf-8")) if path.suffix == ".md" else path.read_text()
    every = _compiled("|".join(patterns))  # most lines have none of them
    for number, line in enumerate(text.splitlines(), start=1):
        for pattern, fix in patterns.items() if every.search(line) else ():
            for found in _compiled(pattern).finditer(line):
                yield f"{name}:{number}: '{found[0]}': {fix}"
    if is_page:
        yield from (f"{name}: two semicolons in a sentence: {one}" for one in _long(text))


@cache
def _compiled(pattern: str) -> re.Pattern[str]:
    return re.compile(rf"\b(?:{pattern})\b", re.IGNORECASE)


def _prose(text: str) -> str:
    """Return a page without fenced blocks, names in backticks and targets of links."""
    text = re.sub(r"^(`{3,}).*?^\1", _blank, text, flags=re.MULTILINE | re.DOTALL)
    text = re.sub(r"`[^`\n]*`", "x", text)
    return re.sub(r"\]\([^)]*\)", "]", text)


def _blank(found: re.Match[str]) -> str:
    return "\n" * found[0].count("\n")


def _long(text: str) -> Iterator[str]:
    """Yield sentences with two semicolons or more; cells of tables may be lists."""
    text = re.sub(r"^\|.*$", "", text, flags=re.MULTILINE)
    for paragraph in re.split(r"\n\s*\n|\n(?=\s*(?:-|\d+\.) )", text):
        for sentence in re.split(r"(?<=[.!?:])\s", " ".join(paragraph.split())):
            if _TWO_SEMICOLONS.search(sentence):
                yield sentence[:80]


def all_files() -> list[Path]:
    """Return the pages and the code of the repository."""
    code = [path for room in _CODE for path in (ROOT / room).rglob("*.py")]
    return sorted([ROOT / "README.md", *(ROOT / "docs").rglob("*.md"), *code])


def main(names: list[str]) -> int:
    """Print the findings and return the exit code."""
    files = [Path(name).resolve() for name in names] or all_files()
    found = [problem for path in files for problem in problems(path)]
    sys.stdout.writelines(f"{problem}\n" for problem in found)
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
