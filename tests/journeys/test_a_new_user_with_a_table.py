"""A new user with a table as it comes, in the shape of UCI's heart disease data.

They type six commands and change one line of a file, the target: 0 against 1 to 4, which every
paper uses. Nothing else is written by hand.
"""

import csv
import io
import json

import numpy as np
import pytest

pytestmark = pytest.mark.slow

SITES = {  # rows, and how ill patients are; sizes are those of UCI
    "Cleveland": (304, -0.6),
    "Hungary": (293, -0.9),
    "Switzerland": (123, 1.6),
    "VA Long Beach": (200, 0.9),
}
GAPS = {  # shares of missing cells, about those of UCI
    **{"trestbps": 0.06, "chol": 0.03, "fbs": 0.1, "restecg": 0.002, "thalch": 0.06},
    **{"exang": 0.06, "oldpeak": 0.07, "slope": 0.34, "ca": 0.66, "thal": 0.53},
}


def heart(seed: int = 0) -> str:
    """Return 920 rows of 16 columns: ids, texts, truth values, gaps and a target from 0 to 4."""
    rng = np.random.default_rng(seed)

    def pick(names: str, well: tuple[float, ...], sick: tuple[float, ...], ill: float) -> str:
        shares = (1 - ill) * np.array(well) + ill * np.array(sick)
        return str(rng.choice(names.split("|"), p=shares / shares.sum()))

    rows = list[dict[str, object]]()
    for site, (count, level) in SITES.items():
        for _ in range(count):
            male = rng.random() < 0.79
            score = rng.normal(level, 1.3) + 0.5 * male
            ill = float(1 / (1 + np.exp(-2.5 * score)))
            row: dict[str, object] = {
                "id": len(rows) + 1,
                "age": int(np.clip(rng.normal(50 + 7 * ill, 9), 28, 77)),
                "sex": "Male" if male else "Female",
                "dataset": site,
                "cp": pick(
                    "typical angina|atypical angina|non-anginal|asymptomatic",
                    *((0.05, 0.35, 0.3, 0.3), (0.05, 0.03, 0.12, 0.8), ill),
                ),
                "trestbps": int(rng.normal(130 + 4 * ill, 18)),
                "chol": 0 if site == "Switzerland" else int(rng.normal(235 + 15 * ill, 50)),
                "fbs": str(rng.random() < 0.12 + 0.08 * ill).upper(),
                "restecg": pick(
                    "normal|lv hypertrophy|st-t abnormality", (6, 2, 2), (6, 2, 2), ill
                ),
                "thalch": int(np.clip(rng.normal(155 - 32 * ill, 22), 60, 202)),
                "exang": str(rng.random() < 0.08 + 0.6 * ill).upper(),
                "oldpeak": round(float(np.clip(rng.normal(0.1 + 1.7 * ill, 0.8), -2.6, 6.2)), 1),
                "slope": pick("upsloping|flat|downsloping", (5, 4, 1), (1.5, 7, 1.5), ill),
                "ca": float(min(3, rng.poisson(0.3 + ill))),
                "thal": pick("normal|reversable defect|fixed defect", (15, 4, 1), (5, 13, 2), ill),
                "num": 0 if score < 0 else min(4, 1 + int(score * rng.uniform(0.4, 1.8))),
            }
            rows.append(row | {name: "" for name, share in GAPS.items() if rng.random() < share})
    text = io.StringIO()
    table = csv.DictWriter(text, list(rows[0]))
    table.writeheader()
    table.writerows(rows)
    return text.getvalue()


def test_from_a_table_as_it_comes_to_the_usual_task(journey) -> None:
    journey.write("heart.csv", heart())
    drafted = journey.type("fedsim init hearts --data heart.csv --target num --clients dataset")
    names = heart().splitlines()[0].split(",")
    lines = [line.split()[0] for line in drafted.stdout.splitlines() if line.startswith("  ")]
    assert sorted(lines[:15]) == sorted(set(names) - {"dataset"})  # a decision for each column

    checked = journey.type("fedsim validate hearts/experiment.yaml --data").stdout
    assert "4 clients (Cleveland, Hungary, Switzerland, VA Long Beach)" in checked
    assert "warning: the constants of columns were read from the rows" in checked
    first = journey.type("fedsim run hearts/experiment.yaml --out runs/five --quiet").stdout
    assert "constants came from the rows" in first

    path = journey.home / "hearts/experiment.yaml"
    drafted_text = path.read_text()
    comment = "# two classes: num: {classes: {first: [0], others: [1, 2, 3, 4]}}"
    assert comment in drafted_text  # the user pastes it, with names of their own
    grouped = "num: {classes: {healthy: [0], ill: [1, 2, 3, 4]}}"
    lines = drafted_text.splitlines()
    edited = [f"      {grouped}" if line.strip().startswith("num: {") else line for line in lines]
    changes = [new for new, old in zip(edited, lines, strict=True) if new != old]
    assert len(changes) == 1
    path.write_text("\n".join(edited))

    done = journey.type("fedsim run hearts/experiment.yaml --out runs/two --quiet").stdout
    assert "recall by class  healthy: " in done
    summary = json.loads((journey.home / "runs/two/summary.json").read_text())
    assert summary["classes"] == ["healthy", "ill"]
    assert summary["test_accuracy"] > 0.7
    scores = json.loads((journey.home / "runs/two/scores.json").read_text())
    classes = [sum(row) for row in scores["confusion"]]
    assert summary["test_accuracy"] > max(classes) / sum(classes) + 0.1
    assert "healthy" in (journey.home / "runs/two/report.html").read_text()
    assert "sound" in journey.type("fedsim verify runs/two").stdout

    predicted = journey.type("fedsim predict runs/two heart.csv").stdout
    rows = list(csv.DictReader(io.StringIO(predicted)))
    assert {row["prediction"] for row in rows} == {"healthy", "ill"}
    right = sum(row["prediction"] == row["target"] for row in rows)
    assert right > 0.7 * len(rows) == 0.7 * 920
    assert len(journey.steps) == 6
