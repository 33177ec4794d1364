"""Totals of clients: composition, and everything that has no total."""

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import dp_accounting as dp
import opacus.accountants
import pytest
import yaml
from dp_accounting.pld import PLDAccountant

from fedsim.accountant import (
    ZCDP,
    EpsilonDelta,
    Gaussian,
    NonPrivate,
    PldAccountant,
    PoissonSampled,
    PrivacyLedger,
    RdpAccountant,
)
from fedsim.accountant.sampler_slack import epsilon_with_slack
from fedsim.tools.totals.sources import (
    ClientRecord,
    Source,
    SourceError,
    read_source,
    registry_ledger,
)
from fedsim.tools.totals.totals import Totals, account_of

STEP = PoissonSampled(0.1, Gaussian(1.0))
NAMES = {"0": "Mainz"}


def run(
    name: str,
    counts: dict[str, int],
    *,
    names: dict[str, str] = NAMES,
    delta: float = 1e-5,
    chains: dict[str, tuple[str, ...]] | None = None,
    **terms: Any,
) -> Source:
    """A run in which each client took so many steps."""
    chains = chains or {client: (f"{name}-{client}",) for client in counts}
    clients = {
        client: ClientRecord(
            PrivacyLedger().record(STEP, n), names.get(client), delta, None, chains[client]
        )
        for client, n in counts.items()
    }
    chosen: dict[str, Any] = {
        "is_run": True,
        "unit": "example",
        "adjacency": "zero_out",
        "observer": "server",
        "accountant": "pld",
    }
    return Source(name, clients, **(chosen | terms))


def epsilons(account: Totals) -> dict[str, float]:
    return {total.client: total.epsilon for total in account.clients}


def slack_of_two(count: int) -> float:
    ideal = PldAccountant().compose(STEP, count).get_epsilon
    return epsilon_with_slack(lambda delta: epsilon_with_slack(ideal, delta), 1e-5)


def test_a_total_is_the_composition_of_both_ledgers() -> None:
    one, two = run("a", {"0": 10, "1": 20}), run("b", {"1": 30, "2": 5})
    account = account_of([one, two])
    single = epsilon_with_slack(PldAccountant().compose(STEP, 10).get_epsilon, 1e-5)
    assert epsilons(account)["0"] == single, "as in privacy.json of the run"
    assert epsilons(account)["1"] == slack_of_two(50)
    assert [total.sources for total in account.clients] == [("a",), ("a", "b"), ("b",)]
    assert account.clients[0].name == "Mainz"
    assert account.largest.client == "1"
    assert account.to_json()["system_epsilon"] == slack_of_two(50)


def test_clients_are_sorted_by_number_and_then_by_name() -> None:
    account = account_of([run("a", {"Ulm": 1, "²": 1, "10": 1, "9": 1})])
    assert list(epsilons(account)) == ["9", "10", "Ulm", "²"]


def test_accountants_are_columns() -> None:
    account = account_of([run("a", {"0": 10})], accountants=["rdp", "pld"], delta=1e-4)
    rdp = RdpAccountant().compose(STEP, 10).get_epsilon
    assert account.clients[0].epsilon == epsilon_with_slack(rdp, 1e-4)
    assert set(account.clients[0].epsilons) == {"rdp", "pld"}


def test_a_map_says_which_clients_are_the_same() -> None:
    sources = [run("a", {"0": 10, "1": 20}), run("b", {"0": 30})]
    clients = {"left": ["a:0"], "right": ["a:1", "b:0"]}
    found = epsilons(account_of(sources, clients=clients))
    assert found["right"] == slack_of_two(50)
    for wrong, message in (
        ({"left": ["a:0"], "right": ["a:1"]}, r"b:0 is in no entry"),
        ({"left": ["a:0", "a:1"], "right": ["b:0"]}, r"two clients of a"),
        ({"left": ["a:0"], "right": ["a:0"]}, r"a:0 is in left and in right"),
        (clients | {"third": ["c:9"]}, r"c:9 is no client"),
    ):
        with pytest.raises(SourceError, match=message):
            account_of(sources, clients=wrong)


