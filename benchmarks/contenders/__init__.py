"""Who takes part in `benchmarks/federation.py`: one module each, behind one interface."""

import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib import import_module
from types import MappingProxyType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from contenders.base import Contender


@dataclass(frozen=True)
class Entry:
    """How a contender is made, in the process that it has to itself.

    Attributes:
        module: where its class is.
        kind: the class.
        arguments: of the class.
        modes: whether it takes part in private work (True), in work without privacy (False).
        most_clients: rounds of more would take hours; they are timed with so many and scaled.
        interpreter: environment variable that names the interpreter it is installed for.
        device: cpu or cuda; `federation.py` measures the first, `gpu.py` both.
    """

    module: str
    kind: str
    arguments: Mapping[str, object] = field(default_factory=dict)
    modes: tuple[bool, ...] = (True, False)
    most_clients: int | None = None
    interpreter: str | None = None
    device: str = "cpu"

    def make(self) -> "Contender":
        """Return the contender; ImportError where what it needs is not installed."""
        return getattr(import_module(f"contenders.{self.module}"), self.kind)(**self.arguments)

    def python(self) -> str | None:
        """Return the interpreter that it runs in; None where nobody named one."""
        return sys.executable if self.interpreter is None else os.environ.get(self.interpreter)


# Ratios are taken to the bare loop, which is the limit.
CONTENDERS: Mapping[str, Entry] = MappingProxyType(
    {
        "bare": Entry("bare", "BareLoop"),
        "fedsim": Entry("fedsim_engines", "LocalEngine"),
        "fedsim-alone": Entry("fedsim_engines", "LocalEngine", {"vectorized_clients": "off"}),
        "fedsim-ray-1": Entry("fedsim_engines", "RayWorkers", {"workers": 1}),
        "fedsim-ray-2": Entry("fedsim_engines", "RayWorkers", {"workers": 2}),
        "fedsim-apart": Entry("apart", "TwoApart"),
        "flower-opacus": Entry("flower_opacus", "FlowerOpacus", modes=(True,), most_clients=100),
        "flower-opacus-prv": Entry(
            "flower_opacus", "FlowerOpacus", {"accountant": "prv"}, modes=(True,), most_clients=100
        ),
        "flower-opacus-no-epsilon": Entry(
            "flower_opacus", "FlowerOpacus", {"accountant": None}, modes=(True,), most_clients=100
        ),
        "bare-cuda": Entry(
            "bare", "BareLoop", {"device": "cuda"}, most_clients=1000, device="cuda"
        ),
        "fedsim-cuda": Entry("fedsim_engines", "LocalEngine", {"device": "cuda"}, device="cuda"),
        "pfl": Entry("pfl_research", "PflResearch", modes=(False,), interpreter="PFL_PYTHON"),
    }
)
