"""Import paths of the tools in `fedsim/tools/`; no other module outside that folder names them.

They are no entry points: a checkout on PYTHONPATH has none, or those of another installed copy,
reading them takes 50 ms, longer than `fedsim --help` may, and the help page needs an order.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from fedsim.core.commands import ByName

if TYPE_CHECKING:
    from fedsim.core.settings import Settings

COMMANDS = {
    "curve": "fedsim.tools.curve:curve_command",
    "totals": "fedsim.tools.totals:account_command",
    "audit": "fedsim.tools.attack:audit_command",
    "deploy": "fedsim.tools.deployment:deploy_command",
    "node-policy": "fedsim.tools.deployment:node_policy_command",
    "client-key": "fedsim.tools.deployment:client_key_command",
    "helper-key": "fedsim.tools.deployment:helper_key_command",
}
"""The commands of tools, by name."""

OPTIONS = ByName[Callable[..., Any]](
    {
        "plan --advise": "fedsim.tools.advice.advice:advise_experiment",
        "print of plan --advise": "fedsim.tools.advice.advice:print_advice",
        "why not plan --advise": "fedsim.tools.advice:why_not_advised",
        "compare --select": "fedsim.tools.search.perform:perform",
        "verify --replay": "fedsim.tools.replay:replay_run",
        "verify of a search": "fedsim.tools.search.verify:verify_if_search",
    }
)
"""Options of core commands that a tool implements, by command and option."""

FILES: "ByName[type[Settings]]" = ByName(
    {"a node's policy": "fedsim.tools.deployment.policy:NodePolicy"}
)
"""The settings files of tools, for the reference page."""
