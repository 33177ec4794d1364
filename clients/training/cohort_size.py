"""Number of clients that train together: the cost model of `runtime.cohort: auto`."""

from dataclasses import dataclass

from torch import nn

_MAX_CLIENTS = 512
_MAX_PRIVATE_VALUES, _MAX_PLAIN_VALUES = 1 << 23, 1 << 20  # of all clients
_MIN_PRIVATE_CLIENTS, _MIN_CONV_CLIENTS, _MIN_PLAIN_CLIENTS = 3, 8, 16
_MAX_GRADIENT_VALUES = 1 << 24  # values of all clients' per-example gradients: 64 MB
_MAX_INPUT_VALUES = (
    1 << 20
)  # values of all clients' lots; what layers make of images is ten times as large


@dataclass(frozen=True)
class Workload:
    """Work of one client in a step.

    Attributes:
        values: trainable values of the model.
        lot: expected examples of a lot.
        inputs: values of one example.
        private: whether clients clip and add noise.
    """

    values: int
    lot: float
    inputs: int
    private: bool


def cohort_size(model: nn.Module, work: Workload, setting: int | str) -> int:
    """Return the number of clients that train together; 1: each alone.

    The cost model. Clients of a cohort share the cost of starting each operation. That is most of
    the time of small models and small batches, much of the clipping, and the refilling of the
    instruction cache between steps. Without privacy it is little, and the values of all clients
    should fit into the cache, as those of one client do. Convolutions run client by client and hold
    the gradients of all examples, so their memory is bounded, too. Recurrent layers gain little.

    Table: clients per cohort, and the time of a private client's round of 4 steps over its time
    alone (in brackets: without privacy). AMD EPYC with 1 MB of L2 and AVX-512, whole rounds with
    the server:

    | model       | lot |                                                                  |
    |-------------|-----|------------------------------------------------------------------|
    | 64-32-10    |   8 | 64: 0.29 (0.38); 128: 0.28 (0.40); 256: 0.25 (0.37); 512: 0.22   |
    | 784-32-10   |  16 | 41: 0.59 (0.78); 82: 0.51 (0.74); 164: 0.51 (0.74)               |
    | 784-64-10   |  32 | 20: 0.72 (0.92); 40: 0.69 (0.96); 80: 0.64 (0.94); 160: 0.63     |
    | 784-128-10  |  32 | 10: 0.86 (1.10); 20: 0.83 (1.09); 40: 0.80 (1.12); 80: 0.74      |
    | 784-256-10  |  32 | 5: 0.95 (1.16); 10: 0.92 (1.07); 20: 0.86 (1.01); 40: 0.82       |
    | small CNN   |  32 | 4: 1.04; 10: 0.94; 25: 0.89; 50: 0.85                            |

    On an earlier processor of that kind, beside other work, private MLPs neither gained nor lost by
    more than 2^20 values. Two clients together are slower than each alone.

    Args:
        model: the architecture.
        work: of one client in a step.
        setting: `runtime.cohort`: auto, off, or the number itself.
    """
    if setting == "off":
        return 1
    if isinstance(setting, int):
        return setting
    limit = _MAX_PRIVATE_VALUES if work.private else _MAX_PLAIN_VALUES
    clients = min(_MAX_CLIENTS, limit // work.values)
    fewest = _MIN_PRIVATE_CLIENTS if work.private else _MIN_PLAIN_CLIENTS
    if _has(model, nn.Conv1d, nn.Conv3d, nn.RNNBase):
        return 1
    if _has(model, nn.Conv2d):
        if not work.private:
            return 1
        fewest = _MIN_CONV_CLIENTS
        held, inputs = work.lot * work.values, work.lot * work.inputs
        clients = min(clients, int(_MAX_GRADIENT_VALUES / held), int(_MAX_INPUT_VALUES / inputs))
    return clients if clients >= fewest else 1


def _has(model: nn.Module, *kinds: type[nn.Module]) -> bool:
    return any(isinstance(module, kinds) for module in model.modules())
