"""The public queries of PATE, a part of the server's test set that is not used to score models."""

import numpy as np

from fedsim.core.streams import Purpose, stream
from fedsim.data import DataError, Examples, FederatedData

MIN_TEST_EXAMPLES = 2  # private models are checked on at least two examples


def with_queries(data: FederatedData, number: int, *, seed: int) -> tuple[FederatedData, Examples]:
    """Draw queries from the test set; return the data without these queries, and the queries.

    Queries keep their labels for the report. Clients and student never see the labels.

    Args:
        data: the data of the experiment.
        number: number of queries.
        seed: the experiment's seed, by which queries are drawn.

    Raises:
        DataError: too few test examples are left, or the targets are not classes.
    """
    if data.num_classes is None:
        raise DataError(
            "task: pate needs targets that are classes 0, 1, 2, ..., one for each example: "
            "teachers vote for classes"
        )
    left = len(data.test) - number
    if left < MIN_TEST_EXAMPLES:
        most = max(0, len(data.test) - MIN_TEST_EXAMPLES)
        raise DataError(
            f"pate.queries {number:,} of {len(data.test):,} public test examples leave {left:,} "
            f"for the test scores; ask at most {most:,}, raise data.test_fraction, or bring a "
            "larger test set"
        )
    order = stream(seed, Purpose.QUERIES).permutation(len(data.test))
    asked, rest = order[:number], np.sort(order[number:])
    return data.with_test(rest), data.test.rows(asked)
