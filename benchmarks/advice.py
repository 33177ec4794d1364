"""Whether `fedsim plan --advise` puts candidates into the order of their measured accuracy.

    python benchmarks/advice.py [--federations N] [--json FILE]

Each of 20 federations is generated from its number: clients, sizes, partition, budgets, task, model
and a recipe that a person might write. Of the candidates that the advice compares, 60 are drawn and
the 8 that differ most in their settings are kept, the file among them. Each is run. The figure of a
federation is the rank correlation (Spearman) of predicted and measured order.

Neither the draw of candidates nor the choice among them looks at a prediction or an accuracy. The
constants of the noise model were fitted to digits and to other federations of a similar generator.
The grid of learning rates and the margin of near-best candidates were set after a look at the first
6 of these 20, so those are no blind test of them.
With --json, finished federations are kept in FILE and not run again.
"""

import argparse
import json
import math
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from records import Number, quartiles, write_record
from scipy.stats import spearmanr

from fedsim.experiment import load_experiment
from fedsim.federation.assembly import assemble
from fedsim.federation.federation import Federation
from fedsim.runs.runner import run_experiment
from fedsim.tools.advice.candidates import AdviceCandidate, changes_of
from fedsim.tools.advice.ranking import Ranking

NUM_FEDERATIONS, NUM_CANDIDATES, GOAL = 20, 8, 0.8
HERE = Path(__file__).parent
_DRAWN, _MOST_STEPS = 60, 100
_FIGURES = 4


def generated(number: int) -> dict[str, Any]:
    """Return the experiment of a number."""
    rng = np.random.default_rng([number, 2026])

    def one_of(*values: Any) -> Any:
        return values[int(rng.integers(len(values)))]

    clients, classes, norm = one_of(5, 8, 10), one_of(2, 4, 6, 10), one_of(1.0, 2.0, 3.0)
    examples = int(clients * math.exp(rng.uniform(math.log(60), math.log(250))))
    skewed = {"scheme": "dirichlet", "alpha": one_of(0.5, 1.0), "min_examples": 20}
    uneven = {"scheme": "quantity", "alpha": 0.7, "min_examples": 20}
    mlp = {"name": "mlp", "args": {"hidden": [one_of(8, 16, 32)], "activation": "tanh"}}
    epsilon = one_of(1.0, 2.0, 4.0, 8.0)
    privacy = {"target_epsilon": epsilon, "delta": 1e-3, "max_grad_norm": one_of(0.3, 0.5, 1.0)}
    if rng.uniform() < 0.3:
        privacy["clients"] = {"careful": {"share": 0.5, "target_epsilon": epsilon / 4}}
    rounds, steps = one_of(20, 30, 40), one_of(1, 2, 5)
    path = math.exp(rng.uniform(math.log(20), math.log(120)))
    lr = float(f"{path / norm / (rounds * steps * privacy['max_grad_norm']):.2g}")
    task = {
        "examples": examples,
        "dims": one_of(10, 20, 40),
        "classes": classes,
        "clusters": one_of(1, 1, 2),
        "separation": round(float(rng.uniform(0.6, 1.3)) * (1.0 if classes < 6 else 1.3), 3),
        "decay": one_of(0.0, 0.3, 0.6),
        "norm": norm,
    }
    return {
        "name": f"generated-{number}",
        "seed": number,
        "data": {
            "dataset": "./gaussian_mixture.py:load",
            "args": task,
            "partition": {**one_of({"scheme": "iid"}, skewed, uneven), "num_clients": clients},
        },
        "model": one_of({"name": "logistic"}, mlp),
        "federation": {"rounds": rounds, "weighting": "uniform"},
        "local": {
            "steps": steps,
            "batch_size": one_of(16, 28),
            "optimizer": {"name": "sgd", "lr": lr},
        },
        "privacy": privacy,
    }


def federation_of(experiment: Mapping[str, Any]) -> Federation:
    """Return the federation of a generated experiment."""
    return assemble(load_experiment(experiment, base=HERE), ledger=None)


