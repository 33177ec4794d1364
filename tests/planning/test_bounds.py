"""`fedsim curve` and `fedsim plan --bounds`: several bounds on ε of one schedule, or of clients."""

import csv
import json
from pathlib import Path
from typing import Any

import pytest

from fedsim.cli import main
from fedsim.planning.bounds import even_numbers
from fedsim.tools.curve import round_numbers

EXPERIMENT: dict[str, Any] = {
    "name": "curve",
    "data": {"dataset": "digits", "partition": {"scheme": "iid", "num_clients": 3}},
    "model": {"name": "logistic"},
    "federation": {"rounds": 3},
    "local": {"steps": 2, "batch_size": 200},
    "privacy": {"target_epsilon": 4.0, "delta": 1e-3, "max_grad_norm": 0.5},
}
CURVE = ("curve", "-q", "0.01", "-z", "4")


class Command:
    def __init__(self, monkeypatch: Any, capsys: Any, directory: Path) -> None:
        self._monkeypatch, self._capsys = monkeypatch, capsys
        monkeypatch.chdir(directory)
        Path("e.json").write_text(json.dumps(EXPERIMENT))  # JSON is YAML

    def __call__(self, *arguments: str) -> tuple[int, str, str]:
        self._monkeypatch.setattr("sys.argv", ["fedsim", *arguments])
        code = 0
        try:
            main()
        except SystemExit as end:
            code = int(end.code or 0)
        captured = self._capsys.readouterr()
        return code, captured.out, captured.err


@pytest.fixture
def fedsim(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> Command:
    return Command(monkeypatch, capsys, tmp_path)


def test_the_table_has_a_line_for_each_number_of_steps(fedsim: Command) -> None:
    code, out, _ = fedsim(*CURVE, "-T", "10000,100", "--delta", "1e-5")
    lines = [line.split() for line in out.splitlines()]
    assert code == 0
    assert ["steps", "basic", "strong", "moments", "RDP", "PLD"] in lines
    assert ["10,000", "223.6", "16.88", "1.259", "1.036", "0.947"] in lines
    assert sum(line[:1] in (["100"], ["10,000"]) for line in lines) == 2


def test_the_numbers_go_to_programs(fedsim: Command) -> None:
    options = ("-T", "..50", "--bounds", "moments,pld", "--csv", "c.csv", "--json")
    code, out, _ = fedsim(*CURVE, *options)
    content = json.loads(out)
    assert (code, content["bounds"]) == (0, ["moments", "pld"])
    (curve,) = content["curves"]
    assert [point["steps"] for point in curve["points"]] == [1, 2, 5, 10, 20, 50]
    rows = list(csv.DictReader(Path("c.csv").read_text().splitlines()))
    assert [float(row["pld"]) for row in rows] == [p["epsilon"]["pld"] for p in curve["points"]]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("-q", "0.1"), "give -z/--noise-multiplier, -T/--steps, or the FILE"),
        (("-q", "2", "-z", "1", "-T", "3"), "sampling_rate must be between 0 and 1, got 2.0"),
        (("-q", "0.1", "-z", "0", "-T", "3"), "noise_multiplier"),
        (("-q", "0.1", "-z", "1", "-T", "9..3"), "from the smaller to the larger"),
        (("-q", "0.1", "-z", "1", "-T", "many"), "must be a number, numbers such as 10,100"),
        (("-q", "0.1", "-z", "1", "-T", "3", "--bounds", "rpd"), "there is no bound 'rpd'"),
        (("-q", "0.1", "-z", "1", "-T", "3", "--orders", "1"), "orders must lie in (1,"),
        (("-q", "0.1", "-z", "1", "-T", "3", "--plot", "c.gif"), "a plot is a .svg, .png or .pdf"),
        (("e.json", "--delta", "0.1"), "--delta does not go with FILE"),
    ],
)
def test_a_mistake_is_one_clear_line(
    fedsim: Command, arguments: tuple[str, ...], message: str
) -> None:
    code, out, err = fedsim("curve", *arguments)
    assert (code, out) == (2, "")
    assert message in err
    assert "Traceback" not in err


def test_the_kinds_of_clients_of_an_experiment(fedsim: Command) -> None:
    changes = ('privacy.clients={"0": {target_epsilon: 2}}',)
    code, out, _ = fedsim("curve", "e.json", *changes, "--json", "--plot", "c.svg")
    assert code == 0
    kinds = {tuple(one["clients"]): one for one in json.loads(out)["curves"]}
    assert sorted(client for kind in kinds for client in kind) == [0, 1, 2]
    assert kinds[(0,)]["points"][-1]["epsilon"]["pld"] == pytest.approx(2.0, abs=2e-3)
    for one in kinds.values():
        last = one["points"][-1]
        assert last["steps"] == one["steps"] == 6
        assert last["epsilon"]["pld"] <= last["epsilon"]["rdp"] < last["epsilon"]["moments"]
    assert "beside each line" in Path("c.svg").read_text()


def test_a_plan_has_the_same_columns_on_request(fedsim: Command) -> None:
    whole = "local.batch_size=full"
    _, plain, _ = fedsim("plan", "e.json", whole)
    _, out, _ = fedsim("plan", "e.json", whole, "--bounds")
    _, curve, _ = fedsim("curve", "e.json", whole)
    assert "strong" not in plain
    table = curve[curve.index("clients") :].splitlines()[:4]
    assert all(line in out for line in table)
    _, out, _ = fedsim("plan", "e.json", whole, "--bounds", "basic,pld", "--json")
    (first, *_) = json.loads(out)["bounds"]
    assert list(first["points"][-1]["epsilon"]) == ["basic", "pld"]
    code, _, err = fedsim("plan", "e.json", whole, "--bounds", "x")
    assert code == 2
    assert "there is no bound 'x'" in err


def test_experiments_have_no_theorem_for_random_allocation_by_pairs(fedsim: Command) -> None:
    _, out, _ = fedsim("curve", "e.json", "privacy.sampling=balls_and_bins")
    assert "–: the theorem does not cover these releases" in out


@pytest.mark.slow
@pytest.mark.parametrize("suffix", ["svg", "png", "pdf"])
def test_the_plot_is_the_same_every_time_and_in_colours_of_its_own(
    fedsim: Command, suffix: str
) -> None:
    for name in ("a", "b"):
        assert fedsim(*CURVE, "-T", "..1000", "--plot", f"{name}.{suffix}")[0] == 0
    content = Path(f"a.{suffix}").read_bytes()
    assert content == Path(f"b.{suffix}").read_bytes()
    assert b"var(" not in content
    if suffix == "png":
        from matplotlib.image import imread

        pixels = imread("a.png")[..., :3].reshape(-1, 3)
        blue = (abs(pixels - [0x1D / 255, 0x5B / 255, 0xB8 / 255]) < 0.01).all(axis=1)
        assert blue.sum() > 500  # the first line, in the colour of the report


def test_numbers_of_steps() -> None:
    assert round_numbers(3, 300) == (3, 5, 10, 20, 50, 100, 200, 300)
    assert round_numbers(7, 7) == (7,)
    assert even_numbers(1, 1, 12) == (1,)
    assert even_numbers(1, 10**6, 4) == (1, 100, 10**4, 10**6)
