"""Bitwise checks that examples of a padded batch, and clients that train together, are independent.

Every proof of DP-SGD assumes that an example's contribution depends on the parameters and on the
example alone. With client-level privacy, the proof assumes that a client's update depends on the
global model and on the client's data alone. With padded batches of a fixed shape, this is true if
the matrix library computes all rows of a product in the same way. Libraries and machines differ in
this. So it is tested here with the shape, the dtype, the device and the number of threads that
training will use.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from fedsim.clients.clipping.clipping import LayerClipping
from fedsim.clients.gradients.layers.base import ExampleUse, LayerUse
from fedsim.clients.gradients.per_example import (
    ClipBounds,
    OneAtATime,
    PaddedBatch,
    PerExampleGradients,
)
from fedsim.clients.model_checks.isolation import seed_torch
from fedsim.clients.model_checks.safety import UnsafeModelError, preserve_state

_LARGE = 1e4
_SCALE = 0.1  # factor of the watched rows' clipped gradients, not a power of two
_STEP = 3  # distance between the places of two clients' watched rows


_NUMBER = "the number of examples"


def other_rows(
    features: Tensor, targets: Tensor, kept: Tensor, *, signs: int = 0
) -> Iterator[tuple[str, Tensor, Tensor]]:
    """Yield copies of the given examples in which all rows but the kept ones are changed.

    Args:
        features: features of n rows (n, ...).
        targets: targets of the rows (n, ...).
        kept: booleans (n,), true for the rows that stay.
        signs: number of random sign patterns of the large values. Each pattern is also used with
            all signs reversed, as a ReLU may hide a coupling of rows for one of the two. With 0,
            the large values have the signs of the examples.

    Yields:
        Triples (change of the other rows, features, targets). Zeros stand for rows without example.
    """

    def changed(cause: str, x: Tensor, y: Tensor) -> tuple[str, Tensor, Tensor]:
        return cause, _with_rows(x, kept, features), _with_rows(y, kept, targets)

    yield changed("other examples", features.roll(1, 0), targets.roll(1, 0))
    if features.is_floating_point():
        generator = torch.Generator().manual_seed(0)
        drawn = (torch.randint(0, 2, features.shape[1:], generator=generator) for _ in range(signs))
        patterns = [sign * (2 * bits - 1).to(features) for bits in drawn for sign in (1, -1)]
        for pattern in patterns or [1.0]:
            yield changed("large values", _LARGE * pattern * features, targets)
        yield changed("NaN", features * torch.nan, targets)
    yield changed(_NUMBER, torch.zeros_like(features), torch.zeros_like(targets))


def _with_rows(values: Tensor, kept: Tensor, old: Tensor) -> Tensor:
    values = values.clone()
    values[kept] = old[kept]
    return values


class _Isolation(ABC):
    """Base of the checks, which test each shape of padded batches once.

    Args:
        gradients: computes the model's per-example gradients, as in training.
        features: a few public or synthetic examples (n ≥ 1, ...), never private ones.
        targets: targets of these examples (n, ...).
        views: number of views V of each example, in successive rows.
    """

    def __init__(
        self, gradients: PerExampleGradients, features: Tensor, targets: Tensor, *, views: int = 1
    ) -> None:
        self._gradients, self._examples, self._views = gradients, (features, targets), views
        self._found: dict[tuple[int, int], str | None] = {}

    def check(self, clients: int, rows: int) -> None:
        """Check padded batches of one shape, with as many threads as training will use.

        Args:
            clients: number of clients K.
            rows: number of rows R of each client.

        Guarantee:
            the model's values, buffers and modes and the global random generators are unchanged.

        Raises:
            UnsafeModelError: a watched result changed; the message names the cause and the fix.
        """
        reason = self._reason(clients, rows)
        if reason is not None:
            raise UnsafeModelError(reason)

    def _reason(self, clients: int, rows: int) -> str | None:
        shape = clients, rows
        if shape not in self._found:
            self._found[shape] = self._first_difference(clients, rows)
        return self._found[shape]

    @abstractmethod
    def _first_difference(self, clients: int, rows: int) -> str | None:
        """Return the reason to refuse padded batches of a shape; None if they pass."""


class RowIsolation(_Isolation):
    """Bitwise check that no row of a padded batch changes another row's clipped gradient.

    One example of each client moves to another row, and the other rows get other examples, large
    values, NaN and zeros. The clipped gradient of this example must not change in any bit. When
    rows are permuted, the gradient norms of all rows must stay the same too.
    """

    def height(self, clients: int, rows: int, *, most: int | None = None, unit: int = 1) -> int:
        """Return a number of rows per client that passes the check, close to the preferred number.

        A number may fail, as libraries compute the last rows of some matrix products in another
        way. With one client, the number 1 always passes: each example is then computed alone.

        Args:
            clients: number of clients K.
            rows: preferred number of rows R of each client.
            most: largest physical batch, in rows; None for no limit.
            unit: number of views of an example; each of the R rows stands for that many rows of the
                padded batch.

        Raises:
            UnsafeModelError: no number passes; the message says why `rows` rows do not pass.
        """
        for tried in _heights(rows, most):
            if tried == 1 < rows and clients > 1:  # all rows are watched: no other row could change
                break
            if self._reason(clients, tried * unit) is None:
                return tried
        raise UnsafeModelError(self._reason(clients, rows * unit) or "")

    def _first_difference(self, clients: int, rows: int) -> str | None:
        gradients = self._gradients
        if clients * rows == 1 or isinstance(gradients, OneAtATime):
            return None  # each example has its own passes
        with preserve_state(gradients.model):
            gradients.model.eval()  # without keys, dropout draws by place
            trial = _Trial(gradients, _base(self._examples, clients, rows, self._views))
            difference = trial.first_difference()
        if difference is None:
            return None
        layer, cause = difference
        return (
            f"{layer}: in padded batches of {clients} x {rows} rows, an example's contribution "
            f"changes in its last bits with {cause}, so one example may change the contributions "
            "of all others, and no ε would hold; set local.max_physical_batch: 1, which computes "
            "each example alone"
        )


def _heights(rows: int, most: int | None) -> Iterator[int]:
    """Yield numbers of rows to try: `rows`, larger ones, smaller ones and 1, each once."""
    larger = [rows + 8, rows + 16, -(-rows // 64) * 64, 1 << rows.bit_length()]
    smaller = [height for height in (64, 32, 16, 8) if height < rows]
    fitting = [height for height in larger if rows > 1 and (most is None or height <= most)]
    yield from dict.fromkeys([rows, *fitting, *smaller, 1])


@dataclass(frozen=True)
class _Layout:
    """R rows of each of K clients, with the place of each client's watched row.

    A row is an example here, with V views in the padded batch.

    Attributes:
        features: features of the rows (K · R, V, ...).
        targets: targets of the rows (K · R, V, ...).
        places: places of the watched rows in the padded batch (K,).
    """

    features: Tensor
    targets: Tensor
    places: Tensor

    def moved(self, order: Tensor) -> "_Layout":
        """Return the layout with row order[i] in place i (K · R,)."""
        now = torch.argsort(order)[self.places]
        return _Layout(self.features[order], self.targets[order], now)

    def padded(self) -> PaddedBatch:
        """Return the padded batch."""
        return self._padded(self.features, self.targets, torch.ones_like(self._watched))

    def others(self) -> Iterator[tuple[str, PaddedBatch]]:
        """Yield (change of the other rows, padded batch with the same watched rows)."""
        watched = self._watched
        for cause, x, y in other_rows(self.features, self.targets, watched):
            yield cause, self._padded(x, y, watched | (cause != _NUMBER))

    @property
    def _watched(self) -> Tensor:
        watched = torch.zeros(len(self.features), dtype=torch.bool, device=self.places.device)
        watched[self.places] = True
        return watched

    def _padded(self, x: Tensor, y: Tensor, present: Tensor) -> PaddedBatch:
        views = x.shape[1]
        weights = present.float().repeat_interleave(views)
        return PaddedBatch(len(self.places), x.flatten(0, 1), y.flatten(0, 1), weights, views)


def _many_rows(examples: tuple[Tensor, Tensor], n: int) -> tuple[Tensor, Tensor]:
    """Return n rows, which repeat the examples with noise on floating-point features."""
    features, targets = examples
    index = torch.arange(n, device=features.device) % len(features)
    x, y = features[index], targets[index]
    if x.is_floating_point():
        noise = torch.randn(x.shape, generator=torch.Generator().manual_seed(0)).to(x)
        x = x + 0.3 * (x.std(correction=0) + 0.1) * noise
    return x, y


def _moved_values(gradients: PerExampleGradients, clients: int) -> Tensor:
    """Return values near the model's (K, size), as weights of zero could hide a difference."""
    data, generator = gradients.parameters.data, torch.Generator().manual_seed(1)
    return data + 0.02 * torch.randn(clients, len(data), generator=generator).to(data)


