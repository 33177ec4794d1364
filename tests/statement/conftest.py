"""Facts of runs that never happened: any combination, plausible or not."""

import math
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import strategies as st

from fedsim.accountant.sampler_slack import Slack
from fedsim.clients.sampling.schemes import SAMPLING_SCHEMES
from fedsim.statement import AttackBound, ClientFacts, Facts, MechanismFacts, Profile, RunFacts

EVENT_OF_SAMPLING = {name: scheme.event for name, scheme in SAMPLING_SCHEMES.items()}

finite = st.floats(min_value=0, max_value=60, allow_nan=False)
epsilons = st.one_of(finite, st.just(math.inf), st.just(0.0))
names = st.sampled_from([*EVENT_OF_SAMPLING.values(), "Gaussian", "NonPrivate"])


@st.composite
def clients(draw, sampling: str | None, number: int, is_sound: bool) -> ClientFacts:
    rounds = draw(st.sampled_from([0, 0, 1, 5, 60]))
    honest = EVENT_OF_SAMPLING.get(sampling or "", "Gaussian")
    events = frozenset({honest})
    if not is_sound:
        events = draw(st.one_of(st.just(events), st.frozensets(names, max_size=2)))
    return ClientFacts(
        client=number,
        examples=draw(st.integers(1, 10**6)),
        delta=draw(st.sampled_from([1e-3, 1e-5, 0.2])),
        epsilon=draw(finite if is_sound else epsilons) if rounds else 0.0,
        noise_multiplier=draw(st.floats(0, 10)),
        sampling_rate=draw(st.floats(1e-6, 1)),
        rounds=rounds,
        steps=5 * rounds,
        max_grad_norm=draw(st.sampled_from([None, 0.5, 1.0])),
        target_epsilon=draw(st.sampled_from([None, 2.0, 8.0])),
        events=events if rounds else frozenset(),
        is_joint=draw(st.booleans()),
        withdrawn_round=draw(st.sampled_from([None, None, 3])),
    )


@st.composite
def any_facts(draw) -> Facts:
    """Facts in any combination: contradictory ones, and those of a sound run in each second."""
    is_sound = draw(st.booleans())

    def one_of(*sound: Any, others: Sequence[Any]) -> Any:
        return draw(st.sampled_from(sound if is_sound else (*sound, *others)))

    sampling = one_of("poisson", others=[*EVENT_OF_SAMPLING, "my_own", None])
    mechanism = MechanismFacts(
        adjacency=one_of("zero_out", "add_remove", "replace_one", others=["other"]),
        accountant=one_of("pld", "rdp", "moments", others=["gdp"]),
        noise=one_of("seeded", "secure", others=[None, "weak"]),
        sampling=sampling,
        clipping=one_of("flat", "per_layer", others=["adaptive", "own", None]),
        slack=one_of(Slack(1e-5, 1e-9), others=[None]),
    )
    some = tuple(
        draw(clients(sampling, number, is_sound)) for number in range(draw(st.integers(0, 4)))
    )
    worst = max(some, key=lambda client: client.epsilon, default=None)
    profile = None
    if worst is not None and math.isfinite(worst.epsilon) and one_of(True, others=[False]):
        profile = Profile(
            client=one_of(worst.client, others=[0]),
            delta=worst.delta,
            epsilon=worst.epsilon * one_of(1.0, others=[0.5, 2.0]),
            curve=((0.0, 0.3), (worst.epsilon + 1.0, worst.delta)),
            mu=draw(st.sampled_from([None, 0.7])),
            slack=draw(st.sampled_from([0.0, 1e-6])),
        )
    run = RunFacts(
        status=draw(st.sampled_from(["completed", "interrupted", "failed", "stopped"])),
        rounds=draw(st.integers(0, 60)),
        planned_rounds=draw(st.sampled_from([None, 60])),
        lost_updates=draw(st.integers(0, 3)),
    )
    return Facts(
        clients=some,
        mechanism=one_of(mechanism, others=[MechanismFacts()]),
        profile=profile,
        attack=draw(st.sampled_from([None, AttackBound.over([profile])])) if profile else None,
        digest=draw(st.sampled_from([None, "f" * 64])),
        version=draw(st.sampled_from([None, "0.2.0"])),
        secure_aggregation=draw(st.sampled_from([None, {"protocol": "additive"}])),
        run=draw(st.sampled_from([run, RunFacts()])),
    )


@pytest.fixture(scope="session")
def facts_strategy() -> st.SearchStrategy[Facts]:
    return any_facts()


@pytest.fixture
def honest() -> Facts:
    """Return the facts of an ordinary private run of two clients, secure noise."""
    some = tuple(
        ClientFacts(
            client=number,
            examples=1000,
            delta=1e-5,
            epsilon=epsilon,
            noise_multiplier=1.1,
            sampling_rate=0.1,
            rounds=10,
            steps=50,
            max_grad_norm=1.0,
            target_epsilon=8.0,
            events=frozenset({"PoissonSampled"}),
        )
        for number, epsilon in enumerate((2.0, 3.0))
    )
    profile = Profile(1, 3.0, 1e-5, ((0.0, 0.3), (3.0, 1e-5)), 0.7, 1e-7)
    return Facts(
        clients=some,
        mechanism=MechanismFacts(
            adjacency="zero_out",
            accountant="pld",
            noise="secure",
            sampling="poisson",
            clipping="flat",
            slack=Slack(1e-5, 1e-9),
        ),
        profile=profile,
        attack=AttackBound.over([profile]),
        digest="f" * 64,
        version="0.2.0",
        run=RunFacts(status="completed", rounds=10, planned_rounds=10),
    )
