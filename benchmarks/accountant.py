"""The accountant against dp-accounting and Opacus: times, accuracies and their ratios.

    python benchmarks/accountant.py [--quick] [--json [FILE]]

All contenders of a case run in turn, repetition by repetition, in one process and one thread, so
that a busy machine slows all of them; medians are reported. Every repetition asks about slightly
different (q, z), so no cache of earlier answers helps. Opacus is left out where it is missing.
"""

import argparse
import json
import logging
import math
import platform
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any

import dp_accounting
import numpy as np
from dp_accounting.pld import PLDAccountant as OtherPldAccountant
from dp_accounting.rdp import RdpAccountant as OtherRdpAccountant
from records import Number, quartiles, write_record
from saddle_point import InversionError, near_exact_epsilon
from scipy.special import logsumexp
from threadpoolctl import threadpool_limits

from fedsim.accountant import (
    Gaussian,
    PldAccountant,
    PoissonSampled,
    RandomAllocation,
    RdpAccountant,
)
from fedsim.accountant.composition import SampledGaussian
from fedsim.accountant.fleet import FleetAccountant
from fedsim.accountant.pld.fleet import grid_spacing
from fedsim.accountant.privacy_filter import PrivacyFilter

try:
    from opacus.accountants import RDPAccountant as OpacusRdpAccountant
except ImportError:
    OpacusRdpAccountant = None

DELTA = 1e-5
ALLOCATION_GOAL = 1.1  # epsilon of random allocation over that of samples of its dominating pair
# dp-accounting's default orders: more than ours, and finer where ours are a quarter apart.
OTHER_ORDERS = (*(1 + k / 10 for k in range(1, 100)), *range(11, 64), 128, 256, 512, 1024)
Client = tuple[float, float, int]  # (q, z, T)


@dataclass
class Contender:
    """One way to answer, timed.

    Attributes:
        name: as printed.
        run: repetition number -> epsilon.
        scale: what a run's time is multiplied by, where only a part of the work was done.
        least_ratio: how many times slower than ours it should be; None if there is no goal.
    """

    name: str
    run: Callable[[int], float]
    scale: float = 1.0
    least_ratio: float | None = None
    seconds: list[float] = field(default_factory=list)
    answer: float = math.nan


def measure(contenders: Sequence[Contender], repetitions: int) -> None:
    """Times all contenders in turn, after one run of each to warm up."""
    for contender in contenders:
        contender.run(-1)
    for repetition in range(repetitions):
        for contender in contenders:
            start = time.perf_counter()
            contender.answer = contender.run(repetition)
            contender.seconds.append((time.perf_counter() - start) * contender.scale)


def report(title: str, contenders: Sequence[Contender]) -> dict[str, Any]:
    """Prints a case, ours first, and returns it as JSON values."""
    print(f"\n{title}")
    ours = statistics.median(contenders[0].seconds)
    rows = []
    for contender in contenders:
        median = statistics.median(contender.seconds)
        # Ratios of neighbours in time: both have seen the same machine.
        pairs = zip(contender.seconds, contenders[0].seconds, strict=True)
        low, ratio, high = quartiles([theirs / mine for theirs, mine in pairs])
        goal = contender.least_ratio
        verdict = "" if goal is None else f"goal {goal:g}x: {'met' if ratio >= goal else 'MISSED'}"
        answer = "" if math.isnan(contender.answer) else f"{contender.answer:.6f}"
        print(
            f"  {contender.name:<46} {1e3 * median:12.4f} ms {ratio:9.2f}x  {answer:10} {verdict}"
        )
        rows.append(
            {
                "contender": contender.name,
                "median_s": median,
                "ratio": ratio,
                "quartiles": (low, high),
                "answer": contender.answer,
                "goal_ratio": goal,
            }
        )
    return {"title": title, "median_s": ours, "contenders": rows}


def perturbed(repetition: float) -> tuple[float, float]:
    """Returns (q, z) near (0.01, 1), different in every repetition."""
    return 0.01 + 1e-7 * repetition, 1.0 + 1e-6 * repetition


