"""The statement of each of the six cells: one observer and one unit for each number."""

import itertools
import math
import re
from typing import Any

import pytest

from fedsim.accountant import Event, Gaussian, JointGaussian, PoissonSampled, PrivacyLedger
from fedsim.statement import read_facts, to_json

DELTA, ROUNDS, MIN_CLIENTS, COLLUDING = 1e-3, 20, 5, 1
FACTOR = math.sqrt(MIN_CLIENTS - COLLUDING)
SHARE, RATE = 1.0, 0.2
SUMS = {"min_clients": MIN_CLIENTS, "colluding_clients": COLLUDING}
ONE_STEP = {"local_steps": 1, "optimizer": "sgd"}
SECURE = {
    "protocol": "additive",
    "clipped": 0,
    "parties": {"survivors_per_round": [MIN_CLIENTS] * ROUNDS},
    "trust": {"privacy_requires": "one of leader and helpers follows the protocol"},
}
CELLS = list(itertools.product(("local", "distributed", "central"), ("example", "client")))


def ledger(unit: str, noise: float, *, rate: float | None = None) -> PrivacyLedger:
    event: Event = Gaussian(noise)
    if unit == "example":
        event = PoissonSampled(RATE, event)
    elif rate is not None:
        event = PoissonSampled(rate, event)
    return PrivacyLedger().record(event, ROUNDS)


def client(trust: str, unit: str, *, rate: float | None = None) -> dict[str, Any]:
    claimed = ledger(unit, SHARE * (FACTOR if trust == "distributed" else 1.0), rate=rate)
    row: dict[str, Any] = {
        "examples": 100 if unit == "example" else None,
        "delta": DELTA,
        "epsilon": claimed.epsilon_with_slack(DELTA),
        "epsilon_rdp": claimed.epsilon_with_slack(DELTA, "rdp"),
        "target_epsilon": None,
        "noise_multiplier": SHARE * (FACTOR if trust == "distributed" else 1.0),
        "sampling_rate": RATE,
        "max_grad_norm": 1.0,
        "rounds": ROUNDS,
        "steps": ROUNDS,
        "ledger": claimed.to_list(),
        "ledger_head": "0" * 64,
    }
    if trust == "distributed":
        own = ledger(unit, SHARE)
        row["epsilon_against_server"] = own.epsilon_with_slack(DELTA)
        row["ledger_against_server"] = own.to_list()
    return row


def privacy(
    trust: str, unit: str, /, *, drawn: float | None = None, **changes: Any
) -> dict[str, Any]:
    row = client(trust, unit, rate=drawn)
    content: dict[str, Any] = {
        "version": "0.2.0",
        "trust": trust,
        "unit": unit,
        "adjacency": "zero_out",
        "accountant": "pld",
        "sampling": "poisson" if unit == "example" else None,
        "clipping": "flat",
        "noise": "secure",
        "slack": {"epsilon": 1e-5, "delta": 1e-9},
        "secure_aggregation": SECURE if trust == "distributed" else None,
        "personal_models": None,
        "clients": [{**row, "client": number} for number in range(MIN_CLIENTS)],
        **({"weighting": "uniform"} if unit == "client" else {}),
        **({"participation": {"scheme": "poisson", "rate": drawn}} if drawn else {}),
    }
    if trust != "local":
        steps = ONE_STEP if unit == "example" else {}
        content["sums"] = {**(SUMS if trust == "distributed" else {}), **steps}
    return {**content, **changes}


def said(content: dict[str, Any]) -> dict[str, str]:
    points = to_json(read_facts(content))["statement_points"]
    return {point["id"]: point["text"] for point in points}


def certificates(content: dict[str, Any]) -> dict[str, float | None]:
    found = to_json(read_facts(content))["certificates"]
    assert all(one["delta"] == DELTA for one in found)
    return {one["against"]: one["epsilon"] for one in found}


OBSERVERS = {
    "local": ("against a server that sees every update", ["server"]),
    "distributed": ("against an observer of sums, who sees no single update", ["sums", "server"]),
    "central": ("against an observer of global models", ["models"]),
}


@pytest.mark.parametrize(("trust", "unit"), CELLS)
def test_each_cell_names_its_observer_and_its_unit(trust: str, unit: str) -> None:
    content = privacy(trust, unit)
    words, (observer, views) = said(content), OBSERVERS[trust]
    assert observer in words["guarantee"].lower()
    protected = "everything that" if unit == "client" else "training example"
    assert protected in words["guarantee"]
    assert list(certificates(content)) == views
    assert certificates(content)[views[0]] == content["clients"][0]["epsilon"]
    assert ("unit" in words, "client_unit" in words) == (unit == "example", unit == "client")
    assert ("against_server" in words) == (trust == "distributed")
    assert ("trusted_server" in words) == (trust == "central")
    assert ("collusion" in words) == (trust == "distributed")


