"""A value of absurd size is one line before it costs memory or time."""

import struct
import sys
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from fedsim.cli import main
from fedsim.core.limits import MAX_REPORTED
from fedsim.data import DataError
from fedsim.data.files import read_files
from fedsim.data.settings import FileDataset
from fedsim.experiment import ExperimentError, json_schema, load_experiment
from fedsim.federation.assembly import full_batch_note

EXPERIMENT: dict[str, Any] = {
    "name": "absurd",
    "data": {"dataset": "digits", "partition": {"scheme": "iid", "num_clients": 3}},
    "model": {"name": "mlp"},
    "federation": {"rounds": 1},
    "local": {"steps": 1, "batch_size": 8},
    "privacy": {"noise_multiplier": 1.0, "delta": 1e-3, "max_grad_norm": 0.5},
}
Command = Callable[..., tuple[object, list[str]]]


@pytest.fixture
def command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Command:
    """Run a command on a copy of EXPERIMENT; return its exit code and the lines of stderr."""
    monkeypatch.chdir(tmp_path)

    def run(name: str, *arguments: str, **sections: Any) -> tuple[object, list[str]]:
        Path("e.yaml").write_text(yaml.safe_dump({**EXPERIMENT, **sections}))
        monkeypatch.setattr(sys, "argv", ["fedsim", name, "e.yaml", *arguments])
        code: object = 0
        try:
            main()
        except SystemExit as ended:
            code = ended.code
        return code, capsys.readouterr().err.splitlines()

    return run


@pytest.mark.parametrize(
    "override",
    [
        "federation.rounds=10000000",
        "federation.clients_per_round=10000000000",
        f"local.steps=1{'0' * 30}",
        "local.steps=1e30",
        "local.batch_size=100000000000",
        "local.max_physical_batch=100000000000",
        "privacy.delta=1e-301",
        "privacy.delta=5e-324",
        "data.test_fraction=1e-301",
        "privacy.sampling.rate=1e-310",
        "data.partition.num_clients=1000000000",
        "data.partition.min_examples=100000000000",
        "model.args.hidden=[1000000000]",
        f"model.args.hidden=[{','.join(['4'] * 101)}]",
        "runtime.workers=100000",
        f"seed={'9' * 999}",
        f"seed={'9' * 2000}",
        "federation.deadline=1e300",
        "faults=[{kind: error, clients: [1000000000]}]",
        "secure_aggregation={encoding: {max_clients: 1000000000000}}",
        "secure_aggregation={protocol: {name: additive, combine_retries: 1000000000}}",
        f"data.args={'[' * 200}{']' * 200}",
    ],
)
def test_a_setting_of_absurd_size_is_refused_by_every_command(
    override: str, command: Command
) -> None:
    commands = [("validate",), ("plan",), ("run", "--out", "r"), ("audit",)]
    for name, *options in [*commands, ("deploy", "--out", "app")]:
        code, lines = command(name, override, *options)
        assert code == 2, name
        assert 1 <= len(lines) <= 2, name
        assert all(len(line) < 400 for line in lines)
    assert sorted(path.name for path in Path().iterdir()) == ["e.yaml"]


def test_every_whole_number_of_a_file_has_a_limit() -> None:
    def unlimited(node: object, path: str) -> Iterator[str]:
        if isinstance(node, dict):
            is_whole = node.get("type") == "integer" and not {"enum", "const"} & node.keys()
            if is_whole and not {"maximum", "exclusiveMaximum"} & node.keys():
                yield path
            for key, value in node.items():
                yield from unlimited(value, f"{path}/{key}")
        elif isinstance(node, list):
            for index, value in enumerate(node):
                yield from unlimited(value, f"{path}/{index}")

    assert list(unlimited(json_schema(), "")) == []


def test_more_records_than_a_ledger_holds_are_refused(command: Command) -> None:
    partition = {"scheme": "iid", "num_clients": 1000}
    sections = {"data": {"dataset": "digits", "partition": partition}}
    code, lines = command("validate", "federation.rounds=200000", **sections)
    assert code == 2
    assert "200,000,000 records of the ledger" in lines[0]


@pytest.mark.parametrize("name", ["plan", "run", "audit"])
def test_a_batch_above_every_client_is_refused_before_any_probe(
    name: str, command: Command
) -> None:
    options = ["--out", "r"] if name == "run" else []
    code, lines = command(name, "local.batch_size=10000000", *options)
    assert code == 2
    (line,) = lines
    assert "local.batch_size: 10,000,000 is above the size of every client, at most 480" in line
    assert not Path("r").exists()


def test_without_privacy_a_large_batch_is_the_clients_data(command: Command) -> None:
    code, _ = command("run", "local.batch_size=10000000", "--out", "r", privacy=None)
    assert code == 0


def test_a_batch_above_some_clients_is_a_note() -> None:
    experiment = load_experiment({**EXPERIMENT}, ["local.batch_size=100"]).experiment
    note = full_batch_note(experiment, [50, 99, 100, 500])
    assert note is not None
    assert "2 of 4 clients (the smallest has 50 examples): their sampling rate is 1" in note
    assert full_batch_note(experiment, [100, 101]) is None


