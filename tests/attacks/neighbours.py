"""Runs of two neighbouring data sets with the same streams and the same released values.

The second run gets the released values of the first. What is left is compared: everything that an
observer sees beside these values must be equal to the byte, and what the noise is added to may
differ by no more than the charge allows. So each release is one Gaussian mechanism given all that
was seen before it, and their composition is what the ledger says.

| what | in the second run |
|---|---|
| a release: integers plus noise | replaced by that of the first run; the integers are compared |
| batches | those of the first run, without the example that is gone |
| keyed digests | a constant: without its key, a digest is a random number |
| clocks | stand still: times are no function of the data that anything here promises |
"""

import hashlib
import json
import math
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import ArrayRecord, ConfigRecord
from safetensors import safe_open
from torch import Tensor

import fedsim.clients.mechanisms.votes.mechanism as client_votes
import fedsim.clients.training.member as client_streams
import fedsim.noise.release as noise_release
import fedsim.server.aggregation.noisy_sum as noisy_sum
from fedsim.accountant import Event, Gaussian, JointGaussian
from fedsim.accountant.ledger.journal import FileJournal
from fedsim.clients.gradients.example_randomness import KEY_BYTES
from fedsim.core.errors import FedsimError
from fedsim.core.settings import written_name
from fedsim.core.streams import Purpose
from fedsim.experiment import load_experiment
from fedsim.noise.sources import DEVIATION, NoiseSource, NoNoise
from fedsim.runs.directory import KEPT
from fedsim.runs.runner import run_experiment
from fedsim.server.app import Timeline
from fedsim.server.participation.participation import Participation
from fedsim.simulation.engines import DirectChannel

CLIENT = 0
"""The client in which neighbours differ."""

PLUGIN = """
from pathlib import Path

import numpy as np
import torch

DATA = Path(__file__).with_name("data.npz")


def load(seed=0):
    with np.load(DATA) as data:
        return data["x"], data["y"], data["test_x"], data["test_y"]


def split(features, targets, seed=0):
    with np.load(DATA) as data:
        return data["clients"]


def dropout():
    return torch.nn.Sequential(
        torch.nn.Linear(5, 6), torch.nn.Tanh(), torch.nn.Dropout(0.5), torch.nn.Linear(6, 3)
    )
"""


class ToldApartError(AssertionError):
    """Neighbours that somebody can tell apart by something that was not charged."""