def other_event(q: float, z: float) -> dp_accounting.DpEvent:
    """Returns the event in dp-accounting's words."""
    return dp_accounting.PoissonSampledDpEvent(q, dp_accounting.GaussianDpEvent(z))


def one_query_rdp(steps: int, repetitions: int) -> dict[str, Any]:
    """Case (a): one epsilon by Rényi DP."""

    def ours(repetition: int) -> float:
        q, z = perturbed(repetition)
        return RdpAccountant().compose(PoissonSampled(q, Gaussian(z)), steps).get_epsilon(DELTA)

    def same_orders(repetition: int) -> float:
        q, z = perturbed(repetition)
        accountant = RdpAccountant(OTHER_ORDERS)
        return accountant.compose(PoissonSampled(q, Gaussian(z)), steps).get_epsilon(DELTA)

    def fleet(repetition: int) -> float:
        q, z = perturbed(repetition + 0.5)  # what others cached is of no use
        fleet = FleetAccountant("rdp").compose(0, PoissonSampled(q, Gaussian(z)), steps)
        return float(fleet.get_epsilon(DELTA)[0])

    def theirs(repetition: int) -> float:
        event = other_event(*perturbed(repetition))
        return OtherRdpAccountant().compose(event, steps).get_epsilon(DELTA)

    def opacus(repetition: int) -> float:
        q, z = perturbed(repetition)
        accountant: Any = OpacusRdpAccountant and OpacusRdpAccountant()
        accountant.history = [(z, q, steps)]
        return float(accountant.get_epsilon(DELTA))

    contenders = [
        Contender("fedsim RdpAccountant", ours),
        Contender("fedsim RdpAccountant, dp-accounting's orders", same_orders),
        Contender("fedsim FleetAccountant('rdp'), one client", fleet),
        Contender("dp-accounting RdpAccountant", theirs, least_ratio=10.0),
    ]
    if OpacusRdpAccountant is not None:
        contenders.append(Contender("Opacus RDPAccountant", opacus))
    measure(contenders, repetitions)
    return report(f"(a) epsilon of {steps} steps at q=.01, z=1 by RDP, nothing cached", contenders)


def one_query_pld(steps: int, repetitions: int) -> dict[str, Any]:
    """Case (b): one epsilon by PLD; dp-accounting's grid is chosen for the same excess as ours."""
    q, z = perturbed(0)
    exact = near_exact_epsilon({SampledGaussian(q, z): steps}, DELTA)
    excess = PldAccountant().compose(PoissonSampled(q, Gaussian(z)), steps).get_epsilon(DELTA)
    trial = 1e-4 if steps >= 1000 else 1e-3
    at_trial = OtherPldAccountant(value_discretization_interval=trial).compose(
        other_event(q, z), steps
    )
    # The excess of both grows with the square of the spacing.
    spacing = trial * math.sqrt((excess - exact) / (at_trial.get_epsilon(DELTA) - exact))

    def ours(repetition: int) -> float:
        q, z = perturbed(repetition)
        return PldAccountant().compose(PoissonSampled(q, Gaussian(z)), steps).get_epsilon(DELTA)

    def fleet(repetition: int) -> float:
        q, z = perturbed(repetition + 0.5)  # what others cached is of no use
        fleet = FleetAccountant("pld").compose(0, PoissonSampled(q, Gaussian(z)), steps)
        return float(fleet.get_epsilon(DELTA)[0])

    def theirs(repetition: int) -> float:
        accountant = OtherPldAccountant(value_discretization_interval=spacing)
        return accountant.compose(other_event(*perturbed(repetition)), steps).get_epsilon(DELTA)

    def inversion(repetition: int) -> float:
        return near_exact_epsilon({SampledGaussian(*perturbed(repetition)): steps}, DELTA)

    contenders = [
        Contender("fedsim PldAccountant", ours),
        Contender("fedsim FleetAccountant('pld'), one client", fleet),
        Contender("fedsim near_exact_epsilon (no bound)", inversion),
        Contender(f"dp-accounting PLDAccountant, h={spacing:.2e}", theirs, least_ratio=4.0),
    ]
    measure(contenders, repetitions)
    return report(
        f"(b) epsilon of {steps} steps at q=.01, z=1 by PLD at equal accuracy "
        f"(+{excess - exact:.1e} above the exact {exact:.6f})",
        contenders,
    )


