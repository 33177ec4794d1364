"""Rounds of a federation on fedsim and on others, beside the bare loop that is the limit.

    python benchmarks/federation.py                    # 10, 100 and 1,000 clients, three models
    python benchmarks/federation.py --clients 10000 --models small --json out.json --plot out.svg

Contenders take turns, round by round, on one thread, so that a busy machine disturbs all alike.
Times are CPU time of this process where nobody uses another one. Peak memory is measured in a
process of its own for each contender.
"""

import argparse
import json
import platform
import resource
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch
from contenders.bare import BareLoop
from contenders.base import Contender, Work
from contenders.local import LocalEngine


def contenders() -> list[Contender]:
    """Return everybody; the first is the limit that ratios are taken to."""
    return [BareLoop(), LocalEngine(), LocalEngine("off")]


def measure(work: Work, rounds: int) -> list[dict[str, Any]]:
    """Return a row for each contender: client-rounds per second, and times relative to the limit.

    Ratios are medians over neighbours in time.
    """
    everybody = contenders()
    times: list[list[float]] = [[] for _ in everybody]
    for one in everybody:
        one.prepare(work)
        one.round()  # the first round warms up
    try:
        for _ in range(rounds):
            for one, own in zip(everybody, times, strict=True):
                start = time.process_time()
                one.round()
                own.append(time.process_time() - start)
    finally:
        for one in reversed(everybody):
            one.close()
    return [
        {
            "model": work.model,
            "clients": work.clients,
            "private": work.private and one.private,
            "contender": one.name,
            "client_rounds_per_second": work.clients / statistics.median(own),
            "ratio": statistics.median(a / b for a, b in zip(own, times[0], strict=True)),
            "ratio_of_best": min(own) / min(times[0]),
            "peak_megabytes": peak_memory(work, number),
        }
        for number, (one, own) in enumerate(zip(everybody, times, strict=True))
    ]


def peak_memory(work: Work, number: int) -> float:
    """Return the peak memory (MB) of two rounds in a process of their own."""
    job = json.dumps([work.model, work.clients, work.private, number])
    command = [sys.executable, __file__, "--memory-of", job]
    return float(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


def _memory_of(job: str) -> None:
    model, clients, private, number = json.loads(job)
    one = contenders()[number]
    one.prepare(Work(model, clients, private))
    one.round()
    one.round()
    one.close()
    print(_peak_megabytes())


def _peak_megabytes() -> float:
    status = Path("/proc/self/status")
    if status.exists():  # getrusage would also count the process that started this one
        (line,) = [each for each in status.read_text().splitlines() if each.startswith("VmHWM")]
        return int(line.split()[1]) / 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def plot(rows: list[dict[str, Any]], path: Path) -> None:
    """Draw client-rounds per second over the number of clients, a panel for each model."""
    import matplotlib.pyplot as plt

    models = list(dict.fromkeys(row["model"] for row in rows))
    figure, panels = plt.subplots(1, len(models), figsize=(4.5 * len(models), 3.6), squeeze=False)
    for panel, model in zip(panels[0], models, strict=True):
        lines: dict[str, list[tuple[int, float]]] = {}
        for row in rows:
            if row["model"] == model:
                label = row["contender"] + (", private" if row["private"] else "")
                lines.setdefault(label, []).append(
                    (row["clients"], row["client_rounds_per_second"])
                )
        for label, points in lines.items():
            panel.loglog(*zip(*sorted(set(points)), strict=True), marker="o", label=label)
        panel.set(title=model, xlabel="clients", ylabel="client-rounds per second")
    panels[0][0].legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(path)


def main() -> None:
    """Measure what the command line asks for and print it."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--clients", type=int, nargs="+", default=[10, 100, 1000])
    parser.add_argument("--models", nargs="+", default=["mlp", "cnn", "small"])
    parser.add_argument("--rounds", type=int, default=5, help="timed rounds of each contender")
    parser.add_argument("--quick", action="store_true", help="only show that it runs")
    parser.add_argument("--json", type=Path, help="write the rows and the machine")
    parser.add_argument("--plot", type=Path, help="draw the rows")
    parser.add_argument("--memory-of", help=argparse.SUPPRESS)
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.memory_of:
        _memory_of(options.memory_of)
        return
    if options.quick:
        options.clients, options.models, options.rounds = [3], ["small"], 1
    rows = []
    for model in options.models:
        for clients in options.clients:
            for private in (True, False):
                found = measure(Work(model, clients, private), options.rounds)
                rows += found
                print(f"{model}, {clients} clients, {'private' if private else 'not private'}")
                for row in found:
                    print(
                        f"  {row['contender']:<24} {row['client_rounds_per_second']:9.0f} /s  "
                        f"{row['ratio']:5.2f} x (median)  {row['ratio_of_best']:5.2f} x (best)  "
                        f"{row['peak_megabytes']:6.0f} MB"
                    )
    machine = {
        "machine": platform.machine(),
        "system": platform.platform(),
        "torch": torch.__version__,
    }
    if options.json:
        options.json.write_text(json.dumps({"machine": machine, "rows": rows}, indent=1))
    if options.plot:
        plot(rows, options.plot)


if __name__ == "__main__":
    main()
