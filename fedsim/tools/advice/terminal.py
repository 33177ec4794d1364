"""`fedsim plan --advise`: the advice on stdout."""

from collections.abc import Callable

from rich.console import Console

from fedsim.core.commands import Phases
from fedsim.core.formatting import count_text
from fedsim.experiment import LoadedExperiment
from fedsim.report.terminal_text import figure_table, print_sentence, print_table
from fedsim.tools.advice.advice import Advice, advise_experiment
from fedsim.tools.advice.noise_model import plausible_tasks
from fedsim.tools.advice.ranking import Ranked


def advise(loaded: LoadedExperiment, *, phases: Phases) -> tuple[Advice, Callable[[Advice], None]]:
    """Return advice about an experiment, and what prints it.

    Args:
        loaded: the experiment.
        phases: the phases of the command.
    """
    return advise_experiment(loaded, phases=phases), print_advice


def print_advice(advice: Advice, console: Console | None = None) -> None:
    """Print the candidates, the lines to change, the predicted gain and the notes.

    Args:
        advice: to print.
        console: where; None: stdout.
    """
    console = console or Console()
    table = figure_table(
        "Candidates at the same ε, by predicted noise-to-signal ratio",
        ["q", "z", "steps", "lr", "× file", "between"],
        texts=["candidate", "weights"],
    )
    for row in advice.rows:
        table.add_row(*_cells(row, is_proposed=row is advice.proposal))
    table.caption = (
        "q: sampling rate; z: noise multiplier; steps: rounds × local steps\n"
        "≈: without a search; for correlated noise, independent noise of equal error\n"
        "× file: predicted noise-to-signal ratio, over that of the file\n"
        f"between: least and largest on {len(plausible_tasks())} plausible learning tasks"
    )
    print_table(console, table)
    proposal = advice.proposal
    if proposal is None:
        print_sentence(
            console, f"nothing to change: none of {advice.compared:,} candidates is clearly better"
        )
    else:
        low, high = proposal.ratio_range
        print_sentence(
            console,
            f"proposal, the best of {count_text(advice.compared, 'candidate')}: predicted "
            f"noise-to-signal ratio × {proposal.ratio:.2g}, between × {low:.2g} and × {high:.2g}; "
            "change these lines:",
        )
        console.print(advice.lines.rstrip(), highlight=False, markup=False, soft_wrap=True)
    for note in advice.notes:
        print_sentence(console, note)
    print_sentence(
        console,
        "from public figures alone: no example was read, no training was done, no file was changed",
    )


def _cells(row: Ranked, *, is_proposed: bool) -> list[str]:
    candidate, weighting = row.candidate, row.candidate.weighting
    low, high = row.ratio_range
    return [
        f"→ {row.name}" if is_proposed else row.name,
        weighting if isinstance(weighting, str) else str(weighting.get("name")),
        _range(row.rates, 2),
        ("" if row.exact else "≈") + _range(row.noise, 2),
        f"{candidate.rounds} × {candidate.steps}",
        f"{candidate.learning_rate:g}",
        f"{row.ratio:.2f}",
        f"{low:.2f}–{high:.2f}",
    ]


def _range(values: tuple[float, float], digits: int) -> str:
    low, high = (f"{value:.{digits}g}" for value in values)
    return low if low == high else f"{low}–{high}"
