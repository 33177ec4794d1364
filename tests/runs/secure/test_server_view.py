"""What reached the server in a whole run: nothing of a single client."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fedsim.secagg.payload import PayloadCodec


@dataclass(frozen=True)
class Upload:
    """What a client encoded: its payload, and its metrics in clear."""

    payload: np.ndarray
    metrics: Mapping[str, float]


class Everything:
    """All bytes and whole numbers that reached the server."""

    def __init__(self, wire: Any) -> None:
        self.bytes, self.numbers, self.records = b"", set[float](), set[str]()
        for _, reply in wire.seen:
            self.records |= set(reply.content)
            for record in reply.content.array_records.values():
                for array in record.values():
                    self.bytes += array.numpy().tobytes() + b"|"
            others = [*reply.content.config_records.values()]
            others += [*reply.content.metric_records.values()]
            for record in others:
                for value in record.values():
                    self._scalar(value)

    def _scalar(self, value: Any) -> None:
        if isinstance(value, list):
            for one in value:
                self._scalar(one)
        elif isinstance(value, bytes):
            self.bytes += value + b"|"
        elif isinstance(value, (int, float)) and not isinstance(value, bool):
            self.numbers.add(value)


def leaks(everything: Everything, uploads: list[Upload]) -> list[str]:
    """Return what the server could read off: pieces of payloads, weights, unexpected records."""
    found = []
    for upload in uploads:
        whole = upload.payload.tobytes()
        pieces = [whole[start : start + 16] for start in range(0, len(whole) - 15, 16)]
        if any(set(piece) != {0} and piece in everything.bytes for piece in pieces):
            found.append("a piece of a plain update")
        *metrics, _, weight, _ = upload.payload[-3 - len(upload.metrics) :]
        if int(weight) in everything.numbers or upload.payload[-2:].tobytes() in everything.bytes:
            found.append("a weight")
        encoded = any(one.tobytes() in everything.bytes for one in metrics)
        if encoded or not everything.numbers.isdisjoint(upload.metrics.values()):
            found.append("a metric")
    allowed = {"identity", "secagg", "secagg-arrays"}
    return found + sorted(everything.records - allowed)


PROTOCOLS: dict[str, dict[str, Any]] = {
    "additive-2": {"aggregators": 2},
    "additive-3": {"aggregators": 3},
    "secagg": {"protocol": "secagg"},
    "quantized": {"protocol": "quantized"},
}


@pytest.mark.parametrize("name", PROTOCOLS)
def test_the_servers_whole_view_holds_no_update_weight_or_metric(
    lab: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """Of every message that reached the server; the control arm shows that the search finds it."""
    encode, uploads = PayloadCodec.encode, list[Upload]()

    def recorded(*arguments: Any, metrics: Mapping[str, float], **options: Any) -> Any:
        payload = encode(*arguments, metrics=metrics, **options)
        uploads.append(Upload(payload.copy(), dict(metrics)))
        return payload

    monkeypatch.setattr(PayloadCodec, "encode", recorded)
    wire = lab.wire()
    declared = {"train_loss": 5.0, "train_accuracy": 1.0}
    lab.run(tmp_path, {**PROTOCOLS[name], "metrics": declared}, wire)
    assert len(uploads) == 2 * lab.clients
    weights = {int(upload.payload[-2]) for upload in uploads}
    assert len(weights) > 1
    assert min(weights) > 40  # no round, client or version by chance
    assert all(len(upload.metrics) == 2 and all(upload.payload[-5:-3]) for upload in uploads)
    found = leaks(Everything(wire), uploads)
    if name == "quantized":
        assert {"a piece of a plain update", "a weight", "a metric"} == set(found)
    else:
        assert found == []
