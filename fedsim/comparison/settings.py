"""Settings of a comparison file, and the rules for a valid comparison or a valid search.

A search performs a secret, random number of runs, of which only the best model is released. No run
and no score may be released unless one of the two guarantees of the search covers the release.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal, Self

from pydantic import Field, field_validator, model_validator

from fedsim.core.metrics import LOSS, METRICS
from fedsim.core.settings import Settings
from fedsim.experiment import Experiment
from fedsim.experiment.errors import any_of, did_you_mean, value_text
from fedsim.experiment.messages import PathMessage
from fedsim.experiment.schema import NAME_PATTERN

MAX_SEEDS = 1000

# Metrics of the global model on the server's test set, of personal models on public data, and of
# the clients' own data.
_NUMBERS = [name for name, entry in METRICS.items() if not entry.per_class]
TEST_METRICS = tuple(f"test_{name}" for name in (LOSS, *_NUMBERS))
PERSONAL_METRICS = ("personal_accuracy", "personal_loss", "personal_mse")
CLIENT_METRICS = ("client_accuracy", "client_loss", "client_mse", "client_r2")
MOST_EXPECTED_RUNS = 100

_SHAPES = {"geometric": 1.0, "logarithmic": 0.0}


class SearchSettings(Settings):
    """Content of `select.search:` in a comparison file: a search with a random number of runs."""

    distribution: Literal["geometric", "logarithmic", "negative_binomial", "poisson"] = Field(
        default="geometric",
        description="distribution of the number of runs, from which one number is drawn; "
        "negative_binomial: the truncated one, with a shape",
    )
    mean: float = Field(ge=1, le=MOST_EXPECTED_RUNS, description="expected number of runs")
    shape: float | None = Field(
        default=None, ge=0, le=1000, description="η of negative_binomial, and of no other"
    )

    @property
    def eta(self) -> float | None:
        """Shape η of the negative binomial distribution of the number of runs; None for Poisson."""
        return _SHAPES.get(self.distribution, self.shape)

    @model_validator(mode="after")
    def _shape_of_the_distribution(self) -> Self:
        has_shape = self.distribution == "negative_binomial"
        if has_shape and self.shape is None:
            raise ValueError("negative_binomial needs a shape, for example shape: 0.5")
        if not has_shape and self.shape is not None:
            got = f"got distribution: {self.distribution}; leave shape out"
            raise ValueError(f"shape belongs to distribution: negative_binomial, {got}")
        return self


class SelectSettings(Settings):
    """Content of `select:` in a comparison file: how the best variant is selected."""

    metric: str = Field(
        description="the variant with the best mean is chosen: `test_` and a built-in metric that "
        "every candidate computes, or client_accuracy, client_loss, client_mse, client_r2"
    )
    on: Literal["public_data", "public_test", "private"] = Field(
        description="public_data: every example of the comparison is public; public_test: models "
        "of private data, scored on public data; private: scored on private data"
    )
    among: list[str] | None = Field(
        default=None,
        description="candidate variants; null: every variant with privacy, in a search every one",
    )
    search: SearchSettings | None = Field(
        default=None,
        description="perform a charged search with `fedsim compare FILE --select`; null: compare",
    )

    @field_validator("metric")
    @classmethod
    def _known_metric(cls, metric: str) -> str:
        return _checked(metric, (*TEST_METRICS, *CLIENT_METRICS))


_BUDGET = ("target_epsilon", "noise_multiplier", "delta", "clients", "unit", "trust", "adjacency")
_NOT_TUNED = ("seed", "data", "evaluation", "task", *(f"privacy.{key}" for key in _BUDGET))


class TuneSettings(Settings):
    """Content of `tune:` in a comparison file: settings to tune before the comparison."""

    keys: dict[str, list[Any] | None] = Field(
        min_length=1,
        description="values to try by key, such as {local.optimizer.lr: [0.1, 1]}; null: 1/16, "
        "1/4, 1, 4 and 16 times each variant's own value",
    )
    on: Literal["public_data", "public_test"] = Field(
        default="public_test",
        description="public_data: every example of the comparison is public; public_test: models "
        "of private data, scored on public data, so that the candidates are charged",
    )
    seeds: int = Field(
        default=2, ge=1, le=MAX_SEEDS, description="number of seeds to tune on; none is compared"
    )

    @field_validator("keys")
    @classmethod
    def _values(cls, keys: dict[str, list[Any] | None]) -> dict[str, list[Any] | None]:
        for key, values in keys.items():
            if values is not None and len(set(map(repr, values))) < max(len(values), 1):
                raise ValueError(f"{key}: there must be one value or more, each once")
            if key == "privacy" or any(f"{key}.".startswith(f"{name}.") for name in _NOT_TUNED):
                rule = "tuning must change neither data nor guarantee"
                raise ValueError(f"{key}: {rule}; tune another key, such as local.optimizer.lr")
        return keys


def _checked(metric: str, known: Sequence[str]) -> str:
    if metric not in known:
        hint = did_you_mean(metric, known) or f"; choose from {any_of(known)}"
        raise ValueError(f"no such metric: {value_text(metric)}{hint}")
    return metric


class ComparisonSettings(Settings):
    """Content of a comparison file: base experiment, variants, seeds, baseline and metric."""

    base: str = Field(description="an experiment file, relative to the comparison file")
    name: str | None = Field(
        default=None,
        pattern=NAME_PATTERN,
        max_length=100,
        description="name of the comparison; null: the file's name",
    )
    seeds: Any = Field(
        default=None,
        description="number of seeds (0, 1, 2, ...), or a list of seeds; none in a search",
    )
    baseline: str | dict[str, str] | None = Field(
        default=None,
        description="the variant that all others are compared with; with two units, a mapping from "
        "each unit to its own; none in a search",
    )
    variants: dict[str, Any] = Field(
        min_length=1, description="names of variants, each with its changes to the base"
    )
    metric: str | None = Field(
        default=None,
        description="the compared metric, `test_` and its name, or that of personal models; null: "
        "the first of evaluation.metrics, or else accuracy, R² or the loss",
    )
    client_metrics: bool = Field(
        default=False,
        description="whether to evaluate the final model on every client's own data: private "
        "figures that no ε covers, for the experimenter alone",
    )
    select: SelectSettings | None = Field(
        default=None, description="choose a variant by these results; null: choose none"
    )
    tune: TuneSettings | None = Field(
        default=None,
        description="tune keys of every variant before the comparison; null: compare as written",
    )

    @field_validator("metric")
    @classmethod
    def _known_metric(cls, metric: str | None) -> str | None:
        if metric is None or (metric.startswith("test_") and metric.isidentifier()):
            return metric  # the metrics of the experiments are known when they are loaded
        return _checked(metric, (*TEST_METRICS, *PERSONAL_METRICS))

    @field_validator("seeds")
    @classmethod
    def _seeds(cls, seeds: object) -> tuple[int, ...]:
        """Return a tuple of seeds from a list of seeds, or from their number."""
        if isinstance(seeds, bool) or not isinstance(seeds, int | list):
            raise ValueError(f"must be a whole number or a list of them, got {value_text(seeds)}")
        if not 1 <= (len(seeds) if isinstance(seeds, list) else seeds) <= MAX_SEEDS:
            got = f"a list of {len(seeds)}" if isinstance(seeds, list) else value_text(seeds)
            raise ValueError(f"must be 1 to {MAX_SEEDS} seeds, got {got}")
        if isinstance(seeds, int):
            return tuple(range(seeds))
        for seed in seeds:
            if isinstance(seed, bool) or not isinstance(seed, int) or not 0 <= seed < 2**63:
                rule = "a seed must be a whole number from 0 to 2^63 - 1"
                raise ValueError(f"{rule}, got {value_text(seed)}")
            if seeds.count(seed) > 1:
                raise ValueError(f"seed {seed} occurs twice: it would be the same run again")
        return tuple(seeds)


_NOT_IN_A_SEARCH = {
    "seeds": "a search has the seed of its base: it sets split, partition, initial model and "
    "participants, and every run draws batches and noise anew",
    "baseline": "a search compares nothing and keeps one model alone",
    "client_metrics": "they are private figures of every run, which a search destroys",
    "tune": "a search draws its runs from the variants as they are",
    "metric": "a search has one metric, that of select.metric",
}


def required_problems(settings: ComparisonSettings) -> Iterator[PathMessage]:
    """Yield (key path, message) for each key that a comparison lacks, or that it may not have."""
    if settings.select is not None and settings.select.search is not None:
        yield (
            ("select", "search"),
            "the file describes a search, and a comparison looks at every run: perform the search "
            "with fedsim compare FILE --select, or remove select.search",
        )
        return
    if settings.select is not None and settings.tune is not None:
        yield ("tune",), "tune and select exclude each other: tune first, then select in a new file"
    fields = ComparisonSettings.model_fields
    for key in ("seeds", "baseline"):
        if getattr(settings, key) is None:
            purpose = (fields[key].description or "").partition(";")[0]
            yield (key,), f"missing; {purpose}"


def file_problems(settings: ComparisonSettings) -> Iterator[PathMessage]:
    """Yield (key path, message) for each key that a search lacks, or that it may not have."""
    for key, message in _NOT_IN_A_SEARCH.items():
        if getattr(settings, key) not in (None, False):
            yield (key,), f"{message}; leave {key} out"
    select = settings.select
    if select is None or select.search is None:
        yield (
            ("select",) if select else (),
            "--select performs a search, which the file does not describe; add select.search, for "
            "example: select: {metric: test_accuracy, on: public_test, search: {mean: 5}}",
        )
        return
    if select.on != "public_test":
        rule = f"a search scores its runs on the public test set, got {select.on}"
        yield ("select", "on"), f"{rule}; write on: public_test, or remove select.search"
    if select.metric.startswith("client_"):
        private = f"{select.metric!r} is measured on private data outside of the charged runs"
        yield ("select", "metric"), f"{private}; use a test_ metric"


def candidate_problems(candidates: Mapping[str, Experiment]) -> Iterator[PathMessage]:
    """Yield (key path, message) for each reason why a variant cannot be a candidate of a search."""
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
        advice = "leave it out of select.among"
        yield ("privacy",), f"without privacy its runs cannot be charged; {advice}"
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
    if (engine := experiment.runtime.engine) != "local":
        yield ("runtime", "engine"), f"engine {engine} leaves logs of every run; use engine: local"
    if experiment.objects:
        named = ", ".join(experiment.objects)
        yield (), f"a search runs in other processes, which do not have {named}; use files"
    if experiment.runtime.trackers:
        yield ("runtime", "trackers"), "trackers keep figures of every run; leave trackers out"
