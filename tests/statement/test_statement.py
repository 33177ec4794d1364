"""No combination of facts makes the statement claim more than holds."""

import dataclasses
import json
import math
import re

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fedsim.clients.local_settings import LocalSettings
from fedsim.clients.mechanisms.plan import PlanRequest
from fedsim.clients.mechanisms.planner import plan_privacy
from fedsim.clients.privacy_settings import PrivacySettings
from fedsim.statement import (
    SENTENCES,
    Facts,
    MechanismFacts,
    UnsupportedClaimError,
    in_words,
    statement_of,
    to_json,
)
from fedsim.statement.guarantee import TABLE, guarantee, simulated_guarantee

# How an ε, a δ or the word itself could be claimed.
FINITE = re.compile(r"ε(?:_k)?(?: of client \d+)?\s*(?:is|=|≤|<)\s*\d|at δ|μ\s*=|\d% of")
CLAIMED = re.compile(r"are \(ε|differentially private")


def words(facts: Facts) -> str:
    return "\n".join(sentence.text for sentence in statement_of(facts))


def changed(facts: Facts, **mechanism: str | None) -> Facts:
    return dataclasses.replace(facts, mechanism=dataclasses.replace(facts.mechanism, **mechanism))


def with_client(facts: Facts, number: int, **values: object) -> Facts:
    some = list(facts.clients)
    some[number] = dataclasses.replace(some[number], **values)
    return dataclasses.replace(facts, clients=tuple(some))


def built_exactly_where_its_facts_hold(facts: Facts) -> None:
    built = {sentence.id for sentence in statement_of(facts)}
    for row in SENTENCES:
        if row.identifier in built:
            assert row(facts).text.endswith(".")
        else:
            with pytest.raises(UnsupportedClaimError, match="the facts do not support"):
                row(facts)


def finite_figures_are_of_bounded_runs(facts: Facts) -> None:
    text = words(facts)
    finite = (
        facts.is_private
        and facts.has_charges
        and math.isfinite(facts.epsilon)
        and not facts.objections
    )
    assert finite == facts.is_bounded
    if not finite:
        nothing = "no privacy was spent: ε = 0 for every client"
        assert not FINITE.search(text.replace(nothing, "")), text
        assert not CLAIMED.search(text)
        assert to_json(facts)["profile"] is None
        kinds = {s.kind for s in statement_of(facts) if s.point != "guarantee"}
        assert "claim" not in kinds


def exactly_one_sentence_says_what_is_guaranteed(facts: Facts) -> None:
    assert sum(row.holds(facts) for row in TABLE[: TABLE.index(guarantee) + 1]) == 1


def printed_epsilon_is_the_largest_and_never_rounded_down(facts: Facts) -> None:
    for printed in re.findall(r"largest ε_k is ([0-9.]+)", words(facts)):
        assert float(printed) >= max(client.epsilon for client in facts.clients)
    for printed in re.findall(r"at δ [=≤] ([0-9.e-]+[0-9])", words(facts)):
        assert float(printed) >= max(client.delta for client in facts.clients)


def conditions_are_named_whenever_they_apply(facts: Facts) -> None:
    text = words(facts)
    mechanism = facts.mechanism
    if facts.is_bounded:
        assert ("The mechanism that this run simulates" in text) == (mechanism.noise == "seeded")
        assert ("no protection against anyone" in text) == (mechanism.noise == "seeded")
        assert ("is not below 1 / examples" in text) == bool(facts.clients_with_large_delta)
        assert ("a δ of its own" in text) == (len({c.delta for c in facts.clients}) > 1)
        assert "Tuning runs on the same data are not charged" in text
        assert "No amplification by client selection" in text
        assert ("made of integers" in text) == (mechanism.slack is not None)
    unfinished = facts.is_private and facts.run.status != "completed"
    assert ("continuing it spends more" in text) == unfinished
    failed = facts.is_private and facts.run.lost_updates > 0
    assert ("error message, may depend on its examples" in text) == failed
    if facts.secure_aggregation is not None:
        assert "is not differential privacy" in text


def the_quoted_paragraph_holds_the_guarantee_and_every_warning(facts: Facts) -> None:
    sentences = statement_of(facts)
    quoted = in_words(sentences)
    for sentence in sentences:
        if sentence.kind == "warning" or sentence.point == "guarantee":
            assert sentence.text in quoted


def it_is_json_without_nan_or_infinity(facts: Facts) -> None:
    content = to_json(facts)
    assert json.loads(json.dumps(content, allow_nan=False)) == content


