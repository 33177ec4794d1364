"""The notebook of the docs is run from its first cell to its last, without Jupyter.

With WRITE_DOCS=1 in the environment, what its cells print is written into it.
"""

import ast
import contextlib
import io
import json
import math
import os
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parent.parent.parent
NOTEBOOK = ROOT / "docs" / "notebooks" / "first_federation.ipynb"
TOLERANCE = 0.05  # of an accuracy or a loss: other processors add in another order
pytestmark = pytest.mark.skipif(not NOTEBOOK.exists(), reason="reads the documents of a checkout")


def run_cell(source: str, namespace: dict[str, Any]) -> list[dict[str, Any]]:
    """Run a cell as a notebook does and return its outputs."""
    module, shown = ast.parse(source), None
    last = module.body.pop() if isinstance(module.body[-1], ast.Expr) else None
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(compile(module, "cell", "exec"), namespace)
        if last is not None and isinstance(last, ast.Expr):
            shown = eval(compile(ast.Expression(last.value), "cell", "eval"), namespace)
    outputs: list[dict[str, Any]] = []
    if printed.getvalue():
        text = lines(printed.getvalue())
        outputs.append({"name": "stdout", "output_type": "stream", "text": text})
    if shown is not None:
        data = {"text/plain": lines(repr(shown))}
        if (svg := getattr(shown, "_repr_svg_", lambda: None)()) is not None:
            data["image/svg+xml"] = lines(svg)
        elif (html := getattr(shown, "_repr_html_", lambda: None)()) is not None:
            data["text/html"] = lines(html)
        outputs.append({"data": data, "metadata": {}, "output_type": "display_data"})
    return outputs


def lines(text: str) -> list[str]:
    return text.splitlines(keepends=True)


def words(outputs: list[dict[str, Any]]) -> list[str]:
    """Return the words that a cell prints; a drawing and a table of HTML have none."""
    texts: list[str] = [text for one in outputs for text in one.get("text", [])]
    texts += [text for one in outputs for text in one.get("data", {}).get("text/plain", [])]
    return "".join(texts).split()


def alike(shown: list[str], printed: list[str]) -> bool:
    """Whether a cell prints what the notebook shows; only figures of a model may differ."""
    of_a_model = any("accuracy" in word for word in shown)
    return len(shown) == len(printed) and all(
        one == other or (of_a_model and close(one, other))
        for one, other in zip(shown, printed, strict=True)
    )


def close(one: str, other: str) -> bool:
    try:
        numbers = [float(word.strip("%,()")) for word in (one, other)]
    except ValueError:
        return False
    return math.isclose(*numbers, rel_tol=TOLERANCE, abs_tol=TOLERANCE)


@pytest.mark.slow
def test_every_cell_prints_what_the_notebook_shows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    notebook = json.loads(NOTEBOOK.read_text(encoding="utf-8"))
    namespace: dict[str, Any] = {"__name__": "__main__"}
    wrong = []
    for number, cell in enumerate(cells_of(notebook), start=1):
        outputs = run_cell("".join(cell["source"]), namespace)
        shown, printed = words(cell["outputs"]), words(outputs)
        kinds = [[*one.get("data", {})] for one in outputs]
        same = kinds == [[*one.get("data", {})] for one in cell["outputs"]]
        if not same or not alike(shown, printed):
            wrong.append(f"cell {number} shows\n{shown}\nand printed\n{printed}")
            cell["outputs"] = outputs
        cell["execution_count"] = number
    if os.environ.get("WRITE_DOCS") == "1":
        text = json.dumps(notebook, indent=1, ensure_ascii=False)
        NOTEBOOK.write_text(text + "\n", encoding="utf-8")
    assert not wrong, "\n\n".join(wrong)


def cells_of(notebook: dict[str, Any]) -> list[dict[str, Any]]:
    return [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]


def test_the_notebook_is_one_that_jupyter_reads() -> None:
    notebook = json.loads(NOTEBOOK.read_text(encoding="utf-8"))
    assert (notebook["nbformat"], notebook["nbformat_minor"]) == (4, 5)
    assert all(set(cell) >= {"cell_type", "id", "metadata", "source"} for cell in notebook["cells"])
    assert len({cell["id"] for cell in notebook["cells"]}) == len(notebook["cells"])
    assert all(cell["outputs"] for cell in cells_of(notebook))
    assert len(cells_of(notebook)) >= 7
