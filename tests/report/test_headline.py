"""The note on features that span orders of magnitude, from public examples alone."""

import numpy as np
import pytest

from fedsim.report.progress import scale_note

AGES = np.array([[40.0, 1.0], [70.0, 0.0]], np.float32)


def test_usual_scales_have_no_note() -> None:
    assert scale_note(AGES, ["age", "sex"]) is None
    assert scale_note(np.zeros((3, 2), np.float32), None) is None
    assert scale_note(np.full((3, 1, 8, 8), 1.0, np.float32), None) is None
    assert scale_note(np.full((3, 2), 10**6), None) is None  # tokens


@pytest.mark.parametrize(
    ("features", "names", "words"),
    [
        (AGES * [1, 172000], ["age", "income"], "income up to 1.72e+05"),
        (AGES * [1, 172000], None, "features of the public test set are as large as 1.72e+05"),
        (np.full((2, 8, 8), 255.0), None, "data.images"),
    ],
)
def test_the_note_names_the_largest(features: np.ndarray, names: list[str], words: str) -> None:
    assert words in str(scale_note(features.astype(np.float32), names))
