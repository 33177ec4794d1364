"""Rules of a comparison file that is searched: no score and no run may escape the two figures."""

from collections.abc import Iterator, Mapping

from fedsim.comparison.file.settings import ComparisonSettings
from fedsim.experiment import Experiment
from fedsim.experiment.messages import PathMessage

_NOT_IN_A_SEARCH = {
    "seeds": "a search has the seed of its base: it sets split, partition, initial model and "
    "participants, and every run draws lots and noise anew; leave seeds out",
    "baseline": "a search compares nothing and keeps one model alone; leave baseline out",
    "client_metrics": "they are private figures of every run, which a search destroys; leave "
    "client_metrics out",
    "metric": "a search has one metric, that of select.metric; leave metric out",
}


def required_problems(settings: ComparisonSettings) -> Iterator[PathMessage]:
    """Yield what a comparison lacks or must not have."""
    if settings.select is not None and settings.select.search is not None:
        yield (
            ("select", "search"),
            "the file describes a search, and a comparison looks at every run: perform the search "
            "with fedsim compare FILE --select, or remove select.search",
        )
        return
    fields = ComparisonSettings.model_fields
    for key in ("seeds", "baseline"):
        if getattr(settings, key) is None:
            purpose = (fields[key].description or "").partition(";")[0]
            yield (key,), f"missing; {purpose}"


def file_problems(settings: ComparisonSettings) -> Iterator[PathMessage]:
    """Yield what a file lacks or must not have to be searched."""
    for key, message in _NOT_IN_A_SEARCH.items():
        if getattr(settings, key) not in (None, False):
            yield (key,), message
    select = settings.select
    if select is None or select.search is None:
        yield (
            ("select",) if select else (),
            "--select performs a search, which the file does not describe; add select.search, for "
            "example: select: {metric: test_accuracy, on: public_test, search: {mean: 5}}",
        )
        return
    if select.on != "public_test":
        yield (
            ("select", "on"),
            f"a search scores its runs on the public test set, got {select.on}; write on: "
            "public_test, or remove select.search",
        )
    if select.metric.startswith("client_"):
        yield (
            ("select", "metric"),
            f"{select.metric!r} is measured on private data outside of the charged runs; use a "
            "test_ metric",
        )


def candidate_problems(candidates: Mapping[str, Experiment]) -> Iterator[PathMessage]:
    """Yield why variants cannot be candidates of a search.

    Args:
        candidates: the experiment of each, by name.
    """
    first = next(iter(candidates))
    for name, experiment in candidates.items():
        for key, message in _problems(experiment):
            yield ("variants", name, *key), f"{message} (candidate {name!r})"
        if experiment.data != candidates[first].data:
            yield (
                ("variants", name, "data"),
                f"candidates must have the same data: an example of a client of {first!r} may be "
                f"on another client of {name!r}; leave data as in the base",
            )


def _problems(experiment: Experiment) -> Iterator[PathMessage]:
    if experiment.privacy is None:
        yield (
            ("privacy",),
            "without privacy its runs cannot be charged; leave it out of select.among",
        )
    elif experiment.privacy.noise != "secure":
        yield (
            ("privacy", "noise"),
            "a search needs noise: secure, from the operating system: runs with seeded noise are "
            "not independent, and anyone who knows the seed can repeat and count them",
        )
    elif (experiment.privacy.trust.name, experiment.privacy.unit) != ("local", "example"):
        yield (
            ("privacy", "trust"),
            f"a search has no figures for trust {experiment.privacy.trust.name} with unit "
            f"{experiment.privacy.unit}: it charges every run to the server; use trust: local and "
            "unit: example, or run each candidate by fedsim compare",
        )
    if experiment.runtime.engine != "local":
        yield (
            ("runtime", "engine"),
            f"engine {experiment.runtime.engine} leaves logs of every run; use engine: local",
        )
    if experiment.runtime.trackers:
        yield ("runtime", "trackers"), "trackers keep figures of every run; leave trackers out"
