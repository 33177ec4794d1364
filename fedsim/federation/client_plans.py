"""The plans of all clients, by what they do in a round: steps of DP-SGD, an update, or votes."""

from collections.abc import Sequence

from fedsim.clients.gradients.parameters import FlatParameters
from fedsim.clients.mechanisms.client_privacy import ClientPrivacy
from fedsim.clients.mechanisms.plan import PlanRequest, PrivacyPlan
from fedsim.clients.mechanisms.planner import plan_privacy
from fedsim.clients.privacy_settings import PrivacySettings
from fedsim.core.shared_values import map_shared
from fedsim.experiment import Experiment
from fedsim.federation.schedule import StepSchedule


def client_plans(
    experiment: Experiment,
    terms: Sequence[ClientPrivacy],
    sizes: Sequence[int],
    steps: StepSchedule,
    parameters: FlatParameters | None = None,
    problem: object = None,
) -> tuple[PrivacyPlan, ...]:
    """Return the plan of every client as if it added all noise of its claim alone.

    Args:
        experiment: the settings.
        terms: privacy settings of each client.
        sizes: number of examples of each client; unused where the unit is the client.
        steps: the planned steps of each client.
        parameters: of what clients send, for the rounding of the grid; None: not known.
        problem: what a kind of release needs beside settings (see `PlanRequest`); None: not known.

    Raises:
        PrivacyPlanError: no noise meets the settings of a client.
    """
    kind, drawn = experiment.release_kind, steps.participation.secret_rate

    def plan(
        privacy: PrivacySettings, examples: int, planned_rounds: int, planned_steps: int
    ) -> PrivacyPlan:
        request = PlanRequest(
            privacy,
            experiment.local,
            examples=examples,
            planned_rounds=planned_rounds,
            planned_steps=planned_steps,
            parameters=parameters,
            drawn=drawn,
            problem=experiment.ballots or problem,
            kind=kind,
        )
        return plan_privacy(request)

    settings = [own.privacy for own in terms]
    rounds = steps.participation.planned_rounds()
    return tuple(map_shared(plan, settings, sizes, rounds, steps.planned()))