def federation(clients: int, seed: int) -> list[Client]:
    """Returns clients that differ in everything, log-uniform in the ranges of small federations."""
    rng = np.random.default_rng(seed)

    def spread(low: float, high: float) -> list[float]:
        return np.exp(rng.uniform(math.log(low), math.log(high), clients)).tolist()

    columns = zip(spread(0.006, 0.16), spread(0.6, 2.5), spread(2, 3543), strict=True)
    return [(q, z, round(steps)) for q, z, steps in columns]


def fleet_of(name: Any, clients: Sequence[Client]) -> FleetAccountant:
    """Returns the fleet that composed all clients."""
    fleet = FleetAccountant(name)
    for client, (q, z, steps) in enumerate(clients):
        fleet.compose(client, PoissonSampled(q, Gaussian(z)), steps)
    return fleet


def whole_fleet(name: Any, number: int, sample: int, repetitions: int) -> dict[str, Any]:
    """Case (c): all clients of a federation; others on a subsample, scaled up."""

    def ours(repetition: int) -> float:
        epsilons = fleet_of(name, federation(number, repetition + 1)).get_epsilon(DELTA)
        return float(np.mean(list(epsilons.values())[:sample]))

    def alone(repetition: int) -> float:
        accountant = RdpAccountant if name == "rdp" else PldAccountant
        return statistics.fmean(
            accountant().compose(PoissonSampled(q, Gaussian(z)), steps).get_epsilon(DELTA)
            for q, z, steps in federation(number, repetition + 1)[:sample]
        )

    def theirs(repetition: int) -> float:
        return statistics.fmean(
            other_epsilon(name, client) for client in federation(number, repetition + 1)[:sample]
        )

    scale, note = number / sample, f"{sample} clients, scaled by {number / sample:g}"
    contenders = [
        Contender(f"fedsim FleetAccountant({name!r})", ours),
        Contender(f"fedsim one by one ({note})", alone, scale),
        Contender(f"dp-accounting ({note})", theirs, scale, 50.0 if name == "rdp" else 15.0),
    ]
    measure(contenders, repetitions)
    title = (
        f"(c) {number} heterogeneous clients by {name.upper()}; answers: mean of the first {sample}"
    )
    result = report(title, contenders)
    if name == "pld":
        result["excess"] = excesses(federation(number, 1)[:sample])
    return result


def other_epsilon(name: str, client: Client) -> float:
    """Returns dp-accounting's epsilon of one client; PLD on the grid that the fleet would use."""
    q, z, steps = client
    accountant: Any = OtherRdpAccountant()
    if name == "pld":
        single = RdpAccountant().compose(PoissonSampled(q, Gaussian(z)), steps)
        slope = (single.get_privacy_spent(DELTA).best_order or 2.0) - 1.0
        spacing = grid_spacing(((SampledGaussian(q, z), steps),), slope)
        accountant = OtherPldAccountant(value_discretization_interval=spacing)
    return float(accountant.compose(other_event(q, z), steps).get_epsilon(DELTA))


def excesses(clients: Sequence[Client]) -> dict[str, float]:
    """Prints and returns how far both are above the exact epsilons, where those can be had."""
    ours, theirs = [], []
    answers = fleet_of("pld", clients).get_epsilon(DELTA).values()
    for (q, z, steps), answer in zip(clients, answers, strict=True):
        if steps < 20:
            continue
        try:
            exact = near_exact_epsilon({SampledGaussian(q, z): steps}, DELTA)
        except InversionError:
            continue
        ours.append(float(answer) - exact)
        theirs.append(other_epsilon("pld", (q, z, steps)) - exact)
    if not ours:
        return {}
    result = {
        "clients": float(len(ours)),
        "fedsim_min": min(ours),
        "fedsim_max": max(ours),
        "dp_accounting_min": min(theirs),
        "dp_accounting_max": max(theirs),
    }
    print(
        f"  excess over the exact epsilon ({len(ours)} clients): "
        f"fedsim {min(ours):.1e} .. {max(ours):.1e}, "
        f"dp-accounting {min(theirs):.1e} .. {max(theirs):.1e}"
    )
    return result


