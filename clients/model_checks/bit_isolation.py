"""Check, bit for bit, that rows of a tile and clients of a block are kept apart.

Every proof of DP-SGD assumes that an example's contribution depends on the parameters and on the
example alone; where the unit is the client, that its update is a function of the global model and
of its own data. Tiles of a fixed shape make that true where a matrix library treats the rows of one
product alike. That is a property of a library on a machine, so it is tested on the tiles that will
run: their shape, type, device and threads.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from fedsim.clients.clipping.clipping import GroupClipping
from fedsim.clients.gradients.fallback import OneAtATime
from fedsim.clients.gradients.layers.base import ExampleUse, LayerUse
from fedsim.clients.gradients.per_example import ClipBounds, PerExampleGradients, Tile
from fedsim.clients.model_checks.safety import UnsafeModelError, preserve_state

_SCALE = 0.1  # of the watched rows' clipped gradients, no power of two
_STEP = 3  # between the places of two clients' watched rows


class _Isolation(ABC):
    """Checks the tiles of each shape once.

    Args:
        gradients: of the model, as training will use them.
        features: a few public or synthetic examples (n ≥ 1, ...), never private ones.
        targets: their targets (n, ...).
        views: V, the rows of each example, side by side.
    """

    def __init__(
        self, gradients: PerExampleGradients, features: Tensor, targets: Tensor, *, views: int = 1
    ) -> None:
        self._gradients, self._examples, self._views = gradients, (features, targets), views
        self._found: dict[tuple[int, int], str | None] = {}

    def check(self, clients: int, rows: int) -> None:
        """Check tiles of one shape; call it with the number of threads that will train.

        Args:
            clients: K.
            rows: R of each client.

        Guarantee:
            the model's values, buffers and modes and the global random generators are unchanged.

        Raises:
            UnsafeModelError: what was watched changed; the message names the cause and the fix.
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
        """Return why tiles of a shape are refused; None: they are not."""


class RowIsolation(_Isolation):
    """Checks that rows of a tile are kept apart.

    One example of each client is watched. It changes its place, and the other rows get other
    examples, large values, NaN and zeros. Its clipped contribution must stay the same, bit for bit.
    Of permuted rows, the gradient norms of all must stay the same.
    """

    def height(self, clients: int, rows: int, *, most: int | None = None, unit: int = 1) -> int:
        """Return the height of tiles in which examples keep apart: `rows`, or the next that does.

        In some products a library treats the last rows of some shapes in another way. For one
        client there is always a height without such products: 1 computes each example alone.

        Args:
            clients: K.
            rows: R of each client.
            most: rows that fit into memory; None: any number.
            unit: rows of the tile that are one row here.

        Raises:
            UnsafeModelError: there is none; the message is that of `check` for `rows`.
        """
        for tried in _heights(rows, most):
            if tried == 1 < rows and clients > 1:  # every row is watched: no other would be seen
                break
            if self._reason(clients, tried * unit) is None:
                return tried
        raise UnsafeModelError(self._reason(clients, rows * unit) or "")

    def _first_difference(self, clients: int, rows: int) -> str | None:
        gradients = self._gradients
        if clients * rows == 1 or isinstance(gradients, OneAtATime):
            return None  # each example has passes of its own
        with preserve_state(gradients.model):
            gradients.model.eval()  # dropout draws by place
            trial = _Trial(gradients, _base(self._examples, (clients, rows, self._views)))
            found = trial.first_difference()
        if found is None:
            return None
        layer, what = found
        return (
            f"{layer}: in tiles of {clients} x {rows} rows, what an example contributes changes in "
            f"its last bits with {what}, so one example may change the contributions of all, and "
            "no ε would hold; set local.max_physical_batch: 1, which computes each example alone"
        )


