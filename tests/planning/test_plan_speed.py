"""A plan asks for no more values of ε than it prints."""

from fedsim.core.commands import Phases
from fedsim.experiment import load_experiment
from fedsim.planning import projection

EXPERIMENT = {
    "name": "plan",
    "data": {
        "dataset": "digits",
        "partition": {"scheme": "dirichlet", "num_clients": 3, "alpha": 0.5, "min_examples": 20},
    },
    "model": {"name": "logistic"},
    "federation": {"rounds": 6},
    "local": {"steps": 2, "batch_size": 200},
    "privacy": {"target_epsilon": 2.0, "delta": 1e-3, "max_grad_norm": 0.5, "accountant": "rdp"},
}


def test_curves_are_computed_only_if_they_are_shown(monkeypatch):
    loaded = load_experiment(EXPERIMENT)
    whole = projection.plan_experiment(loaded)
    asked: list[int] = []
    monkeypatch.setattr(
        projection,
        "planned_epsilon",
        lambda plan, privacy, steps, exact=projection.planned_epsilon: (
            asked.append(steps) or exact(plan, privacy, steps)
        ),
    )
    announced: list[str] = []
    plan = projection.plan_experiment(loaded, curves=False, phases=Phases(announced.append))
    for one, other in zip(plan.clients, whole.clients, strict=True):
        assert one.curve == other.curve[-1:]
        assert vars(one) | {"curve": ()} == vars(other) | {"curve": ()}
    # The end of the plan, and one round more: it shows how many rounds the budget affords.
    # Of the variations, "as planned" is the client's row, which is known.
    assert len(asked) == 2 * len(plan.clients) + len(plan.variations) - 1
    assert announced == [
        "loading the data",
        "checking the model",
        "calibrating noise",
        "projecting ε",
        "",
    ]
