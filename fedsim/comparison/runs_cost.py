"""The privacy cost of several runs on the same data, and of selecting the best of them.

The ε of a run covers only that run. An adversary that sees several runs sees their composition, and
releasing the best of several runs has a cost too. Scores on a public test set do not change this:
the scored models depend on private data.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from fedsim.accountant import PrivacyLedger
from fedsim.accountant.accountants import RdpAccountant
from fedsim.accountant.checks import Floats
from fedsim.accountant.events import check_adjacency
from fedsim.accountant.ledger.journal import total_of
from fedsim.accountant.rdp.conversion import epsilon_from_rdp
from fedsim.accountant.rdp.curves import leak, total_rdp
from fedsim.accountant.rdp.poisson import DEFAULT_ORDERS
from fedsim.accountant.rdp.selection import rdp_repeat_and_select
from fedsim.accountant.sampler_slack import SHARE, sampler_slack
from fedsim.accountant.trust import CLAIMED_AGAINST, Observer
from fedsim.comparison.outcomes import RunOutcome
from fedsim.comparison.results import Results, VariantResult
from fedsim.comparison.settings import SelectSettings, TuneSettings
from fedsim.core.formatting import epsilon_text
from fedsim.core.metrics import LOSS, metric_entry
from fedsim.core.settings import written_name
from fedsim.core.text_formats import finite_or_none
from fedsim.runs.directory import RunDirectory, RunFiles
from fedsim.runs.files import read_object
from fedsim.statement.sentence import OBSERVER_NAMES

TUNING = "tuning"  # the folder of a comparison's candidates

_DECLARED_PUBLIC = (
    "The file declares every example of this comparison public. If that is so, the choice "
    "costs no privacy, and the settings can be used on private data without a charge for "
    "tuning. If any example is private, this does not hold."
)
_PRIVATE_MODELS = (
    "The scores come from the public test set, but the models that were scored come from the "
    "clients' private data, so the choice costs privacy."
)
_PRIVATE_SCORES = (
    "The scores come from test examples that the file declares private: the choice gives these "
    "test examples no protection. For the clients' training examples:"
)
_SHARED = (
    " That is the cost of deployed runs, each with noise of its own; the simulated runs of one "
    "seed share their noise."
)


@dataclass(frozen=True)
class Composition:
    """The composed privacy cost of several runs."""

    runs: int
    not_private: int
    epsilon: float | None  # None if infinite, of two units or adjacencies, or without private runs
    delta: float | None
    # Of releasing the best run alone, had the number of runs been drawn at random and kept secret.
    selected_epsilon: float | None
    against: Observer | None = None  # the one of all runs that sees least, so all ε hold against it
    shares_noise: bool = False  # two runs share seeded noise: `epsilon` is that of deployed runs


@dataclass(frozen=True, kw_only=True)
class Tuning:
    """The privacy cost of all runs of a comparison together, and of selecting a variant.

    These are the keys of the entry `tuning` of `comparison.json`.
    """

    selected: str | None = None
    on: str | None = None  # `public_test` or `public_data`, as the file declares
    everything: Composition  # all runs of the directory, interrupted and superseded ones included
    candidates: Composition | None = None  # None without a selection
    statement: str


def tuning_cost(results: Results, out: Path, select: SelectSettings | None) -> Tuning:
    """Return the privacy cost of all runs below `out`, and of selecting a variant.

    Guarantee: for every training example, all private runs together are (`epsilon`, `delta`)-DP
    under their adjacency. Rényi DP adds up over runs. At each order, a run counts with the largest
    Rényi divergence bound of any client, so the sum bounds every example, whichever client holds
    it. The durable ledger of every run below `out` counts.
    """
    everything = _cost_of(results, _all_runs(out))
    if select is None:
        return Tuning(everything=everything, statement=_without_selection(everything))
    names = select.among or [variant.name for variant in results.variants if variant.is_private]
    candidates = [variant for variant in results.variants if variant.name in names]
    composed = _cost_of(results, [out / run.path for v in candidates for run in v.outcomes])
    best = best_variant(candidates, select.metric)
    statement = _selection_statement(select, best, candidates, composed, everything)
    return Tuning(
        selected=best and best.name,
        on=select.on,
        everything=everything,
        candidates=composed,
        statement=statement,
    )


def cost_of_tuned(
    results: Results, out: Path, tune: TuneSettings, chosen: Mapping[str, str]
) -> Tuning:
    """Return the privacy cost of a comparison whose variants were tuned before it (`tune:`).

    The candidates are in the folder `tuning`; `chosen` has each variant's values as text, by name.
    """
    everything = _cost_of(results, _all_runs(out))
    listed = "; ".join(f"{name}: {text}" for name, text in chosen.items())
    words = results.metric.replace("_", " ")
    cost = f"On charged data: {_PRIVATE_MODELS} {_together(everything)}"
    if tune.on == "public_data":
        cost = f"On public data: {_DECLARED_PUBLIC}"
    statement = (
        f"Tuned before the comparison, each variant by itself: {', '.join(tune.keys)}, by mean "
        f"{words} over {tune.seeds} seeds that are not compared. Chosen: "
        f"{listed}. Each ε of a variant covers one run. {cost}"
    )
    return Tuning(on=tune.on, everything=everything, statement=statement)


def tuning_of_runs(results: Results, paths: Sequence[Path]) -> Tuning:
    """Return the privacy cost of existing, verified runs together, without a selection."""
    everything = _cost_of(results, paths, are_verified=True)
    statement = _without_selection(everything).replace(" in this directory", "")
    return Tuning(everything=everything, statement=statement)


def _cost_of(results: Results, paths: Sequence[Path], *, are_verified: bool = False) -> Composition:
    """Return the privacy cost of runs together, at the largest δ of the variants."""
    delta = max(results.deltas, default=None)
    # Without this file, a run failed before it read any data.
    files = [path / "experiment.yaml" for path in paths if (path / "experiment.yaml").is_file()]
    begun = {file.parent: read_object(file) for file in files}
    private = {path: run["privacy"] for path, run in begun.items() if _is_private(run)}
    terms = {(written_name(entry["adjacency"]), entry["unit"]) for entry in private.values()}
    seen: list[Observer] = [CLAIMED_AGAINST[written_name(p["trust"])] for p in private.values()]
    # The last of the observers sees least.
    against = max(seen, key=tuple(OBSERVER_NAMES).index) if len(terms) == 1 else None
    curves = [
        _largest_rdp(path, written_name(privacy["adjacency"]), is_verified=are_verified)
        for path, privacy in private.items()
    ]
    not_private = len(begun) - len(private)
    infinite = Composition(len(begun), not_private, None, delta, None, against)
    if delta is None or len(terms) != 1 or any(np.isinf(curve).all() for curve in curves):
        return infinite
    seeds = [begun[path]["seed"] for path in private if private[path]["noise"] == "seeded"]
    largest, sums = np.max(curves, axis=0), np.sum(curves, axis=0)
    selected = rdp_repeat_and_select(DEFAULT_ORDERS, largest, float(len(curves)), None)
    return replace(
        infinite,
        epsilon=_epsilon(sums, delta, len(curves)),
        selected_epsilon=_epsilon(selected, delta, len(curves)),
        shares_noise=len(set(seeds)) < len(seeds),
    )


def _is_private(experiment: Mapping[str, Any]) -> bool:
    """Whether a run adds noise: a noise multiplier of 0 clips alone."""
    privacy = experiment.get("privacy")
    clips_alone = privacy and privacy.get("noise_multiplier") == 0 and not privacy.get("clients")
    return privacy is not None and not clips_alone


def _epsilon(rdp: Floats, delta: float, runs: int) -> float | None:
    """Return ε of an RDP curve, with the noise sampler's slack once for each run; None: infinite.

    The slack of a run covers far more values of noise than a run draws, hence also a random number
    of runs around this one.
    """
    if not rdp.any():
        return 0.0
    deltas = [delta * (1.0 - SHARE) ** number for number in range(runs + 1)]
    epsilon = epsilon_from_rdp(DEFAULT_ORDERS, rdp, deltas.pop())[0]
    for whole in reversed(deltas):
        epsilon += sampler_slack(epsilon, whole).epsilon
    return finite_or_none(epsilon)


def _all_runs(out: Path) -> list[Path]:
    folders = [base / kind for base in (out, out / TUNING) for kind in ("runs", "superseded")]
    return sorted(run for folder in folders for run in folder.glob("*/*"))


def _largest_rdp(path: Path, adjacency: str, *, is_verified: bool) -> Floats:
    """Return the largest RDP of any client of a run at each order of `DEFAULT_ORDERS`.

    A run counts with the largest bound at each order, so the sum over runs bounds every example.
    """
    files, largest = RunFiles(RunDirectory(path)), np.zeros(len(DEFAULT_ORDERS))
    ledgers = list[PrivacyLedger]()  # a run that failed before its first charge has none
    if is_verified:  # so that the sums in `privacy.json` are those of its ledger
        ledgers = [PrivacyLedger.from_list(row["ledger"]) for row in files.clients]
    elif files.directory.ledger.exists() or files.optional("privacy.json"):
        ledgers = [total_of(charges) for charges in files.histories.values()]
    for ledger in ledgers:
        accountant = ledger.compose_into(RdpAccountant(adjacency=check_adjacency(adjacency)))
        # An (ε, δ) step may reveal everything with probability δ, which RDP leaves out.
        if math.isinf(accountant.get_epsilon(0.5)) or leak(accountant.steps.items()) > 0.0:
            return np.full(len(DEFAULT_ORDERS), np.inf)
        largest = np.maximum(largest, total_rdp(accountant.steps.items(), DEFAULT_ORDERS))
    return largest


def best_variant(candidates: Sequence[VariantResult], metric: str) -> VariantResult | None:
    """Return the variant with the best mean metric over all its seeds.

    Of variants with equal means, it is the one with the smallest test loss. The result is None if
    no variant has the metric for all its seeds.
    """
    sign = -1.0 if metric_entry(metric).smaller_is_better else 1.0
    scored = list[tuple[float, float, VariantResult]]()
    for candidate in candidates:
        score, loss = _score(candidate, metric), _score(candidate, f"test_{LOSS}")
        if score is not None:
            scored.append((sign * score, -math.inf if loss is None else -loss, candidate))
    return max(scored, key=lambda entry: entry[:2])[2] if scored else None


def _score(variant: VariantResult, metric: str) -> float | None:
    """Return a variant's mean metric over the seeds; None if a seed is missing."""
    values = [_value(run, metric) for run in variant.finished_runs]
    known = [value for value in values if value is not None]
    return float(np.mean(known)) if len(known) == len(variant.outcomes) else None


