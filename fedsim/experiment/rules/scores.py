"""Rules of `evaluation` and `personalization`."""

from collections.abc import Iterator
from pathlib import Path

from fedsim.core.metrics import LOSS, METRICS, TASK_OF_LOSS, metric_key, wrong_task
from fedsim.experiment.errors import KeyPath, value_text
from fedsim.experiment.messages import PathMessage
from fedsim.experiment.references import check_name
from fedsim.experiment.rules.sections import Sections, messages_at
from fedsim.models.catalog import LOSSES
from fedsim.personalization.settings import LabelPriorSettings


def check_test_metrics(sections: Sections, base: Path) -> Iterator[PathMessage]:
    """Yield the mistakes in `evaluation.metrics` that show without data and plug-ins."""
    if sections.evaluation is None:
        return
    keys = {LOSS: "loss, which is always computed"}
    task = None if sections.model is None else TASK_OF_LOSS.get(sections.model.loss)
    for index, name in enumerate(sections.evaluation.metrics or ()):
        path: KeyPath = ("evaluation", "metrics", index)
        key = metric_key(name)
        if name == LOSS:
            yield path, "loss is always computed; remove it"
        elif (problem := check_name(name, "metric", METRICS, base)) is not None:
            yield path, problem
        elif keys.get(key) == name:
            yield path, f"{name} is named twice; remove one"
        elif key in keys or (":" in name and key in METRICS):
            other = keys.get(key, f"the built-in metric {key}")
            yield path, f"{name} has the name of {other}; remove or rename one"
        elif ":" not in name and task is not None:
            yield from messages_at(path, wrong_task(name, task))
        keys.setdefault(key, name)


def check_early_stopping(sections: Sections) -> Iterator[PathMessage]:
    """Yield the mistakes in the metric of `federation.early_stopping`."""
    federation, evaluation = sections.federation, sections.evaluation
    if federation is None or federation.early_stopping is None or sections.model is None:
        return
    place: KeyPath = ("federation", "early_stopping", "metric")
    metric, chosen = federation.early_stopping.metric, None
    if evaluation is not None and evaluation.metrics is not None:
        chosen = [metric_key(name) for name in evaluation.metrics]
    if chosen is None:  # those of the task; of a loss of one's own it is known later
        task = TASK_OF_LOSS.get(sections.model.loss)
        chosen = ["mse", "r2"] if task == "regression" else ["accuracy"]
        if task is None:
            chosen += ["mse", "r2"]
    known = [LOSS, *(name for name in chosen if not name.endswith("_per_class"))]
    if metric not in known:
        yield (
            place,
            f"must be one of {', '.join(known)}, the numbers of the test set, got {metric!r}; "
            "choose one, or add it to evaluation.metrics",
        )


def check_evaluation(sections: Sections) -> Iterator[PathMessage]:
    """Yield the mistakes in the evaluation on clients' held-out examples."""
    if sections.evaluation is None or sections.evaluation.holdout is None:
        return
    section: KeyPath = ("evaluation", "holdout")
    if sections.privacy is not None:
        yield (
            section,
            "a client's score on its own examples is a release that no ε of this experiment "
            "covers; remove holdout (evaluation.holdout=null): scores on the server's public test "
            "set cost nothing",
        )
    if sections.secure_aggregation is not None:
        yield (
            section,
            "clients send their scores in clear, beside updates that secure_aggregation hides; "
            "remove holdout, or the section secure_aggregation",
        )
    evaluated = sections.evaluation.clients
    clients = sections.num_clients
    if evaluated is not None and clients is not None and evaluated > clients:
        rule = f"must be <= data.partition.num_clients ({value_text(clients)})"
        yield ("evaluation", "clients"), f"{rule}, got {value_text(evaluated)}"


def check_personalization(sections: Sections) -> Iterator[PathMessage]:
    """Yield the mistakes in `personalization`."""
    personal = sections.personalization
    if personal is None:
        return
    section: KeyPath = ("personalization",)
    loss = None if sections.model is None else sections.model.loss
    if isinstance(personal, LabelPriorSettings) and loss in LOSSES and loss != "cross_entropy":
        yield (
            (*section, "method"),
            f"label_prior shifts the logits of classes, and model.loss {loss} has no classes; use "
            "method: fine_tune or ditto",
        )
    if personal.holdout is None:
        return
    evaluation = sections.evaluation
    if evaluation is not None and evaluation.holdout not in (None, personal.holdout):
        yield (
            (*section, "holdout"),
            f"a client holds out its examples once: got {value_text(personal.holdout)}, and "
            f"evaluation.holdout is {value_text(evaluation.holdout)}; set both to one number",
        )
    if sections.privacy is not None and sections.privacy.adjacency.name == "add_remove":
        yield (
            (*section, "holdout"),
            "one more example would change which ones a client holds out, and so more than one "
            "example of its training; remove holdout, or use adjacency: zero_out",
        )
