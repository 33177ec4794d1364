"""Rules of mechanisms without noisy gradients: perturbation, zeroth-order steps and PATE votes.

Each message names the condition of a proof in `fedsim.clients.mechanisms` that the file breaks.

A zeroth-order upload has one number for each step and direction, and only these numbers may change
the model. Settings that would change it in another way are refused.
"""

from operator import attrgetter

from fedsim.algorithms.algorithm import Algorithm, AlgorithmSettings
from fedsim.clients.local_settings import LocalSettings, SgdSettings
from fedsim.clients.mechanisms.conditions import unmet
from fedsim.clients.mechanisms.kinds import GRADIENT_PERTURBATION, KINDS, LOSSES
from fedsim.clients.privacy_settings import (
    BoundedExamplesSettings,
    GradientPerturbationSettings,
    PrivacySettings,
)
from fedsim.core.settings import Settings
from fedsim.experiment.messages import Mistakes
from fedsim.experiment.rules import Sections, example_keys_of_clients, mistake
from fedsim.experiment.rules.algorithm import built_in_algorithm
from fedsim.models.catalog import MODELS
from fedsim.models.settings import ModelSettings
from fedsim.pate.settings import PateSettings

# Keys of the section that act on gradients: the value that is allowed.
_GRADIENT_KEYS = {
    "sampling.name": "poisson",
    "sampling.rate": None,
    "noise_correlation.name": "none",
    "clipping.name": "flat",
}
_PROTECTED = {"example": "one example", "client": "everything of a client"}
_GRADIENT = f"or use mechanism: {GRADIENT_PERTURBATION}"
_PLAIN_DESCENT = "mechanism: output_perturbation has a proof for plain gradient descent alone"


def check_perturbation(privacy: PrivacySettings, sections: Sections) -> Mistakes:
    """Yield (key path, message) for settings that the proof of a perturbation does not cover."""
    perturbation = privacy.mechanism
    if isinstance(perturbation, GradientPerturbationSettings):
        return
    name, kind = perturbation.name, KINDS[perturbation.name]
    if kind.local_trust_only and privacy.trust.name != "local":
        why = f"with mechanism: {name} each client adds all of its noise alone"
        sums = f"{privacy.trust.name} trust needs noise on sums"
        yield mistake(f"privacy.trust: {why}, and {sums}; use trust: local, {_GRADIENT}")
    if privacy.release_kind is not kind:
        known, asked = _PROTECTED[kind.unit], _PROTECTED[privacy.unit]
        why = f"mechanism: {name} has a sensitivity for {known}, and none for {asked}"
        yield mistake(f"privacy.unit: {why}; use unit: {kind.unit}, {_GRADIENT}")
    failed = unmet(privacy.choices())
    if "adjacency_of_mechanism" in failed:
        why = f"add_remove keeps client sizes private, and with mechanism: {name}"
        fix = "use zero_out or replace_one"
        yield mistake(f"privacy.adjacency: {why} {_WHY_NO_ADD_REMOVE[name]}; {fix}")
    if "noise_of_mechanism" in failed:
        why = f"with mechanism: {name} a process makes the noisy examples again from the seed"
        other = "secure noise would be another release"
        yield mistake(f"privacy.noise: {why}, and {other}; use noise: seeded, {_GRADIENT}")
    gradients = f"acts on gradients, and mechanism: {name} adds no noise to them"
    for key, allowed in _GRADIENT_KEYS.items():
        if attrgetter(key)(privacy) != allowed:
            written = key.removesuffix(".name")
            yield mistake(f"privacy.{written}: {gradients}; remove {written}, {_GRADIENT}")
    for path, key in example_keys_of_clients(privacy):
        yield path, f"{key} {gradients}; remove {key}"
    if sections.model is not None:
        yield from _check_loss(perturbation, sections.model)
    if name == "output_perturbation":
        yield from _check_output(sections, privacy)


def _check_output(sections: Sections, privacy: PrivacySettings) -> Mistakes:
    """Check that local training is of the kind whose output sensitivity is proven."""
    federation, model = sections.federation, sections.model
    if sections.local is not None:
        yield from _check_descent(sections.local)
    algorithm = None if federation is None else built_in_algorithm(federation)
    if federation is not None and algorithm is not None:
        yield from changed_steps(algorithm, federation.algorithm.name, privacy)
    if model is not None and model.name in MODELS and model.name != "logistic":
        why = "mechanism: output_perturbation has a proven sensitivity for a linear model alone"
        hidden = f"with hidden layers, as of {model.name}, the loss is not convex"
        yield mistake(f"model.name: {why}: {hidden}; use logistic, {_GRADIENT}")


def changed_steps(algorithm: Algorithm, name: str, privacy: PrivacySettings | None) -> Mistakes:
    """Yield (key path, message) if an algorithm changes steps of which a proof depends."""
    is_output = privacy is not None and privacy.mechanism.name == "output_perturbation"
    if is_output and algorithm.client() is not None:
        why = f"{_PLAIN_DESCENT}, and strategy {name} changes local steps"
        yield mistake(f"federation.strategy: {why}; use fedavg, {_GRADIENT}")


