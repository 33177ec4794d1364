"""Printing of an audit in the terminal."""

import math

from rich.console import Console
from rich.table import Table

from fedsim.core.formatting import count_text, epsilon_text, least_epsilon_text
from fedsim.report.terminal import figure_table, print_sentence, print_table
from fedsim.tools.attack.evidence import Interval
from fedsim.tools.attack.findings import Audit, ClientAudit


def print_audit(audit: Audit) -> None:
    """Print each client's measurements with its claim, and the verdict of the audit."""
    console = Console()
    print_table(console, _epsilon_table(audit))
    console.print()
    print_table(console, _mechanism_table(audit))
    problems = len(audit.violations)
    verdict = f"{count_text(problems, 'violation')} found" if problems else "no claim is violated"
    print_sentence(
        console,
        f"{audit.name}: {verdict} ({count_text(audit.num_audited, 'client')}, "
        f"{count_text(audit.steps, 'step')} each, confidence {audit.confidence:g})",
    )


def _epsilon_table(audit: Audit) -> Table:
    """Return the table of claimed, certified and estimated ε."""
    shows_views = any(client.views is not None for client in audit.clients)
    title = "ε of each client: claimed, certified, and estimated"
    numbers = [*_who(audit), "examples", "claimed", "certified", "of runs", "steps"]
    if shows_views:
        title, numbers = f"{title} from four views", [*numbers, "uploads", "sums", "final"]
    table = figure_table(title, numbers)
    for client in audit.clients:
        findings, views = client.findings, client.views
        last = [math.nan] * 3 if views is None else [views.uploads, views.sums, views.final_model]
        table.add_row(
            *_who(audit, client),
            str(client.num_examples),
            epsilon_text(client.claim.epsilon),
            _bound_text(findings.epsilon),
            _bound_text(findings.epsilon_of_runs),
            _estimate_text(findings.epsilon_estimate),
            *(_estimate_text(value) for value in last if shows_views),
        )
    table.caption = "\n".join(_epsilon_notes(audit, shows_views=shows_views))
    return table


def _epsilon_notes(audit: Audit, *, shows_views: bool) -> list[str]:
    """Return the notes below the table of ε."""
    notes = [
        f"certified: at least so much is spent (confidence {audit.confidence:g}), by single steps;",
        "of runs: the same by whole runs, whatever the distribution of the noise;",
    ]
    if shows_views:
        notes += [
            "estimated, for one who sees all steps (as charged), all uploads of the",
            "client, the sums of all clients' updates, or the final model",
        ]
    else:
        notes.append("steps: estimated, for one who sees every release")
    notes += [text for name, text in _OBSERVERS.items() if name in _observers(audit)]
    if audit.num_clients > audit.num_audited:
        shown = audit.num_audited
        which = f"the {shown} largest claims" if shown > 1 else "the largest claim"
        notes.append(f"{which} of {audit.num_clients:,} clients")
    return notes


def _observers(audit: Audit) -> set[str]:
    """Return the adversaries of the claims; empty if all claims are against the server."""
    observers = {client.against for client in audit.clients}
    return set() if observers == {"server"} else set(observers)


def _who(audit: Audit, row: ClientAudit | None = None) -> list[str]:
    """Return the first cells of a row, or of the heading: client, and adversary if it differs."""
    cells = ["client", "against"] if row is None else [str(row.client), row.against]
    return cells if _observers(audit) else cells[:1]


def _mechanism_table(audit: Audit) -> Table:
    """Return the table of measured noise, clipping and sampling."""
    table = figure_table(
        "Measured mechanism, relative to the charge",
        [*_who(audit), "noise", "clipping", "sampling"],
    )
    for client in audit.clients:
        findings, highest = client.findings, client.findings.contribution.high
        table.add_row(
            *_who(audit, client),
            _interval_text(findings.noise),
            f"{highest:.4f}" if math.isfinite(highest) else "–",
            _interval_text(findings.sampling_rate),
        )
    table.caption = (
        "noise: standard deviation; clipping: largest\ncontribution of an example; sampling: rate"
    )
    return table


def _bound_text(epsilon: float) -> str:
    """Return a lower bound of ε rounded down, as text with four significant digits."""
    if not epsilon:
        return "0"
    text = least_epsilon_text(epsilon)
    return text if text == "∞" else f"{float(text):#.4g}"


def _estimate_text(epsilon: float) -> str:
    return "–" if math.isnan(epsilon) else f"{epsilon:#.3g}"


def _interval_text(interval: Interval) -> str:
    if math.isnan(interval.estimate):
        return "–"
    return f"{interval.estimate:.3f} ± {interval.high - interval.estimate:.3f}"


_OBSERVERS = {
    "sums": "sums: the smallest sum that may be opened, with the fewest honest clients;",
    "server": "server: the client's own uploads, if secure aggregation fails;",
    "models": "models: the client's part with the noise that the server adds",
}
