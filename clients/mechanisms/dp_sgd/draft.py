"""Privacy plan of a client that trains with DP-SGD, made from the client's settings."""

from fedsim.accountant import Gaussian, UnsupportedEventError, make_accountant
from fedsim.clients.clipping.adaptive import BATCH_OVER_COUNT_NOISE, AdaptiveClipping
from fedsim.clients.clipping.clipping import (
    ALL_OTHERS,
    AutomaticClipping,
    ChosenNoise,
    Clipping,
    FlatClipping,
    LayerClipping,
    NoiseAllocation,
    PatternClipping,
)
from fedsim.clients.correlated_noise import NoiseCorrelation
from fedsim.clients.local_settings import LocalSettings
from fedsim.clients.mechanisms.conditions import most_examples
from fedsim.clients.mechanisms.dp_sgd.mechanism import DpSgdMechanism
from fedsim.clients.mechanisms.dp_sgd.settings import has_all_noise
from fedsim.clients.mechanisms.plan import Draft, PlanRequest, PrivacyPlanError, check_draws
from fedsim.clients.privacy_settings import PrivacySettings
from fedsim.clients.sampling.divided_batches import SAMPLINGS
from fedsim.clients.sampling.sampling import Sampling
from fedsim.noise.correlated.settings import OF_STEPS, ToeplitzSettings
from fedsim.noise.release import NoiseRangeError


def draft(request: PlanRequest) -> Draft:
    """Return the privacy plan, before noise calibration, of a client that trains with DP-SGD.

    Sampling rate and expected batch size follow from the client's number of examples. Under
    zero-out and replace-one adjacency this number is public. Under add-remove it is private, and
    the size that the settings declare takes its place.

    Args:
        request: the client's settings, schedule and model.

    Raises:
        PrivacyPlanError: the accountant does not support the sampling under this adjacency, or
            two uses of an example are too few steps apart for the correlated noise.
    """
    privacy, local, parameters = request.privacy, request.local, request.parameters
    size = privacy.adjacency.declared_examples or request.examples
    sampling, expected_batch = _sampling(privacy, local, max(1, size))
    round_steps = _steps_at(local, sampling.sampling_rate)
    if privacy.noise == "secure":
        sampling = sampling.within_rounds(round_steps)
    steps = request.planned_steps
    steps = round_steps * request.planned_rounds if steps is None else steps
    steps = steps if size else 0  # a client without examples takes no step
    correlation = _correlation(privacy, steps)
    if correlation is not None:
        sampling = _spaced(sampling, correlation.bands)
    _check_accountable(privacy, sampling)
    given = given_noise(privacy, expected_batch)
    key = "clipping.groups" if privacy.clipping.groups else "clipping"

    def build(noise: float) -> DpSgdMechanism:
        try:
            step = DpSgdMechanism(
                sampling=sampling,
                clipping=clipping_of(privacy, expected_batch),
                noise_multiplier=noise,
                expected_batch=expected_batch,
                allocation=_allocation(privacy),
                max_physical_batch=local.max_physical_batch,
                largest_batch=_largest_batch(privacy, size),
                correlation=correlation,
            )
            if correlation is not None and given is None:
                step = step.with_effective_noise(noise)
        except ValueError as error:
            raise PrivacyPlanError(f"privacy.{key} cannot be used: {error}") from error
        if parameters is None:
            return step
        check_draws(steps * (parameters.size + 1))
        try:
            step = step.for_model(parameters)
            return step if given is not None else step.with_effective_noise(noise)
        except NoiseRangeError as error:
            raise PrivacyPlanError(f"privacy.max_grad_norm cannot be used: {error}") from error
        except ValueError as error:
            raise PrivacyPlanError(f"privacy.{key} does not fit the model: {error}") from error

    return Draft(
        examples=size,
        steps=steps,
        round_steps=round_steps,
        given=given,
        like=DpSgdMechanism(sampling, FlatClipping(1.0), 1.0, 1.0),
        build=build,
    )


def _sampling(
    privacy: PrivacySettings, local: LocalSettings, public_size: int
) -> tuple[Sampling, float]:
    """Return the sampling of a client and its expected batch size."""
    rate = privacy.sampling.rate
    batch_size = (
        local.expected_batch(public_size) if rate is None else max(1, round(rate * public_size))
    )
    kind = SAMPLINGS[privacy.sampling.name]
    sampling, batch = kind.for_client(public_size, batch_size, sampling_rate=rate)
    return sampling, batch


