"""Settings of sampling: `privacy.sampling`."""

from pydantic import Field

from fedsim.clients.sampling.schemes import SAMPLING_SCHEMES, SamplingName, SamplingScheme
from fedsim.core.settings import Settings, Share


class SamplingSettings(Settings):
    """How lots are drawn from a client's examples."""

    name: SamplingName = Field(description="which sampling; see `privacy.sampling`")
    rate: Share | None = Field(
        default=None,
        description="expected share of a client's examples in a lot, the same for clients of all "
        "sizes; null: local.batch_size / declared client size",
    )

    @property
    def scheme(self) -> SamplingScheme:
        """What is known of the sampling without numbers."""
        return SAMPLING_SCHEMES[self.name]
