"""Audits an experiment: clients' own mechanisms under attack, with canaries among their examples.

The clients are those of the experiment: its data, model, loss, plans and random streams. What they
release is looked at as the server would, which knows everything but whether an example took part.
A lower bound of ε above the claim, noise below the charged one, or noise that repeats shows a bug,
up to the confidence; their absence is evidence, no proof. docs/howto/attack.md has the limits.
"""

from collections.abc import Callable
from copy import deepcopy
from dataclasses import replace
from itertools import pairwise

import numpy as np
import torch
from numpy.typing import NDArray

from fedsim.audit.canaries import CanaryModel, with_canary
from fedsim.audit.findings import LOOKS, Claim, findings, noise_correlation
from fedsim.audit.observation import charged_noise, observe
from fedsim.audit.results import Audit, ClientAudit
from fedsim.clients.app import one_thread
from fedsim.clients.budget.affordable_steps import epsilon_of_steps
from fedsim.clients.budget.plan import PrivacyPlanError
from fedsim.clients.dp_sgd.model_checks.safety import preserve_state
from fedsim.clients.dp_sgd.per_example.backend import gradients_for
from fedsim.clients.dp_sgd.per_example.clipped_sum import PerExampleGradients
from fedsim.core.streams import Purpose, stream
from fedsim.experiment import LoadedExperiment
from fedsim.federation.assembly import assemble
from fedsim.federation.federation import Federation
from fedsim.federation.initial_model import NUM_CHECK_EXAMPLES, public_examples, to_tensors


def audit_experiment(
    loaded: LoadedExperiment,
    *,
    clients: int = 10,
    steps: int = 1000,
    confidence: float = 0.999,
    on_client: Callable[[int, int], None] = lambda done, of: None,
) -> Audit:
    """Plant canaries in the data of clients, train them privately and see what shows.

    Args:
        loaded: an experiment with privacy.
        clients: how many to audit: those that claim to spend the most.
        steps: that each of them takes, at least; more steps give tighter bounds.
        confidence: that a sound federation passes.
        on_client: told how many clients are done, and of how many.

    Raises:
        PrivacyPlanError: the experiment has no privacy, or no client with a claim.
        ValueError: the experiment cannot be assembled (see `assemble`).
    """
    federation = assemble(loaded, ledger=None)
    chosen = _chosen(federation, clients)
    looks = LOOKS * len(chosen) + 2 * (len(chosen) - 1)
    miss = (1.0 - confidence) / looks
    audited: list[ClientAudit] = []
    with one_thread():
        for client, epsilon in chosen:
            audited.append(_audit(federation, client, epsilon, steps=steps, miss=miss))
            on_client(len(audited), len(chosen))
    return Audit(
        name=loaded.experiment.name,
        clients=tuple(sorted(audited, key=lambda one: one.client)),
        num_clients=federation.num_clients,
        steps=len(audited[0].findings.noise_rows),
        confidence=confidence,
        shared=tuple(_shared(audited, miss=miss)),
    )


def _chosen(federation: Federation, most: int) -> list[tuple[int, float]]:
    """Return the clients of the largest finite claims, with these."""
    privacy = federation.experiment.privacy
    if privacy is None or federation.plans is None:
        raise PrivacyPlanError("there is nothing to audit: the experiment has no privacy section")
    claims = [
        (
            client,
            epsilon_of_steps(
                plan.step,
                plan.steps_to_take,
                delta=plan.delta,
                accountant=privacy.accountant,
                adjacency=privacy.adjacency,
            ),
        )
        for client, plan in enumerate(federation.plans)
        if plan.step.noise_multiplier > 0.0 and federation.data.clients.size(client)
    ]
    if not claims:
        raise PrivacyPlanError(
            "there is nothing to audit: no client has examples and a noise_multiplier above 0"
        )
    return sorted(claims, key=lambda claim: -claim[1])[:most]


def _audit(
    federation: Federation, client: int, epsilon: float, *, steps: int, miss: float
) -> ClientAudit:
    experiment, plans, terms = federation.experiment, federation.plans, federation.client_privacy
    if plans is None or terms is None or experiment.privacy is None:
        raise ValueError("an audit needs plans")
    plan, size = plans[client], federation.data.clients.size(client)
    planted = _planted(experiment.seed, client, size)
    gradients, targets = _with_canaries(
        federation, client, planted, bound=terms[client].privacy.max_grad_norm
    )
    step = replace(plan.step, bound_groups=None).for_model(gradients.parameters)
    seen = observe(
        gradients,
        targets,
        planted,
        step=step,
        local=experiment.local,
        seed=experiment.seed,
        client=client,
        steps=steps,
        secure=plan.secure_noise,
    )
    claim = Claim(
        epsilon=epsilon,
        delta=plan.delta,
        noise=charged_noise(step, gradients),
        sampling=step.sampling,
        steps=plan.steps_to_take,
        accountant=experiment.privacy.accountant,
        adjacency=experiment.privacy.adjacency,
    )
    found = findings(seen, claim, round_steps=experiment.local.steps, miss=miss)
    return ClientAudit(client, size, claim, found)


def _planted(seed: int, client: int, size: int) -> NDArray[np.bool_]:
    """Return which examples carry their canary: half of them, at random."""
    order = stream(seed, Purpose.CANARIES, client=client).permutation(size)
    return order < (size + 1) // 2


def _with_canaries(
    federation: Federation, client: int, planted: NDArray[np.bool_], *, bound: float
) -> tuple[PerExampleGradients, torch.Tensor]:
    """Return the gradients of the client's model with canaries, and its targets.

    The way to the gradients is chosen on public examples, as in a run: they stand behind the
    client's own and are never drawn.
    """
    own = federation.data.clients[client]
    features, targets = to_tensors(own, federation.device)
    public = public_examples(federation.data, NUM_CHECK_EXAMPLES)
    check_features, check_targets = to_tensors(public, federation.device)
    carries = torch.zeros(len(features) + len(check_features), device=federation.device)
    carries[: len(features)] = torch.from_numpy(planted)
    network = deepcopy(federation.model)
    with preserve_state(network), torch.no_grad():
        shape = network(check_features[:1]).shape[1:]
    model = CanaryModel(network, torch.cat([features, check_features]), carries, bound)
    model = model.to(federation.device)
    checks = torch.arange(len(features), len(carries), device=federation.device)
    loss = with_canary(federation.loss, shape)
    return gradients_for(model, loss, checks, check_targets), targets


def _shared(audited: list[ClientAudit], *, miss: float) -> list[str]:
    """Return the neighbours whose noise is correlated: clients must not share a stream."""
    found = []
    for one, other in pairwise(audited):
        rows, others = one.findings.noise_rows, other.findings.noise_rows
        width = min(rows.shape[1], others.shape[1])
        interval = noise_correlation(rows[:, :width], others[:, :width], miss=miss)
        if interval.excludes(0.0):
            found.append(
                f"clients {one.client} and {other.client} have noise in common: "
                f"correlation {interval.estimate:.3g}"
            )
    return found
