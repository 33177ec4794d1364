"""The graph of SecAgg+: the published degrees are reached, and smaller ones are not safe."""

import math
from typing import Any

import pytest
from scipy.stats import hypergeom

from fedsim.secagg.errors import ThresholdError
from fedsim.secagg.graph import NeighbourGraph, smallest_threshold, sparse_neighbourhood
from fedsim.secagg.settings import SecureAggregationSettings

# (n, γ, δ) -> smallest (degree, threshold) by the tails of Bell et al. 2020, 40 and 30 bits.
TABLE = {
    (20, 0.05, 0.05): (14, 2),
    (20, 0.1, 0.1): None,
    (20, 0.2, 0.2): None,
    (20, 0.33, 0.1): None,
    (50, 0.05, 0.05): (15, 3),
    (50, 0.1, 0.1): (21, 6),
    (50, 0.2, 0.2): (36, 11),
    (50, 0.33, 0.1): (39, 17),
    (100, 0.05, 0.05): (15, 6),
    (100, 0.1, 0.1): (21, 11),
    (100, 0.2, 0.2): (41, 21),
    (100, 0.33, 0.1): (42, 32),
    (1000, 0.05, 0.05): (33, 18),
    (1000, 0.1, 0.1): (52, 28),
    (1000, 0.2, 0.2): (112, 59),
    (1000, 0.33, 0.1): (113, 77),
    (10000, 0.05, 0.05): (38, 21),
    (10000, 0.1, 0.1): (60, 32),
    (10000, 0.2, 0.2): (136, 71),
    (10000, 0.33, 0.1): (140, 95),
}


def keys(corrupt: float, dropout: float) -> dict[str, Any]:
    return {"corrupt_fraction": corrupt, "dropout_fraction": dropout, "security_bits": 40}


@pytest.mark.parametrize("case", TABLE)
def test_published_degrees(case: tuple[int, float, float]) -> None:
    clients, corrupt, dropout = case
    found = next(
        (
            (degree, threshold)
            for degree in range(2, clients)
            if (threshold := smallest_threshold(clients, degree, **keys(corrupt, dropout)))
        ),
        None,
    )
    assert found == TABLE[case]


@pytest.mark.parametrize("case", [case for case, found in TABLE.items() if found])
def test_what_is_used_is_at_least_the_published_and_above_half(
    case: tuple[int, float, float],
) -> None:
    clients, corrupt, dropout = case
    used = sparse_neighbourhood(clients, **keys(corrupt, dropout))
    published = TABLE[case]
    assert used is not None
    assert published is not None
    assert used.degree >= published[0]
    assert used.threshold >= published[1]
    assert used.threshold > used.degree / 2
    lost = clients * hypergeom.cdf(
        used.threshold - 1,
        clients - 1,
        clients - 1 - math.floor(dropout * clients),
        used.degree,
    )
    assert lost <= 2.0**-30


def test_few_thresholds_are_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    """One tail takes a quarter of a millisecond, and there are as many thresholds as neighbours."""
    tried: list[int] = []
    tail = hypergeom.sf
    monkeypatch.setattr(hypergeom, "sf", lambda k, *rest: tried.append(k) or tail(k, *rest))
    assert smallest_threshold(600, 532, **keys(0.45, 0.45)) == 268
    assert len(tried) < 12


@pytest.mark.parametrize(("clients", "degree"), [(50, 15), (100, 21), (21, 14)])
def test_the_graph_is_regular_and_mutual(clients: int, degree: int) -> None:
    from fedsim.secagg.graph import _harary

    graph = _harary(tuple(range(clients)), degree)
    for one, others in graph.items():
        assert len(set(others)) == len(others) == degree
        assert one not in others
        assert all(one in graph[other] for other in others)


def test_places_are_drawn_anew() -> None:
    settings = SecureAggregationSettings.model_validate({"protocol": "secagg_plus"})
    one, other = (NeighbourGraph.for_round(settings, range(100)) for _ in range(2))
    assert not one.complete
    assert one.neighbours != other.neighbours


def test_few_clients_are_all_neighbours() -> None:
    settings = SecureAggregationSettings.model_validate({"protocol": "secagg_plus"})
    graph = NeighbourGraph.for_round(settings, [7, 3, 5, 9])
    assert graph.complete
    assert graph.threshold == 3
    assert graph.neighbours[7] == (3, 5, 9)
    assert graph.holders(7) == (3, 5, 7, 9)
    assert [graph.point(client) for client in (3, 5, 7, 9)] == [1, 2, 3, 4]


@pytest.mark.parametrize("threshold", [3, 7])
def test_thresholds_that_cannot_work_are_refused(threshold: int) -> None:
    protocol = {"name": "secagg", "threshold": threshold}
    settings = SecureAggregationSettings.model_validate({"protocol": protocol})
    with pytest.raises(ThresholdError, match="above half and at most all of the 6"):
        NeighbourGraph.for_round(settings, range(6))
