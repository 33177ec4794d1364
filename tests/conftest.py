"""Settings of the whole suite, made before torch and numpy are imported."""

import os

# The tests are many small computations: a second thread has nothing to do but wait, and on a busy
# machine waiting threads take the processor from everybody.
for _name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
    os.environ.setdefault(_name, "1")