@pytest.mark.parametrize(
    ("terms", "message"),
    [
        ({"unit": "client"}, r"a has unit 'example' and b 'client'.*no meaning"),
        ({"adjacency": "add_remove"}, r"a has adjacency 'zero_out' and b 'add_remove'"),
        ({"observer": "models"}, r"a has observer 'server' and b 'models'"),
        ({"delta": 1e-6}, r"client Mainz has several δ: 1e-06, 1e-05; pass .*--delta"),
    ],
)
def test_what_has_no_total_is_refused(terms: dict[str, Any], message: str) -> None:
    with pytest.raises(SourceError, match=message):
        account_of([run("a", {"0": 1}), run("b", {"0": 1}, **terms)])


def test_runs_of_one_seed_share_their_noise() -> None:
    one, two = run("a", {"0": 10}, seed=3), run("b", {"0": 40}, seed=3)
    with pytest.raises(SourceError, match=r"a and b have seed 3 .*no ε\. Give each run a seed"):
        account_of([one, two])
    assert epsilons(account_of([one, two], independent_noise=True))["Mainz"] == slack_of_two(50)
    account_of([one, run("b", {"0": 40}, seed=4)])
    account_of([one, run("b", {"0": 40})])


def test_a_repeated_run_costs_nothing() -> None:
    terms: dict[str, Any] = {"seed": 3}
    whole = run("whole", {"0": 10}, chains={"0": ("h1", "h2")}, releases=("r1", "r2"), **terms)
    part = run("part", {"0": 5}, chains={"0": ("h1",)}, releases=("r1",), **terms)
    for sources in ([whole, part], [part, whole]):
        account = account_of(sources)
        assert account.sources == ("whole",)
        assert account.repeated == ("part",)
        assert epsilons(account) == epsilons(account_of([whole]))


def test_other_refusals() -> None:
    with pytest.raises(SourceError, match="a is given twice"):
        account_of([run("a", {"0": 1}), run("a", {"0": 1})])
    unnamed = Source("events.json", {"": ClientRecord(PrivacyLedger().record(STEP))})
    with pytest.raises(SourceError, match=r"events\.json names no client, and a does.*--clients"):
        account_of([run("a", {"0": 1}), unnamed])
    with pytest.raises(SourceError, match=r"the ledger has no δ; pass .*--delta"):
        account_of([unnamed])
    with pytest.raises(SourceError, match=r"a holds under zero_out adjacency only"):
        account_of([run("a", {"0": 1})], adjacency="add_remove")
    mixed = account_of([run("a", {"0": 10}), unnamed], clients={"x": ["a:0", "events.json"]})
    ideal = PldAccountant().compose(STEP, 11).get_epsilon
    assert epsilons(mixed)["x"] == epsilon_with_slack(ideal, 1e-5)


# --- files --------------------------------------------------------------------------------------


def written(path: Path, content: Any) -> str:
    path.write_text(json.dumps(content))
    return str(path)


FOREIGN: list[Any] = [
    {
        "type": "PoissonSampled",
        "sampling_rate": 0.1,
        "event": {"type": "Gaussian", "noise_multiplier": 1.0},
    },
    {"event": {"type": "NoOpDpEvent"}, "count": 3},
    {
        "type": "SelfComposedDpEvent",
        "count": 9,
        "event": {
            "type": "PoissonSampledDpEvent",
            "sampling_probability": 0.1,
            "event": {"type": "GaussianDpEvent", "noise_multiplier": 1.0},
        },
    },
    {"type": "ComposedDpEvent", "events": [{"type": "LaplaceDpEvent", "noise_multiplier": 10.0}]},
]


def test_events_of_dp_accounting_have_their_epsilon(tmp_path: Path) -> None:
    account = account_of([read_source(written(tmp_path / "e.json", FOREIGN))], delta=1e-5)
    theirs = PLDAccountant(value_discretization_interval=1e-3)
    step = dp.PoissonSampledDpEvent(0.1, dp.GaussianDpEvent(1.0))
    theirs.compose(step, 10).compose(dp.LaplaceDpEvent(10.0))
    assert theirs.get_epsilon(1e-5) <= account.largest.epsilon <= theirs.get_epsilon(1e-5) + 0.11


