"""A run that was cut off goes on to the same result, and opens no second sum."""

from pathlib import Path
from typing import Any

import pytest
from flwr.app import Message

import fedsim


@pytest.mark.parametrize("protocol", ["additive", "secagg"])
def test_an_interrupted_run_resumes_to_the_same_result(
    lab: Any, tmp_path: Path, protocol: str
) -> None:
    class Stop:
        def started(self, federation: object, path: Path) -> None: ...

        def round_finished(self, row: Any) -> None:
            if row["round"] == 1:
                raise KeyboardInterrupt

        def ended(self) -> None: ...

    secure = lab.experiment({"protocol": protocol}, privacy=lab.privacy, federation={"rounds": 3})
    whole = lab.control({"protocol": protocol}, privacy=lab.privacy, federation={"rounds": 3})
    assert fedsim.run(secure, out=tmp_path / "r", observer=Stop()).status == "interrupted"
    result = fedsim.run(secure, out=tmp_path / "r", resume=True)
    lab.same_result(whole, result)
    assert (whole.path / "privacy.json").read_bytes() == (result.path / "privacy.json").read_bytes()


@pytest.mark.parametrize("protocol", ["additive", "secagg"])
def test_a_run_that_dies_inside_a_round_resumes_to_the_same_result(
    lab: Any, tmp_path: Path, protocol: str
) -> None:
    """Charged and uploaded, but not opened: the round is repeated under a new run id."""
    stage = "secagg_combine" if protocol == "additive" else "secagg_masked"

    def power_cut(request: Message) -> bool:
        if request.metadata.message_type.endswith(stage):
            raise KeyboardInterrupt
        return False

    secure = lab.experiment({"protocol": protocol}, privacy=lab.privacy)
    whole = lab.control({"protocol": protocol}, privacy=lab.privacy)
    cut = fedsim.run(secure, out=tmp_path / "r", engine=lab.wire(power_cut))
    assert (cut.status, cut.rounds) == ("interrupted", ())
    assert cut.privacy is not None
    assert {spend.rounds for spend in cut.privacy.clients} == {1}
    lab.same_result(whole, fedsim.run(secure, out=tmp_path / "r", resume=True))
