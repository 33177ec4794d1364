"""Output in the terminal: tables, wrapped sentences, and the result of a run."""

import re
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from typing import TypeVar

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from fedsim.core.formatting import (
    count_text,
    delta_text,
    duration_text,
    metric_text,
    printable,
    shortened,
)
from fedsim.report.contents import RunContents, read_contents
from fedsim.runs.client_columns import client_places
from fedsim.runs.directory import KEPT, RunDirectory
from fedsim.runs.manifest import root_of
from fedsim.runs.recorded_figures import PERSONALIZATION
from fedsim.statement.guarantee import epsilon_heading, guarantee_words, is_plain, unit_text
from fedsim.statement.sentence import OBSERVER_NAMES

# On one line: `ε = 8`, `δ = 0.001`, `± 1.2`, `22 steps`, `95 %`, `round 3`, `client 7`.
_GLUED = re.compile(
    r"(?<=[εδμzqC±≤=]) (?=[=≤∞\d])|(?<=\d) (?=%|pp\b|s\b|steps?\b|rounds?\b|clients?\b|examples?\b)"
    r"|(?<=\bround) (?=\d)|(?<=\bclient) (?=\d)|(?<=\baccuracy) (?=\d)|(?<=\bloss) (?=\d)"
)
_GLUE = "\u00a0"


def wrap_text(text: str, width: int, *, indent: str = "") -> str:
    """Return a text, wrapped into lines of at most `width` characters; the first has no indent.

    A word that is longer than a line, such as a path, is not broken.
    """
    lines = textwrap.wrap(
        _GLUED.sub(_GLUE, text),
        max(width, len(indent) + 1),
        subsequent_indent=indent,
        break_long_words=False,
        break_on_hyphens=False,
    )
    return "\n".join(lines).replace(_GLUE, " ")


def print_sentence(console: Console, text: str, style: str | None = None) -> None:
    """Print a sentence: in a terminal, wrapped to its width; elsewhere on one line."""
    text = printable(text)
    if console.is_terminal:
        text = wrap_text(text, console.width, indent="  ")
    console.print(text, style=style, highlight=False, markup=False, soft_wrap=True)


_MAX_WIDTH_CHARACTERS = 1000
_MAX_NAME_CHARS = 30
_MAX_TABLE_CLIENTS = 25
_Client = TypeVar("_Client")
_ADVICE = (
    "What may help: inputs around 0 (range of a column, model.features: [{center: ...}]), a "
    "larger local.optimizer.lr, more rounds"
)
_MAX_FAILING = 5


def figure_table(title: str, numbers: list[str], *, texts: Sequence[str] = ()) -> Table:
    """Return a table without rows, with columns of texts first, and then of numbers.

    Ten columns of numbers fit into a width of 80 characters.
    """
    table = Table(
        box=box.SIMPLE_HEAD,
        title=escape(title),
        title_justify="left",
        caption_justify="left",
        padding=(0, 1, 0, 0),
    )
    for heading in texts:
        table.add_column(heading, overflow="fold")
    for heading in numbers:
        table.add_column(heading, justify="right", no_wrap=True)
    return table


def print_table(console: Console, table: Table) -> None:
    """Print a table without cutting numbers; brackets in a cell are text, not markup of rich.

    A table that is too wide gets less padding, or else is printed wider than the terminal.
    """
    options = console.options.update(width=_MAX_WIDTH_CHARACTERS, markup=False)
    if console.measure(table, options=options).maximum > console.width:
        table.padding = (0, 0, 0, 0)
    width = max(console.measure(table, options=options).maximum, console.width)
    console.print(table, width=width, crop=False, markup=False)


def most_spent(clients: Sequence[_Client], epsilons: Sequence[float]) -> list[_Client]:
    """Return the 25 clients with the largest ε, in the order of `clients`."""
    falling = sorted(range(len(clients)), key=lambda place: -epsilons[place])
    return [clients[place] for place in sorted(falling[:_MAX_TABLE_CLIENTS])]


def client_text(client: int, name: str | None) -> str:
    """Return a client's number, followed by its name if it has one."""
    shown = "" if name is None else f" {shortened(printable(name), _MAX_NAME_CHARS)}"
    return f"{client}{shown}"


def print_result(
    directory: RunDirectory, console: Console | None = None, *, waited: float | None = None
) -> None:
    """Print the result of a run: a table of clients' ε, a summary, warnings and the root digest.

    The root digest covers all records in the run's manifest. `waited` is the time in seconds since
    the user gave the command, if it is known.

    Guarantee: an ε is stated only where the privacy statement of the run states it.
    """
    console = console or Console()
    contents = read_contents(directory)
    if contents.facts.is_private:
        print_table(console, _privacy_table(contents))
    for line in _summary(contents, waited):
        print_sentence(console, line)
    if (scores := contents.scores) is not None:
        for warning in scores.warnings:
            print_sentence(console, f"warning: {warning}", style="yellow")
        if scores.is_constant:
            print_sentence(console, _ADVICE)
    lines = [f"report: {directory.report}"]
    if (root := root_of(directory)) is not None:
        lines.append(f"root: {root}")
        lines.append("to keep elsewhere: the root; fedsim verify --root finds any later change")
    if contents.facts.is_private:
        lines.append(f"to share: everything but {KEPT}")
    for line in lines:
        console.print(line, highlight=False, markup=False, soft_wrap=True)


