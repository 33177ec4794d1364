"""Privacy audit of an experiment: canaries attack the mechanism of each client.

The adversary knows everything except whether an example was in the batch, and except the noise of
honest parties. A violation shows a bug, up to the confidence. An audit without violations is
evidence, not proof. docs/howto/attack.md has the limits.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import pairwise

from rich.console import Console
from rich.table import Table

from fedsim.clients.app import one_thread
from fedsim.clients.mechanisms.plan import PrivacyPlanError
from fedsim.core.commands import Phases
from fedsim.core.formatting import count_text, epsilon_text, least_epsilon_text
from fedsim.core.plugin_errors import plugin_calls
from fedsim.experiment import LoadedExperiment
from fedsim.federation.assembly import assemble
from fedsim.federation.federation import Federation
from fedsim.report.terminal import figure_table, print_sentence, print_table
from fedsim.tools.attack.evidence import Interval, correlation_interval
from fedsim.tools.attack.findings import NUM_INTERVAL_ENDS, Audit, ClientAudit, measure_leakage
from fedsim.tools.attack.observation import Claim, ExampleRounds, UpdateRounds, claims_of
from fedsim.tools.attack.views import views_of

_OBSERVERS = {
    "sums": "sums: the smallest sum that may be opened, with the fewest honest clients;",
    "server": "server: the client's own uploads, if secure aggregation fails;",
    "models": "models: the client's part with the noise that the server adds",
}


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

    `on_client` is called with (number of audited clients, number to audit).
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
        num_views = sum(len(claims) for _, claims in chosen)
        interval_ends = NUM_INTERVAL_ENDS * num_views + 2 * (len(chosen) - 1)
        miss = (1.0 - confidence) / interval_ends
        rounds_of = UpdateRounds if kind.protects_client else ExampleRounds
        audited = list[ClientAudit]()
        with one_thread():
            for done, (client, claims) in enumerate(chosen, start=1):
                phases.begin(f"auditing client {client}, {done} of {len(chosen)}")
                size = federation.data.clients.size(client)
                for claim in claims:
                    seen = rounds_of(federation, client, claim, steps).observe()
                    findings = measure_leakage(seen, claim, miss=miss)
                    audited.append(ClientAudit(client, size, claim, findings))
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


def _choose_clients(federation: Federation, most: int) -> list[tuple[int, list[Claim]]]:
    """Return (client, its claims) for the clients with the largest claimed ε."""
    privacy = federation.experiment.privacy
    if privacy is None or federation.plan.clients is None:
        raise PrivacyPlanError("there is nothing to audit: the experiment has no privacy section")
    if privacy.is_correlated:
        raise PrivacyPlanError(
            "an audit measures noise that is independent from step to step, and "
            "privacy.noise_correlation is set: audit the same file with "
            "privacy.noise_correlation=none"
        )
    claims = [
        (client, claims_of(federation, client))
        for client, plan in enumerate(federation.plan.clients)
        if plan.release.noise_multiplier > 0.0 and federation.data.clients.size(client)
    ]
    if not claims:
        why = "no client has examples and a noise_multiplier above 0"
        raise PrivacyPlanError(f"there is nothing to audit: {why}")
    return sorted(claims, key=lambda claim: -claim[1][0].epsilon)[:most]


def _shared_noise(audited: list[ClientAudit], *, miss: float) -> Iterator[str]:
    """Yield a message for each two consecutive clients whose own releases have correlated noise."""
    for client, other in pairwise(client for client in audited if client.claim.against == "server"):
        rows, others = client.findings.noise_rows, other.findings.noise_rows
        width = min(rows.shape[1], others.shape[1])
        interval = correlation_interval(rows[:, :width], others[:, :width], miss=miss)
        if interval.excludes(0.0):
            both = f"clients {client.client} and {other.client}"
            yield f"{both} have noise in common: correlation {interval.estimate:.3g}"


def print_audit(audit: Audit) -> None:
    """Print each client's measurements with its claim, and the verdict of the audit."""
    console = Console()
    print_table(console, _epsilon_table(audit))
    console.print()
    print_table(console, _mechanism_table(audit))
    problems = len(audit.violations)
    verdict = f"{count_text(problems, 'violation')} found" if problems else "no claim is violated"
    clients, steps = count_text(audit.num_audited, "client"), count_text(audit.steps, "step")
    scope = f"{clients}, {steps} each, confidence {audit.confidence:g}"
    print_sentence(console, f"{audit.name}: {verdict} ({scope})")