@dataclass(frozen=True)
class Dataset:
    """The examples of all clients."""

    x: np.ndarray
    y: np.ndarray
    clients: np.ndarray

    @classmethod
    def make(cls, sizes: Sequence[int]) -> "Dataset":
        """Return examples with large gradients: each is clipped to the bound."""
        clients = np.repeat(np.arange(len(sizes)), sizes)
        stream = np.random.default_rng(7)
        x = stream.normal(size=(len(clients), 5)).astype(np.float32) * 3.0
        return cls(x, np.arange(len(clients)) % 3, clients)

    def write(self, base: Path) -> None:
        """Write the data, and the plug-in that reads them."""
        base.mkdir(parents=True, exist_ok=True)
        (base / "p.py").write_text(PLUGIN)
        test = np.random.default_rng(8).normal(size=(9, 5)).astype(np.float32)
        own = {"x": self.x, "y": self.y, "clients": self.clients}
        content: dict[str, Any] = {**own, "test_x": test, "test_y": np.arange(9) % 3}
        np.savez(base / "data.npz", **content)

    def with_other_example(self, row: int) -> "Dataset":
        """Return the data with another example in a row of CLIENT."""
        place = np.flatnonzero(self.clients == CLIENT)[row]
        x, y = self.x.copy(), self.y.copy()
        x[place], y[place] = -2.5 * x[place], (y[place] + 1) % 3
        return replace(self, x=x, y=y)

    def without_last_example(self) -> "Dataset":
        """Return the data without the last example of CLIENT."""
        keep = np.arange(len(self.y)) != np.flatnonzero(self.clients == CLIENT)[-1]
        return Dataset(self.x[keep], self.y[keep], self.clients[keep])

    def with_other_client(self) -> "Dataset":
        """Return the data in which CLIENT has other examples, and fewer of them."""
        own = np.flatnonzero(self.clients == CLIENT)
        keep = ~np.isin(np.arange(len(self.y)), own[len(own) // 2 :])
        x = np.where(self.clients[:, None] == CLIENT, -self.x, self.x)
        y = np.where(self.clients == CLIENT, 2 - self.y, self.y)
        return Dataset(x[keep], y[keep], self.clients[keep])

    def with_emptied_client(self) -> "Dataset":
        """Return the data in which CLIENT has no example."""
        keep = self.clients != CLIENT
        return Dataset(self.x[keep], self.y[keep], self.clients[keep])

    def without_client(self) -> "Dataset":
        """Return the data of a federation without its last client."""
        keep = self.clients != self.clients.max()
        return Dataset(self.x[keep], self.y[keep], self.clients[keep])


@dataclass(frozen=True)
class Pair:
    """A neighbour of the first run's data.

    Attributes:
        second: the data of the second run.
        factor: how many charged sensitivities lie between them.
        gone: place of the example of CLIENT that contributes nothing in the second; None: none.
    """

    second: Dataset
    factor: float
    gone: int | None = None


def pair_of(experiment: Mapping[str, Any], data: Dataset, row: int) -> Pair:
    """Return neighbours under the unit and the adjacency of an experiment.

    Args:
        experiment: its content.
        data: of the first run.
        row: of CLIENT; its example differs where examples are replaced or zeroed out.
    """
    privacy = experiment["privacy"]
    unit = privacy.get("unit", "example")
    adjacency = written_name(privacy.get("adjacency", "zero_out"))
    if unit == "client":
        if adjacency == "add_remove":
            return Pair(data.without_client(), 1.0)
        if adjacency == "zero_out":
            return Pair(data.with_emptied_client(), 1.0)
        return Pair(data.with_other_client(), 2.0)
    if isinstance(privacy.get("mechanism"), dict):  # no batch leaves an example out
        return Pair(data.with_other_example(row), 2.0)
    if adjacency == "add_remove":
        return Pair(data.without_last_example(), 1.0, gone=int((data.clients == CLIENT).sum()) - 1)
    if adjacency == "zero_out":
        return Pair(data.with_other_example(row), 1.0, gone=row)
    return Pair(data.with_other_example(row), 2.0)


@dataclass
class Transcript:
    """What the first run drew and released, in order, for the second one.

    Attributes:
        batches: of each client and round.
        draws: clients of each round, where they are secret.
        always: examples of CLIENT that are in each of its batches: one that is removed.
        before: integers of each release before its noise.
        after: its released values.
        moves: how far the integers of the second run are from those of the first, in standard
            deviations of the noise.
        seen: what an observer saw: of the first run, then of the second.
    """

    batches: dict[tuple[int, int], list[np.ndarray]] = field(default_factory=dict)
    draws: dict[int, tuple[int, ...]] = field(default_factory=dict)
    always: tuple[int, ...] = ()
    before: list[Tensor] = field(default_factory=list)
    after: list[Tensor] = field(default_factory=list)
    moves: list[float] = field(default_factory=list)
    seen: list[list[Any]] = field(default_factory=list)
    error: str | None = None
    position: int = 0
    is_on: bool = False

    def started(self, federation: object, path: Path) -> None:
        """Begin with the rounds: probes before them see no private example."""
        self.is_on = True

    def round_finished(self, row: Mapping[str, Any]) -> None: ...

    def ended(self) -> None:
        """End with the rounds."""
        self.is_on = False

    @property
    def drawn_row(self) -> int:
        """An example of CLIENT that was drawn, the first of its batch."""
        batches = (
            batch for place, own in self.batches.items() for batch in own if place[0] == CLIENT
        )
        return next((int(batch[0]) for batch in batches if len(batch)), 0)

    def release(self, integers: Tensor, noisy: Tensor) -> Tensor:
        """Return the values of a release: those of the first run."""
        if not self.is_on:
            return noisy
        if len(self.seen) == 1:
            self.before.append(integers.clone())
            self.after.append(noisy.clone())
            return noisy
        if self.position >= len(self.before) or integers.shape != self.after[self.position].shape:
            raise ToldApartError(f"release {self.position} has no counterpart")
        moved = (integers - self.before[self.position]).norm().item() / DEVIATION
        self.moves.append(moved)
        self.position += 1
        return self.after[self.position - 1].clone()


def run_pair(
    experiment: Mapping[str, Any], base: Path, *, sizes: Sequence[int] = (12, 9, 9, 6, 6)
) -> Transcript | None:
    """Run an experiment on neighbours and compare all that an observer of its trust model sees.

    Args:
        experiment: its content; data, model and loss are of `PLUGIN`.
        base: an empty folder.
        sizes: examples of each client.

    Returns:
        What was drawn and released; None where the file is refused.

    Raises:
        ToldApartError: something that is not released differs, or a release moves too far.
    """
    trust = written_name(experiment["privacy"].get("trust", "local"))
    transcript, data = Transcript(), Dataset.make(sizes)
    if written_name(experiment["privacy"].get("adjacency", "zero_out")) == "add_remove":
        transcript.always = (sizes[CLIENT] - 1,)
    bases = base / "first", base / "second"
    data.write(bases[0])
    if not _is_accepted(experiment, bases[0]):
        return None
    errors = [_run(experiment, bases[0], transcript, trust, None)]
    pair = pair_of(experiment, data, transcript.drawn_row)
    pair.second.write(bases[1])
    errors.append(_run(experiment, bases[1], transcript, trust, pair.gone))
    _compare("the error", *errors)
    transcript.error = errors[0]
    _compare_seen(*transcript.seen)
    outs = [one / "run" for one in bases]
    _compare_files(*outs)
    if outs[0].exists():
        _check_moves(transcript, outs[0], pair.factor)
    return transcript


def _run(
    experiment: Mapping[str, Any], base: Path, transcript: Transcript, trust: str, gone: int | None
) -> str | None:
    """Run an experiment, and return the text of its error."""
    transcript.seen.append([])
    with patched(transcript, trust, gone):
        try:
            run_experiment(dict(experiment), base=base, out=base / "run", callback=transcript)
        except FedsimError as found:
            return str(found).replace(str(base), "BASE")
    return None


def _is_accepted(experiment: Mapping[str, Any], base: Path) -> bool:
    with suppress(FedsimError):
        load_experiment(dict(experiment), base=base)
        return True
    return False


# --- What is put in the place of what ------------------------------------------------------------


@contextmanager
def patched(transcript: Transcript, trust: str, gone: int | None) -> Iterator[None]:
    """Record the first run of a transcript, or make the second one release and draw the same."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(time, "perf_counter", lambda: 0.0)
        patch.setattr("fedsim.core.commands.perf_counter", lambda: 0.0)
        patch.setattr(Timeline.__init__, "__defaults__", (lambda: 0.0,))
        _patch_releases(patch, transcript)
        _patch_batches(patch, transcript, gone)
        _patch_digests(patch)
        _patch_draws(patch, transcript)
        _patch_messages(patch, transcript, trust)
        yield


def _patch_releases(patch: pytest.MonkeyPatch, transcript: Transcript) -> None:
    add, votes, server = noise_release._noisy, client_votes.release_votes, noisy_sum.add_noise

    def noisy(block: Tensor, sources: Sequence[NoiseSource]) -> Tensor:
        before = block.double()
        found = add(block, sources)
        return transcript.release(before.round(), found) if _adds(sources) else found

    def release_votes(labels: Any, classes: int, *, vote: int, noise: NoiseSource) -> Any:
        found = votes(labels, classes, vote=vote, noise=noise)
        if not _adds([noise]):
            return found
        plain = votes(labels, classes, vote=vote, noise=NoNoise())
        return transcript.release(torch.from_numpy(plain), torch.from_numpy(found)).numpy()

    def add_server_noise(sums: Any, source: NoiseSource) -> dict[str, np.ndarray]:
        noisy = server(sums, source)
        flat = [torch.from_numpy(_flat(one)).double() for one in (sums, noisy)]
        values, start, found = transcript.release(*flat).numpy(), 0, dict[str, np.ndarray]()
        for name, value in noisy.items():
            own = values[start : start + value.size].reshape(value.shape)
            found[name], start = own.astype(value.dtype), start + value.size
        return found

    patch.setattr(noise_release, "_noisy", noisy)
    patch.setattr(client_votes, "release_votes", release_votes)
    patch.setattr(noisy_sum, "add_noise", add_server_noise)


def _adds(noises: Sequence[NoiseSource | None]) -> bool:
    return any(one is not None and not isinstance(one, NoNoise) for one in noises)


def _flat(sums: Mapping[str, np.ndarray]) -> np.ndarray:
    return np.concatenate([one.ravel() for one in sums.values()])


def _patch_batches(patch: pytest.MonkeyPatch, transcript: Transcript, gone: int | None) -> None:
    draw = client_streams.StreamKey.draw_batches

    def draw_batches(key: Any, *args: Any, **options: Any) -> Iterator[np.ndarray]:
        own = draw(key, *args, **options)
        if not transcript.is_on:
            yield from own
        place = key.client, key.round_number
        if len(transcript.seen) == 1:
            kept = transcript.batches.setdefault(place, [])
            for batch in own:
                kept.append(batch if key.client != CLIENT else _with(batch, transcript.always))
                yield kept[-1]
        for batch in transcript.batches.get(place, []):
            yield batch[batch != gone] if key.client == CLIENT else batch

    def model_randomness(key: Any, *, secure: bool = False) -> bytes:
        return key.key_bytes(Purpose.DROPOUT)[:KEY_BYTES]  # the same secret in both runs

    patch.setattr(client_streams.StreamKey, "draw_batches", draw_batches)
    patch.setattr(client_streams.StreamKey, "model_randomness", model_randomness)


def _with(batch: np.ndarray, always: Sequence[int]) -> np.ndarray:
    return np.append(batch, [one for one in always if one not in batch]).astype(batch.dtype)


def _patch_draws(patch: pytest.MonkeyPatch, transcript: Transcript) -> None:
    """Draw the same clients in both runs where the draw is secret."""
    draw = Participation.draw

    def drawn(participation: Participation, number: int) -> tuple[int, ...]:
        if not participation.is_secret:
            return draw(participation, number)
        if len(transcript.seen) == 1:
            transcript.draws[number] = draw(participation, number)
        clients = transcript.draws.get(number, ())
        return tuple(client for client in clients if client < participation.num_clients)

    patch.setattr(Participation, "draw", drawn)


def _patch_digests(patch: pytest.MonkeyPatch) -> None:
    """Make every keyed digest a constant, and every secret key."""
    blake = hashlib.blake2b

    class Constant:
        def update(self, _: bytes) -> None: ...

        def hexdigest(self) -> str:
            return "0" * 64

    def keyed(content: bytes = b"", **options: Any) -> Any:
        if options.get("key") and options["key"] != b"fedsim stream keys, version 1":
            return Constant()
        return blake(content, **options)

    patch.setattr(hashlib, "blake2b", keyed)


def _patch_messages(patch: pytest.MonkeyPatch, transcript: Transcript, trust: str) -> None:
    train = DirectChannel.train

    def watched(channel: DirectChannel, requests: Any, **options: Any) -> Iterator[Any]:
        for node, request in requests.items():
            if trust != "central":
                transcript.seen[-1].append(("request", node, plain(request)))
        for node, answer in train(channel, requests, **options):
            if trust != "central":
                transcript.seen[-1].append(("answer", node, plain(answer)))
            yield node, answer

    patch.setattr(DirectChannel, "train", watched)


def plain(value: Any) -> Any:
    """Return a message as values that can be compared; sealed content by its size."""
    if isinstance(
        value, ConfigRecord
    ):  # a round's offer: fresh keys and nonces beside public facts
        return {name: _size(one) if name in _RANDOM else plain(one) for name, one in value.items()}
    if isinstance(value, ArrayRecord):
        return {name: (a.dtype, a.shape, a.numpy().tobytes()) for name, a in value.items()}
    if type(value).__name__ == "SealedReply":
        return type(value).__name__, _size(value)
    if isinstance(value, Mapping):
        return {str(name): plain(one) for name, one in value.items()}
    if hasattr(value, "__dataclass_fields__"):
        fields = {name: plain(getattr(value, name)) for name in value.__dataclass_fields__}
        return type(value).__name__, fields
    if isinstance(value, list | tuple):
        return [plain(one) for one in value]
    return value if isinstance(value, str | int | float | bytes | None) else repr(value)


_RANDOM = ("run_id", "round_nonce", "helper_keys")


def _size(value: Any) -> int:
    if isinstance(value, bytes | str):
        return len(value)
    if isinstance(value, np.ndarray):
        return value.nbytes
    if isinstance(value, Mapping):
        return sum(map(_size, value.values()))
    if hasattr(value, "__dataclass_fields__"):
        return sum(_size(getattr(value, name)) for name in value.__dataclass_fields__)
    return sum(map(_size, value)) if isinstance(value, list | tuple) else 1


# --- What is compared -----------------------------------------------------------------------------


def _compare(what: str, first: Any, second: Any) -> None:
    if first != second:
        raise ToldApartError(f"{what} differs: {_excerpt(first, second)}")


def _excerpt(first: Any, second: Any) -> str:
    one, other = repr(first), repr(second)
    start = next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), 0)
    part = slice(max(0, start - 60), start + 100)
    return f"... {one[part]} ... and ... {other[part]} ..."


def _compare_seen(first: list[Any], second: list[Any]) -> None:
    for place, (one, other) in enumerate(zip(first, second, strict=False)):
        _compare(f"message {place}", one, other)
    _compare("the number of messages", len(first), len(second))


def _compare_files(first: Path, second: Path) -> None:
    names = [sorted(_shared(run)) for run in (first, second)]
    _compare("the files", *names)
    for name in names[0]:
        _compare(name, *(_content(run, name) for run in (first, second)))


_CHECKPOINT = "checkpoint/model.safetensors"


def _content(run: Path, name: str) -> Any:
    """Return the bytes of a file.

    safetensors writes the metadata of a checkpoint in any order, so a manifest has its content in
    place of its digest.
    """
    if name != "manifest.json":
        return (run / name).read_bytes()
    manifest = json.loads((run / name).read_text())
    if manifest["records"].pop(_CHECKPOINT, None) is None:
        return manifest
    del manifest["root"]
    with safe_open(run / _CHECKPOINT, "numpy") as file:
        tensors = {key: file.get_tensor(key).tobytes() for key in file.keys()}  # noqa: SIM118
        return manifest, tensors, file.metadata()


def _shared(run: Path) -> Iterator[str]:
    """Yield the files of a run that may be shared."""
    for path in run.rglob("*"):
        name = str(path.relative_to(run))
        if path.is_file() and is_shared(name):
            yield name


def is_shared(name: str) -> bool:
    """Whether a file of a run may be shared."""
    return not name.startswith(KEPT)


def _check_moves(transcript: Transcript, run: Path, factor: float) -> None:
    """Check every release against the charges of CLIENT, in each view that has a certificate."""
    journal = FileJournal(run / "ledger.jsonl")
    worst = max(transcript.moves, default=0.0)
    privacy = json.loads((run / "privacy.json").read_text())
    sums = privacy.get("sums", {})
    honest = sums.get("min_clients", 1) - sums.get("colluding_clients", 0)
    for charge in journal.history(CLIENT):
        views = [(charge.ledger, math.sqrt(honest))]  # noise of a sum over one share
        if charge.against_server is not None:
            views.append((charge.against_server, 1.0))
        for ledger, share in views:
            for event, count in ledger.entries:
                queries = count if "votes" in privacy else 1  # of one release
                allowed = factor * share * math.sqrt(queries) / _multiplier(event)
                if worst > allowed * (1.0 + 1e-12):
                    raise ToldApartError(
                        f"a release moves by {worst / allowed:.6f} of what is charged"
                    )


def _multiplier(event: Event) -> float:
    """Return the noise multiplier of an event, whatever samples it."""
    if isinstance(event, Gaussian):
        return event.noise_multiplier
    if isinstance(event, JointGaussian):
        return 1.0 / math.sqrt(sum(z**-2.0 for z in event.noise_multipliers))
    inner: Any = event
    return _multiplier(inner.event)


def facts_of(transcript: Transcript, run: Path) -> set[tuple[str, str]]:
    """Return (message or file, key) of everything that was seen of a run; "" for a whole one."""
    found = {(kind, key) for _, _, (kind, own) in transcript.seen[0] for key in _keys(own)}
    for name in _shared(run):
        text = (run / name).read_bytes()
        rows: list[Any] = [""]
        if name.endswith(".jsonl"):
            rows = [json.loads(line) for line in text.splitlines()]
        elif name.endswith(".json"):
            rows = [json.loads(text)]
        elif name.endswith(".csv"):
            rows = [dict.fromkeys(text.decode().splitlines()[0].split(","))]
        found |= {(name, key) for row in rows for key in _keys(row)}
    return found


def _keys(value: Any) -> list[str]:
    return list(value) if isinstance(value, dict) else [""]
