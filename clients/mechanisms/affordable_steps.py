"""A client's budget: how many of its planned steps its target ε affords.

The schedule of a client (its mechanism, lots and rounds) is fixed before the run and depends on
nothing private. So the decisions of its privacy filter are known beforehand: it grants the first
`affordable_steps` steps and refuses all later ones.
"""

from functools import lru_cache

from fedsim.accountant import make_accountant
from fedsim.accountant.accountants import AccountantChoice
from fedsim.accountant.events import Adjacency
from fedsim.accountant.sampler_slack import epsilon_with_slack
from fedsim.accountant.search import largest_count
from fedsim.clients.mechanisms.contract import Mechanism


@lru_cache(maxsize=4096)  # clients of one size and budget share the answer
def affordable_steps(
    step: Mechanism,
    most: int,
    *,
    target_epsilon: float,
    delta: float,
    accountant: AccountantChoice,
    adjacency: Adjacency,
) -> int:
    """Return the number of steps that a target affords, at most `most`.

    Guarantee: that many steps have ε(delta) ≤ `target_epsilon` by the accountant, under the
    adjacency. Below `most`, one more step exceeds the target.

    Args:
        step: the mechanism of each step.
        most: the largest answer, ≥ 0.
        target_epsilon: > 0.
        delta: in (0, 1).
        accountant: the accountant of the target.
        adjacency: what the guarantee protects against.
    """

    def epsilon(steps: int) -> float:
        return epsilon_of_steps(
            step, min(steps, most), delta=delta, accountant=accountant, adjacency=adjacency
        )

    if most == 0 or epsilon(most) <= target_epsilon:
        return most
    return largest_count(epsilon, target_epsilon, start=max(1, most // 2))


def epsilon_of_steps(
    step: Mechanism,
    steps: int,
    *,
    delta: float,
    accountant: AccountantChoice,
    adjacency: Adjacency,
) -> float:
    """Return ε of a client's first `steps` steps with the sampler's slack; 0 for none.

    Args:
        step: the mechanism of each step.
        steps: ≥ 0.
        delta: in (0, 1).
        accountant: the accountant that computes ε.
        adjacency: what ε protects against.
    """
    if steps == 0:
        return 0.0
    account = make_accountant(accountant, adjacency=adjacency)
    for event, count in step.charges(0, steps):
        account.compose(event, count)
    return epsilon_with_slack(account.get_epsilon, delta)