def _heights(rows: int, most: int | None) -> Iterator[int]:
    """Yield `rows`, larger heights, smaller ones and 1; each once."""
    larger = [rows + 8, rows + 16, -(-rows // 64) * 64, 1 << rows.bit_length()]
    smaller = [height for height in (64, 32, 16, 8) if height < rows]
    fitting = [one for one in larger if rows > 1 and (most is None or one <= most)]
    yield from dict.fromkeys([rows, *fitting, *smaller, 1])


@dataclass(frozen=True)
class _Layout:
    """Rows of K clients, R each, and the place of each client's watched row.

    A row is an example here, with V views of it in the tile.

    Attributes:
        features: (K, R, V, ...).
        targets: (K, R, V, ...).
        places: of the watched rows in the tile (K,).
    """

    features: Tensor
    targets: Tensor
    places: Tensor

    @property
    def rows(self) -> int:
        """R."""
        return self.features.shape[1]

    def moved(self, places: Tensor) -> "_Layout":
        """Return the layout with the row at places[r] (R,) of each client in its row r."""
        clients = torch.arange(len(self.features), device=self.places.device)
        now = torch.argsort(places)[self.places % self.rows] + self.rows * clients
        return _Layout(self.features[:, places], self.targets[:, places], now)

    def with_others(self, features: Tensor, targets: Tensor) -> "_Layout":
        """Return the layout with the watched rows of this one, and other rows beside them."""
        features, targets = features.clone(), targets.clone()
        for new, own in ((features, self.features), (targets, self.targets)):
            new.flatten(0, 1)[self.places] = own.flatten(0, 1)[self.places]
        return replace(self, features=features, targets=targets)

    def tile(self, *, is_alone: bool) -> Tile:
        """Return the tile; alone, the watched rows are the only examples."""
        x, y = self.features.flatten(0, 2), self.targets.flatten(0, 2)
        clients, rows, views = self.features.shape[:3]
        weights = torch.full((clients * rows,), 0.0 if is_alone else 1.0, device=x.device)
        weights[self.places] = 1.0
        return Tile(clients, x, y, weights.repeat_interleave(views), views)


def _many_rows(examples: tuple[Tensor, Tensor], n: int) -> tuple[Tensor, Tensor]:
    """Return n rows: the examples again and again, moved a little where they can be."""
    features, targets = examples
    index = torch.arange(n, device=features.device) % len(features)
    x, y = features[index], targets[index]
    if x.is_floating_point():
        noise = torch.randn(x.shape, generator=torch.Generator().manual_seed(0)).to(x)
        x = x + 0.3 * (x.std(correction=0) + 0.1) * noise
    return x, y


def _base(examples: tuple[Tensor, Tensor], shape: tuple[int, int, int]) -> _Layout:
    """Return the rows of a tile.

    Args:
        examples: a few, with their targets.
        shape: (K, R, V).
    """
    clients, rows, views = shape
    x, y = _many_rows(examples, clients * rows * views)
    places = torch.arange(clients, device=x.device) * rows
    places += torch.arange(clients, device=x.device) * _STEP % rows
    return _Layout(x.unflatten(0, shape), y.unflatten(0, shape), places)


class _Trial:
    """Passes over tiles of one shape.

    Args:
        gradients: of the model.
        base: the rows of the first pass.
    """

    def __init__(self, gradients: PerExampleGradients, base: _Layout) -> None:
        self._gradients, self._base = gradients, base
        data = gradients.parameters.data
        moved = torch.randn(
            len(base.features), len(data), generator=torch.Generator().manual_seed(1)
        )
        self._values = data + 0.02 * moved.to(data)  # zero weights could hide a difference
        self._clipping = GroupClipping(1.0)
        self._groups = self._clipping.groups(gradients.parameters)
        self._first = base.tile(is_alone=False)

    def first_difference(self) -> tuple[str, str] | None:
        """Return the layer and the cause of the first difference; None: there is none."""
        base, rows = self._base, self._base.rows
        norms, sums = self._pass(self._first, base.places)
        order = torch.arange(rows, device=base.places.device)
        for places in (order.flip(0), order.roll(_STEP)):
            layout = base.moved(places)
            tile = layout.tile(is_alone=False)
            found = self._pass(tile, layout.places)
            expected = norms.unflatten(0, (-1, rows))[:, places].flatten(0, 1)
            if not _same(found[0], expected) or not _same(found[1], sums):
                return self._layer(tile, layout.places), "its place among the rows"
        for what, layout, is_alone in self._companies():
            tile = layout.tile(is_alone=is_alone)
            found = self._pass(tile, layout.places)
            same_norms = _same(found[0][layout.places], norms[base.places])
            if not same_norms or not _same(found[1], sums):
                return self._layer(tile, layout.places), what
        return None

    def _companies(self) -> Iterator[tuple[str, _Layout, bool]]:
        """Yield what differs from the base, the rows, and whether the others are no examples."""
        base = self._base
        x, y = base.features, base.targets
        yield (
            "other examples in the other rows",
            base.with_others(x.roll(1, 1), y.roll(1, 1)),
            False,
        )
        if x.is_floating_point():
            yield "large values in the other rows", base.with_others(1e4 * x, y), False
            yield "NaN in the other rows", base.with_others(x * torch.nan, y), False
        zeros = base.with_others(torch.zeros_like(x), torch.zeros_like(y))
        yield "the number of examples", zeros, True

    def _pass(self, tile: Tile, places: Tensor) -> tuple[Tensor, Tensor]:
        """Return the norms of all rows (n, m), and each client's watched contribution (K, size)."""
        groups, n = self._groups, len(tile.example_weights)
        scales = torch.zeros(n, 1, dtype=torch.float64, device=places.device)
        scales[places] = _SCALE
        bounds = scales.new_tensor([groups.bounds]).expand(n, -1)
        into = torch.zeros_like(self._values, dtype=torch.float64)
        clip = ClipBounds(self._clipping, groups.members, bounds, scales)
        norms, _ = self._gradients.add_clipped_sums(self._values, tile, clip, into)
        return norms, into

    def _layer(self, tile: Tile, places: Tensor) -> str:
        """Return the name of the layer that treats the watched rows in another way.

        It is the last layer before the first other input; with the same inputs, the first layer
        behind the last other output gradient; with the same gradients too, the first layer.
        """
        one = self._gradients.row_gradients(self._values, self._first)
        two = self._gradients.row_gradients(self._values, tile)
        layers = self._groups.members
        at = self._base.places * tile.views, places * tile.views  # of the first views

        def differs(part: str, number: int) -> bool:
            used = [i for i in layers[number] if i in one and i in two]
            return any(not _same_part(one[i], two[i], part, at) for i in used)

        inputs = [n for n in range(len(layers)) if differs("input", n)]
        outputs = [n for n in range(len(layers)) if differs("output_gradient", n)]
        number = 0
        if inputs:
            number = max(inputs[0] - 1, 0)
        elif outputs:
            number = min(outputs[-1] + 1, len(layers) - 1)
        name = self._gradients.parameters.names[layers[number][0]].rpartition(".")[0]
        return f"layer {name!r}" if name else "the model"


def _same_part(one: ExampleUse, two: ExampleUse, part: str, places: tuple[Tensor, Tensor]) -> bool:
    """Whether the watched rows have the same input, or output gradient, in two passes."""
    if not isinstance(one, LayerUse) or not isinstance(two, LayerUse):
        return True
    left, right = getattr(one, part), getattr(two, part)
    return len(left) == 0 or _same(left[places[0]], right[places[1]])


def _same(one: Tensor, two: Tensor) -> bool:
    """Whether two tensors have the same values; NaN is one value."""
    return bool(((one == two) | (one.isnan() & two.isnan())).all())


class MemberIsolation(_Isolation):
    """Checks that clients of a block are kept apart.

    Every other client gets other examples, large values, NaN, or none. The sums of gradients of the
    clients between them must stay the same, bit for bit. They must also stay the same in another
    place of the tile.
    """

    def _first_difference(self, clients: int, rows: int) -> str | None:
        if clients == 1:
            return None
        with preserve_state(self._gradients.model):
            self._gradients.model.train()
            what = self._first_cause(clients, rows)
        if what is None:
            return None
        return (
            f"in blocks of {clients} clients, what one client learns changes in its last bits with "
            f"{what} of another, so no ε of a client would hold; set local.cohort: off, which "
            "trains each client alone"
        )

    def _first_cause(self, clients: int, rows: int) -> str | None:
        """Return what of another client changes a sum; None: nothing does."""
        n = clients * rows * self._views
        weights = self._gradients.parameters.data.new_full((n,), 1.0 / rows)
        base = Tile(clients, *_many_rows(self._examples, n), weights, self._views)
        generator = torch.Generator().manual_seed(1)
        data = self._gradients.parameters.data
        values = data + 0.02 * torch.randn(clients, len(data), generator=generator).to(data)
        if self._is_moved(values, base):
            return "the place"
        expected = self._sums(values, base)
        for parity in (0, 1):
            watched = torch.arange(clients, device=data.device) % 2 == parity
            kept = watched.repeat_interleave(rows * self._views)
            for what, tile in _companies(base, kept):
                found = self._sums(values, tile)
                if not torch.equal(found[watched], expected[watched]):
                    return what
        return None

    def _is_moved(self, values: Tensor, base: Tile) -> bool:
        """Whether a sum depends on its client's place in the tile; without dropout, as by place."""
        is_training = self._gradients.model.training
        self._gradients.model.eval()
        each = len(base.weights) // base.clients
        moved = replace(
            base, features=base.features.roll(each, 0), targets=base.targets.roll(each, 0)
        )
        sums = self._sums(values, base), self._sums(values.roll(1, 0), moved)
        self._gradients.model.train(is_training)
        return not torch.equal(sums[0].roll(1, 0), sums[1])

    def _sums(self, values: Tensor, tile: Tile) -> Tensor:
        into = torch.zeros_like(values)
        torch.manual_seed(0)  # of dropout
        self._gradients.add_sums(values, tile, into)
        return into


def _companies(base: Tile, kept: Tensor) -> Iterator[tuple[str, Tile]]:
    """Yield what differs from the base in the rows that are not kept, and the tile."""

    def with_others(features: Tensor, targets: Tensor) -> Tile:
        features, targets = features.clone(), targets.clone()
        features[kept], targets[kept] = base.features[kept], base.targets[kept]
        return replace(base, features=features, targets=targets)

    x, y = base.features, base.targets
    yield "the examples", with_others(x.roll(1, 0), y.roll(1, 0))
    if x.is_floating_point():
        yield "large values", with_others(1e4 * x, y)
        yield "NaN in the data", with_others(x * torch.nan, y)
    none = with_others(torch.zeros_like(x), torch.zeros_like(y))
    yield "the number of examples", replace(none, weights=base.weights * kept)