@pytest.mark.parametrize(("drawn", "sends"), [(None, True), (0.25, False)])
def test_clients_drawn_in_secret_send_no_ledger(drawn: float | None, sends: bool) -> None:
    """The server charges them: a client's own charge would show that it was drawn."""
    words = said(privacy("central", "client", drawn=drawn))
    assert ("and its ledger" in words["released"]) == sends
    assert ("The server writes every client's charge" in words["ledger"]) != sends


@pytest.mark.slow
@pytest.mark.parametrize(("trust", "unit"), CELLS)
def test_no_sentence_of_one_unit_speaks_of_the_other(trust: str, unit: str) -> None:
    text = " ".join(said(privacy(trust, unit)).values())
    other = "for everything that" if unit == "example" else "training example of each client"
    assert other not in text
    if unit == "client":
        assert "sampling rate" not in text
        assert "for each of its training examples" not in text


def test_both_guarantees_of_distributed_trust_hold_at_once() -> None:
    content = privacy("distributed", "example")
    words, both = said(content), certificates(content)
    row = content["clients"][0]
    assert both == {"sums": row["epsilon"], "server": row["epsilon_against_server"]}
    assert row["epsilon"] < row["epsilon_against_server"]
    assert "never add or compare their ε" in words["against_server"]
    assert "Up to 1 client of a sum may collude" in words["collusion"]
    assert "4 honest clients" in words["collusion"]
    assert "every global model, the final one included" in words["threat_model"]
    assert "√4 times" in words["shared_noise"]


def without_shares() -> dict[str, Any]:
    row = client("distributed", "example")
    more = PrivacyLedger().record(PoissonSampled(RATE, Gaussian(1.01 * FACTOR * SHARE)), ROUNDS)
    claim = {"epsilon": more.epsilon_with_slack(DELTA), "ledger": more.to_list()}
    return {"clients": [{**row, **claim, "client": number} for number in range(MIN_CLIENTS)]}


BROKEN: dict[str, dict[str, Any]] = {
    "were not summed by a protocol": {"secure_aggregation": {**SECURE, "protocol": "quantized"}},
    "by a protocol that hides": {"secure_aggregation": None},
    "clipped after their noise": {"secure_aggregation": {**SECURE, "clipped": 1}},
    "no honest client": {"sums": {**SUMS, **ONE_STEP, "colluding_clients": 5}},
    "leave no honest": {"sums": ONE_STEP},
    "a sum of fewer than 5": {
        "secure_aggregation": {**SECURE, "parties": {"survivors_per_round": [5, 4, 5]}}
    },
    "took 2 steps": {"sums": {**SUMS, **ONE_STEP, "local_steps": 2}},
    "took None steps": {"sums": SUMS},
    "optimizer adam": {"sums": {**SUMS, **ONE_STEP, "optimizer": "adam"}},
    "clipping per_layer": {"clipping": "per_layer"},
    "needs public client sizes": {"adjacency": "add_remove"},
    "claims more noise": without_shares(),
}


@pytest.mark.parametrize("reason", BROKEN)
def test_no_number_for_a_view_of_which_a_condition_failed(reason: str) -> None:
    """The guarantee against the server, which needs none of the conditions, stays."""
    content = privacy("distributed", "example", **BROKEN[reason])
    words, both = said(content), certificates(content)
    assert both["sums"] is None
    assert reason in words["withheld"]
    assert not {"guarantee", "attack_bound", "gaussian_bound", "spread"} & words.keys()
    own = client("distributed", "example")["epsilon_against_server"]
    assert both["server"] == own
    numbers = re.findall(
        r"ε(?:_k)?(?: of client \d+)?\s*(?:is|=|≤|<)\s*([\d.]+)", " ".join(words.values())
    )
    assert [float(one) for one in numbers] == [pytest.approx(own, rel=1e-3)]


@pytest.mark.parametrize("unit", ["example", "client"])
def test_a_missing_ledger_against_the_server_gives_no_second_number(unit: str) -> None:
    content = privacy("distributed", unit)
    for row in content["clients"]:
        row["ledger_against_server"] = None
    words = said(content)
    assert certificates(content) == {"sums": None, "server": None}
    assert {"withheld", "no_server_guarantee"} <= words.keys()
    assert "against_server" not in words


def test_a_second_epsilon_below_its_ledger_is_not_stated() -> None:
    content = privacy("distributed", "example")
    for row in content["clients"]:
        row["epsilon_against_server"] *= 0.5
    assert certificates(content)["server"] is None
    assert "against_server" not in said(content)


@pytest.mark.parametrize(
    ("trust", "unit", "changes", "reason"),
    [
        ("everywhere", "example", {}, "trust model 'everywhere' is not known"),
        ("local", "person", {}, "unit 'person' is not known"),
        ("local", "client", {"adjacency": "add_remove"}, "follow from the list of clients"),
        (
            *("central", "client"),
            {"adjacency": "add_remove", "drawn": 0.1},
            "follow from the list of clients",
        ),
        ("central", "example", {"adjacency": "add_remove"}, "needs public client sizes"),
        ("local", "client", {"drawn": 0.1}, "lowers ε only with trust: central"),
        ("central", "example", {"drawn": 0.1}, "lowers ε only with trust: central"),
        ("central", "client", {"drawn": 0.1, "secure_aggregation": SECURE}, "know which clients"),
        ("central", "example", {"sums": {**ONE_STEP, "local_steps": 3}}, "took 3 steps in a round"),
        ("central", "client", {"clipping": "per_layer"}, "bounds no whole update"),
        ("local", "example", {"unit": "client"}, "clients were drawn by the schedule"),
    ],
)
def test_other_cells_withhold_a_number_without_their_conditions(
    trust: str, unit: str, changes: dict[str, Any], reason: str
) -> None:
    content = privacy(trust, unit, **changes)
    words = said(content)
    assert reason in words["withheld"]
    assert set(certificates(content).values()) <= {None}
    assert "guarantee" not in words


