import platform
import subprocess
import sys

import pytest

CODE = """
import resource, torch
from fedsim.simulation.memory import keep_freed_memory
if {keep}:
    assert keep_freed_memory()
def train():
    torch.ones(3, 1 << 19).sum()  # 6 MB, freed at once
for _ in range(5):
    train()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(20):
    train()
print((resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before) / 20)
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="tunes the allocator of glibc")
def test_freed_memory_is_used_again_without_page_faults() -> None:
    faults = []
    for keep in (False, True):
        code = CODE.format(keep=keep)
        result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
        assert result.returncode == 0, result.stderr
        faults.append(float(result.stdout))
    assert faults[1] < faults[0] / 3, "6 MB are 1,536 pages of 4 kB"
