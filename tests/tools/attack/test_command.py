"""`fedsim audit`: what it prints, and how it ends."""

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result
from torch import Tensor

from fedsim.cli import cli
from fedsim.noise import release

EXPERIMENT: dict[str, Any] = {
    "name": "audited",
    "data": {"dataset": "digits", "partition": {"scheme": "iid", "num_clients": 4}},
    "model": {"name": "logistic"},
    "federation": {"rounds": 10},
    "local": {"steps": 5, "batch_size": 32, "optimizer": {"name": "sgd", "lr": 0.5}},
    "privacy": {"noise_multiplier": 1.0, "delta": 1e-3, "max_grad_norm": 0.5},
}


@pytest.fixture
def audit(tmp_path: Path) -> Any:
    path = tmp_path / "exp.yaml"
    path.write_text(json.dumps(EXPERIMENT))

    def run(*arguments: str) -> Result:
        return CliRunner().invoke(cli, ["audit", str(path), *arguments])

    return run


def test_a_sound_federation_ends_with_0(audit: Any) -> None:
    found = audit("--clients", "3", "--steps", "20")
    assert found.exit_code == 0, found.output
    last = found.stdout.splitlines()[-1]
    assert last == "audited: no claim is violated (3 clients, 20 steps each, confidence 0.999)"
    assert "the 3 largest claims of 4 clients" in found.stdout
    assert max(map(len, found.stdout.splitlines()[:12])) <= 80
    heads = [line for line in found.stdout.splitlines() if line.startswith(" client ")]
    assert [" ".join(head.split()) for head in heads] == [
        "client examples claimed certified of runs steps uploads sums final",
        "client noise clipping sampling",
    ]
    done = [line for line in found.stderr.splitlines() if line.endswith("audited")]
    assert done == [f"client {n}/3 audited" for n in (1, 2, 3)]  # other lines show on slow machines


def test_a_violation_ends_with_1_and_says_what(audit: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = release.fill_rows_

    def smaller(sources: Any, rows: Tensor) -> None:
        whole(sources, rows)
        rows *= 0.7

    monkeypatch.setattr(release, "fill_rows_", smaller)
    found = audit("--clients", "1", "--steps", "20", "--quiet")
    assert found.exit_code == 1
    assert "violations found" in found.stdout
    assert all(line.startswith("client ") for line in found.stderr.splitlines())
    assert "of what is charged" in found.stderr


def test_json_has_every_interval(audit: Any) -> None:
    found = audit("--clients", "2", "--steps", "20", "--quiet", "--json")
    assert found.exit_code == 0, found.output
    content = json.loads(found.stdout)
    assert (content["steps"], content["num_clients"], content["violations"]) == (20, 4, [])
    for client in content["clients"]:
        assert client["epsilon_certified"] <= client["epsilon_claimed"]
        assert client["epsilon_certified_of_runs"] == 0.0  # 20 steps are no whole run
        assert set(client["epsilon_estimated"]) == {"steps", "uploads", "sums", "final_model"}
        for name in ("noise_over_charged", "contribution_over_bound", "sampling_over_charged"):
            assert client[name]["low"] < client[name]["estimate"] < client[name]["high"]


def test_where_no_canary_was_drawn_nothing_is_said_of_it(audit: Any) -> None:
    empty = "privacy.sampling.rate=1e-7"  # all batches are empty, with any seed but one in 10,000
    tiny = (empty, "local.batch_size=1", "local.steps=1", "--steps", "1", "--clients", "1", "-q")
    printed = audit(*tiny)
    assert printed.exit_code == 0, printed.output
    assert " – " in printed.stdout
    assert "the largest claim of 4 clients" in printed.stdout
    (client,) = json.loads(audit(*tiny, "--json").stdout)["clients"]
    assert client["epsilon_certified"] == 0.0
    assert client["contribution_over_bound"] == {"estimate": None, "low": None, "high": None}


def test_steps_are_whole_rounds(audit: Any) -> None:
    assert (
        json.loads(audit("--clients", "1", "--steps", "7", "--quiet", "--json").stdout)["steps"]
        == 10
    )


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["privacy=null"], "the experiment has no privacy section"),
        (["privacy.noise_multiplier=0"], "no client has examples and a noise_multiplier above 0"),
        (["model.name=logistics"], "model.name"),
    ],
)
def test_mistakes_are_the_persons_to_mend(audit: Any, arguments: list[str], message: str) -> None:
    from fedsim.core.errors import FedsimError

    found = audit(*arguments)
    assert isinstance(found.exception, FedsimError)
    assert message in str(found.exception)


@pytest.mark.parametrize("option", [["--clients", "0"], ["--steps", "0"], ["--confidence", "1"]])
def test_options_outside_their_range_end_with_2(audit: Any, option: list[str]) -> None:
    assert audit(*option).exit_code == 2
