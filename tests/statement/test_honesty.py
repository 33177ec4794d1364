"""A judge of statements that shares no code with them, and mutants that it must catch.

Whoever weakens a precondition, averages an ε or rounds it down has to get past the judge; each
mutant below is such a change, and a judge that misses it would be of no use.
"""

import dataclasses
import math
import re
import statistics

import pytest

from fedsim.statement import SENTENCES, Facts, MechanismFacts, statement_of
from fedsim.statement import guarantee as guarantee_module

KNOWN = {
    "adjacency": {"zero_out", "add_remove", "replace_one"},
    "accountant": {"pld", "rdp", "moments"},
    "noise": {"seeded", "secure"},
}
LEDGER = {
    "poisson": "PoissonSampled",
    "fixed_size": "FixedSizeSampled",
    "shuffle": "EpochShuffled",
    "balls_and_bins": "RandomAllocation",
}
CLAIMS = [row for row in SENTENCES if row.kind == "claim"]


def supported(facts: Facts) -> bool:
    """Return whether a finite ε may be stated, from the raw facts alone."""
    mechanism = facts.mechanism
    if mechanism.accountant is None or not facts.clients:
        return False
    if any(getattr(mechanism, name) not in names for name, names in KNOWN.items()):
        return False
    trained = [client for client in facts.clients if client.rounds]
    expected = LEDGER.get(mechanism.sampling or "")
    if not trained or any(set(client.events) != {expected} for client in trained):
        return False
    if mechanism.clipping not in (None, "flat", "per_layer", "automatic", "adaptive"):
        return False
    if mechanism.clipping == "adaptive" and not all(client.is_joint for client in trained):
        return False
    if any(math.isinf(client.epsilon) for client in facts.clients):
        return False
    worst = max(facts.clients, key=lambda client: client.epsilon)
    profile = facts.profile
    if not worst.rounds:
        return True
    return (
        profile is not None
        and profile.client == worst.client
        and profile.delta == worst.delta
        and profile.epsilon <= worst.epsilon * (1 + 1e-6)
    )


def flaws(facts: Facts) -> list[str]:
    """Return what a statement says that the raw facts do not support."""
    sentences = statement_of(facts)
    text = " ".join(sentence.text for sentence in sentences)
    found = []
    if not supported(facts):
        said = text.replace("so no privacy was spent: ε = 0 for every client", "")
        if re.search(r"ε(_k)? (is|=|≤) \d|\(ε_k, δ\)|at most [\d.]+%|μ = \d|upper bound", said):
            found.append("a finite claim without support")
        if any(s.kind == "claim" and s.point != "guarantee" for s in sentences):
            found.append("a sentence of kind claim without support")
        return found
    largest = max(client.epsilon for client in facts.clients)
    stated = re.findall(r"largest ε_k is ([\d.]+)", text)
    if not stated or not all(largest <= float(one) <= largest * 1.002 for one in stated):
        found.append("not the largest ε")
    deltas = re.findall(r"at δ [=≤] ([\de.-]*\d)", text)
    if not all(float(one) >= max(c.delta for c in facts.clients) for one in deltas):
        found.append("not the largest δ")
    seeded = facts.mechanism.noise == "seeded"
    if seeded != text.startswith("The mechanism that this run simulates"):
        found.append("a simulation passed off as what ran")
    if any(c.delta >= 1 / c.examples for c in facts.clients) and "would satisfy the" not in text:
        found.append("a loose δ unmentioned")
    if "Tuning runs on the same data are not charged" not in text:
        found.append("tuning unmentioned")
    if facts.run.status != "completed" and "continuing it spends more" not in text:
        found.append("an unfinished run passed off as finished")
    return found


