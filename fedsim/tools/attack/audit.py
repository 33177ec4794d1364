"""Privacy audit of an experiment: canaries attack the mechanism of each client.

The audit uses the experiment's data, model, loss, plans and random streams. The adversary knows
everything except whether an example was in the batch, and except the noise of honest parties.
Violations are, for example, a lower bound on ε above the claimed ε, less noise than charged, or
repeated noise. A violation shows a bug, up to the confidence. An audit without violations is
evidence, not proof. docs/howto/attack.md has the limits.
"""

from collections.abc import Callable
from copy import deepcopy
from dataclasses import replace
from itertools import pairwise

import numpy as np
import torch
from numpy.typing import NDArray

from fedsim.clients.app import one_thread
from fedsim.clients.gradients.choice import gradients_for
from fedsim.clients.gradients.per_example import PerExampleGradients
from fedsim.clients.mechanisms.dp_sgd.mechanism import DpSgdMechanism
from fedsim.clients.mechanisms.plan import PrivacyPlanError
from fedsim.clients.model_checks.safety import preserve_state
from fedsim.clients.sampling.sampling import PoissonSampling
from fedsim.clients.training.shared_model import SharedModel
from fedsim.core.commands import Phases
from fedsim.core.plugin_errors import plugin_calls
from fedsim.core.streams import Purpose, stream
from fedsim.experiment import LoadedExperiment
from fedsim.federation.assembly import assemble
from fedsim.federation.federation import Federation
from fedsim.federation.trained_model import NUM_CHECK_EXAMPLES, public_examples, to_tensors
from fedsim.tools.attack.adversaries import Adversary, OtherNoise, adversaries_of
from fedsim.tools.attack.canaries import CanaryModel, add_canary_loss, num_groups, with_canaries
from fedsim.tools.attack.evidence import correlation_interval
from fedsim.tools.attack.findings import (
    NUM_INTERVAL_ENDS,
    Audit,
    Claim,
    ClientAudit,
    measure_leakage,
)
from fedsim.tools.attack.observation import UpdateRounds, charged_noise, num_spares, observe
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
    experiment, plans, terms = (
        federation.experiment,
        federation.plan.clients,
        federation.plan.client_privacy,
    )
    if plans is None or terms is None or experiment.privacy is None:
        raise ValueError("an audit needs plans")
    plan, size = plans[client], federation.data.clients.size(client)
    if plan.release.protects_client:
        return _audit_updates(federation, client, adversary, steps=steps, miss=miss)
    release = plan.release_as(DpSgdMechanism)
    has_canary = _choose_canaries(experiment.seed, client, size)
    gradients, targets = _canary_gradients(
        federation,
        client,
        has_canary,
        bound=terms[client].privacy.clip_norm,
        spares=num_spares(size, steps),
        groups=num_groups(release),
    )
    step = with_canaries(release, gradients.parameters)
    view = adversary.view
    seen = observe(
        gradients,
        targets,
        has_canary,
        step=step,
        local=experiment.local,
        seed=experiment.seed,
        client=client,
        steps=steps,
        round_steps=plan.round_steps,
        secure=plan.secure_noise,
        others=None
        if view is None
        else OtherNoise(
            federation,
            view,
            gradients,
            targets,
            model=SharedModel(gradients.model, parameters=gradients.parameters),
            loss=gradients.loss,
        ),
    )
    claim = Claim(
        epsilon=adversary.epsilon,
        delta=plan.delta,
        noise=adversary.noise_factor * charged_noise(step, gradients),
        sampling=step.sampling,
        steps=plan.steps_to_take,
        accountant=experiment.privacy.accounting,
        adjacency=experiment.privacy.adjacency.name,
        is_fixed=step.clipping.adapted_clip_norm is None,
    )
    findings = measure_leakage(seen, claim, round_steps=plan.round_steps, miss=miss)
    return ClientAudit(client, size, claim, findings, against=adversary.against)


def _audit_updates(
    federation: Federation, client: int, adversary: Adversary, *, steps: int, miss: float
) -> ClientAudit:
    """Audit a client that releases whole updates: all of its data together are one canary."""
    experiment, plan = federation.experiment, (federation.plan.clients or ())[client]
    if experiment.privacy is None:
        raise ValueError("an audit needs plans")
    rounds = UpdateRounds(federation, client, adversary.view)
    claim = Claim(
        epsilon=adversary.epsilon,
        delta=plan.delta,
        noise=adversary.noise_factor * rounds.update.charged_multipliers[0],
        sampling=PoissonSampling(plan.release.sampling_rate),
        steps=plan.steps_to_take,
        accountant=experiment.privacy.accounting,
        adjacency=experiment.privacy.adjacency.name,
        is_fixed=False,
    )
    findings = measure_leakage(rounds.observe(steps), claim, round_steps=1, miss=miss)
    size = federation.data.clients.size(client)
    return ClientAudit(client, size, claim, findings, against=adversary.against)


def _choose_canaries(seed: int, client: int, size: int) -> NDArray[np.bool_]:
    """Return a random mask (size,) in which half of the examples have a canary."""
    order = stream(seed, Purpose.CANARIES, client=client).permutation(size)
    return order < (size + 1) // 2


def _canary_gradients(
    federation: Federation,
    client: int,
    has_canary: NDArray[np.bool_],
    *,
    bound: float,
    spares: int,
    groups: int,
) -> tuple[PerExampleGradients, torch.Tensor]:
    """Return (per-example gradients of the client's model with canaries, its targets).

    As in a run, public examples decide how the gradients are computed. They follow the client's own
    examples and are never drawn in a batch.
    """
    examples = federation.data.clients[client]
    features, targets = to_tensors(examples, federation.model.device)
    public = public_examples(federation.data, NUM_CHECK_EXAMPLES)
    check_features, check_targets = to_tensors(public, federation.model.device)
    carries = torch.zeros(len(features) + len(check_features), device=federation.model.device)
    carries[: len(features)] = torch.from_numpy(has_canary)
    network = deepcopy(federation.model.module)
    with preserve_state(network), torch.no_grad():
        shape = network(check_features[:1]).shape[1:]
    model = CanaryModel(
        network, torch.cat([features, check_features]), carries, bound, spares=spares, groups=groups
    )
    model = model.to(federation.model.device)
    checks = torch.arange(len(features), len(carries), device=federation.model.device)
    loss = add_canary_loss(federation.model.loss, shape)
    return gradients_for(model, loss, checks, check_targets), targets


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
