"""The tools by name: the one module outside `fedsim/tools/` that names one.

They stand here as text, not as entry points of the distribution. A checkout on PYTHONPATH has none,
or those of another copy that is installed beside it; reading them takes 50 ms, longer than
`fedsim --help` may; and they have no order, which the help page needs.
"""

from collections.abc import Callable
from typing import Any

from fedsim.core.imports import ByName
from fedsim.core.settings import Settings

COMMANDS = {
    "curve": "fedsim.tools.curve:curve_command",
    "totals": "fedsim.tools.totals.command:account_command",
    "audit": "fedsim.tools.attack.command:audit_command",
    "deploy": "fedsim.tools.deployment.commands:deploy_command",
    "node-policy": "fedsim.tools.deployment.commands:node_policy_command",
    "client-key": "fedsim.tools.deployment.commands:client_key_command",
    "helper-key": "fedsim.tools.deployment.commands:helper_key_command",
}
"""Commands of tools."""

OPTIONS = ByName[Callable[..., Any]](
    {
        "plan --advise": "fedsim.tools.advice.advice:advise",
        "compare --select": "fedsim.tools.search.terminal:perform",
        "verify --replay": "fedsim.tools.replay:replay_run",
        "verify of a search": "fedsim.tools.search.verify:check_command",
    }
)
"""What commands of the core hand on."""

FILES = ByName[type[Settings]]({"a node's policy": "fedsim.tools.deployment.policy:NodePolicy"})
"""Settings files of tools, for the reference page."""