def drawn_candidates(ranking: Ranking, number: int) -> list[AdviceCandidate]:
    """Return the file and the drawn candidates that differ most from each other in their settings.

    Args:
        ranking: of the federation.
        number: of the federation; it seeds the draw.
    """
    rng = np.random.default_rng([number, 11])
    feasible = [c for c in ranking.candidates[1:] if c.local_steps <= _MOST_STEPS]
    drawn = [feasible[int(i)] for i in rng.choice(len(feasible), _DRAWN, replace=False)]
    chosen = [ranking.candidates[0]]
    while len(chosen) < NUM_CANDIDATES:
        chosen.append(max(drawn, key=lambda c: min(_distance(c, other) for other in chosen)))
    return chosen


def _distance(one: AdviceCandidate, other: AdviceCandidate) -> float:
    ratios = (
        one.rounds / other.rounds,
        one.steps / other.steps,
        one.learning_rate * one.local_steps / other.learning_rate / other.local_steps,
    )
    numbers = sum(abs(math.log2(ratio)) for ratio in ratios)
    return numbers + 2.0 * (one.rate != other.rate) + 2.0 * (one.weighting != other.weighting)


def predicted_error(ranking: Ranking, candidate: AdviceCandidate) -> float:
    """Return the predicted error of one of the candidates that a ranking compares."""
    return float(ranking.errors[ranking.candidates.index(candidate)])


def measure(number: int) -> dict[str, Any]:
    """Return predicted and measured order of the candidates of a generated federation."""
    experiment = generated(number)
    federation = federation_of(experiment)
    ranking = Ranking(federation)
    rows = []
    for candidate in drawn_candidates(ranking, number):
        changes = changes_of(candidate, ranking.facts)
        rows.append(
            {
                "changes": changes,
                "predicted": float(f"{predicted_error(ranking, candidate):.{_FIGURES}g}"),
                "accuracy": accuracy(experiment, changes),
            }
        )
    return {"number": number, "experiment": experiment, "candidates": rows}


def accuracy(experiment: Mapping[str, Any], changes: Mapping[str, Any]) -> float:
    """Return the test accuracy of a run.

    Args:
        experiment: generated.
        changes: settings of the candidate.
    """
    with tempfile.TemporaryDirectory() as directory:
        result = run_experiment(
            experiment, overrides=changes, out=Path(directory) / "run", base=HERE
        )
    return round(result.metrics["test_accuracy"], _FIGURES)


def rank_correlation(predicted: Sequence[float], measured: Sequence[float]) -> float:
    """Return Spearman's correlation of small predicted errors with large accuracies.

    Args:
        predicted: noise-to-signal ratio of each candidate.
        measured: accuracy of each candidate.
    """
    return float(spearmanr([-value for value in predicted], measured)[0])  # type: ignore[arg-type]


def correlation_of(federation: Mapping[str, Any]) -> float:
    """Return the rank correlation of a measured federation."""
    rows = federation["candidates"]
    return rank_correlation([r["predicted"] for r in rows], [r["accuracy"] for r in rows])


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, print and record."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--federations", type=int, default=NUM_FEDERATIONS)
    parser.add_argument("--json", type=Path, help="record; its federations are not measured again")
    options = parser.parse_args(arguments)
    done: list[dict[str, Any]] = []
    if options.json is not None and options.json.exists():
        done = json.loads(options.json.read_text())["federations"]
    known = {one["number"] for one in done}
    for number in (n for n in range(options.federations) if n not in known):
        done.append(measure(number))
        accuracies = [row["accuracy"] for row in done[-1]["candidates"]]
        print(
            f"federation {number}: rank correlation {correlation_of(done[-1]):.2f}, accuracies "
            f"{min(accuracies):.3f} to {max(accuracies):.3f}, the file {accuracies[0]:.3f}",
            flush=True,
        )
        if options.json is not None:
            _record(done, options.json)
    print(_number(done).line())


def _number(federations: Sequence[Mapping[str, Any]]) -> Number:
    correlations = [correlation_of(one) for one in federations]
    low, _, high = quartiles(correlations)
    return Number(
        "rank correlation of predicted and measured order of candidates",
        f"mean over {len(correlations)} federations",
        float(np.mean(correlations)),
        low,
        high,
        goal=GOAL,
        least=True,
    )


def _record(federations: Sequence[Mapping[str, Any]], path: Path) -> None:
    mean = round(_number(federations).value or 0.0, _FIGURES)
    details = {"mean_rank_correlation": mean, "federations": federations}
    write_record(path, "advice.py", [], details)  # no time, so no number for the tables


if __name__ == "__main__":
    main()
