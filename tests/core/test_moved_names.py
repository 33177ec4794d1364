"""Old public names work, with a warning that names the new one."""

import subprocess
import sys
import warnings
from importlib import import_module

import pytest

from fedsim.core.moved_names import MOVED_MODULES, MOVED_NAMES

OLD_IMPORTS = [  # from the docs of 0.1.0 and from what its users may have written
    "from fedsim.accountant.classical import advanced_composition, subsample_amplification",
    "from fedsim.accountant.moments import MOMENTS_ORDERS, log_moments, moments_epsilon",
    "from fedsim.accountant.conversion import epsilon_from_rdp",
    "from fedsim.accountant.renyi import bad_case_rdp, bad_case_rdp_clt, good_case_rdp_clt",
    "from fedsim.accountant.wor_rdp import wor_rdp",
    "from fedsim.accountant.pld import pld_epsilon",
    "from fedsim.accountant.fleet import FleetAccountant",
    "import fedsim.accountant.journal",
    "from fedsim.clients.workbench import Workbench",
    "from fedsim.clients.dp_sgd.mechanism import DpSgdStep",
    "from fedsim.clients.faults import FaultPlan",
    "from fedsim.errors import InputError",
    "from fedsim.plugins import resolve",
    "from fedsim.runs.running import RunResult, run_experiment",
    "from fedsim.server.aggregation import OrderedMean",
    "from fedsim.server.averaging import Averaging",
    "from fedsim.server.secure_aggregation import hpke, shamir",
    "import fedsim.server.secure_aggregation.leader",
]


@pytest.mark.parametrize("old", MOVED_MODULES)
def test_a_moved_module_is_found_under_its_old_path(old: str) -> None:
    new = import_module(MOVED_MODULES[old])
    sys.modules.pop(old, None)
    with pytest.warns(DeprecationWarning, match=rf"{old} is now {new.__name__}; .* fedsim 0\.3"):
        found = import_module(old)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # names of the module that moved on their own
        for name in {name for name in vars(new) if not name.startswith("_")}:
            assert getattr(found, name) is getattr(new, name), name


@pytest.mark.parametrize("old", MOVED_NAMES)
def test_a_moved_name_is_found_under_its_old_path(old: str) -> None:
    module, name = old.rsplit(".", 1)
    new_module, new_name = MOVED_NAMES[old]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = import_module(module)
    with pytest.warns(DeprecationWarning, match=rf"{old} is now {new_module}\.{new_name};"):
        assert getattr(found, name) is getattr(import_module(new_module), new_name)


@pytest.mark.parametrize("line", OLD_IMPORTS)
def test_an_old_import_works_and_the_warning_points_at_it(line: str) -> None:
    result = subprocess.run([sys.executable, "-c", line], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    assert "<string>:1: DeprecationWarning: fedsim." in result.stderr


def test_a_name_that_never_was_is_an_attribute_error() -> None:
    import fedsim.accountant.pld

    with pytest.raises(AttributeError, match=r"module 'fedsim\.accountant\.pld' has no attribute"):
        _ = fedsim.accountant.pld.nothing
    with pytest.raises(ModuleNotFoundError):
        import_module("fedsim.nothing")