def training_loop(charges: int, repetitions: int) -> dict[str, Any]:
    """Case (d): what accounting adds to every step of a training loop."""
    event = PoissonSampled(0.01, Gaussian(1.0))

    def loop(step: Callable[[], object]) -> Callable[[int], float]:
        def run(_: int) -> float:
            for _ in range(charges):
                step()
            return math.nan

        return run

    accountant = RdpAccountant().compose(event)
    budget = PrivacyFilter(8.0, DELTA)
    adaptive = PrivacyFilter(50.0, DELTA, mode="adaptive")

    def cached() -> None:
        accountant.compose(event)
        accountant.get_privacy_spent(DELTA)

    def charge_and_ask() -> None:
        if budget.is_affordable(event):
            budget.request(event)

    def charge_and_ask_adaptive() -> None:
        if adaptive.is_affordable(event):
            adaptive.request(event)

    contenders = [
        Contender("RdpAccountant: compose, get_epsilon", loop(cached), 1.0 / charges),
        Contender("PrivacyFilter (pld): may, request", loop(charge_and_ask), 1.0 / charges),
        Contender("PrivacyFilter (adaptive)", loop(charge_and_ask_adaptive), 1.0 / charges),
    ]
    if OpacusRdpAccountant is not None:
        opacus = OpacusRdpAccountant()

        def step() -> None:
            opacus.step(noise_multiplier=1.0, sample_rate=0.01)

        contenders.append(Contender("Opacus step, no query", loop(step), 1.0 / charges))
    measure(contenders, repetitions)
    result = report("(d) one step of a training loop; goal <= 0.02 ms", contenders)
    slowest = max(statistics.median(c.seconds) for c in contenders[:3])
    print(f"  slowest of ours {1e6 * slowest:.1f} us: {'met' if slowest <= 20e-6 else 'MISSED'}")
    return result


def allocation(batches: int, passes: int, samples: int, repetitions: int) -> dict[str, Any]:
    """Case (e): passes of balls and bins, beside samples of its dominating pair."""

    def ours(repetition: int) -> float:
        _, z = perturbed(repetition)
        event = RandomAllocation(batches, Gaussian(z))
        return PldAccountant().compose(event, passes).get_epsilon(DELTA)

    def by_rdp(repetition: int) -> float:
        _, z = perturbed(repetition)
        event = RandomAllocation(batches, Gaussian(z))
        return RdpAccountant().compose(event, passes).get_epsilon(DELTA)

    def poisson(repetition: int) -> float:
        _, z = perturbed(repetition)
        event = PoissonSampled(1.0 / batches, Gaussian(z))
        return PldAccountant().compose(event, passes * batches).get_epsilon(DELTA)

    def monte_carlo(repetition: int) -> float:
        _, z = perturbed(repetition)
        return sampled_epsilon(batches, z, passes, samples, seed=repetition + 1)

    contenders = [
        Contender("fedsim PldAccountant, random allocation", ours),
        Contender("fedsim RdpAccountant, random allocation", by_rdp),
        Contender("fedsim PldAccountant, Poisson batches", poisson),
        Contender("Monte Carlo of the dominating pair (no bound)", monte_carlo),
    ]
    measure(contenders, repetitions)
    result = report(
        f"(e) epsilon of {passes} passes of random allocation to {batches} batches at z=1",
        contenders,
    )
    sampled = [monte_carlo(repetition) for repetition in range(repetitions)]
    ratios = [ours(repetition) / epsilon for repetition, epsilon in enumerate(sampled)]
    low, middle, high = result["over_samples"] = quartiles(ratios)
    met = 1.0 <= middle <= ALLOCATION_GOAL
    print(
        f"  over its samples: {middle:.3f} ({low:.3f} to {high:.3f}), "
        f"goal 1 to {ALLOCATION_GOAL:g}: {'met' if met else 'MISSED'}"
    )
    return result


