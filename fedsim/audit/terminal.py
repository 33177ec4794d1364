"""Terminal output of an audit."""

import math

from rich.console import Console

from fedsim.audit.evidence import Interval
from fedsim.audit.results import Audit
from fedsim.core.formatting import epsilon_text, least_epsilon_text
from fedsim.report.lines import print_sentence
from fedsim.report.tables import figure_table, print_table
from fedsim.statement.sentence import count_text


def print_audit(audit: Audit, console: Console | None = None) -> None:
    """Print each client's measurements beside its claim, and the verdict.

    Args:
        audit: the result to print.
        console: where to print; standard output by default.
    """
    console = console or Console()
    table = figure_table(
        "Measured on each client, relative to the charge",
        ["client", "examples", "ε claimed", "ε at least", "noise", "example", "sampling"],
    )
    for one in audit.clients:
        found = one.findings
        table.add_row(
            str(one.client),
            str(one.num_examples),
            epsilon_text(one.claim.epsilon),
            least_epsilon_text(found.epsilon),
            _interval_text(found.noise),
            _interval_text(found.contribution),
            f"{found.sampling_rate.estimate:.3f}",
        )
    notes = [
        "ε at least: lower bound from measured noise, clipping and sampling",
        "noise: deviation; example: contribution to a sum; sampling: rate",
    ]
    if audit.num_clients > len(audit.clients):
        shown = len(audit.clients)
        which = f"the {shown} largest claims" if shown > 1 else "the largest claim"
        notes.append(f"{which} of {audit.num_clients:,} clients")
    table.caption = "\n".join(notes)
    print_table(console, table)
    problems = len(audit.violations)
    verdict = f"{count_text(problems, 'violation')} found" if problems else "no claim is violated"
    print_sentence(
        console,
        f"{audit.name}: {verdict} ({count_text(len(audit.clients), 'client')}, "
        f"{count_text(audit.steps, 'step')} each, confidence {audit.confidence:g})",
    )


def _interval_text(interval: Interval) -> str:
    if math.isnan(interval.estimate):
        return "–"
    return f"{interval.estimate:.3f} ± {interval.high - interval.estimate:.3f}"
