"""A generated task for many clients with few examples each, for experiments with unit: client."""

import numpy as np
from numpy.typing import NDArray

CLASSES, INPUTS, TEST_EXAMPLES = 10, 20, 4000
SEPARATION = 0.6  # of the class centres, in standard deviations of the examples


def load(
    seed: int = 0, examples: int = 10_000
) -> tuple[NDArray[np.float32], NDArray[np.int64], NDArray[np.float32], NDArray[np.int64]]:
    """Return examples of ten classes around random centres, and a test set.

    Args:
        seed: of centres and examples.
        examples: number of training examples.
    """
    generator = np.random.default_rng(seed)
    centres = SEPARATION * generator.normal(size=(CLASSES, INPUTS))
    classes = generator.integers(CLASSES, size=examples + TEST_EXAMPLES)
    inputs = centres[classes] + generator.normal(size=(classes.size, INPUTS))
    inputs = inputs.astype(np.float32)
    return inputs[:examples], classes[:examples], inputs[examples:], classes[examples:]