def _base(examples: tuple[Tensor, Tensor], clients: int, rows: int, views: int) -> _Layout:
    """Return the layout of the first pass: examples for K clients, R rows and V views."""
    x, y = _many_rows(examples, clients * rows * views)
    places = torch.arange(clients, device=x.device) * rows
    places += torch.arange(clients, device=x.device) * _STEP % rows
    return _Layout(x.unflatten(0, (-1, views)), y.unflatten(0, (-1, views)), places)


class _Trial:
    """Runs passes over padded batches of one shape and compares their results.

    Args:
        gradients: computes the model's per-example gradients.
        base: the rows of the first pass.
    """

    def __init__(self, gradients: PerExampleGradients, base: _Layout) -> None:
        self._gradients, self._base = gradients, base
        self._values = _moved_values(gradients, len(base.places))
        self._clipping = LayerClipping(1.0)
        self._groups = self._clipping.groups(gradients.parameters)
        self._first = base.padded()

    def first_difference(self) -> tuple[str, str] | None:
        """Return the layer and the cause of the first difference; None if there is none."""
        base = self._base
        norms, sums = self._pass(self._first, base.places)
        rows = torch.arange(len(base.features), device=base.places.device)
        rows = rows.view(len(base.places), -1)
        for order in (rows.flip(1).flatten(), rows.roll(_STEP, 1).flatten()):
            layout = base.moved(order)
            padded = layout.padded()
            results = self._pass(padded, layout.places)
            if not _same(results[0], norms[order]) or not _same(results[1], sums):
                return self._layer(padded, layout.places), "its place among the rows"
        for cause, padded in base.others():
            results = self._pass(padded, base.places)
            same_norms = _same(results[0][base.places], norms[base.places])
            if not same_norms or not _same(results[1], sums):
                return self._layer(padded, base.places), f"{cause} in the other rows"
        return None

    def _pass(self, padded: PaddedBatch, places: Tensor) -> tuple[Tensor, Tensor]:
        """Return the norms of all rows (n, m), and the watched contributions (K, size)."""
        groups, n = self._groups, len(padded.example_weights)
        scales = torch.zeros(n, 1, dtype=torch.float64, device=places.device)
        scales[places] = _SCALE
        bounds = scales.new_tensor([groups.bounds]).expand(n, -1)
        into = torch.zeros_like(self._values, dtype=torch.float64)
        clip = ClipBounds(self._clipping, groups.members, bounds, scales)
        clipped = self._gradients.clipped(self._values, padded, clip)
        with torch.no_grad():
            clipped.add_to(self._gradients.parameters.stacked_views(into))
        return clipped.norms, into

    def _layer(self, padded: PaddedBatch, places: Tensor) -> str:
        """Return the name of the layer in which the watched rows' results first differ.

        It is the layer before the first one whose input differs; where all inputs are equal, the
        layer after the last one whose output gradient differs; else the first layer.
        """
        before = self._gradients.row_gradients(self._values, self._first)
        after = self._gradients.row_gradients(self._values, padded)
        layers = self._groups.members
        at = self._base.places * padded.views, places * padded.views  # of the first views

        def differs(part: str, number: int) -> bool:
            used = [i for i in layers[number] if i in before and i in after]
            return any(not _same_part(before[i], after[i], part, at) for i in used)

        inputs = [n for n in range(len(layers)) if differs("input", n)]
        outputs = [n for n in range(len(layers)) if differs("output_gradient", n)]
        number = 0
        if inputs:
            number = max(inputs[0] - 1, 0)
        elif outputs:
            number = min(outputs[-1] + 1, len(layers) - 1)
        name = self._gradients.parameters.names[layers[number][0]].rpartition(".")[0]
        return f"layer {name!r}" if name else "the model"