def test_a_history_of_opacus_has_its_epsilon(tmp_path: Path) -> None:
    theirs = opacus.accountants.RDPAccountant()
    for _ in range(30):
        theirs.step(noise_multiplier=1.1, sample_rate=0.05)
    state = {"history": theirs.history, "mechanism": "rdp"}
    source = read_source(written(tmp_path / "opacus.json", state))
    account = account_of([source], delta=1e-5, accountants=["rdp"])
    assert account.largest.epsilon == pytest.approx(theirs.get_epsilon(1e-5), rel=0.02)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (["x"], r"event 0: event must be an object"),
        ([{"type": "GaussianDpEvent"}], r"event 0: key 'noise_multiplier' is missing"),
        ([{"type": "SkellamDpEvent"}], r"no accounting rule for 'SkellamDpEvent'.*GaussianDpEvent"),
        ([{"type": "ZCDpEvent", "rho": 1.0, "xi": 0.5}], r"xi=0\.5 has no accounting rule"),
        ({"history": [[1.0, 0.1]]}, r"history entry 0 must be \[noise_multiplier"),
        ({"history": [[1.0, 1.5, 3]]}, r"history entry 0 .*1\.5"),
        ({"clients": [{"client": 1}]}, r"clients\[0\] must have the keys"),
        ({"clients": [{"client": 1, "ledger": []}] * 2}, r"client 1 is there twice"),
        ({"name": "x"}, r"neither a list of events, nor an object with"),
        (3, r"neither a list of events"),
        ({"clients": []}, r"neither a list of events"),
        (
            {"ledger": [{"type": "Gaussian", "noise_multiplier": -1.0}]},
            r"event 0: noise_multiplier",
        ),
    ],
)
def test_ten_bad_files_are_named_in_one_line(content: Any, message: str, tmp_path: Path) -> None:
    path = written(tmp_path / "bad.json", content)
    with pytest.raises(SourceError, match=message) as caught:
        read_source(path)
    assert str(caught.value).startswith(f"{path}: ")
    assert "\n" not in str(caught.value)


def test_bad_text_and_missing_files_are_named(tmp_path: Path) -> None:
    (tmp_path / "bad.json").write_text("{")
    with pytest.raises(SourceError, match=r"bad\.json: neither JSON nor YAML"):
        read_source(str(tmp_path / "bad.json"))
    with pytest.raises(SourceError, match="no such run or file"):
        read_source(str(tmp_path / "none"))
    (tmp_path / "ledger.jsonl").touch()
    with pytest.raises(SourceError, match="the ledger has no record"):
        read_source(str(tmp_path / "ledger.jsonl"))


def test_what_is_printed_as_json_is_read_again(tmp_path: Path) -> None:
    account = account_of([run("a", {"0": 10, "1": 20})])
    path = written(tmp_path / "total.json", account.to_json())
    again = account_of([read_source(path)], delta=1e-5)
    ideal = PldAccountant().compose(STEP, 20).get_epsilon(1e-5)
    assert epsilons(again)["1"] == ideal
    assert again.clients[0].name == "Mainz"


def test_an_infinite_epsilon_stays_infinite(tmp_path: Path) -> None:
    row = {"client": 0, "ledger": [], "epsilon": None}
    account = account_of([read_source(written(tmp_path / "p.json", {"clients": [row]}))], delta=0.1)
    assert math.isinf(account.largest.epsilon)
    assert account.to_json()["system_epsilon"] is None


# --- the registry of deployments -----------------------------------------------------------------


def entry(parameters: dict[str, Any], **loss: Any) -> dict[str, Any]:
    return {"deployment": {"privacy_loss": {"privacy_parameters": parameters, **loss}}}


def test_an_entry_of_the_registry_is_one_release() -> None:
    assert registry_ledger(entry({"epsilon": 2.0})["deployment"]).entries == (
        (EpsilonDelta(2.0, 0.0), 1),
    )
    with_delta = entry({"epsilon": 2.0, "delta": 1e-6})
    assert registry_ledger(with_delta["deployment"]).entries == ((EpsilonDelta(2.0, 1e-6), 1),)
    assert registry_ledger(entry({"rho": 0.81, "epsilon": 9.0})["deployment"]).entries == (
        (ZCDP(0.81), 1),
    )
    assert registry_ledger({}).entries == ((NonPrivate(), 1),)


def test_entries_that_say_something_else_are_refused(tmp_path: Path) -> None:
    for content, message in (
        (entry({"epsilon": -1}), "privacy_parameters: epsilon"),
        (entry({"epsilon": 1.0}, number_of_privacy_units=4), "4 privacy units at once"),
        ({"deployment": None}, "deployment must be a mapping"),
        ({"deployment": {"privacy_loss": 3}}, "deployment.privacy_loss must be a mapping"),
        ({"deployment": {"privacy_loss": {"privacy_parameters": [1]}}}, "parameters must be a"),
    ):
        path = tmp_path / "entry.yaml"
        path.write_text(yaml.safe_dump(content))
        with pytest.raises(SourceError, match=message):
            read_source(str(path))