def corpus(honest: Facts) -> list[Facts]:
    """Return runs of every kind, starting from an ordinary one."""
    mechanism = honest.mechanism

    def with_mechanism(**values: str | None) -> Facts:
        return dataclasses.replace(honest, mechanism=dataclasses.replace(mechanism, **values))

    def with_client(number: int, **values: object) -> Facts:
        some = [
            dataclasses.replace(c, **values) if c.client == number else c for c in honest.clients
        ]
        return dataclasses.replace(honest, clients=tuple(some))

    nothing = {"rounds": 0, "epsilon": 0.0, "events": frozenset()}
    idle = tuple(dataclasses.replace(client, **nothing) for client in honest.clients)
    runs = [honest, dataclasses.replace(honest, mechanism=MechanismFacts())]
    runs += [dataclasses.replace(honest, clients=idle, profile=None)]
    runs += [dataclasses.replace(honest, profile=None), dataclasses.replace(honest, attack=None)]
    for name, value in [
        ("noise", "seeded"),
        ("noise", None),
        ("sampling", "shuffle"),
        ("sampling", "own"),
        ("sampling", None),
        ("adjacency", "edit"),
        ("accountant", "clt"),
        ("clipping", "own"),
        ("clipping", "adaptive"),
    ]:
        runs.append(with_mechanism(**{name: value}))
    runs += [
        with_client(0, epsilon=math.inf),
        with_client(1, epsilon=math.inf),
        with_client(0, delta=1e-3),
        with_client(0, delta=1e-4),
        with_client(1, epsilon=2.9),
        with_client(0, events=frozenset({"PoissonSampled", "NonPrivate"})),
        with_client(0, **nothing),
    ]
    together = tuple(dataclasses.replace(client, is_joint=True) for client in honest.clients)
    runs.append(dataclasses.replace(with_mechanism(clipping="adaptive"), clients=together))
    for status in ("interrupted", "failed", "stopped"):
        run = dataclasses.replace(honest.run, status=status)
        runs.append(dataclasses.replace(honest, run=run))
    return runs


def test_no_run_of_any_kind_is_overstated(honest):
    found = [flaws(facts) for facts in corpus(honest)]
    assert found == [[]] * len(found)
    assert sum(map(supported, corpus(honest))) >= 6


def caught(honest: Facts) -> bool:
    try:
        return any(flaws(facts) for facts in corpus(honest))
    except (KeyError, AttributeError, TypeError, ValueError):
        return True  # without its facts a sentence cannot even be put into words


@pytest.mark.parametrize("row", CLAIMS, ids=lambda row: row.identifier)
def test_a_claim_without_its_precondition_is_caught(honest, monkeypatch, row):
    loose = dataclasses.replace(row, holds=lambda facts: bool(facts.clients))
    rows = tuple(loose if one is row else one for one in SENTENCES)
    monkeypatch.setattr("fedsim.statement.SENTENCES", rows)
    assert caught(honest)


MUTANTS = {
    "the mean": lambda facts: statistics.mean(c.epsilon for c in facts.clients),
    "the median": lambda facts: statistics.median(c.epsilon for c in facts.clients),
    "the smallest": lambda facts: min(c.epsilon for c in facts.clients),
    "the finite ones": lambda facts: max(
        (c.epsilon for c in facts.clients if math.isfinite(c.epsilon)), default=0.0
    ),
}


@pytest.mark.parametrize("mutant", MUTANTS.values(), ids=MUTANTS)
def test_another_epsilon_than_the_largest_is_caught(honest, monkeypatch, mutant):
    monkeypatch.setattr(Facts, "epsilon", property(mutant))
    assert caught(honest)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("objections", ()),
        ("is_bounded", True),
        ("clients_with_large_delta", ()),
        ("delta", 1e-6),
    ],
)
def test_a_fact_that_is_overlooked_is_caught(honest, monkeypatch, name, value):
    monkeypatch.setattr(Facts, name, property(lambda facts: value))
    assert caught(honest)


def test_rounding_down_is_caught(honest, monkeypatch):
    third = dataclasses.replace(honest.clients[1], epsilon=3.00049)
    facts = dataclasses.replace(
        honest,
        clients=(honest.clients[0], third),
        profile=dataclasses.replace(honest.profile, epsilon=3.00049),
    )
    assert flaws(facts) == []
    monkeypatch.setattr(guarantee_module, "epsilon_text", lambda epsilon: f"{epsilon:.4g}")
    assert "not the largest ε" in flaws(facts)


@pytest.mark.parametrize("dropped", ["tuning_not_charged", "unfinished", "delta_too_large"])
def test_a_limit_that_is_left_out_is_caught(honest, monkeypatch, dropped):
    left = tuple(row for row in SENTENCES if row.identifier != dropped)
    assert len(left) < len(SENTENCES)
    monkeypatch.setattr("fedsim.statement.SENTENCES", left)
    assert caught(honest)