def _privacy_table(contents: RunContents) -> Table:
    clients, facts = contents.clients, contents.facts
    places = client_places("terminal", clients)
    headings = {name: place.heading for name, place in places.items()}
    observers = facts.trust.observers
    against = {observer: epsilon_heading(facts, observer) for observer in observers}
    if observers:
        headings["epsilon"] = against[observers[0]]
    if "examples" in places and facts.sizes_are_declared:
        headings["examples"] = "declared"
    table = figure_table("Privacy spent by each client", ["client", *headings.values()])
    shown = most_spent(clients, [client.epsilon for client in facts.clients])
    for spend in shown:
        cells = (str(place.text(spend.get(name))) for name, place in places.items())
        table.add_row(client_text(spend["client"], spend.get("name")), *cells)
    notes = ["z: noise multiplier"]
    if not is_plain(facts):
        notes += [f"{against[one]}: against {OBSERVER_NAMES[one]}" for one in observers]
        notes.append(f"each ε protects {unit_text(facts)}")
    if "delta" not in places:
        notes.append(f"δ = {delta_text(clients[0]['delta'])} for all")
    if "withdrawn_round" in places:
        notes.append("left: the round of withdrawal")
    if len(clients) > len(shown):
        notes.append(f"the {len(shown)} largest of {len(clients):,}; clients.csv has all")
    table.caption = "\n".join(notes)
    return table


def _summary(contents: RunContents, waited: float | None) -> Iterator[str]:
    """Yield the summary of a run: lines on the run, the model, its clients and the guarantee."""
    summary, scores, lost = contents.summary, contents.scores, contents.facts.run.lost_updates
    reason = f": {summary['reason']}" if summary["status"] in ("stopped", "failed") else ""
    rounds = count_text(summary["rounds"], "round")
    yield f"{summary['name']}: {summary['status']} after {rounds} {_time(contents, waited)}{reason}"
    baseline = f" ({scores.baseline})" if scores is not None and scores.baseline else ""
    metrics = (
        f"{name.replace('_', ' ')} {metric_text(name, value)}"
        + baseline * (name == "test_accuracy")
        for name, value in contents.metrics.items()
    )
    yield ", ".join(metrics) or "no round finished"
    if scores is not None:
        yield from scores.lines
    if held_out := _figures(contents.client_metrics, "clients_"):
        yield f"on clients' held-out examples: {held_out}"
    if (personal := contents.optional(PERSONALIZATION)) is not None:
        own, common = _figures(personal["personal"]), _figures(personal["global"])
        figures = f"personal model {own}; global model {common}"
        yield f"public data, on each client's own held-out examples: {figures}"
    elif contents.privacy.get("personal_models") is not None:
        yield (
            "personal models: none was made or scored here; each client makes its own, on its own "
            "machine, with fedsim.personalize and the final global model"
        )
    left = len(contents.facts.withdrawn_clients)
    events = [f"{left} of {count_text(len(contents.clients), 'client')} withdrew"] * bool(left)
    events += [f"{count_text(lost, 'update')} lost"] * bool(lost)
    if events:
        yield ", ".join(events)
    yield from _failing_lines(contents)
    yield guarantee_words(contents.facts)


def _time(contents: RunContents, waited: float | None) -> str:
    """Return the time of a run in words: as the user waited, or as it is recorded."""
    rounds = contents.summary["seconds"]
    if contents.has_times:
        whole = waited or rounds + sum(contents.setup.values())
        return f"in {duration_text(whole)} (rounds: {duration_text(rounds)})"
    hidden = "times are not recorded, as they would tell how many clients took part"
    return f"({hidden})" if waited is None else f"in {duration_text(waited)} ({hidden})"


def _failing_lines(contents: RunContents) -> Iterator[str]:
    """Yield a line for each client that failed repeatedly with the same reason."""
    repeated = contents.summary.get("repeated_failures", [])
    for failure in repeated[:_MAX_FAILING]:
        is_absent = failure["client"] in contents.facts.run.absent_clients
        failed = f"failed in {count_text(failure['rounds'], 'round')}"
        failed += " and never took part" if is_absent else ""
        yield f"warning: client {failure['client']} {failed}: {failure['reason']}"
    if len(repeated) > _MAX_FAILING:
        yield f"warning: {len(repeated) - _MAX_FAILING} more clients failed repeatedly"


def _figures(metrics: Mapping[str, float | None], prefix: str = "") -> str:
    """Return metrics as text, with names without a prefix."""
    return ", ".join(f"{k.removeprefix(prefix)} {metric_text(k, v)}" for k, v in metrics.items())
