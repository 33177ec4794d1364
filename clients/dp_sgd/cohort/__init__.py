"""Steps of many clients at once: stacked parameters, one forward, one backward.

The clients share an architecture. Their examples pass through the unchanged model as one batch,
client after client; operations with parameters run on the stacked ones (`uses`), so each
client's examples meet that client's values. Clipping bounds, noise and random streams stay each
client's own.

Guarantee: on the CPU a client's values after a step are, to the bit, those of the client alone,
whoever else is in the cohort, for models on which `cohorts_agree` holds. That is why a cohort may
be formed, or not, by whatever is fast: no sum runs over clients, a client's products have the shape
that they have alone, and batched products are the same routine.
"""

from fedsim.clients.dp_sgd.cohort.base import Cohort, Member
from fedsim.clients.dp_sgd.cohort.plain import PlainCohort
from fedsim.clients.dp_sgd.cohort.private import PrivateCohort

__all__ = ["Cohort", "Member", "PlainCohort", "PrivateCohort"]
