"""The comparison of results sees every kind of difference, and nothing that differs by itself."""

import json
import sys
from collections.abc import Callable, Sequence
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from fedsim.experiment import load_experiment

RESULTS = {"cnn": {"ledger.jsonl": "one\ntwo", "messages": "a", "digests of settings": "x"}}
Compare = Callable[..., int]


def changed(part: str, content: str | None) -> dict[str, dict[str, str]]:
    """Return the results with another content of a part; None: without it."""
    other = {**RESULTS["cnn"], part: content}
    return {"cnn": {name: text for name, text in other.items() if text is not None}}


@pytest.fixture
def compare(
    script: Callable[[str], ModuleType], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> Compare:
    """Run the script on checkouts with given results; return its exit code."""
    module = script("same_results")

    def run(*results: dict[str, dict[str, str]], options: Sequence[str] = ()) -> int:
        checkouts = {tmp_path / str(number): own for number, own in enumerate(results)}
        for one in checkouts:
            (one / "fedsim").mkdir(parents=True, exist_ok=True)

        def perform(checkout: Path, names: Sequence[str], folder: Path) -> Any:
            for name, parts in checkouts[checkout].items():
                for part, text in parts.items():
                    (folder / "texts" / name).mkdir(parents=True, exist_ok=True)
                    (folder / "texts" / name / part).write_text(text)
            return module.digests_of(folder / "texts")

        monkeypatch.setattr(module, "perform", perform)
        monkeypatch.setattr(sys, "argv", ["same_results.py", *map(str, checkouts), *options])
        try:
            module.main()
        except SystemExit as end:
            return int(end.code or 0)
        return 0

    return run


def test_equal_results_are_equal(compare: Compare, capsys: pytest.CaptureFixture[str]) -> None:
    assert compare(RESULTS, RESULTS) == 0
    assert capsys.readouterr().out == "cnn: equal\n"


@pytest.mark.parametrize(
    ("after", "told"),
    [
        (changed("ledger.jsonl", "one\n2"), "cnn: ledger.jsonl, line 2: 'two' became '2'\n"),
        (changed("ledger.jsonl", "one"), "line 2: 'two' became '(no line)'\n"),
        (changed("messages", None), "cnn: messages, only before\n"),
        (changed("clients.csv", "a"), "cnn: clients.csv, only after\n"),
        ({"cnn": {"messages": "a"}}, "cnn: ledger.jsonl, only before; also digests of settings\n"),
    ],
)
def test_a_difference_is_shown_and_ends_with_1(
    compare: Compare, capsys: pytest.CaptureFixture[str], after: Any, told: str
) -> None:
    assert compare(RESULTS, after) == 1
    assert told in capsys.readouterr().out


def test_an_experiment_of_one_side_is_a_difference(
    compare: Compare, capsys: pytest.CaptureFixture[str]
) -> None:
    assert compare(RESULTS, {**RESULTS, "votes": {"messages": "a"}}) == 1
    assert capsys.readouterr().out == "cnn: equal\nvotes: only after\n"


def test_renamed_settings_are_no_difference(compare: Compare) -> None:
    after = changed("digests of settings", "y")
    assert compare(RESULTS, after) == 1
    assert compare(RESULTS, after, options=["--renamed"]) == 0
    assert compare(RESULTS, changed("messages", "b"), options=["--renamed"]) == 1


def test_saved_digests_are_compared(
    compare: Compare, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    saved = tmp_path / "saved.json"
    assert compare(RESULTS, options=["--save", str(saved)]) == 0
    assert set(json.loads(saved.read_text())["cnn"]) == set(RESULTS["cnn"])
    assert compare(RESULTS, options=["--against", str(saved)]) == 0
    assert compare(changed("messages", "b"), options=["--against", str(saved)]) == 1
    assert capsys.readouterr().out == "cnn: equal\ncnn: messages, differs\n"


def test_times_and_versions_are_left_out(benchmarks: Path, tmp_path: Path) -> None:
    texts = import_module("same.texts").Texts()
    (tmp_path / "summary.json").write_text('{"seconds": 0.2, "epsilon": {"max": 1.5}}')
    row = {"client": 1, "request": "ab", "ledger": [{"count": 2}]}
    (tmp_path / "ledger.jsonl").write_text(f"{json.dumps(row)}\n")
    (tmp_path / "environment.json").write_text("{}")
    (tmp_path / "report.html").write_text(
        "<head><title>a</title></head><body><p>accuracy 90 %, 0.3 s</p>\n"
        "<tr><th>train</th><td>59 ms</td><td>8.0%</td></tr>\n"
        '<figure><svg aria-label="loss over seconds"></svg></figure>\n'
        '<figure><svg aria-label="loss over round"><path d="M1 2"/></svg></figure>\n'
        '<section id="settings"><p>commit</p></section></body>'
    )
    texts.run(tmp_path)
    assert "".join(texts["summary.json"]).replace(" ", "") == '{"epsilon":{"max":1.5}}'
    assert texts["ledger.jsonl"] == ['{"client": 1, "ledger": [{"count": 2}]}']
    assert texts["digests of settings"] == ['ledger.jsonl:1 request = "ab"']
    assert texts["report.html"] == ["accuracy 90 %", "aria-label loss over round", "d M1 2"]
    assert "environment.json" not in texts


def test_every_experiment_is_accepted(benchmarks: Path) -> None:
    table = import_module("same.experiments")
    for settings in table.EXPERIMENTS.values():
        load_experiment(table.BASE, overrides=settings)


@pytest.mark.slow  # a real process
def test_a_run_is_equal_to_itself(
    script: Callable[[str], ModuleType], tmp_path: Path, benchmarks: Path
) -> None:
    perform = script("same_results").perform
    first, second = (
        perform(benchmarks.parent, ["plain", "privacy-engine"], tmp_path / name) for name in "ab"
    )
    assert first == second
    assert {"model.safetensors", "messages", "rounds.jsonl", "terminal"} <= set(first["plain"])
    assert set(first["privacy-engine"]) == {"model", "ledger", "epsilon"}
