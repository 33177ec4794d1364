"""The digest of a model depends on every bit, name and shape of it, and on nothing else."""

import numpy as np

from fedsim.protocol.arrays import digest, to_arrays

ARRAYS_VALUE = {"w": np.arange(6, dtype=np.float32).reshape(2, 3), "n": np.array(7)}


def test_digest_tells_models_apart() -> None:
    base = digest(to_arrays(ARRAYS_VALUE))
    assert base == digest(to_arrays({k: v.copy() for k, v in ARRAYS_VALUE.items()}))
    changed = {**ARRAYS_VALUE, "w": np.nextafter(ARRAYS_VALUE["w"], np.float32(9))}
    assert digest(to_arrays(changed)) != base
    assert digest(to_arrays({"v": ARRAYS_VALUE["w"], "n": ARRAYS_VALUE["n"]})) != base
    assert digest(to_arrays({**ARRAYS_VALUE, "w": ARRAYS_VALUE["w"].reshape(3, 2)})) != base
