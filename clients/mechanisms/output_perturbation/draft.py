"""The draft of a client that releases a model trained without noise in each of its rounds."""

from fedsim.clients.mechanisms.dp_sgd.draft import whole_round_steps
from fedsim.clients.mechanisms.output_perturbation.mechanism import OutputMechanism
from fedsim.clients.mechanisms.output_perturbation.problem import ConvexProblem, Descent
from fedsim.clients.mechanisms.plan import Draft, PlanRequest, check_draws, draft_of_bounded


def draft(request: PlanRequest) -> Draft:
    """Return the draft of a client that releases trained models.

    Args:
        request: its settings, its schedule, its model, and the convex problem that it solves.
    """
    parameters, problem, examples = request.parameters, request.problem, request.examples

    def known(noise: float) -> OutputMechanism:
        release = OutputMechanism(noise)
        if parameters is None or not isinstance(problem, ConvexProblem):
            return release
        check_draws(request.planned_rounds * parameters.size)
        local, optimizer = request.local, request.local.optimizer
        descent = Descent(
            problem,
            learning_rate=optimizer.lr,
            weight_decay=optimizer.weight_decay,
            steps=whole_round_steps(request.privacy, local, examples),
            batch=local.lot(examples),
            examples=examples,
        )
        return release.for_training(descent, parameters.tensors[0].dtype)

    return draft_of_bounded(request, OutputMechanism, known)
