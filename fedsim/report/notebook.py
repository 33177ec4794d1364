"""Progress in a notebook: an output of its cell that is written anew with every line.

Nothing is imported for it: a notebook has IPython loaded already.
"""

import io
import re
import sys
from html import escape
from importlib import import_module
from typing import Any
from uuid import uuid4

from rich.console import Console

from fedsim.report.progress import ProgressObserver

_MAX_LINES = 40
_WIDTH = 100
# Lines that count or name a phase: `round 3/20`, `3/9  eps-6, seed 1`, `checking the model ...`.
_PASSING = re.compile(r"(round )?\d+/\d+\b.*|.* \.\.\.")


def notebook_progress() -> ProgressObserver | None:
    """Return an observer that shows a run in the notebook; None outside of one."""
    console = notebook_console()
    return None if console is None else ProgressObserver(console)


def notebook_console() -> Console | None:
    """Return a console that prints into the running cell of a notebook; None outside of one."""
    ipython: Any = sys.modules.get("IPython")
    shell = None if ipython is None else ipython.get_ipython()
    if shell is None or not hasattr(shell, "kernel"):  # IPython in a terminal has none
        return None
    area = NotebookArea(import_module("IPython.display"))
    return Console(file=area, width=_WIDTH, force_terminal=False, force_jupyter=False)


class NotebookArea(io.StringIO):
    """A text stream that shows its last lines in one output of a cell.

    A line that counts or names a phase is replaced by the next line.

    Args:
        display: the module `IPython.display`.
    """

    def __init__(self, display: Any) -> None:
        super().__init__()
        self._display = display
        self._id = uuid4().hex
        self._shown = False
        self._rest = ""
        self._lines: list[str] = []

    def write(self, text: str, /) -> int:
        """Add text; whole lines are shown."""
        *lines, self._rest = (self._rest + text).split("\n")
        for line in lines:
            if self._lines and _PASSING.fullmatch(self._lines[-1]):
                self._lines.pop()
            self._lines.append(line)
        if lines:
            self._show()
        return len(text)

    def _show(self) -> None:
        text = "\n".join(self._lines[-_MAX_LINES:])
        bundle = {"text/plain": text, "text/html": f"<pre>{escape(text)}</pre>"}
        show = self._display.update_display if self._shown else self._display.display
        show(bundle, raw=True, display_id=self._id)
        self._shown = True