def _value(run: RunOutcome, metric: str) -> float | None:
    """Return a run's metric; that of clients is the mean, weighted by their numbers of examples."""
    if not metric.startswith("client_"):
        return run.metrics.get(metric)
    values = [row[metric] for row in run.client_metrics if row.get(metric) is not None]
    if len(values) < max(1, len(run.client_metrics)):
        return None
    return float(np.average(values, weights=[row["examples"] for row in run.client_metrics]))


def _without_selection(everything: Composition) -> str:
    return (
        "This comparison chooses no variant, and each of its ε covers one run. "
        f"{_together(everything)} Choosing a variant after looking at these results is tuning: for "
        "private data it costs what all runs cost together."
    )


def _selection_statement(
    select: SelectSettings,
    best: VariantResult | None,
    candidates: Sequence[VariantResult],
    composed: Composition,
    everything: Composition,
) -> str:
    words = select.metric.replace("_", " ")
    if best is None:
        nothing = f"Nothing was selected: no candidate has a {words} for every seed."
        return f"{nothing} {_together(everything)}"
    chosen = f"Selected: {best.name}, the best of {len(candidates)} variants by mean {words}. "
    if select.on == "public_data":
        return f"{chosen}{_DECLARED_PUBLIC} "
    if select.metric.startswith("client_"):
        scores = "The scores were computed on the clients' training data without noise"
        none = "no ε covers them, and the choice has no privacy guarantee"
        return f"{chosen}{scores}: {none}. {_together(everything)}"
    scored = f"{chosen}{_PRIVATE_MODELS if select.on == 'public_test' else _PRIVATE_SCORES}"
    if composed.not_private:
        without = f"{composed.not_private} of the {composed.runs} candidate runs had no privacy"
        return f"{scored} {without}, so the choice has no privacy guarantee."
    if composed.epsilon is None or composed.selected_epsilon is None:
        return f"{scored} No finite ε covers the choice."
    return (
        f"{scored} The results of all {composed.runs} candidate runs were seen, so their "
        f"composition counts: {_bound(composed)} for the chosen model with all results; no smaller "
        "ε is claimed for the choice alone. (Had the number of runs been drawn from a Poisson "
        f"distribution of mean {composed.runs} and kept secret, and only the best model been "
        "released, random selection (Papernot, Steinke 2022) would cost ε ≤ "
        f"{epsilon_text(composed.selected_epsilon)}. This comparison did neither; a charged "
        "search, `fedsim compare FILE --select`, does both.)"
        f"{_SHARED if composed.shares_noise else ''}"
    )


def _together(everything: Composition) -> str:
    private = everything.runs - everything.not_private
    if not private:
        return "None of the runs had privacy."
    runs, cost, have = f"{private} runs", "together cost", "together have"
    if private == 1:
        runs, cost, have = "run", "costs", "has"
    without = ""
    if everything.not_private:
        others = f"the other {everything.not_private} had no privacy"
        without = f"; {others}, so there is no finite ε for all"
    if everything.epsilon is None and everything.against is None:
        terms = "have two units or adjacencies, which do not compose to one ε"
        return f"The {runs} with privacy {terms}{without}."
    if everything.epsilon is None:
        return f"The {runs} with privacy {have} no finite ε{without}."
    return (
        f"The {runs} with privacy in this directory {cost} {_bound(everything)} (Rényi "
        f"composition; in each run the client with the largest spend){without}."
        f"{_SHARED if everything.shares_noise else ''}"
    )


def _bound(composed: Composition) -> str:
    """Return ε and δ as text, with the observer if it is not the server."""
    against = composed.against
    view = "" if against in (None, "server") else f" for {OBSERVER_NAMES[against]}"
    return f"ε ≤ {epsilon_text(composed.epsilon)} at δ = {composed.delta:g}{view}"
