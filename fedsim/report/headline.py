"""An assembled experiment in two lines, with notes and warnings before its first round."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from fedsim.core.formatting import count_text, delta_text, range_text
from fedsim.data.settings import FileDataset
from fedsim.federation.client_plans import ignored_weighting
from fedsim.federation.federation import Federation
from fedsim.federation.movement import still_warnings
from fedsim.federation.plan_checks import full_batch_note

_MAX_NAMES = 5
_MAX_NAME_CHARS = 80
_LARGE_FEATURE = 100.0  # absolute value above which gradients of usual models explode
_MAX_FEATURE_RATIO = 100.0  # of the largest feature to the median one, without a note
_MAX_NAMED_FEATURES = 3


def headline(federation: Federation) -> list[str]:
    """Return the headline of a run, from public figures: private client sizes are left out."""
    experiment = federation.experiment
    first = (
        f"{experiment.name}: {_clients(federation)} with "
        f"{_sizes(federation)}, {len(federation.data.test):,} test examples, "
        f"{experiment.task_facts.work(experiment.federation.rounds, experiment.local)}"
    )
    if federation.plan.clients is None:
        return [first, "no differential privacy"]
    noise = range_text([plan.noise_multiplier for plan in federation.plan.clients], digits=3)
    delta = delta_text(max(plan.delta for plan in federation.plan.clients))
    target = experiment.privacy.target_epsilon if experiment.privacy else None
    goal = f"target ε = {target:g}" if target is not None else "given noise"
    return [first, f"{_mechanism(federation)}: {goal} at δ = {delta}, noise multiplier {noise}"]


def notes(federation: Federation) -> list[str]:
    """Return notes on settings that mean something else for these data."""
    experiment = federation.experiment
    found = (
        full_batch_note(experiment, federation.data.clients.sizes),
        ignored_weighting(experiment, federation.plan.weights),
        scale_note(federation.data.test.features, _feature_names(federation)),
    )
    return [note for note in found if note is not None]


def scale_note(features: NDArray[np.generic], names: Sequence[str] | None) -> str | None:
    """Return a line about features that span orders of magnitude; None without one.

    The largest features decide the gradient and its clipping, so that the others teach nothing.

    Args:
        features: (n, ...) of the public test set, as the model gets them.
        names: name of each feature (k,) of (n, k); None: features have no names.
    """
    if features.dtype.kind != "f" or not len(features):
        return None
    flat = np.abs(features.reshape(len(features), -1)).max(axis=0)
    used = flat[flat > 0]
    if not used.size:
        return None
    usual = float(np.median(used))
    if used.max() <= _LARGE_FEATURE and used.max() <= _MAX_FEATURE_RATIO * usual:
        return None
    if features.ndim > 2 or names is None or len(names) != len(flat):
        return (
            f"features of the public test set are as large as {used.max():,.4g} (the median "
            f"feature: {usual:,.4g}), and SGD learns little from such scales; divide them by a "
            "public constant: data.images: {scale: ...} for images, model.features: [{standardize: "
            "{mean: ..., std: ...}}] for others"
        )
    order = np.argsort(-flat, kind="stable")
    large = [
        index for index in order if flat[index] > min(_LARGE_FEATURE, _MAX_FEATURE_RATIO * usual)
    ]
    shown = ", ".join(f"{names[i]} up to {flat[i]:,.4g}" for i in large[:_MAX_NAMED_FEATURES])
    more = (
        f" and {len(large) - _MAX_NAMED_FEATURES} more" if len(large) > _MAX_NAMED_FEATURES else ""
    )
    first = names[large[0]]
    return (
        f"features of the public test set span orders of magnitude ({shown}{more}; the median "
        f"feature up to {usual:,.4g}), and SGD learns little from such scales; set public bounds: "
        f"data.dataset.columns: {{{first}: {{range: [LOW, HIGH]}}}}, with log: true where few "
        "values are large"
    )


def _clients(federation: Federation) -> str:
    """Return the number of clients, and the names of a few that have some."""
    count, names = count_text(federation.num_clients, "client"), federation.data.client_names
    if names is None or len(names) > _MAX_NAMES or sum(map(len, names)) > _MAX_NAME_CHARS:
        return count
    return f"{count} ({', '.join(names)})"


def _feature_names(federation: Federation) -> list[str] | None:
    """Return the names of a table's features; None where `model.features` changes them."""
    dataset, columns = federation.experiment.data.dataset, federation.data.columns
    if columns is None or not isinstance(dataset, FileDataset):
        return None
    if federation.experiment.model.features:
        return None
    return [name for one in columns for name in dataset.constants_of(one).feature_names(one)]


def _mechanism(federation: Federation) -> str:
    experiment = federation.experiment
    privacy = experiment.privacy
    what = experiment.release_kind.releases
    if privacy is None or privacy.trust.name == "local":
        return what
    return f"{what}, {privacy.trust.name} trust"


def _sizes(federation: Federation) -> str:
    privacy = federation.experiment.privacy
    declared = None if privacy is None else privacy.adjacency.declared_examples
    if declared is not None:
        return f"{declared:,} declared examples each"
    if federation.experiment.release_kind.protects_client:
        return "private numbers of examples"
    return f"{range_text(federation.data.clients.sizes)} examples"


def warnings(federation: Federation) -> list[str]:
    """Return warnings of parameters that would not learn, and of a δ that is too large."""
    return [*still_warnings(federation.model.still), *_loose_deltas(federation)]


def _loose_deltas(federation: Federation) -> list[str]:
    """Return a warning if δ of a client allows publishing a whole example; else nothing."""
    if federation.plan.clients is None:
        return []
    loose = [
        str(client)
        for client, plan in enumerate(federation.plan.clients)
        if plan.delta * plan.examples >= 1
    ]
    if not loose:
        return []
    return [
        f"δ is not below 1 / examples for the clients {', '.join(loose[:10])}: such a δ allows "
        "publishing a whole example; choose a smaller privacy.delta"
    ]