@settings(
    max_examples=120,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(data=st.data())
def test_no_combination_of_facts_is_overstated(facts_strategy, data):
    facts = data.draw(facts_strategy)
    built_exactly_where_its_facts_hold(facts)
    finite_figures_are_of_bounded_runs(facts)
    exactly_one_sentence_says_what_is_guaranteed(facts)
    printed_epsilon_is_the_largest_and_never_rounded_down(facts)
    conditions_are_named_whenever_they_apply(facts)
    the_quoted_paragraph_holds_the_guarantee_and_every_warning(facts)
    it_is_json_without_nan_or_infinity(facts)


def test_an_ordinary_run_is_stated(honest):
    text = words(honest)
    assert text.startswith("Against a server that sees every update, the updates of each client k")
    assert "The largest ε_k is 3 at δ = 1e-05" in text
    assert "no protection against anyone" not in text


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda f: changed(f, noise="seeded"), "no protection against anyone who knows the seed"),
        (lambda f: changed(f, noise=None), "the source of its noise is not recorded"),
        (lambda f: changed(f, sampling="my_own"), "the sampling of its batches is not recorded"),
        (lambda f: changed(f, sampling="shuffle"), "drawn by shuffle, but the ledger of client 0"),
        (lambda f: changed(f, adjacency="edit"), "adjacency 'edit' is not known"),
        (lambda f: changed(f, accountant="gdp"), "accountant 'gdp' is not known"),
        (lambda f: with_client(f, 0, epsilon=math.inf), "Client 0 released updates"),
        (lambda f: with_client(f, 0, delta=1e-3), "δ is not below 1 / examples for client 0"),
        (lambda f: changed(f, adjacency="add_remove"), "a client that holds more than declared"),
        (lambda f: with_client(f, 0, delta=1e-4), "each client having a δ of its own"),
        (lambda f: with_client(f, 1, epsilon=9.0), "The target ε was exceeded by client 1"),
        (lambda f: with_client(f, 1, epsilon=2.5), "smaller than the ε of its ledger"),
        (lambda f: with_client(f, 0, withdrawn_round=4), "1 client withdrew before the end"),
        (lambda f: dataclasses.replace(f, profile=None), "proves nothing"),
        (
            lambda f: dataclasses.replace(f, mechanism=MechanismFacts()),
            "without differential privacy",
        ),
    ],
)
def test_each_fact_changes_what_is_said(honest, change, said):
    assert said not in words(honest)
    assert said in words(change(honest))


@pytest.mark.parametrize("name", ["flat", "automatic", "per_layer", "adaptive"])
@pytest.mark.parametrize("groups", [False, True])
def test_every_clipping_that_a_file_can_name_is_described_and_known(honest, name, groups):
    if groups and name in ("automatic", "per_layer"):
        return  # they take no groups
    own = {"groups": {"*": {"max_grad_norm": 1.0}}} if groups else {}
    section = {"noise_multiplier": 1.0, "delta": 1e-5, "clipping": {"name": name, **own}}
    bound = {} if groups else {"max_grad_norm": 1.0}
    privacy = PrivacySettings.model_validate({**section, **bound})
    facts = changed(honest, clipping=privacy.recorded_clipping)
    for number in range(len(facts.clients)):
        facts = with_client(facts, number, is_joint=True)
    assert facts.objections == ()
    assert "clipped to L2 norm C. Then" not in words(facts)


def test_the_limit_on_private_sizes_is_the_one_by_which_clients_are_refused(honest):
    """Under add_remove a failure for too many examples depends on a private number."""
    for declared in (300, 100_000):
        adjacency = {"name": "add_remove", "declared_examples": declared}
        section = {"noise_multiplier": 1.0, "delta": 1e-5, "max_grad_norm": 1.0}
        plan = plan_privacy(
            PlanRequest(
                PrivacySettings.model_validate({**section, "adjacency": adjacency}),
                LocalSettings.model_validate({"steps": 1, "batch_size": 32}),
                examples=declared,
                planned_rounds=1,
            )
        )
        stated = changed(honest, adjacency="add_remove")
        for number in range(len(honest.clients)):
            stated = with_client(stated, number, examples=declared)
        assert f"clients of at most {plan.release.most_examples:,} examples" in words(stated)


def test_median_and_minimum_are_rounded_up_like_every_epsilon(honest):
    text = words(with_client(honest, 0, epsilon=2.00001))
    assert "ε = 3 of client 1. The median (2.501) and the minimum (2.001) are" in text


def test_a_guarantee_of_what_ran_cannot_be_had_for_a_simulation(honest):
    simulated = changed(honest, noise="seeded")
    with pytest.raises(UnsupportedClaimError, match="'guarantee'"):
        guarantee(simulated)
    assert "simulates" in simulated_guarantee(simulated).text


def test_a_run_without_anything_released_spends_nothing(honest):
    some = tuple(
        dataclasses.replace(c, rounds=0, epsilon=0.0, events=frozenset()) for c in honest.clients
    )
    facts = dataclasses.replace(honest, clients=some, profile=None)
    assert "no privacy was spent" in words(facts)
    assert "attacker" not in words(facts)


def test_a_statement_for_programs_has_the_numbers_unrounded(honest):
    content = to_json(honest)
    by_id = {point["id"]: point for point in content["statement_points"]}
    assert by_id["guarantee"]["values"] == {"epsilon": 3.0, "delta": 1e-5, "client": 1}
    assert by_id["sampler"]["values"] == {"ran": "poisson", "accounted_as": "PoissonSampled"}
    assert by_id["spread"]["values"] == {"max": 3.0, "median": 2.5, "min": 2.0}
    assert content["profile"]["mu"] == 0.7


def test_the_ids_of_sentences_in_files_do_not_follow_renamed_functions():
    ids = """
        absent_clients
        accounting active_server adjacency against_server attack_bound client_unit client_update
        collusion concentrated constants_from_rows correlation data_access drawn_clients every_round
        delta_below_one_in_n delta_too_large dp_sgd error_messages floating_point gaussian_bound
        guarantee infinite_epsilon input largest_clients ledger lost_updates no_amplification
        no_privacy no_server_guarantee
        no_targets nothing_hidden nothing_released output parties_on_one_host personal_model
        public_constants public_parts released round_correlation sampler secure_aggregation
        secure_noise seeded_noise
        shared_noise simulated_guarantee sizes_excluded spread trusted_server
        targets_exceeded
        targets_kept threat_model tuning_not_charged unfinished unit
        unseen_updates votes withdrawals withheld
    """
    assert sorted(row.identifier for row in SENTENCES) == sorted(ids.split())
