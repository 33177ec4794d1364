"""Sphinx: the documentation site, built and read without network."""

import json
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from docutils import nodes
from myst_parser.parsers.sphinx_ import MystParser
from sphinx.application import Sphinx

_PROJECT = tomllib.loads((Path(__file__).parent.parent / "pyproject.toml").read_text())["project"]

project = "fedsim"
author = "The fedsim developers"
release = version = _PROJECT["version"]

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
myst_heading_anchors = 3
nitpicky = False
suppress_warnings = [
    "misc.highlighting_failure",  # what a command prints is no program
    "toc.not_included",  # pages of developers; tests/docs/test_site.py finds a page that is missing
]

autodoc_typehints = "description"
autodoc_member_order = "bysource"
autodoc_default_options = {"members": True, "inherited-members": False}
default_role = "code"  # docstrings write code in single backticks
napoleon_use_ivar = True

html_theme = "furo"  # system fonts, nothing from the network
html_title = f"fedsim {release}"
html_copy_source = False
html_show_copyright = False


def _tables(
    app: object, what: str, name: str, obj: object, options: object, lines: list[str]
) -> None:
    """Rewrite the Markdown tables of a docstring as list tables of reStructuredText."""
    text: list[str] = []
    inside = False
    for line in lines:
        row = line.strip()
        if not row.startswith("|"):
            text.append(line)
            inside = False
            continue
        if not inside:
            text += ["", ".. list-table::", "   :header-rows: 1", ""]
            inside = True
        cells = [cell.strip() for cell in row.strip("|").split(" | ")]
        if set(row) <= set("|-: "):
            continue
        text += [f"   {'* -' if not place else '  -'} {cell}" for place, cell in enumerate(cells)]
    lines[:] = text


def _add_contents(app: object, name: str, source: list[str]) -> None:
    """Add a hidden table of contents to each section of a page of links."""
    if name not in ("index", "decisions/README"):
        return
    sections = []
    for section in source[0].split("\n## "):
        pages = re.findall(r"\]\(([\w/]+)\.(?:md|ipynb)\)", section)
        caption = section.split("\n", 1)[0].lstrip("# ")
        head = f"```{{toctree}}\n:hidden:\n:caption: {caption}\n"
        contents = "\n".join([head, *pages, "```\n"])
        sections.append(f"{section}\n{contents}" if pages else section)
    source[0] = "\n## ".join(sections)


class NotebookParser(MystParser):
    """Reads a notebook as a page of Markdown: its text, its code, and what its cells printed."""

    supported = ("ipynb",)

    def parse(self, inputstring: str, document: nodes.document) -> None:
        """Parse the JSON of a notebook into a document."""
        cells = json.loads(inputstring)["cells"]
        super().parse("\n\n".join(part for cell in cells for part in _parts(cell)), document)


def _parts(cell: dict[str, Any]) -> Iterator[str]:
    """Yield the parts of a cell as Markdown."""
    source = "".join(cell["source"])
    if cell["cell_type"] == "markdown":
        yield source
        return
    yield f"```python\n{source}\n```"
    for output in cell["outputs"]:
        data = output.get("data", {})
        html = data.get("text/html") or data.get("image/svg+xml")
        if html is not None:
            yield f"````{{raw}} html\n{''.join(html)}\n````"
        else:
            yield f"```text\n{''.join(data.get('text/plain', output.get('text', [])))}\n```"


def setup(app: Sphinx) -> None:
    """Register the hooks and the parser of notebooks."""
    app.connect("source-read", _add_contents)
    app.connect("autodoc-process-docstring", _tables, priority=400)
    app.add_source_suffix(".ipynb", "ipynb")
    app.add_source_parser(NotebookParser)