_WHY_NO_ADD_REMOVE = {
    "output_perturbation": "the mean loss is divided by the number of examples",
    "input_perturbation": "there is one noisy row for each example",
}


def _check_loss(settings: BoundedExamplesSettings, model: ModelSettings) -> Mistakes:
    """Check that the loss and its targets have public bounds."""
    if model.loss not in LOSSES:
        why = f"mechanism: {settings.name} needs the bounds of a loss and its targets"
        fix = f"use one of them, {_GRADIENT}"
        yield mistake(f"model.loss: {why}, which are known of {', '.join(LOSSES)}; {fix}")
    elif model.loss == "mse" and settings.max_target_norm is None:
        needed = "max_target_norm, the L2 bound of the target of an example"
        yield mistake(f"privacy.mechanism: {settings.name} with loss mse needs {needed}")
    elif model.loss != "mse" and settings.max_target_norm is not None:
        why = f"the targets of loss {model.loss} have a bound already"
        yield mistake(f"privacy.mechanism.max_target_norm: {why}; remove max_target_norm")


def _check_descent(local: LocalSettings) -> Mistakes:
    """Check that local training is gradient descent of the kind whose sensitivity is proven."""
    optimizer = local.optimizer
    if not isinstance(optimizer, SgdSettings) or optimizer.momentum:
        yield mistake(f"local.optimizer: {_PLAIN_DESCENT}; use sgd without momentum, {_GRADIENT}")
    if not optimizer.weight_decay:
        why = "mechanism: output_perturbation needs a strongly convex problem"
        fix = f"set weight_decay: 0.01, for example, {_GRADIENT}"
        yield mistake(f"local.optimizer: {why}, which weight_decay above 0 makes; {fix}")
    if local.views is not None:
        why = f"{_PLAIN_DESCENT}, on the examples as they are"
        yield mistake(f"local.augmentations: {why}; remove the views")
    if local.max_physical_batch is not None:
        why = "mechanism: output_perturbation computes each batch at once"
        fix = "remove max_physical_batch, or set a smaller batch_size"
        yield mistake(f"local.max_physical_batch: {why}; {fix}")
    if local.lr_schedule is not None:
        why = "the sensitivity of output_perturbation is proven for one learning rate"
        yield mistake(f"local.lr_schedule: {why}; remove lr_schedule")


_WHAT = "with local.gradient: zeroth_order"


def check_zeroth_order(local: LocalSettings, sections: Sections) -> Mistakes:
    """Yield (key path, message) for every setting that zeroth-order steps do not support."""
    federation, privacy = sections.federation, sections.privacy
    if local.zeroth_order is None:
        return
    if local.optimizer_name != "sgd":
        rule = f"{_WHAT} it must be sgd without momentum and weight_decay"
        why = "a step moves the model along its own directions alone"
        yield mistake(f"local.optimizer: {rule}: {why}")
    if local.steps is None:
        why = "since they share the directions of a round; use steps"
        yield mistake(f"local.epochs: {_WHAT} all clients need the same number of steps, {why}")
    if federation is not None and federation.algorithm.name != "fedavg":
        why = f"{_WHAT} the directions of each round are others"
        rule = "only means of one round's coefficients have a meaning"
        name = federation.algorithm.name
        yield mistake(f"federation.strategy: {why}, so {rule}, got {name!r}; use fedavg")
    if federation is not None and federation.ema_decay is not None:
        why = f"{_WHAT} the server keeps coefficients and no models"
        yield mistake(f"federation.ema_decay: {why}; remove ema_decay")
    if federation is not None and federation.participation.scheme == "buffered":
        why = f"{_WHAT} an upload has coefficients of its own round's directions"
        fix = "buffered adds up uploads of several rounds; use another scheme"
        yield mistake(f"federation.participation.scheme: {why}, and {fix}")
    if sections.personalization is not None:
        why = "personal models are trained by gradients"
        what = f"{_WHAT} a client has forward passes alone"
        yield mistake(f"personalization: {why}, and {what}; remove personalization")
    if privacy is None:
        return
    if privacy.mechanism.name != GRADIENT_PERTURBATION:
        fix = f"use mechanism: {GRADIENT_PERTURBATION}"
        yield mistake(f"privacy.mechanism: {_WHAT} noise is added to slopes; {fix}")
    if privacy.clipping.name == "per_layer" or privacy.clipping.groups:
        why = f"{_WHAT} an example contributes one number for each direction"
        yield mistake(f"privacy.clipping: {why}, and directions have no layers; use clipping: flat")
    if privacy.is_correlated:
        why = f"{_WHAT} the noise of one step is along other directions than that of the next"
        yield mistake(f"privacy.noise_correlation: {why}, so it cannot cancel; use none")


