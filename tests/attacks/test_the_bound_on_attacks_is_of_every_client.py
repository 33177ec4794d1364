"""The bound on attacks holds for every client, not for the one whose ε is largest by 1e-6."""

import dataclasses
import json
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from fedsim.accountant.events import to_dict
from fedsim.api import run
from fedsim.clients.local_settings import LocalSettings
from fedsim.clients.mechanisms.plan import PlanRequest
from fedsim.clients.mechanisms.planner import plan_privacy
from fedsim.clients.privacy_settings import PrivacySettings
from fedsim.core.formatting import epsilon_text
from fedsim.core.text_formats import json_value
from fedsim.report.contents import RunContents
from fedsim.report.html import render_report
from fedsim.runs.directory import RunDirectory
from fedsim.runs.verification import verify_run
from fedsim.statement import Facts, Profile, profile_of, read_facts, result, to_json
from fedsim.statement.attack import FALSE_POSITIVE_RATES, attack_bound

# Sizes of clients of experiments/digits_dp.yaml, and some that `delta: auto` splits.
DIGITS = (195, 53, 152, 102)
SPLIT = (60, 101, 500, 2000)


def rows_of(sizes: tuple[int, ...], delta: float | str) -> list[dict[str, Any]]:
    """Return the clients of `privacy.json` after 60 rounds of 5 steps to ε = 8."""
    privacy = PrivacySettings.model_validate(
        {"target_epsilon": 8.0, "delta": delta, "max_grad_norm": 0.5}
    )
    local = LocalSettings.model_validate({"steps": 5, "batch_size": 28})
    rows = []
    for client, size in enumerate(sizes):
        plan = plan_privacy(PlanRequest(privacy, local, examples=size, planned_rounds=60))
        ledger = [
            {"event": to_dict(event), "count": count}
            for event, count in plan.release.charges(0, plan.planned_steps)
        ]
        row = {"client": client, "examples": size, "delta": plan.delta, "ledger": ledger}
        profile = profile_of(row, "pld", "zero_out")
        assert profile is not None
        rows.append(
            {
                **row,
                **{"epsilon": profile.epsilon, "rounds": 60, "steps": 300},
                **{
                    "sampling_rate": 28 / size,
                    "noise_multiplier": plan.release.noise_multiplier,
                },
                "ledger_head": f"{client:064x}",
            }
        )
    return rows


def privacy_file(rows: list[dict[str, Any]]) -> dict[str, Any]:
    content = {
        **{"version": "0", "trust": "local", "unit": "example"},
        **{"secure_aggregation": None, "personal_models": None},
        **{"adjacency": "zero_out", "accountant": "pld", "noise": "secure"},
        "slack": {"epsilon": 6e-5, "delta": 1e-8},
        **{"sampling": "poisson", "clipping": "flat", "clients": rows},
    }
    return json.loads(json.dumps({**content, **to_json(read_facts(content))}))


def profiles(rows: list[dict[str, Any]]) -> list[Profile]:
    found = [profile_of(row, "pld", "zero_out") for row in rows]
    return [profile for profile in found if profile is not None]


@pytest.fixture(scope="module", params=["digits", "split"])
def file(request: pytest.FixtureRequest) -> dict[str, Any]:
    sizes, delta = {"digits": (DIGITS, 1e-3), "split": (SPLIT, "auto")}[request.param]
    return privacy_file(rows_of(sizes, delta))


def test_no_client_can_be_attacked_better_than_the_table_says(file: dict[str, Any]) -> None:
    attack = file["attack"]
    assert attack.keys() == {"false_alarms", "detection"}
    assert set(FALSE_POSITIVE_RATES) <= set(attack["false_alarms"])
    each = profiles(file["clients"])
    worst = max(file["clients"], key=lambda row: row["epsilon"])["client"]
    for rate, bound in zip(attack["false_alarms"], attack["detection"], strict=True):
        bounds = [profile.true_positive_bound(rate) for profile in each]
        assert bound == max(rate, *bounds)
    at_one_percent = [profile.true_positive_bound(0.01) for profile in each]
    assert max(at_one_percent) > at_one_percent[worst] + 1e-3, "the old table would do"


