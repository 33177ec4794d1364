"""Rules of `local.lr_schedule`: a learning rate that is a part of a theorem stays as it is."""

from collections.abc import Iterator

from fedsim.experiment.messages import PathMessage
from fedsim.experiment.rules.sections import Sections

_PATH = ("local", "lr_schedule")


def check_lr_schedule(sections: Sections) -> Iterator[PathMessage]:
    """Yield (path, message) for every setting that a schedule of learning rates contradicts.

    Args:
        sections: the valid sections.
    """
    local, privacy, federation = sections.local, sections.privacy, sections.federation
    if local is None or local.lr_schedule is None:
        return
    if privacy is not None and privacy.trust != "local" and privacy.unit == "example":
        yield (
            _PATH,
            f"trust: {privacy.trust} plans the grid of all sums for one learning rate; remove "
            "lr_schedule, or use trust: local",
        )
    if privacy is not None and privacy.perturbation == "output":
        yield (
            _PATH,
            "the sensitivity of perturbation: output is proven for one learning rate; remove "
            "lr_schedule",
        )
    if federation is None:
        return
    for number in (1, federation.rounds):
        rate = local.learning_rate(number)
        if rate <= 0.0:
            yield (
                _PATH,
                f"the learning rate of round {number} is {rate:g}, and that round would teach "
                "nothing at full cost; end the schedule later, or set a larger eta_min or gamma",
            )
            return
