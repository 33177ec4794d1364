"""Nothing that leaves a client depends on a personal model, on its score, or on held-out examples.

The attacker is the server of a private federation: it sees every upload, every answer and the
order of rounds. Clients with personal models must look to it as clients without.
"""

from pathlib import Path
from typing import Any

import pytest

from fedsim.clients import app
from fedsim.clients.faults import ClientFailureError
from fedsim.experiment import load_experiment
from fedsim.federation.assembly import assemble
from fedsim.protocol.flower_internals import server_identity
from fedsim.protocol.messages import EvaluateRequest
from fedsim.runs.runner import run_experiment

METHODS = (
    {"method": "fine_tune", "steps": 5},
    {"method": "ditto", "steps": 5},
    {"method": "label_prior"},
)
SEEN = ("ledger.jsonl", "releases.jsonl", "model.safetensors")
"""What the server sees: charges, tags of all uploads, and the model that they make."""


def experiment(personalization: dict[str, Any] | None) -> dict[str, Any]:
    return {
        "name": "stay",
        "data": {
            "dataset": "digits",
            "partition": {"scheme": "dirichlet", "num_clients": 4, "min_examples": 20},
        },
        "model": {"name": "logistic"},
        "federation": {"rounds": 2, "clients_per_round": 3},
        "local": {"steps": 2, "batch_size": 16, "optimizer": {"name": "sgd", "lr": 0.5}},
        "privacy": {"noise_multiplier": 1.0, "delta": 1e-3, "max_grad_norm": 0.5},
        "personalization": personalization,
    }


def seen(personalization: dict[str, Any] | None, out: Path) -> tuple[bytes, ...]:
    path = run_experiment(experiment(personalization), out=out).path
    *records, model = ((path / name).read_bytes() for name in SEEN)
    header = 8 + int.from_bytes(model[:8], "little")  # its words are about the whole run
    return *records, model[header:]


def test_the_server_sees_the_same_bits_with_and_without_personal_models(tmp_path: Path) -> None:
    without = seen(None, tmp_path / "without")
    for method in METHODS:
        assert seen(method, tmp_path / method["method"]) == without, method


def test_the_server_sees_the_same_bits_whether_personal_models_are_scored(tmp_path: Path) -> None:
    kept = {"holdout": 0.25}
    silent = seen({**METHODS[0], **kept}, tmp_path / "silent")
    for method in METHODS:
        scored = {**method, **kept, "public_data": True}
        assert seen(scored, tmp_path / method["method"]) == silent, method


@pytest.mark.parametrize("privacy", [experiment(None)["privacy"], None])
def test_no_client_scores_a_model_for_the_server(privacy: dict[str, Any] | None) -> None:
    """Examples held out for personal models are no answer to a request to evaluate."""
    sections = {**experiment({**METHODS[0], "holdout": 0.25}), "privacy": privacy}
    federation = assemble(load_experiment(sections), ledger=None)
    assert federation.data.held_out is not None
    with server_identity(1):
        request = EvaluateRequest(1, federation.initial_arrays()).to_message(7)
        with pytest.raises(ClientFailureError, match="does not evaluate"):
            app.evaluate_and_reply(federation.client_task(0), request)
