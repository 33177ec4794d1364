"""ε of an experiment's clients by several bounds, without training."""

from collections.abc import Callable, Sequence

from fedsim.accountant.textbook.bounds import Charges, choose_bounds
from fedsim.clients.mechanisms.plan import PrivacyPlan, PrivacyPlanError
from fedsim.core.commands import Phases
from fedsim.experiment import LoadedExperiment
from fedsim.federation.assembly import assemble
from fedsim.federation.federation import Federation
from fedsim.planning.bounds import BoundCurve, StepSchedule, bound_curve, even_numbers


def experiment_curves(
    loaded: LoadedExperiment,
    names: Sequence[str] | None = None,
    *,
    points: int = 1,
    phases: Phases | None = None,
) -> tuple[BoundCurve, ...]:
    """Return the curve of each kind of clients of an experiment, without training.

    Args:
        loaded: the experiment and the directory that its paths are relative to.
        names: of the bounds; None: the usual ones.
        points: number of points of each curve, at equal ratios; 1: after all steps alone.
        phases: the phases of the caller.

    Raises:
        PrivacyPlanError: the experiment has no `privacy` section, or no noise meets its target.
        ValueError: there is no such bound, or the experiment cannot be assembled.
    """
    privacy = loaded.experiment.privacy
    if privacy is None:
        raise PrivacyPlanError("there is nothing to plan: the experiment has no privacy section")
    bounds = choose_bounds(names, orders=privacy.accountant.orders)
    phases = phases or Phases()
    federation = assemble(loaded, ledger=None, phases=phases)
    phases.begin("bounding ε")
    curves = tuple(
        bound_curve(kind, bounds, even_numbers(1, kind.steps, points) if points > 1 else None)
        for kind in client_kinds(federation)
    )
    phases.end()
    return curves


def client_kinds(federation: Federation) -> tuple[StepSchedule, ...]:
    """Return a schedule for each kind of clients: those with one q, z, δ and number of steps.

    The noise of a kind is that of its client with the least of it, after the grid.

    Args:
        federation: with privacy.
    """
    plans, terms = federation.plan.clients or (), federation.plan.client_privacy or ()
    found: dict[tuple[object, ...], list[int]] = {}
    for client, plan in enumerate(plans):
        if plan.steps_to_take:
            numbers = (plan.release.sampling_rate, plan.noise_multiplier, plan.delta)
            key = (plan.steps_to_take, *(f"{number:.6g}" for number in numbers))
            found.setdefault(key, []).append(client)
    kinds = []
    for clients in found.values():
        least = min(clients, key=lambda one: plans[one].release.effective_noise_multiplier)
        plan, privacy = plans[least], terms[least].privacy
        kinds.append(
            StepSchedule(
                sampling_rate=plan.release.sampling_rate,
                noise_multiplier=plan.noise_multiplier,
                delta=plan.delta,
                steps=plan.steps_to_take,
                charges=_first_charges(plan),
                adjacency=privacy.adjacency.name,
                clients=tuple(clients),
            )
        )
    return tuple(kinds)


def _first_charges(plan: PrivacyPlan) -> Callable[[int], Charges]:
    return lambda count: tuple(plan.charges(0, count))
