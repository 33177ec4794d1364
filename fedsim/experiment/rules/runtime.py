"""Rules of `runtime`."""

from collections.abc import Iterator
from pathlib import Path

from fedsim.experiment.messages import PathMessage
from fedsim.experiment.references import check_name
from fedsim.experiment.rules.messages import messages_at
from fedsim.simulation.catalog import TRACKERS
from fedsim.simulation.settings import RuntimeSettings


def check_trackers(runtime: RuntimeSettings, base: Path) -> Iterator[PathMessage]:
    """Yield the mistakes in `runtime.trackers` that show without importing a plug-in.

    Args:
        runtime: the section.
        base: the directory in which relative paths start.
    """
    for index, name in enumerate(runtime.trackers):
        mistake = check_name(name, "tracker", TRACKERS, base)
        yield from messages_at(("runtime", "trackers", index), mistake)