def whole_round_steps(privacy: PrivacySettings | None, local: LocalSettings, examples: int) -> int:
    """Return the number of local steps of a client in a full round, from public numbers alone.

    Args:
        privacy: the client's privacy settings, or None without privacy.
        local: the `local` section of the experiment file.
        examples: the client's number of examples.

    Raises:
        PrivacyPlanError: the local epochs have more steps than are allowed.
    """
    if local.steps is not None:
        return local.steps
    if privacy is None:
        size = max(1, examples)
        return _steps_at(local, local.expected_batch(size) / size)
    size = max(1, privacy.adjacency.declared_examples or examples)
    return _steps_at(local, _sampling(privacy, local, size)[0].sampling_rate)


def _steps_at(local: LocalSettings, rate: float) -> int:
    try:
        return local.steps_at_rate(rate)
    except ValueError as error:
        raise PrivacyPlanError(str(error)) from error


def _correlation(privacy: PrivacySettings, steps: int) -> NoiseCorrelation | None:
    """Return the correlation of a client's noise over its planned steps, or None without one."""
    settings = privacy.noise_correlation
    if settings.name == "none" or not steps:
        return None
    if not isinstance(settings, ToeplitzSettings):
        raise PrivacyPlanError(
            f"privacy.noise_correlation: {settings.name} is for whole clients; use "
            f"{' or '.join(OF_STEPS)}"
        )
    return NoiseCorrelation.square_root(settings.bands, steps)


def _spaced(sampling: Sampling, bands: int) -> Sampling:
    """Return the sampling with at least `bands` steps between two uses of an example."""
    try:
        return sampling.spaced(bands)
    except ValueError as error:
        raise PrivacyPlanError(
            f"privacy.noise_correlation.bands = {bands} is too much for a client: {error}; set "
            "fewer bands, a smaller local.batch_size, or noise_correlation: none"
        ) from error


def _largest_batch(privacy: PrivacySettings, public_size: int) -> int:
    """Return the public upper limit of the batch size."""
    if privacy.adjacency.name != "add_remove":
        return public_size
    return most_examples(public_size)


def _check_accountable(privacy: PrivacySettings, sampling: Sampling) -> None:
    """Raise an error, before any release, if the accountant does not support the sampling."""
    if privacy.adjacency.name not in sampling.scheme.adjacencies:
        raise PrivacyPlanError(sampling.scheme.refusal(privacy.adjacency.name))
    accountant = make_accountant(privacy.accounting, adjacency=privacy.adjacency.name)
    try:
        accountant.compose(sampling.event(Gaussian(1.0)))
    except UnsupportedEventError as error:
        raise PrivacyPlanError(
            f"accountant {privacy.accountant.name} cannot account for sampling "
            f"{privacy.sampling.name} under adjacency {privacy.adjacency.name}: {error}; use "
            "accountant: rdp, or sampling: poisson"
        ) from error


def _allocation(privacy: PrivacySettings) -> NoiseAllocation:
    """Return how the noise of a step is divided among groups of parameters."""
    if privacy.clipping.groups:
        return chosen_noise(privacy)
    return privacy.clipping.noise_allocation if privacy.clipping.name == "per_layer" else "uniform"


def chosen_noise(privacy: PrivacySettings) -> ChosenNoise:
    """Return the noise that the settings of each parameter group ask for, as a `ChosenNoise`."""
    groups = privacy.clipping.groups.values()
    return ChosenNoise(
        given=tuple(group.noise_multiplier for group in groups),
        relative=tuple(group.relative_noise or 1.0 for group in groups),
    )


def given_noise(privacy: PrivacySettings, expected_batch: float) -> float | None:
    """Return the noise multiplier of a step from the settings, or None if they give none.

    Args:
        privacy: the client's privacy settings.
        expected_batch: the client's expected batch size.
    """
    groups = privacy.clipping.groups
    if not groups or not has_all_noise(groups):
        return privacy.noise_multiplier
    together = chosen_noise(privacy).together
    return None if together is None else clipping_of(privacy, expected_batch).whole_noise(together)


def clipping_of(privacy: PrivacySettings, expected_batch: float) -> Clipping:
    """Return the clipping rule that the settings describe.

    Args:
        privacy: the client's privacy settings.
        expected_batch: the client's expected batch size.
    """
    settings = privacy.clipping
    patterns = tuple(settings.groups)
    norms = tuple(group.max_grad_norm for group in settings.groups.values())
    match settings.name:
        case "adaptive":
            noise = settings.count_noise
            return AdaptiveClipping(
                patterns or (ALL_OTHERS,),
                norms or (privacy.clip_norm,),
                expected_batch / BATCH_OVER_COUNT_NOISE if noise is None else noise,
                settings.quantile,
                settings.learning_rate,
            )
        case "flat":
            return PatternClipping(patterns, norms) if patterns else FlatClipping(privacy.clip_norm)
        case "automatic":
            return AutomaticClipping(privacy.clip_norm)
        case "per_layer":
            return LayerClipping(privacy.clip_norm, bounds=settings.rule)