def test_equal_charges_of_other_releases_are_two_spends() -> None:
    """Under secure noise, and for sums, a chain of charges does not tell what was released."""
    chains = {"0": ("h",)}
    one = run("a", {"0": 10}, chains=chains, releases=("r1",))
    other = run("b", {"0": 10}, chains=chains, releases=("r2",))
    ended = run("c", {"0": 10}, chains=chains, releases=(), charges_tell=False)
    for second in (other, ended):
        account = account_of([one, second])
        assert account.repeated == ()
        assert account.largest.epsilon > account_of([one]).largest.epsilon
    follows = run("d", {"0": 10}, chains=chains)
    assert account_of([one, follows]).repeated == ("d",)


def test_a_sum_without_a_client_is_not_the_sum_with_it() -> None:
    few = run("a", {"1": 5}, chains={"1": ("h",)}, releases=("r1",), seed=3)
    all_of_them = run("b", {"0": 5, "1": 5}, chains={"0": ("g",), "1": ("h",)}, releases=("r2",))
    assert account_of([few, all_of_them]).repeated == ()


def test_named_clients_add_up_by_name() -> None:
    named = {"0": "Mainz", "1": "Trier"}, {"0": "Trier", "1": "Mainz"}
    one = run("a", {"0": 10, "1": 20}, assignment="x", names=named[0])
    two = run("b", {"0": 30, "1": 5}, assignment="y", names=named[1])
    found = epsilons(account_of([one, two]))
    assert found == {"Mainz": slack_of_two(15), "Trier": slack_of_two(50)}


def test_no_client_is_lost_where_two_have_one_name() -> None:
    named = {"0": "Mainz", "1": "Mainz"}
    sources = [run(n, {"0": 40, "1": 5}, assignment="x", names=named) for n in ("a", "b")]
    assert account_of(sources).largest.epsilon == slack_of_two(80)


def test_a_drawn_partition_has_the_total_of_the_worst_assignment() -> None:
    """298 examples were in client 0 of one run and in client 1 of the other."""
    one = run("a", {"0": 10, "1": 20}, assignment="seed 0")
    two = run("b", {"0": 30, "1": 5, "2": 30}, assignment="seed 1")
    account = account_of([one, two])
    assert account.is_of_any_client
    assert epsilons(account) == {"any": slack_of_two(50)}
    clients = {"x": ["a:1", "b:0"], "y": ["a:0", "b:1"], "z": ["b:2"]}
    by_hand = account_of([one, two], clients=clients)
    assert epsilons(by_hand)["x"] == slack_of_two(50)


def test_a_client_that_took_no_step_is_no_choice() -> None:
    """Under distributed trust each client has a second ledger, which is empty, too."""
    sources = [run("a", {"0": 10, "1": 0}, assignment="0"), run("b", {"0": 30}, assignment="1")]
    summed = [
        replace(
            source,
            clients={k: replace(c, against_server=c.ledger) for k, c in source.clients.items()},
        )
        for source in sources
    ]
    for given in (sources, summed):
        assert epsilons(account_of(given)) == {"any": slack_of_two(40)}


def test_clients_that_do_not_dominate_are_all_tried() -> None:
    one = run("a", {"0": 10, "1": 10}, assignment="seed 0")
    less_noise = PrivacyLedger().record(PoissonSampled(0.01, Gaussian(0.5)), 10)
    other = replace(one.clients["1"], ledger=less_noise)
    one = replace(one, clients={**one.clients, "1": other})
    two = run("b", {"0": 30}, assignment="seed 1")
    account = account_of([one, two])
    assert len(account.clients) == 2
    steps = PldAccountant().compose(STEP, 30).compose(PoissonSampled(0.01, Gaussian(0.5)), 10)
    assert account.largest.epsilon >= steps.get_epsilon(1e-5)


def test_whole_clients_of_drawn_partitions_have_no_total() -> None:
    sources = [run(n, {"0": 1}, unit="client", assignment=n, names={}) for n in ("a", "b")]
    with pytest.raises(SourceError, match="none has a total; use one seed and secure noise"):
        account_of(sources)
