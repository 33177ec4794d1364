"""The draft of a client that releases its noisy examples once, before its first round."""

from fedsim.clients.mechanisms.bounded_examples import BoundedExamples
from fedsim.clients.mechanisms.input_perturbation.mechanism import InputMechanism
from fedsim.clients.mechanisms.plan import Draft, PlanRequest, check_draws, draft_of_bounded


def draft(request: PlanRequest) -> Draft:
    """Return the draft of a client that releases noisy examples.

    Args:
        request: its settings, its schedule, its model, and the bounds of an example.
    """
    parameters, bounds = request.parameters, request.problem

    def known(noise: float) -> InputMechanism:
        release = InputMechanism(noise)
        if parameters is None or not isinstance(bounds, BoundedExamples):
            return release
        check_draws(request.examples * (bounds.features + bounds.targets))
        return release.for_examples(bounds, parameters.tensors[0].dtype)

    return draft_of_bounded(request, InputMechanism, known)
