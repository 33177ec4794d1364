"""The plans of all clients, by what they do in a round: steps of DP-SGD, an update, or votes."""

from collections.abc import Sequence

from fedsim.clients.budget.client_privacy import ClientPrivacy
from fedsim.clients.budget.plan import PrivacyPlan
from fedsim.clients.budget.planner import plan_privacy
from fedsim.clients.dp_sgd.parameters import FlatParameters
from fedsim.clients.perturbation.bounds import BoundedExamples
from fedsim.clients.perturbation.problem import ConvexProblem
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
    problem: ConvexProblem | BoundedExamples | None = None,
) -> tuple[PrivacyPlan, ...]:
    """Return the plan of every client as if it added all noise of its claim alone.

    Args:
        experiment: the settings.
        terms: privacy settings of each client.
        sizes: number of examples of each client; unused where the unit is the client.
        steps: the planned steps of each client.
        parameters: of what clients send, for the rounding of the grid; None: not known.
        problem: what noise on models or examples is calibrated to; None: not known.

    Raises:
        PrivacyPlanError: no noise meets the settings of a client.
    """
    ballots, drawn = experiment.ballots, steps.participation.secret_rate

    def plan(
        privacy: PrivacySettings, examples: int, planned_rounds: int, planned_steps: int
    ) -> PrivacyPlan:
        return plan_privacy(
            privacy,
            experiment.local,
            examples=examples,
            planned_rounds=planned_rounds,
            planned_steps=planned_steps,
            parameters=parameters,
            drawn=drawn,
            problem=problem,
            ballots=ballots,
        )

    settings = [own.privacy for own in terms]
    rounds = steps.participation.planned_rounds()
    return tuple(map_shared(plan, settings, sizes, rounds, steps.planned()))
