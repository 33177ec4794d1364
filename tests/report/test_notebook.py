"""Progress in a notebook, with a stand-in for IPython: it is no dependency."""

import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

import fedsim
from fedsim.report.progress import NotebookArea, notebook_console

EXPERIMENT = {
    "name": "shown",
    "data": {"dataset": "digits", "partition": {"scheme": "iid", "num_clients": 2}},
    "model": {"name": "logistic"},
    "federation": {"rounds": 3},
    "local": {"steps": 1, "batch_size": 16},
    "privacy": None,
}


class Display(ModuleType):
    """Stands for IPython.display: remembers what is shown where."""

    def __init__(self) -> None:
        super().__init__("IPython.display")
        self.outputs: dict[str, list[dict[str, str]]] = {}

    def display(self, bundle: dict[str, str], *, raw: bool, display_id: str) -> None:
        assert raw
        assert display_id not in self.outputs
        self.outputs[display_id] = [bundle]

    def update_display(self, bundle: dict[str, str], *, raw: bool, display_id: str) -> None:
        assert raw
        self.outputs[display_id].append(bundle)

    @property
    def last(self) -> dict[str, str]:
        (versions,) = self.outputs.values()
        return versions[-1]


def use(monkeypatch: pytest.MonkeyPatch, shell: Any) -> Display:
    ipython, display = ModuleType("IPython"), Display()
    ipython.version_info = (9, 0)  # type: ignore[attr-defined]  matplotlib asks
    ipython.get_ipython = lambda: shell  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "IPython", ipython)
    monkeypatch.setitem(sys.modules, "IPython.display", display)
    return display


def test_a_notebook_shows_a_run_in_one_output(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    display = use(monkeypatch, SimpleNamespace(kernel=object()))
    fedsim.run(EXPERIMENT, out=tmp_path / "r")
    (versions,) = display.outputs.values()
    lines = versions[-1]["text/plain"].splitlines()
    assert lines[0].startswith("shown: 2 clients with ")
    assert [line for line in lines if line.startswith("round ")] == [lines[-1]]
    assert lines[-1].startswith("round 3/3")
    (first,) = [version for version in versions if "round 1/3" in version["text/plain"]]
    assert '<progress style="width: 30em" value="1" max="3"></progress>' in first["text/html"]
    assert capsys.readouterr() == ("", "")


def test_a_notebook_shows_the_mistakes_of_an_experiment_without_a_traceback() -> None:
    with pytest.raises(fedsim.ExperimentError) as caught:
        fedsim.run(EXPERIMENT, overrides={"federation.round": 3, "seed": -1})
    lines = caught.value._render_traceback_()
    assert lines[0] == "ExperimentError:"
    assert lines[1:] == str(caught.value).splitlines()
    assert len(lines) == 3


@pytest.mark.parametrize("shell", [None, SimpleNamespace()])
def test_elsewhere_nothing_is_shown(monkeypatch: pytest.MonkeyPatch, shell: Any) -> None:
    use(monkeypatch, shell)
    assert notebook_console() is None


def test_without_ipython_nothing_is_shown() -> None:
    assert "IPython" not in sys.modules
    assert notebook_console() is None


def test_passing_lines_are_replaced_and_text_is_escaped() -> None:
    display = Display()
    area = NotebookArea(display)
    area.write("checking the model ...\n")
    assert display.last["text/html"].endswith('<progress style="width: 30em"></progress>')
    for text in (
        "<b> a\n",
        "checking the model ...\n",
        "1/2  x: ",
        "completed\nlost\n",
        "2/2  y\n",
    ):
        area.write(text)
    assert display.last["text/plain"] == "<b> a\nlost\n2/2  y"
    assert display.last["text/html"] == (
        "<pre>&lt;b&gt; a\nlost\n2/2  y</pre>"
        '<progress style="width: 30em" value="2" max="2"></progress>'
    )
    area.write("done\n")
    assert "progress" not in display.last["text/html"]
