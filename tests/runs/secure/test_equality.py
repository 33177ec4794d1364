"""Whole runs have one result, with and without secure aggregation."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fedsim.report.contents import read_contents
from fedsim.report.html import render_report
from fedsim.runs.directory import RunDirectory
from fedsim.runs.verification import verify_run

PROTOCOLS: dict[str, dict[str, Any]] = {
    **{f"additive-{k}": {"aggregators": k} for k in (2, 5)},
    "secagg": {"protocol": "secagg"},
    "secagg_plus": {"protocol": "secagg_plus"},
    "additive-32": {"encoding": {"ring_bits": 32, "guard_bits": 1, "max_weight": 600}},
    "stochastic": {"encoding": {"rounding": "stochastic"}},
    "parameters": {"encoding": {"payload": "parameters"}},
}
METRICS = {"train_loss": 5.0, "train_accuracy": 1.0}


@pytest.mark.parametrize(
    ("name", "private"), [*((name, False) for name in PROTOCOLS), ("additive-2", True)]
)
def test_secure_equals_quantized_bit_for_bit(
    lab: Any, tmp_path: Path, name: str, private: bool
) -> None:
    """P1, over whole runs: any protocol, any number of aggregators, some clients gone.

    Protocols know nothing of privacy: secagg with noise is in test_resuming.py.
    """
    same_numbers = {"encoding": PROTOCOLS[name].get("encoding", {})}
    sections = {"faults": lab.faults, "privacy": lab.privacy if private else None}
    secure = lab.run(tmp_path, PROTOCOLS[name], **sections)
    control = lab.control({**lab.quantized, **same_numbers}, **sections)
    lab.same_result(secure, control)
    assert [len(row["participants"]) for row in secure.rounds] == [lab.clients - 1] * 2
    assert verify_run(RunDirectory(secure.path)).problems == ()


@pytest.mark.parametrize("weighting", ["uniform", "examples", "capped"])
def test_the_first_round_is_plain_averaging_within_the_printed_bound(
    lab: Any, tmp_path: Path, weighting: str
) -> None:
    """P2; later rounds diverge as any two roundings do."""
    capped = {"name": "examples_over_noise", "noise_power": 2.0, "max_share": 0.25}
    sections: dict[str, Any] = {
        "federation": {"rounds": 1, "weighting": capped if weighting == "capped" else weighting}
    }
    if weighting == "capped":
        sections["privacy"] = {**lab.privacy, "clients": {"2": {"noise_multiplier": 3.0}}}
    plain = lab.model(lab.run(tmp_path / "plain", None, **sections).path)
    secure = lab.run(tmp_path / "secure", {}, **sections)
    said = json.loads((secure.path / "privacy.json").read_text())["secure_aggregation"]
    bound = said["encoding"]["max_abs_error"]
    assert 0 < bound < 2e-10
    for name, value in lab.model(secure.path).items():
        room = bound + np.spacing(np.abs(value))  # half an ulp for each of the two casts
        assert (np.abs(value.astype(float) - plain[name]) <= room).all()


def test_epsilon_is_that_of_the_clients_own_noise(lab: Any) -> None:
    plain, secure = (lab.control(section, privacy=lab.privacy) for section in (None, {}))
    assert (plain.path / "clients.csv").read_text() == (secure.path / "clients.csv").read_text()
    statement = json.loads((secure.path / "privacy.json").read_text())["statement_points"]
    said = " ".join(point["text"] for point in statement)
    for words in (
        "saw the sum of weighted updates",
        "is not differential privacy",
        "(masked, so that only sums can be opened)",
        "Every mean equals the mean of the quantised updates bit for bit",
        "2 sums of 6 clients were opened",
        "All parties of secure aggregation ran in one simulation",
        "No amplification by client selection, shuffling or secure aggregation is claimed",
    ):
        assert words in said
    assert "saw the sum" in render_report(read_contents(RunDirectory(secure.path)))


def test_secure_equals_quantized_where_clients_train_alone(lab: Any, tmp_path: Path) -> None:
    sections = {
        "privacy": lab.privacy,
        "local": {"steps": 2, "batch_size": 16, "vectorized_clients": "off"},
        "faults": lab.faults,
    }
    lab.same_result(lab.run(tmp_path, {}, **sections), lab.control(lab.quantized, **sections))


def test_secrets_are_fresh_in_a_seeded_run(lab: Any, tmp_path: Path) -> None:
    """Two runs of one seed share the result and no byte of any share or envelope."""
    wires = lab.wire(), lab.wire()
    one, other = (lab.run(tmp_path / str(n), {}, wire) for n, wire in enumerate(wires))
    lab.same_result(one, other)
    shares = [
        [
            reply.content.array_records["secagg-arrays"]["share"].numpy()
            for _, reply in wire.replies("train")
        ]
        for wire in wires
    ]
    for mine, yours in zip(*shares, strict=True):
        assert not (mine == yours).any()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("engine", "secure", "private"),
    [
        ("flower", {"aggregators": 3}, True),
        ("ray", {"protocol": "secagg", "metrics": METRICS}, False),
    ],
    ids=["flower, additive, private", "ray, secagg, metrics"],
)
def test_every_engine_has_the_same_result(
    lab: Any,
    shared_ray: None,
    tmp_path: Path,
    engine: str,
    secure: dict[str, Any],
    private: bool,
) -> None:
    sections = {"privacy": lab.privacy if private else None, "faults": lab.faults}
    if engine == "flower":  # it asks client by client
        sections["local"] = {"steps": 2, "batch_size": 16, "vectorized_clients": "off"}
    local = lab.control(secure, **sections)
    other = lab.run(tmp_path, secure, runtime={"engine": engine, "workers": 2}, **sections)
    for name in ("model.safetensors", "privacy.json", "clients.csv"):
        assert (local.path / name).read_bytes() == (other.path / name).read_bytes(), name
    for mine, yours in zip(local.rounds, other.rounds, strict=True):
        assert [mine.get(name) for name in METRICS] == [yours.get(name) for name in METRICS]
