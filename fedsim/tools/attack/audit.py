"""Privacy audit of an experiment: canaries attack the mechanism of each client.

The audit uses the experiment's data, model, loss, plans and random streams. The adversary knows
everything except whether an example was in the batch, and except the noise of honest parties.
Violations are, for example, a lower bound on ε above the claimed ε, less noise than charged, or
repeated noise. A violation shows a bug, up to the confidence. An audit without violations is
evidence, not proof. docs/howto/attack.md has the limits.
"""

from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise

from fedsim.clients.app import one_thread
from fedsim.clients.mechanisms.accounting import Accounting
from fedsim.clients.mechanisms.plan import PrivacyPlanError
from fedsim.core.commands import Phases
from fedsim.core.plugin_errors import plugin_calls
from fedsim.experiment import LoadedExperiment
from fedsim.federation.assembly import assemble
from fedsim.federation.federation import Federation
from fedsim.tools.attack.adversaries import Adversary, adversaries_of
from fedsim.tools.attack.evidence import correlation_interval
from fedsim.tools.attack.findings import (
    NUM_INTERVAL_ENDS,
    Audit,
    Claim,
    ClientAudit,
    measure_leakage,
)
from fedsim.tools.attack.observation import ExampleRounds, UpdateRounds
from fedsim.tools.attack.views import views_of


def audit_experiment(
    loaded: LoadedExperiment,
    *,
    clients: int = 10,
    steps: int = 1000,
    confidence: float = 0.999,
    on_client: Callable[[int, int], None] = lambda done, of: None,
    phases: Phases | None = None,
) -> Audit:
    """Add canaries to clients' examples, train the clients privately and measure the leakage.

    Args:
        loaded: the loaded experiment, with privacy.
        clients: maximum number of clients to audit, those with the largest claimed ε first.
        steps: minimum number of steps of each client; more steps give tighter bounds.
        confidence: probability that a correct federation passes, in (0, 1).
        on_client: function called after each client with (number of audited clients, number to
            audit).
        phases: object to which the phases of the work are reported.

    Raises:
        PrivacyPlanError: the experiment has no privacy, or no client with a claimed ε.
        ValueError: the experiment cannot be assembled (see `assemble`).
    """
    if why := loaded.experiment.local.gradient_facts.not_audited:
        raise PrivacyPlanError(why)
    kind, phases = loaded.experiment.release_kind, phases or Phases()
    if loaded.experiment.privacy is not None and not kind.takes_canaries:
        raise PrivacyPlanError(
            "fedsim audit plants canaries in gradients or updates, and clients release "
            f"{kind.releases}: fedsim validate --data probes this noise, and fedsim verify "
            "--replay draws that of a run again"
        )
    with plugin_calls("a plug-in failed in the audit", mixed=not loaded.experiment.plugins):
        federation = assemble(loaded, ledger=None, phases=phases)
        chosen = _choose_clients(federation, clients)
        num_views = sum(len(adversaries) for _, adversaries in chosen)
        interval_ends = NUM_INTERVAL_ENDS * num_views + 2 * (len(chosen) - 1)
        miss = (1.0 - confidence) / interval_ends
        audited: list[ClientAudit] = []
        with one_thread():
            for done, (client, adversaries) in enumerate(chosen, start=1):
                phases.begin(f"auditing client {client}, {done} of {len(chosen)}")
                audited += [
                    _audit_client(federation, client, adversary, steps=steps, miss=miss)
                    for adversary in adversaries
                ]
                phases.end()  # the caller may print
                on_client(done, len(chosen))
        phases.begin("comparing with the claims")
        # Stable: the claimed view of a client is first.
        audited.sort(key=lambda client: client.client)
        if federation.plan.sums is None and kind.draws_batches:
            uploads = {client.client: client.findings.uploads for client in audited}
            views = views_of(federation, uploads)
            audited = [replace(client, views=views.get(client.client)) for client in audited]
        return Audit(
            name=loaded.experiment.name,
            clients=tuple(audited),
            num_clients=federation.num_clients,
            steps=len(audited[0].findings.noise_rows),
            confidence=confidence,
            shared_noise=tuple(_shared_noise(audited, miss=miss)),
        )


def _choose_clients(federation: Federation, most: int) -> list[tuple[int, list[Adversary]]]:
    """Return (client, its adversaries) for the clients with the largest claimed ε."""
    privacy = federation.experiment.privacy
    if privacy is None or federation.plan.clients is None:
        raise PrivacyPlanError("there is nothing to audit: the experiment has no privacy section")
    if privacy.noise_correlation != "none":
        raise PrivacyPlanError(
            "an audit measures noise that is independent from step to step, and "
            "privacy.noise_correlation is set: audit the same file with "
            "privacy.noise_correlation=none"
        )
    claims = [
        (client, adversaries_of(federation, client))
        for client, plan in enumerate(federation.plan.clients)
        if plan.release.noise_multiplier > 0.0 and federation.data.clients.size(client)
    ]
    if not claims:
        raise PrivacyPlanError(
            "there is nothing to audit: no client has examples and a noise_multiplier above 0"
        )
    return sorted(claims, key=lambda claim: -claim[1][0].epsilon)[:most]


def _audit_client(
    federation: Federation, client: int, adversary: Adversary, *, steps: int, miss: float
) -> ClientAudit:
    """Audit what one adversary sees of a client."""
    plan, privacy = (federation.plan.clients or ())[client], federation.experiment.privacy
    if privacy is None:
        raise ValueError("an audit needs plans")
    rounds_of = UpdateRounds if plan.release.protects_client else ExampleRounds
    rounds = rounds_of(federation, client, adversary.view, steps)
    claim = Claim(
        epsilon=adversary.epsilon,
        noise=adversary.noise_factor * rounds.charged_noise,
        sampling=rounds.sampling,
        steps=plan.steps_to_take,
        accounting=Accounting.of(privacy, plan.delta),
        is_fixed=rounds.is_fixed,
    )
    findings = measure_leakage(rounds.observe(), claim, miss=miss)
    size = federation.data.clients.size(client)
    return ClientAudit(client, size, claim, findings, against=adversary.against)


def _shared_noise(audited: list[ClientAudit], *, miss: float) -> list[str]:
    """Return a message for each pair of consecutive audited clients with correlated noise.

    Only clients' own releases are compared, since sums share the noise of other clients.
    """
    lines = []
    for client, other in pairwise(client for client in audited if client.against == "server"):
        rows, others = client.findings.noise_rows, other.findings.noise_rows
        width = min(rows.shape[1], others.shape[1])
        interval = correlation_interval(rows[:, :width], others[:, :width], miss=miss)
        if interval.excludes(0.0):
            lines.append(
                f"clients {client.client} and {other.client} have noise in common: "
                f"correlation {interval.estimate:.3g}"
            )
    return lines
