"""A researcher with a table of patients of several hospitals: gaps, categories, an identifier."""

import csv
import io
import json

import numpy as np
import pytest

pytestmark = pytest.mark.slow

HOSPITALS = ("north", "south", "east", "west", "centre")
EXPERIMENT = """
name: hospitals
data:
  dataset:
    path: patients.csv
    target: ill
    columns:
      age: {range: [0, 100]}
      sex: {classes: [F, M], fill: F}
      pressure: {range: [80, 200], fill: 120}
      income: {fill: 0, log: true, range: [0, 1000000]}
      patient: drop
  partition: {scheme: column, column: hospital}
model: {name: logistic, features: [{center: 0.5}]}
federation: {rounds: 25, weighting: examples}
local: {steps: 1, batch_size: full, optimizer: {name: sgd, lr: 4.0}}
privacy: {target_epsilon: 4.0, delta: 1.0e-4, max_grad_norm: 0.5}
evaluation: {metrics: [accuracy, balanced_accuracy, auc, recall_per_class]}
"""


def patients(count: int, seed: int = 0) -> str:
    """Return a table whose target follows age, pressure and sex."""
    rng = np.random.default_rng(seed)
    text = io.StringIO()
    table = csv.writer(text)
    table.writerow(["patient", "hospital", "age", "sex", "pressure", "income", "ill"])
    for number in range(count):
        age, sex = rng.integers(18, 95), rng.choice(["F", "M"])
        pressure = int(rng.normal(120 + 0.4 * (age - 50), 12))
        risk = (age - 55) / 12 + (pressure - 120) / 15 + 0.5 * (sex == "M")
        ill = "yes" if risk + rng.logistic() * 0.5 > 0 else "no"
        table.writerow(
            [
                f"P{number:05}",
                HOSPITALS[rng.integers(len(HOSPITALS))],
                age,
                "" if rng.random() < 0.02 else sex,
                "" if rng.random() < 0.1 else pressure,
                "" if rng.random() < 0.3 else int(rng.lognormal(10, 1)),
                ill,
            ]
        )
    return text.getvalue()


def test_from_an_own_table_to_a_comparison_and_predictions(journey) -> None:
    journey.write("patients.csv", patients(2000))
    journey.write("exp.yaml", EXPERIMENT)
    assert "5 clients" in journey.type("fedsim validate --data exp.yaml").stdout
    done = journey.type("fedsim run exp.yaml --out runs/first")
    assert "north" in done.stdout
    rows = (journey.home / "runs/first/rounds.jsonl").read_text().splitlines()
    last = json.loads(rows[-1])
    assert last["test_auc"] > 0.9
    assert last["test_balanced_accuracy"] > 0.8
    summary = json.loads((journey.home / "runs/first/summary.json").read_text())
    assert summary["classes"] == ["no", "yes"]
    assert "sound" in journey.type("fedsim verify runs/first").stdout

    journey.type(
        "fedsim compare exp.yaml --vary privacy.target_epsilon=null,4 --seeds 2"
        " --workers 1 --out runs/compared"
    )
    found = json.loads((journey.home / "runs/compared/comparison.json").read_text())
    assert len(found["variants"]) == 2
    assert (journey.home / "runs/compared/comparison.html").is_file()

    journey.write("new.csv", patients(20, seed=1))
    predictions = journey.type("fedsim predict runs/first new.csv").stdout.splitlines()
    assert len(list(csv.DictReader(predictions))) == 20
    assert {"no", "yes"} & set(predictions[1].split(","))