def test_sentence_page_and_plot_say_the_maximum_and_name_the_tie(file: dict[str, Any]) -> None:
    facts = read_facts(file)
    bounds = dict(zip(file["attack"]["false_alarms"], file["attack"]["detection"], strict=True))
    sentence = result.attack_bound(facts)
    printed = [float(text) for text in re.findall(r"at most ([\d.]+)%", sentence.text)]
    assert len(printed) == len(FALSE_POSITIVE_RATES)
    page = render_report(contents(file))
    for rate, text in zip(FALSE_POSITIVE_RATES, printed, strict=True):
        assert 0 <= text / 100 - bounds[rate] < 1.001e-3, "rounded up, by at most 0.1 %"
        assert f"<td>{text:g}%</td>" in page
    tied = [c.client for c in facts.clients if epsilon_text(c.epsilon) == "8"]
    assert list(facts.worst_clients) == tied
    assert len(tied) > 1
    names = ", ".join(map(str, tied))
    for text in (sentence.text, page):
        assert f"The largest ε is that of clients {names}" in text
    assert f"FPR {100 * 0.01:.2g}%: TPR at most {printed[1]:g}%" in page, "the plot's tip"


def contents(privacy: dict[str, Any]) -> RunContents:
    epsilons = [row["epsilon"] for row in privacy["clients"]]
    privacy = {
        **{"system_epsilon": max(epsilons), "private": True, "ledger_digest": "0" * 64},
        **privacy,
    }
    for row in privacy["clients"]:
        row.setdefault("epsilon_rdp", row["epsilon"])
        for name in ("target_epsilon", "group", "withdrawn_round", "clip_norm", "max_grad_norm"):
            row.setdefault(name, None)
    summary = {
        **{"name": "n", "status": "completed", "reason": None, "rounds": 60, "seconds": 1.0},
        **{"epsilon": {"max": max(epsilons), "median": 8.0, "min": 8.0}, "delta": 1e-3},
    }
    found = RunContents(RunDirectory(Path("nowhere")))
    read = {"summary": summary, "privacy": privacy, "rounds": [], "environment": {}}
    vars(found).update(read, experiment_text="name: n\n")  # as if they had been read
    return found


def test_the_page_reads_the_bound_from_the_file(file: dict[str, Any]) -> None:
    detection = [min(1.0, bound + 0.05) for bound in file["attack"]["detection"]]
    higher = {**file, "attack": {**file["attack"], "detection": detection}}
    assert read_facts(higher).attack != read_facts(file).attack
    assert render_report(contents(higher)) != render_report(contents(file))


FORGERIES: dict[str, Callable[[Mapping[str, Any]], object]] = {
    "below the worst client": lambda a: {**a, "detection": [0.9 * b for b in a["detection"]]},
    "another length": lambda a: {**a, "detection": a["detection"][1:]},
    "other rates": lambda a: {"false_alarms": [0.5], "detection": [0.6]},
    "text": lambda a: {**a, "detection": ["0"] * len(a["detection"])},
    "above 1": lambda a: {**a, "detection": [2.0] * len(a["detection"])},
    "nothing": lambda a: None,
}


@pytest.mark.parametrize("forgery", FORGERIES)
def test_a_forged_bound_is_no_claim(forgery: str, file: dict[str, Any]) -> None:
    forged = {**file, "attack": FORGERIES[forgery](file["attack"])}
    facts = read_facts(forged)
    assert not result.attack_bound.holds(facts)
    assert "What an attacker can gain" not in render_report(contents(forged))


def test_the_maximum_is_computed_where_it_is_absent(file: dict[str, Any]) -> None:
    without = {key: value for key, value in file.items() if key != "attack"}
    assert read_facts(without).attack == read_facts(file).attack


