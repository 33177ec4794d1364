"""The number of clients is in the file, or the data show it; each rule runs once either way."""

from collections import Counter
from collections.abc import Callable, Iterator
from functools import wraps
from pathlib import Path

import pytest
import yaml

from fedsim.experiment import (
    Experiment,
    ExperimentError,
    ExperimentWithClients,
    dump_experiment,
    load,
    load_experiment,
    read_settings,
)
from fedsim.experiment.load import RULES, with_clients
from fedsim.experiment.messages import PathMessage

Rule = Callable[..., Iterator[PathMessage]]
WAITING = {"check_participation", "check_clients_of_scheme", "check_budgets", "check_faults"}


@pytest.fixture
def of_data(good: str, tmp_path: Path) -> str:
    """Return a file whose number of clients only the data know."""
    (tmp_path / "p.py").write_text("def split(features, targets, seed): ...\n")
    given = "{scheme: dirichlet, num_clients: 10, alpha: 0.5}"
    return good.replace(given, "{scheme: './p.py:split'}").replace("  clients_per_round: 10\n", "")


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Count the calls of every rule."""
    found = Counter[str]()

    def counted(rule: Rule) -> Rule:
        @wraps(rule)
        def count(**needs: object) -> Iterator[PathMessage]:
            found[rule.__name__] += 1
            return rule(**needs)

        return count

    monkeypatch.setattr(load, "RULES", tuple(map(counted, RULES)))
    return found


def test_every_rule_runs_once(calls: Counter[str], write, good: str, of_data: str) -> None:
    load_experiment(write(good))
    written = Counter(calls)
    calls.clear()
    loaded = load_experiment(write(of_data))
    assert not WAITING & calls.keys()
    known = with_clients(loaded, 10)
    assert calls == written
    assert calls.keys() > WAITING
    assert set(calls.values()) == {1}
    assert known.num_clients == known.data.partition.num_clients == 10


def test_a_section_is_validated_once(monkeypatch: pytest.MonkeyPatch, write, good: str) -> None:
    calls = Counter[str]()
    validate = Experiment.model_validate.__func__

    def count(kind: type, *args: object, **keys: object) -> object:
        calls[kind.__name__] += 1
        return validate(kind, *args, **keys)

    monkeypatch.setattr("fedsim.core.settings.Settings.model_validate", classmethod(count))
    load_experiment(write(good))
    assert calls["Experiment"] == 1
    assert not [name for name in calls if name.endswith("Settings")]


def test_a_file_with_the_number_is_not_asked_again(write, good: str) -> None:
    loaded = load_experiment(write(good))
    assert with_clients(loaded, 3) is loaded.experiment


def test_mistakes_that_the_data_show_name_the_file(write, of_data: str) -> None:
    loaded = load_experiment(write(of_data), ["federation.clients_per_round=4"])
    assert not isinstance(loaded.experiment, ExperimentWithClients)
    with pytest.raises(ExperimentError) as caught:
        with_clients(loaded, 3)
    assert str(caught.value) == (
        "exp.yaml: federation.clients_per_round: must be <= data.partition.num_clients (3), got 4"
    )


def test_the_experiment_of_a_run_has_the_number(write, of_data: str, tmp_path: Path) -> None:
    known = with_clients(load_experiment(write(of_data)), 3)
    assert read_settings(write(dump_experiment(known))) == known
    content = yaml.safe_load(dump_experiment(known))
    content["data"]["partition"]["num_clients"] = None
    with pytest.raises(ExperimentError, match=r"data\.partition\.num_clients: missing"):
        read_settings(write(yaml.safe_dump(content)))
