"""A researcher in a notebook: data and model of cells, results as tables and figures, no files."""

import json

import pytest

pytestmark = pytest.mark.slow

# One string a cell. A researcher starts from `help(fedsim.run)`.
CELLS = (
    """
import fedsim
from sklearn.datasets import load_wine
from torch import nn

x, y = load_wine(return_X_y=True)
x = (x - [13, 2, 2, 20, 100, 2, 2, 0, 2, 5, 1, 3, 750]) / [1, 1, 1, 3, 14, 1, 1, 1, 1, 2, 1, 1, 300]
""",
    """
class Net(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.hidden, self.out = nn.Linear(13, width), nn.Linear(width, 3)

    def forward(self, x):
        return self.out(self.hidden(x).tanh())
""",
    """
wine = {
    "name": "wine",
    "data": {"dataset": (x, y), "partition": {"scheme": "iid", "num_clients": 3}},
    "model": {"name": Net, "args": {"width": 16}},
    "federation": {"rounds": 20},
    "local": {"steps": 2, "batch_size": 16, "optimizer": {"name": "sgd", "lr": 1.0}},
    "privacy": {"target_epsilon": 8.0, "delta": 1e-3, "max_grad_norm": 0.5},
}
result = fedsim.run(wine, out="runs/wine")
""",
    """
result.rounds_frame().test_accuracy.to_csv("rounds.csv")
result.clients_frame().epsilon.to_csv("clients.csv")
result.figure().save("accuracy.svg")
""",
    """
comparison = fedsim.compare(wine, vary={"privacy.target_epsilon": [None, 8, 1]}, seeds=2)
comparison.frame().groupby("variant", sort=False).test_accuracy.mean().to_csv("compared.csv")
""",
)
# The kernel: a stand-in for IPython, which keeps what the cell shows.
KERNEL = """
import json, sys
from types import ModuleType, SimpleNamespace

ipython, display, shown = ModuleType("IPython"), ModuleType("IPython.display"), []
ipython.get_ipython = lambda: SimpleNamespace(kernel=True)
display.display = display.update_display = lambda bundle, **_: shown.append(bundle["text/html"])
sys.modules |= {"IPython": ipython, "IPython.display": display}
for number, cell in enumerate(json.load(open("cells.json"))):
    exec(compile(cell, f"<cell {number}>", "exec"), globals())
json.dump(shown, open("shown.json", "w"))
"""


def test_from_arrays_and_a_class_to_tables_and_figures(journey) -> None:
    journey.write("cells.json", json.dumps(CELLS))
    journey.write("kernel.py", KERNEL)
    done = journey.type("python kernel.py")
    assert (done.stdout, done.stderr) == ("", "")
    assert len([line for cell in CELLS for line in cell.splitlines() if line]) <= 28
    shown = json.loads((journey.home / "shown.json").read_text())
    for done, of in ((1, 20), (20, 20), (6, 6)):  # rounds, and runs of the comparison
        assert any(
            f'<progress style="width: 30em" value="{done}" max="{of}">' in html for html in shown
        )
    rounds = (journey.home / "rounds.csv").read_text().splitlines()
    assert len(rounds) == 21
    assert float(rounds[-1].partition(",")[2]) > 0.6
    clients = (journey.home / "clients.csv").read_text().splitlines()[1:]
    assert all(float(line.partition(",")[2]) <= 8 for line in clients)
    assert (journey.home / "accuracy.svg").read_text().startswith("<?xml")
    compared = (journey.home / "compared.csv").read_text().splitlines()[1:]
    assert [line.partition(",")[0] for line in compared] == [
        f"target_epsilon={value}" for value in ("null", 8, 1)
    ]
    assert "sound" in journey.type("fedsim verify runs/wine").stdout
    refused = journey.type("fedsim verify --replay runs/wine", code=2)
    assert "python:arrays of this run is a Python object" in refused.stderr
    assert "save the arrays by numpy.savez" in refused.stderr
    assert "--base" not in refused.stderr  # no directory has it
