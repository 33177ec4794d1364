"""Adversaries of a client: what each adversary sees, and the ε that is claimed against it.

| trust       | observer | sees                                                                 |
|-------------|----------|----------------------------------------------------------------------|
| local       | server   | the client's own releases                                            |
| distributed | sums     | the smallest sum that may be opened, with the fewest honest clients  |
| distributed | server   | the client's upload (integers) with the client's share of the noise  |
| central     | models   | the client's upload (integers) with the noise of the server          |
"""

from dataclasses import dataclass
from functools import partial

from fedsim.accountant.trust import Observer as Against
from fedsim.clients.mechanisms.plan import Accounting
from fedsim.federation.charged_noise import honest_draws, step_length_of
from fedsim.federation.federation import Federation
from fedsim.planning.alternatives import privacy_of


@dataclass(frozen=True)
class Claim:
    """The ε that is claimed for a client against one adversary, and what that adversary sees."""

    against: Against  # who sees single uploads, opened sums, or global models
    epsilon: float  # after all steps
    steps: int  # of the whole run
    accounting: Accounting
    step_length: float | None = None  # of integers in sums, over the sensitivity; None: no sums
    others: tuple[int, ...] = ()  # the other honest clients, whose noise is in the sum


def claims_of(federation: Federation, client: int) -> list[Claim]:
    """Return the claim against each adversary of a client, that of the report first."""
    plans, privacy = federation.plan.clients or (), privacy_of(federation.experiment)
    plan, step_length = plans[client], step_length_of(federation, client)
    steps, accounting = plan.steps_to_take, Accounting.of(privacy, plan.delta)
    claim = partial(Claim, steps=steps, accounting=accounting, step_length=step_length)
    claimed = accounting.epsilon(plan.charges(0, steps))
    if plan.part is None or step_length is None:
        return [claim("server", claimed, step_length=None)]
    if not plan.part.adds_noise:
        return [claim("models", claimed)]
    others = [k for k, other in enumerate(plans) if other.part is not None and k != client]
    honest = tuple(others[: honest_draws(federation.experiment) - 1])
    by_share = accounting.epsilon(plan.server_charges(0, steps) or [])
    return [claim("sums", claimed, others=honest), claim("server", by_share)]
