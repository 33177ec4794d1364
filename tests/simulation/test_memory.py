import gc
import platform
import subprocess
import sys

import pytest

from fedsim.simulation.engine import frozen_objects

# The C library counts the blocks that it took from the system one by one (`hblks`): those go back,
# page by page, as soon as they are freed.
CODE = """
import ctypes, torch
from fedsim.simulation.engine import keep_freed_memory
fields = "arena ordblks smblks hblks hblkhd usmblks fsmblks uordblks fordblks keepcost".split()
class Mallinfo(ctypes.Structure):
    _fields_ = [(name, ctypes.c_size_t) for name in fields]
mallinfo = ctypes.CDLL("libc.so.6").mallinfo2
mallinfo.restype = Mallinfo
def blocks_taken():
    before = mallinfo().hblks
    tensor = torch.empty(5 << 20)  # 20 MB
    return mallinfo().hblks - before
print(blocks_taken())
assert keep_freed_memory()
print(blocks_taken())
"""


@pytest.mark.skipif(
    platform.libc_ver()[0] != "glibc"
    or tuple(map(int, platform.libc_ver()[1].split("."))) < (2, 33),
    reason="reads the state of glibc's allocator, available since version 2.33",
)
def test_large_blocks_stay_in_the_process() -> None:
    result = subprocess.run([sys.executable, "-c", CODE], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    assert result.stdout.split() == ["1", "0"]


def test_the_collector_is_as_before_after_a_run_that_failed() -> None:
    gc.unfreeze()  # what commands in this process have frozen
    before = gc.get_threshold(), gc.get_freeze_count()
    seen = None

    def fails() -> None:
        nonlocal seen
        with frozen_objects():
            seen = gc.get_threshold(), gc.get_freeze_count()
            raise RuntimeError("in the middle")

    with pytest.raises(RuntimeError, match="in the middle"):
        fails()
    assert seen is not None
    assert seen[0] > before[0]
    assert seen[1] > before[1]
    assert gc.isenabled()
    assert (gc.get_threshold(), gc.get_freeze_count()) == before
