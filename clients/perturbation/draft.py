"""Drafts of a client that releases trained models, or its noisy examples once."""

from fedsim.clients.budget.plan import Draft, PrivacyPlanError, check_draws
from fedsim.clients.dp_sgd.draft import whole_round_steps
from fedsim.clients.dp_sgd.parameters import FlatParameters
from fedsim.clients.local_settings import LocalSettings
from fedsim.clients.perturbation.bounds import BoundedExamples
from fedsim.clients.perturbation.input import InputMechanism
from fedsim.clients.perturbation.output import OutputMechanism
from fedsim.clients.perturbation.problem import ConvexProblem, Descent
from fedsim.clients.privacy_settings import PrivacySettings


def draft_of_perturbation(
    privacy: PrivacySettings,
    local: LocalSettings,
    examples: int,
    rounds: int,
    parameters: FlatParameters | None,
    problem: ConvexProblem | BoundedExamples | None,
) -> Draft:
    """Return the draft of perturbation output or input.

    Args:
        privacy: the `privacy` section.
        local: the `local` section.
        examples: the client's number of examples.
        rounds: that the client is scheduled for.
        parameters: of the model; None: not known.
        problem: what the sensitivity follows from; None: not known.
    """
    rounds = rounds if examples else 0  # nothing to release

    def output(noise: float) -> OutputMechanism:
        release = OutputMechanism(noise)
        if parameters is None or not examples or not isinstance(problem, ConvexProblem):
            return release
        check_draws(rounds * parameters.size)
        steps = whole_round_steps(privacy, local, examples)
        descent = _descent(local, steps, examples, problem)
        return release.for_training(descent, parameters.tensors[0].dtype)

    def noisy_examples(noise: float) -> InputMechanism:
        release = InputMechanism(noise)
        if parameters is None or not examples or not isinstance(problem, BoundedExamples):
            return release
        check_draws(examples * (problem.features + problem.targets))
        return release.for_examples(problem, parameters.tensors[0].dtype)

    is_output = privacy.perturbation == "output"

    def build(noise: float) -> OutputMechanism | InputMechanism:
        try:
            release = output(noise) if is_output else noisy_examples(noise)
            if privacy.noise_multiplier is None and parameters is not None and examples:
                release = release.with_effective_noise(noise)
        except ValueError as error:
            raise PrivacyPlanError(
                f"privacy.perturbation: {privacy.perturbation} cannot be used: {error}"
            ) from error
        return release

    return Draft(
        public_size=examples,
        examples=examples,
        steps=rounds,
        given=privacy.noise_multiplier,
        like=OutputMechanism(1.0) if is_output else InputMechanism(1.0),
        build=build,
    )


def _descent(local: LocalSettings, steps: int, examples: int, problem: ConvexProblem) -> Descent:
    """Return the training of a client of a public size."""
    optimizer = local.optimizer
    return Descent(
        problem,
        learning_rate=optimizer.lr,
        weight_decay=optimizer.weight_decay,
        steps=steps,
        batch=local.lot(examples),
        examples=examples,
    )
