"""Scores of clients are averaged over examples, whoever answers first, and nobody is lost."""

import math
from random import Random

import pytest
from flwr.app import ArrayRecord, Message
from hypothesis import given
from hypothesis import strategies as st

from fedsim.protocol.errors import ProtocolError
from fedsim.protocol.flower_internals import server_identity
from fedsim.protocol.messages import EvaluateReply, EvaluateRequest, TrainReply
from fedsim.protocol.traffic import NO_REPLY, ClientError
from fedsim.server.evaluation import ClientEvaluation, EvaluationResult
from fedsim.server.settings import EvaluationSettings


def evaluation(rounds: int = 10, deadline: float | None = None, **keys: object) -> ClientEvaluation:
    settings = EvaluationSettings.model_validate({"holdout": 0.2, **keys})
    return ClientEvaluation(settings, 3, rounds, deadline)


def reply(client: int, answer: EvaluateReply | ClientError) -> Message | ClientError:
    if isinstance(answer, ClientError):
        return answer
    with server_identity(1):
        request = EvaluateRequest(1, ArrayRecord()).to_message(1000 + client)
        return answer.to_message(request)


def scores(examples: int, loss: float, delay: float = 0.0) -> EvaluateReply:
    return EvaluateReply(examples, {"loss": loss, "accuracy": loss / 8} if examples else {}, delay)


def averaged(answers: dict[int, EvaluateReply | ClientError], **keys: object) -> EvaluationResult:
    found = {client: reply(client, answer) for client, answer in answers.items()}
    return evaluation(**keys).averaged(found.items())  # pyright: ignore[reportArgumentType]


@given(
    st.lists(st.tuples(st.integers(1, 1000), st.floats(0, 1e6)), min_size=1, max_size=8),
    st.randoms(use_true_random=False),
)
def test_the_mean_is_over_examples_and_no_order_shows(
    found: list[tuple[int, float]], random: Random
) -> None:
    answers = {client: scores(n, loss) for client, (n, loss) in enumerate(found)}
    mixed = list(answers.items())
    random.shuffle(mixed)
    one, other = averaged(dict(answers)), averaged(dict(mixed))
    assert one == other
    total = sum(n for n, _ in found)
    assert one.examples == total
    assert one.clients == tuple(range(len(found)))
    assert one.metrics["loss"] == pytest.approx(sum(n * v for n, v in found) / total, rel=1e-12)


def test_who_fails_is_named_and_who_holds_nothing_out_did_not_fail() -> None:
    found = averaged(
        {
            0: scores(10, 4.0),
            1: ClientError("gone"),
            2: scores(0, 0.0),
            3: scores(30, 8.0, delay=9.0),
            4: scores(30, 2.0),
            5: EvaluateReply(5, {"loss": 1.0}),
        },
        deadline=5.0,
    )
    assert found.clients == (0, 4)
    assert found.metrics == {"loss": 2.5, "accuracy": 2.5 / 8}
    assert found.failed == {
        1: "gone",
        3: "answered after 9 s, past the deadline of 5 s",
        5: "reports the metrics ['loss'], other clients ['loss', 'accuracy']",
    }
    silent = evaluation().averaged([(0, reply(0, scores(1, 1.0))), (1, NO_REPLY)])
    assert silent.failed == {1: "no reply"}
    assert averaged({0: ClientError("gone")}) == EvaluationResult(failed={0: "gone"})


def test_a_model_that_diverged_has_no_finite_mean() -> None:
    assert math.isnan(averaged({0: scores(1, math.inf), 1: scores(1, 1.0)}).metrics["loss"])


def test_rounds_and_clients_are_chosen_by_the_seed() -> None:
    assert [n for n in range(1, 11) if evaluation(every_rounds=4).clients(n, 2)] == [4, 8, 10]
    some = evaluation(clients=3)
    chosen = {some.clients(number, 10) for number in range(1, 20)}
    assert len(chosen) > 10
    assert all(len(set(one)) == 3 and list(one) == sorted(one) for one in chosen)
    assert some.clients(7, 10) == evaluation(clients=3).clients(7, 10)
    assert evaluation().clients(1, 4) == (0, 1, 2, 3)


def test_answers_that_are_no_scores_are_refused() -> None:
    with server_identity(1):
        request = EvaluateRequest(2, ArrayRecord()).to_message(1000)
        assert EvaluateRequest.from_message(request) == EvaluateRequest(2, ArrayRecord())
        update = TrainReply({}, 3, None).to_message(request)
        assert EvaluateReply.from_message(update).metrics == {}
        for wrong in (EvaluateReply(-1, {}), EvaluateReply(1, {"loss": 3})):
            with pytest.raises(ProtocolError):
                EvaluateReply.from_message(wrong.to_message(request))