def sampled_epsilon(batches: int, z: float, passes: int, samples: int, *, seed: int) -> float:
    """Returns epsilon of "remove" at DELTA by importance sampling: an estimate, no bound.

    The release that holds the example is shifted by 1.5 in place of 1, so that large losses are
    common; each sample is weighted with the ratio of the densities.
    """
    generator = np.random.default_rng(seed)
    loss, log_weight, shift = np.zeros(samples), np.zeros(samples), 1.5
    for _ in range(passes):
        x = z * generator.standard_normal((samples, batches))
        x[:, 0] += shift
        log_weight += ((x[:, 0] - shift) ** 2 - (x[:, 0] - 1.0) ** 2) / (2.0 * z * z)
        loss += logsumexp((x - 0.5) / z / z, axis=1) - math.log(batches)
    weight = np.exp(log_weight) / samples
    low, high = 0.0, float(loss.max())
    for _ in range(50):
        middle = 0.5 * (low + high)
        delta = float(weight @ np.maximum(0.0, -np.expm1(middle - loss)))
        low, high = (middle, high) if delta > DELTA else (low, middle)
    return high


def versions() -> dict[str, str]:
    """Returns what a reader needs to judge the numbers."""
    names = ["numpy", "scipy", "dp-accounting"] + (["opacus"] if OpacusRdpAccountant else [])
    return {
        "machine": f"{platform.machine()} {platform.system()}",
        "python": platform.python_version(),
        **{name: metadata.version(name) for name in names},
    }


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs all cases."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="tiny sizes: does it run at all?")
    parser.add_argument(
        "--json", nargs="?", const="-", metavar="FILE", help="write a record; without FILE, print"
    )
    options = parser.parse_args(arguments)
    logging.getLogger("absl").setLevel(logging.ERROR)  # a warning per order that fails to converge
    quick = options.quick
    print(", ".join(f"{name} {value}" for name, value in versions().items()))
    with threadpool_limits(1):
        cases = [
            one_query_rdp(100 if quick else 10_000, 2 if quick else 21),
            one_query_pld(100 if quick else 10_000, 2 if quick else 9),
            whole_fleet("rdp", 10 if quick else 1000, 2 if quick else 40, 2 if quick else 5),
            whole_fleet("pld", 10 if quick else 1000, 2 if quick else 40, 2 if quick else 5),
            training_loop(10 if quick else 2000, 2 if quick else 7),
            allocation(94, 10, 4000 if quick else 40_000, 2 if quick else 9),
        ]
    if options.json == "-":
        print(json.dumps({"versions": versions(), "cases": cases}))
    elif options.json:
        write_record(Path(options.json), "accountant.py", numbers(cases), {"cases": cases})


def numbers(cases: Sequence[Mapping[str, Any]]) -> list[Number]:
    """Return the times of other libraries over fedsim's.

    Args:
        cases: what `report` returned.
    """
    libraries = [
        Number(
            # Without the measured accuracy, so that a claim has one name in all records.
            "other library / fedsim: " + case["title"].split(" (")[0].split(";")[0],
            row["contender"].split(", h=")[0],
            row["ratio"],
            *row["quartiles"],
            goal=row["goal_ratio"],
            least=True,
        )
        for case in cases
        for row in case["contenders"][1:]
        if not row["contender"].startswith(("fedsim", "Privacy", "Monte Carlo"))
    ]
    sampled = [
        Number(
            "random allocation: epsilon / that of samples of its dominating pair",
            case["title"].split("(e) epsilon of ")[1],
            case["over_samples"][1],
            case["over_samples"][0],
            case["over_samples"][2],
            goal=ALLOCATION_GOAL,
        )
        for case in cases
        if "over_samples" in case
    ]
    return libraries + sampled


if __name__ == "__main__":
    main()