def test_drawn_clients_are_named_with_their_conditions() -> None:
    words = said(privacy("central", "client", drawn=0.1))
    assert "p = 0.1" in words["drawn_clients"]
    assert "a round without clients releases noise" in words["drawn_clients"]
    assert "who takes part is secret" in words["adjacency"]
    assert "no_amplification" not in words
    uniform = said(privacy("central", "client"))
    assert "drawing clients amplifies nothing" in uniform["every_round"]
    assert "no_amplification" in uniform


def test_a_larger_claim_for_drawn_clients_needs_their_event() -> None:
    drawn = privacy("central", "client", drawn=0.1)
    always = privacy("central", "client")
    assert drawn["clients"][0]["epsilon"] < always["clients"][0]["epsilon"]
    undrawn = {**drawn, "participation": None}
    assert certificates(undrawn) == {"models": None}


def test_weights_by_size_exclude_the_sizes_of_clients() -> None:
    assert "sizes_excluded" not in said(privacy("local", "client"))
    words = said(privacy("local", "client", weighting="examples"))
    assert "no ε covers them" in words["sizes_excluded"]
    by_noise = privacy("local", "client", weighting="examples_over_noise")  # with size_power: 0
    assert "sizes_excluded" not in said(by_noise)


@pytest.mark.parametrize("trust", ["local", "central"])
def test_an_upload_of_slopes_is_not_called_a_model(trust: str) -> None:
    words = said(privacy(trust, "example", public_parts={"directions": 4}))
    assert "sends its clipped slopes along public directions" in words["released"]
    assert "these models" not in words["released"]
    assert "sends its clipped" not in said(privacy("local", "example"))["released"]


def test_noise_for_a_rho_is_not_called_given() -> None:
    assert "no_targets" in said(privacy("local", "example"))
    assert "no_targets" not in said(privacy("local", "example", target_rho=20.0))


def test_a_learnt_bound_of_updates_is_one_event() -> None:
    content = privacy("local", "client", clipping="adaptive")
    assert "was adapted" in said(content)["withheld"]
    joint = PrivacyLedger().record(JointGaussian((1.05, 3.0)), ROUNDS)
    for row in content["clients"]:
        row |= {"ledger": joint.to_list(), "epsilon": joint.epsilon_with_slack(DELTA)}
    words = said(content)
    assert "Update and count are one" in words["client_update"]


@pytest.mark.slow
@pytest.mark.parametrize("met", [0, 3, 4])
def test_an_active_server_is_covered_under_four_conditions(met: int) -> None:
    names = ("pinned_keys", "opened_once", "agreed_plan", "fixed_set")
    conditions = {name: place < met for place, name in enumerate(names)}
    secure = {**SECURE, "trust": {"privacy_requires": "x", "conditions": conditions}}
    words = said(privacy("distributed", "example", secure_aggregation=secure))["active_server"]
    assert ("covers a server that departs" in words) == (met == 4)
    assert ("only the guarantee against the server" in words) == (met < 4)


@pytest.mark.parametrize("met", [3, 4])
def test_a_deployment_without_a_condition_has_the_fallback_guarantee_alone(met: int) -> None:
    """In a simulation all parties stand for real ones that follow the protocol."""
    names = ("agreed_plan", "opened_once", "fixed_set", "pinned_keys")
    conditions = {name: place < met for place, name in enumerate(names)}
    secure = {**SECURE, "trust": {"privacy_requires": "x", "conditions": conditions}}
    secure["simulated_non_collusion"] = False
    content = privacy("distributed", "example", secure_aggregation=secure)
    found, words = certificates(content), said(content)
    assert found["server"] is not None
    assert "against_server" in words
    assert (found["sums"] is None) == (met == 3)
    objected = [
        text for text in words.values() if "nothing kept its server to the protocol" in text
    ]
    assert len(objected) == (met == 3)
    assert ("guarantee" in words) == (met == 4)


@pytest.mark.slow
@pytest.mark.parametrize(("trust", "unit"), CELLS)
def test_seeded_noise_is_said_to_be_simulated(trust: str, unit: str) -> None:
    words = said(privacy(trust, unit, noise="seeded"))
    assert words["simulated_guarantee"].startswith("The mechanism that this run simulates")
    assert "no protection against anyone who knows the seed" in words["seeded_noise"]
    if trust == "distributed":
        assert words["against_server"].startswith("In the mechanism that this run simulates")
