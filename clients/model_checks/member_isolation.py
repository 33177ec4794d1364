"""Check, bit for bit, that what a client learns depends on no other client of its block.

Where the unit is the client, the proof assumes that a client's update is a function of the global
model and of its own data. Clients that train in stacked tensors share products, so this is a
property of a library on a machine, and is tested on the tiles that will run.
"""

from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor

from fedsim.clients.gradients.interface import Tile
from fedsim.clients.gradients.rule_gradients import RuleGradients
from fedsim.clients.model_checks.safety import UnsafeModelError, preserve_state


class MemberIsolation:
    """Checks the tiles of each shape once.

    Args:
        gradients: of the model, as training will use them.
        features: a few public or synthetic examples (n ≥ 1, ...), never private ones.
        targets: their targets (n, ...).
        views: V, the rows of each example, side by side.
    """

    def __init__(
        self, gradients: RuleGradients, features: Tensor, targets: Tensor, *, views: int = 1
    ) -> None:
        self._gradients, self._examples, self._views = gradients, (features, targets), views
        self._found: dict[tuple[int, int], str | None] = {}

    def check(self, clients: int, rows: int) -> None:
        """Check tiles of one shape; call it with the number of threads that will train.

        Every other client gets other examples, large values, NaN, or none. The sums of gradients of
        the clients between them must stay the same, bit for bit. They must also stay the same in
        another place of the tile.

        Guarantee: the model's values, buffers and modes and the global random generators are
        unchanged.

        Args:
            clients: K.
            rows: R of each client.

        Raises:
            UnsafeModelError: a sum changed; the message names the fix.
        """
        shape = clients, rows
        if shape not in self._found:
            with preserve_state(self._gradients.model):
                self._gradients.model.train()
                self._found[shape] = self._first_difference(clients, rows)
        what = self._found[shape]
        if what is not None:
            raise UnsafeModelError(
                f"in blocks of {clients} clients, what one client learns changes in its last bits "
                f"with {what} of another, so no ε of a client would hold; set local.cohort: off, "
                "which trains each client alone"
            )

    def _first_difference(self, clients: int, rows: int) -> str | None:
        if clients == 1:
            return None
        base = self._tile(clients, rows)
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

    def _tile(self, clients: int, rows: int) -> Tile:
        """Return rows of the examples again and again, moved a little where they can be."""
        features, targets = self._examples
        n = clients * rows * self._views
        index = torch.arange(n, device=features.device) % len(features)
        x, y = features[index], targets[index]
        if x.is_floating_point():
            noise = torch.randn(x.shape, generator=torch.Generator().manual_seed(0)).to(x)
            x = x + 0.3 * (x.std(correction=0) + 0.1) * noise
        weights = self._gradients.parameters.data.new_full((n,), 1.0 / rows)
        return Tile(clients, x, y, weights, self._views)

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