def _same_part(use: ExampleUse, other: ExampleUse, part: str, at: tuple[Tensor, Tensor]) -> bool:
    """Return whether the watched rows have the same input, or output gradient, in two passes."""
    if not isinstance(use, LayerUse) or not isinstance(other, LayerUse):
        return True
    left, right = getattr(use, part), getattr(other, part)
    return len(left) == 0 or _same(left[at[0]], right[at[1]])


def _same(left: Tensor, right: Tensor) -> bool:
    """Return whether two tensors have the same values, where NaN equals NaN."""
    return bool(((left == right) | (left.isnan() & right.isnan())).all())


class MemberIsolation(_Isolation):
    """Bitwise check that clients which train together do not change each other's sums of gradients.

    Every second client gets other examples, large values, NaN, or no examples. The sums of
    gradients of all other clients must stay the same, bit for bit. They must also stay the same at
    another position in the padded batch.
    """

    def _first_difference(self, clients: int, rows: int) -> str | None:
        if clients == 1:
            return None
        with preserve_state(self._gradients.model):
            self._gradients.model.train()
            cause = self._first_cause(clients, rows)
        if cause is None:
            return None
        return (
            f"in blocks of {clients} clients, a client's update changes in its last bits with "
            f"{cause} of another client, so no ε of a client would hold; set "
            "local.vectorized_clients: off, which trains each client alone"
        )

    def _first_cause(self, clients: int, rows: int) -> str | None:
        """Return the property of other clients that changes a sum; None if there is none."""
        n = clients * rows * self._views
        weights = self._gradients.parameters.data.new_full((n,), 1.0 / rows)
        base = PaddedBatch(clients, *_many_rows(self._examples, n), weights, self._views)
        values = _moved_values(self._gradients, clients)
        if self._is_moved(values, base):
            return "the place"
        expected = self._sums(values, base)
        for parity in (0, 1):
            watched = torch.arange(clients, device=values.device) % 2 == parity
            kept = watched.repeat_interleave(rows * self._views)
            for cause, x, y in other_rows(base.features, base.targets, kept):
                changed = replace(base, features=x, targets=y)
                if cause == _NUMBER:
                    changed = replace(changed, weights=base.weights * kept)
                sums = self._sums(values, changed)
                if not torch.equal(sums[watched], expected[watched]):
                    return cause
        return None

    def _is_moved(self, values: Tensor, base: PaddedBatch) -> bool:
        """Return whether a sum depends on its client's place in the padded batch.

        Eval mode turns dropout off, which draws by place here.
        """
        is_training = self._gradients.model.training
        self._gradients.model.eval()
        rows = len(base.weights) // base.clients
        moved = replace(
            base, features=base.features.roll(rows, 0), targets=base.targets.roll(rows, 0)
        )
        sums = self._sums(values, base), self._sums(values.roll(1, 0), moved)
        self._gradients.model.train(is_training)
        return not torch.equal(sums[0].roll(1, 0), sums[1])

    def _sums(self, values: Tensor, padded: PaddedBatch) -> Tensor:
        into = torch.zeros_like(values)
        seed_torch(0, values.device)  # for dropout
        self._gradients.add_sums(values, padded, into)
        return into
