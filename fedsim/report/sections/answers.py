"""The section on votes of a run with `task: pate`: queries, answers and what they cost."""

from typing import Any

from fedsim.core.formatting import epsilon_text
from fedsim.report.contents import RunContents


def answers_context(contents: RunContents) -> dict[str, Any] | None:
    """Return what the template needs; None for another task."""
    found = contents.answers
    if found is None:
        return None
    return {"rows": [*_counts(found), *_cost(contents)], "classes": _classes(contents, found)}


def _counts(found: dict[str, Any]) -> list[tuple[str, str]]:
    checked, answered = found["queries_checked"], found["queries_answered"]
    threshold = found["threshold"]
    passed = [row for row in found["queries"] if (row["share"] or 0.0) >= threshold]
    accuracy = found["label_accuracy"]
    return [
        ("Queries checked", f"{checked:,} of {len(found['queries']):,}"),
        ("Passed the check", f"{len(passed):,}, with a noisy share of at least {threshold:g}"),
        ("Answered", f"{answered:,}"),
        (
            "Answers that agree with the true label",
            "no answer" if accuracy is None else f"{100 * accuracy:.1f}%",
        ),
    ]


def _cost(contents: RunContents) -> list[tuple[str, str]]:
    votes, facts = contents.privacy.get("votes"), contents.facts
    if votes is None or not facts.is_bounded:
        return []
    spend = contents.clients[0]
    z = spend["noise_multiplier"]
    return [
        ("Noise on a count in a check", f"{z * votes['sigma_threshold']:.4g} votes"),
        ("Noise on a count in a vote", f"{z * votes['sigma']:.4g} votes"),
        (
            "Charged to every client",
            f"{votes['queries']:,} checks and {votes['answers']:,} votes, whatever was answered: "
            f"ε = {epsilon_text(facts.epsilon)}",
        ),
    ]


def _classes(contents: RunContents, found: dict[str, Any]) -> list[dict[str, Any]]:
    """Return queries, answers and agreement of each true class."""
    names = contents.summary.get("classes")
    number = 1 + max((row["true"] for row in found["queries"]), default=-1)
    table: list[dict[str, Any]] = []
    for each in range(number):
        own = [row for row in found["queries"] if row["true"] == each]
        answered = [row for row in own if row["label"] is not None]
        right = sum(row["label"] == each for row in answered)
        table.append(
            {
                "name": names[each] if names else str(each),
                "queries": len(own),
                "answered": len(answered),
                "agreement": f"{100 * right / len(answered):.1f}%" if answered else "–",
            }
        )
    return table