def test_one_client_that_proves_nothing_takes_the_bound_away(file: dict[str, Any]) -> None:
    unknown = {"event": {"type": "NonPrivate"}, "count": 1}
    rows = [*file["clients"], {**file["clients"][0], "client": 99, "ledger": [unknown]}]
    assert attack_bound(rows, accountant="pld", adjacency="zero_out") is None


def test_fewer_releases_of_one_event_are_not_read_again(
    file: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    from fedsim.statement import attack

    calls, whole = [], attack.profile_of
    monkeypatch.setattr(attack, "profile_of", lambda *a: calls.append(a) or whole(*a))
    rows = [*file["clients"]]
    for row in file["clients"]:
        fewer = [{**entry, "count": 7} for entry in row["ledger"]]
        rows += [{**row, "client": row["client"] + 100, "ledger": fewer}] * 2
        rows.append({**row, "client": row["client"] + 300, "ledger": [], "epsilon": 0.0})
    found = attack_bound(rows, accountant="pld", adjacency="zero_out")
    assert found is not None
    assert json_value(found) == file["attack"]
    sizes = {(row["examples"], row["delta"]) for row in file["clients"]}
    assert len(calls) == len(sizes)


@pytest.mark.parametrize("sampling_rate", [None, 0.1])
def test_a_client_with_more_noise_and_no_more_releases_is_not_read(
    sampling_rate: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The bound is that over all clients, for mixed numbers of releases, too."""
    from fedsim.statement import attack

    rows = []
    for client, (noise, count) in enumerate([(4.0, 60), (5.0, 60), (6.0, 80), (6.5, 70), (7, 81)]):
        event: dict[str, Any] = {"type": "Gaussian", "noise_multiplier": float(noise)}
        if sampling_rate is not None:
            event = {"type": "PoissonSampled", "sampling_rate": sampling_rate, "event": event}
        ledger = [{"event": event, "count": count}]
        rows.append({"client": client, "delta": 1e-5, "ledger": ledger})
    account: Any = {"accountant": "pld", "adjacency": "zero_out"}
    profiles = [profile_of(row, **account) for row in rows]
    read, whole = [], attack.profile_of
    monkeypatch.setattr(attack, "profile_of", lambda *a: read.append(a[0]["client"]) or whole(*a))
    found = attack_bound(rows, **account)
    assert read == [0, 2, 4]
    assert found == attack.AttackBound.over([one for one in profiles if one is not None])
    rows[1]["delta"] = 1e-6
    attack_bound(rows, **account)
    assert read[3:] == [0, 2, 4, 1]


def test_verify_computes_the_bound_again(tmp_path: Path) -> None:
    experiment = {
        "name": "bound",
        "data": {"dataset": "digits", "partition": {"scheme": "quantity", "num_clients": 3}},
        "model": {"name": "logistic"},
        "federation": {"rounds": 2},
        "local": {"steps": 1, "batch_size": 16},
        "privacy": {"target_epsilon": 4.0, "delta": 1e-3, "max_grad_norm": 1.0},
    }
    run(experiment, out=tmp_path / "r")
    directory = RunDirectory.open(tmp_path / "r")
    assert verify_run(directory).problems == ()
    privacy = directory.read_json("privacy.json")
    privacy["attack"]["detection"][20] *= 1.01
    (tmp_path / "r" / "privacy.json").write_text(json.dumps(privacy))
    problems = verify_run(directory).problems
    assert any("the attack does not follow" in problem for problem in problems)


def test_mutation_the_client_with_the_largest_epsilon_alone_is_caught(
    file: dict[str, Any],
) -> None:
    facts = read_facts(file)
    assert facts.profile is not None
    alone = type(facts.attack).over([facts.profile])  # type: ignore[union-attr]
    weak: Facts = dataclasses.replace(facts, attack=alone)
    forged = {**file, **to_json(weak)}
    with pytest.raises(AssertionError):
        test_no_client_can_be_attacked_better_than_the_table_says(forged)