def _epsilon_table(audit: Audit) -> Table:
    shows_views = any(client.views is not None for client in audit.clients)
    title = "ε of each client: claimed, certified, and estimated"
    who = _who(audit)
    numbers = [*who, "examples", "claimed", "certified", "of runs", "steps"]
    if shows_views:
        title, numbers = f"{title} from four views", [*numbers, "uploads", "sums", "final"]
    table = figure_table(title, numbers)
    for client in audit.clients:
        findings = client.findings
        last = [math.nan] * 3 if client.views is None else vars(client.views).values()
        table.add_row(
            *[str(client.client), client.claim.against][: len(who)],
            str(client.num_examples),
            epsilon_text(client.claim.epsilon),
            _bound_text(findings.epsilon),
            _bound_text(findings.epsilon_of_runs),
            _estimate_text(findings.epsilon_estimate),
            *(_estimate_text(value) for value in last if shows_views),
        )
    table.caption = "\n".join(_epsilon_notes(audit, shows_views=shows_views))
    return table


def _epsilon_notes(audit: Audit, *, shows_views: bool) -> list[str]:
    notes = [
        f"certified: at least so much is spent (confidence {audit.confidence:g}), by single steps;",
        "of runs: the same by whole runs, whatever the distribution of the noise;",
        "estimated, for one who sees all steps (as charged), all uploads of the\n"
        "client, the sums of all clients' updates, or the final model"
        if shows_views
        else "steps: estimated, for one who sees every release",
    ]
    observers = {client.claim.against for client in audit.clients}
    if observers != {"server"}:
        notes += [text for name, text in _OBSERVERS.items() if name in observers]
    if audit.num_clients > (shown := audit.num_audited):
        which = f"the {shown} largest claims" if shown > 1 else "the largest claim"
        notes.append(f"{which} of {audit.num_clients:,} clients")
    return notes


def _who(audit: Audit) -> list[str]:
    """Return the headings of the first columns: client, and adversary if any is not the server."""
    is_server = all(client.claim.against == "server" for client in audit.clients)
    return ["client"] if is_server else ["client", "against"]


def _mechanism_table(audit: Audit) -> Table:
    who = _who(audit)
    numbers = [*who, "noise", "clipping", "sampling"]
    table = figure_table("Measured mechanism, relative to the charge", numbers)
    for client in audit.clients:
        findings, highest = client.findings, client.findings.contribution.high
        table.add_row(
            *[str(client.client), client.claim.against][: len(who)],
            _interval_text(findings.noise),
            f"{highest:.4f}" if math.isfinite(highest) else "–",
            _interval_text(findings.sampling_rate),
        )
    table.caption = (
        "noise: standard deviation; clipping: largest\ncontribution of an example; sampling: rate"
    )
    return table


def _bound_text(epsilon: float) -> str:
    """Return a lower bound of ε rounded down, as text with four significant digits."""
    text = least_epsilon_text(epsilon)
    return text if text in ("0", "∞") else f"{float(text):#.4g}"


def _estimate_text(epsilon: float) -> str:
    return "–" if math.isnan(epsilon) else f"{epsilon:#.3g}"


def _interval_text(interval: Interval) -> str:
    if math.isnan(interval.estimate):
        return "–"
    return f"{interval.estimate:.3f} ± {interval.high - interval.estimate:.3f}"