def test_a_note_about_full_batches_is_printed_by_run_and_plan(command: Command) -> None:
    partition = {"scheme": "quantity", "num_clients": 3, "min_examples": 10}
    sections = {"data": {"dataset": "digits", "partition": partition}}
    _, lines = command("run", "local.batch_size=300", "--out", "r", **sections)
    assert "note: local.batch_size = 300 is above the size of" in " ".join(lines)


@pytest.mark.parametrize("largest", [5_000_000, 10**12, 2**62])
def test_labels_of_absurd_size_allocate_no_layer(largest: int, command: Command) -> None:
    y = np.arange(60) % 3
    y[0] = largest
    np.savez("d.npz", x=np.zeros((60, 2), dtype=np.float32), y=y)
    partition = {"scheme": "iid", "num_clients": 2}
    data = {"dataset": {"path": "d.npz", "target": "y"}, "partition": partition}
    code, lines = command("run", "--out", "r", data=data)
    assert code == 2
    (line,) = lines
    assert f"the largest class is {largest:,}" in line


def test_a_model_of_absurd_size_is_refused_before_it_takes_memory(command: Command) -> None:
    code, lines = command("run", "model.args.hidden=[1000000, 1000000]", "--out", "r")
    assert code == 2
    (line,) = lines
    assert "a model of 1,000,0" in line


def npy(shape: str, content: bytes) -> bytes:
    header = f"{{'descr': '<f8', 'fortran_order': False, 'shape': {shape}, }}\n".encode()
    return b"\x93NUMPY\x01\x00" + struct.pack("<H", len(header)) + header + content


@pytest.mark.parametrize(
    ("shape", "content"),
    [("(2000000000000,)", b"\0" * 80), ("(-1,)", b""), ("(3, 1000000)", b"\0" * 24)],
    ids=["14 TiB", "negative", "short"],
)
def test_a_header_larger_than_its_archive_takes_no_memory(
    shape: str, content: bytes, tmp_path: Path
) -> None:
    path = tmp_path / "d.npz"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("x.npy", npy(shape, content))
        archive.writestr("y.npy", npy("(3,)", b"\0" * 24))
    with pytest.raises(DataError, match="but the archive holds"):
        read_files({"d": path}, FileDataset(target="y"))


def test_arrays_larger_than_the_machine_are_not_unpacked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A zip bomb: 80 kB of zeros in 200 bytes, on a machine of 64 kB."""
    monkeypatch.setattr("fedsim.data.files.machine_bytes", lambda: 1 << 16)
    np.savez_compressed(tmp_path / "d.npz", x=np.zeros((10_000, 1)), y=np.zeros(10_000))
    with pytest.raises(DataError, match="GiB of memory"):
        read_files({"d": tmp_path / "d.npz"}, FileDataset(target="y"))


@pytest.mark.slow
@pytest.mark.parametrize("place", ["", "  "], ids=["top", "privacy"])
def test_thousands_of_unknown_keys_are_a_short_message(place: str, tmp_path: Path) -> None:
    path = tmp_path / "e.yaml"
    keys = "".join(f"{place}key{number}: 1\n" for number in range(6_000))
    path.write_text(yaml.safe_dump(EXPERIMENT, sort_keys=False) + keys)  # privacy is the last
    with pytest.raises(ExperimentError) as caught:
        load_experiment(path)
    lines = str(caught.value).splitlines()
    assert len(lines) <= MAX_REPORTED + 1
    assert "5,950 more mistakes" in str(caught.value)


def test_thousands_of_duplicate_keys_are_a_short_message(
    tmp_path: Path,
) -> None:
    path = tmp_path / "e.yaml"
    path.write_text("name: x\n" * 5_000)
    with pytest.raises(ExperimentError) as caught:
        load_experiment(path)
    assert len(str(caught.value).splitlines()) <= MAX_REPORTED + 2


def test_a_file_that_is_no_file_of_settings_is_not_read_whole(command: Command) -> None:
    Path("big.yaml").write_bytes(b"#" * (5 << 20))
    with pytest.raises(ExperimentError, match="larger than 4 MiB"):
        load_experiment("big.yaml")


def test_a_list_without_end_is_left_at_the_limit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It used to be read whole, a minute for 4 MB, before its size was compared with the limit."""
    path = tmp_path / "e.yaml"
    monkeypatch.setattr("fedsim.experiment.yaml_loader.MAX_SIZE", 1000)
    path.write_text("a: [" + "1," * 2_000)  # no end: reading on would say so
    with pytest.raises(ExperimentError, match="more than 1,000 values"):
        load_experiment(path)


def test_a_mapping_that_contains_itself_many_times_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fedsim.experiment.yaml_loader.MAX_SIZE", 1000)
    nested: Any = [0]
    for _ in range(50):
        nested = [nested, nested]
    with pytest.raises(ExperimentError, match="more than 1,000 values"):
        load_experiment({**EXPERIMENT, "data": {**EXPERIMENT["data"], "args": {"a": nested}}})


def test_a_test_set_of_one_example_is_refused_by_name(command: Command) -> None:
    code, lines = command("plan", "data.test_fraction=1e-300")
    assert code == 2
    (line,) = lines
    assert "data.test_fraction leaves 1 public test example" in line