# Keys that mean the same as in other tasks; every other one must have its default.
_BLOCKS = ("max_physical_batch", "vectorized_clients")
_VIEWS = ("augmentation_multiplicity", "augmentations")
_NOISE = ("target_epsilon", "noise_multiplier")
_USED = {
    "federation": ("rounds", "deadline", "min_participants"),
    "local": ("steps", "batch_size", "optimizer", *_BLOCKS, *_VIEWS),
    "privacy": ("unit", "trust", "delta", "accountant", "clients", *_NOISE),
}
_WHY = {
    "max_update_norm": "votes have a fixed size, and nothing is clipped",
    "clipping": "votes have a fixed size, and nothing is clipped",
    "adjacency": "each query is charged for a client that is replaced, which covers one that is "
    "zeroed out",
    "noise": "a run that resumes repeats a ballot with the same noise, which noise from the "
    "operating system cannot",
    "on_exhausted": "the noise of all ballots is planned for the whole run",
    "gradient": "teachers and student are trained by gradients",
    "strategy": "the server counts votes and averages no models",
    "weighting": "every teacher has one vote",
    **dict.fromkeys(("clients_per_round", "participation"), "all teachers vote on every query"),
}
# The default settings as they appear in a written experiment file.
_DEFAULTS = {"strategy": AlgorithmSettings.model_validate({"name": "fedavg", "server_lr": 1.0})}


def check_pate(sections: Sections) -> Mistakes:
    """Yield (key path, message) for mistakes in `task` and `pate`, and keys that PATE ignores."""
    pate, privacy, federation = sections.pate, sections.privacy, sections.federation
    model, evaluation = sections.model, sections.evaluation
    if sections.task != "pate":
        if pate is not None:
            yield mistake("pate: belongs to task: pate; add the key, or remove the section")
        return
    if pate is None and "pate" not in sections.mistaken:
        section = "{queries: ..., sigma_threshold: ..., sigma: ...}"
        yield mistake(f"task: pate needs the section pate: {section}")
    unit = sections.unit if privacy is None else privacy.unit
    if unit != "client" and (privacy is not None or "privacy" in sections.mistaken):
        why = "since one teacher learns from all of it"
        rule = f"task: pate protects everything that one client has, {why}"
        fix = "write unit: client, without a bound: votes have a fixed size"
        yield mistake(f"privacy.unit: {rule}; {fix}")
    elif privacy is not None:
        yield from _check_defaults("privacy", privacy)
    if sections.local is not None:
        yield from _check_defaults("local", sections.local)
    if federation is not None:
        yield from _check_defaults("federation", federation)
        if pate is not None:
            yield from _check_batches(pate, federation.rounds)
    if model is not None and model.loss in ("mse", "bce"):
        why = f"task: pate needs classes to vote for, and loss {model.loss} has none"
        yield mistake(f"model.loss: {why}; use cross_entropy")
    if model is not None and model.has_local_base:
        why = "task: pate trains whole models, and this one has a part that stays on its clients"
        yield mistake(f"model: {why}; remove lora and the local base")
    if sections.personalization is not None:
        why = "task: pate has no global model in the rounds from which a client could make its own"
        yield mistake(f"personalization: {why}; remove the section")
    if evaluation is not None and evaluation.holdout is not None:
        yield mistake("evaluation.holdout: with task: pate clients score no model; remove holdout")
    if sections.secure_aggregation is not None and sections.secure_aggregation.metrics:
        why = "with task: pate clients send votes alone"
        yield mistake(f"secure_aggregation.metrics: {why}; remove metrics")


def _check_defaults(section: str, settings: Settings) -> Mistakes:
    """Yield the keys of a section that have no meaning for PATE votes but are set to a value."""
    for key, field in type(settings).model_fields.items():
        is_set = getattr(settings, key) not in (field.default, _DEFAULTS.get(key))
        if is_set and key not in _USED[section]:
            why = _WHY.get(key, "a teacher trains once, and then its client only votes")
            yield (section, key), f"has no place in task: pate, since {why}; remove {key}"


def _check_batches(pate: PateSettings, rounds: int) -> Mistakes:
    """Yield (key path, message) if queries and answers do not divide into batches of two rounds."""
    if rounds % 2:
        why = "with task: pate a batch of queries takes two rounds, a check and a vote"
        yield mistake(f"federation.rounds: {why}: write an even number, got {rounds}")
        return
    queries, answers, batches = pate.queries, pate.most_answers, rounds // 2
    if answers > queries:
        yield mistake(f"pate.answers: must be at most pate.queries ({queries:,}), got {answers:,}")
        return
    for key, number in (("queries", queries), ("answers", answers)):
        if number % batches:
            near = max(batches, number // batches * batches)
            rule = f"must be a multiple of {batches}, the batches in {rounds} rounds"
            fix = f"use {near:,}, or other federation.rounds"
            yield mistake(f"pate.{key}: {rule}, got {number:,}; {fix}")
