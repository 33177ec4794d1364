"""The policy of a node: a file of the node's operator that limits what a server can request.

Its path is `policy` in --node-config, else FEDSIM_POLICY, else `policy.yaml` in the node's state
directory. A server can neither send nor change it. Without the file, only private experiments are
answered.
"""

import logging
import os
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import Field, field_validator, model_validator

from fedsim.accountant.trust import Trust
from fedsim.core.settings import Settings
from fedsim.experiment.errors import ExperimentError
from fedsim.experiment.load import read_checked
from fedsim.experiment.schema import NAME_PATTERN
from fedsim.tools.deployment.data_ledger import affords_anything
from fedsim.tools.deployment.private_files import DeploymentError, configured_path, refuse_open

POLICY_FILE = "policy.yaml"

logger = logging.getLogger("flwr")

Digest = Annotated[str, Field(pattern="^[0-9a-f]{64}$")]
Digests = Annotated[tuple[Digest, ...], Field(strict=False)]  # a file has lists only


class NodePolicy(Settings):
    """Content of a node's policy file: the limits on what a server can request.

    A key that is left out sets no limit. Without the key `files`, no file of the node is read.
    """

    require_privacy: bool = Field(default=True, description="refuse experiments without `privacy:`")
    require_secure_noise: bool = Field(
        default=False,
        description="refuse `noise: seeded`: the server knows the seed and can subtract the noise",
    )
    max_epsilon: float | None = Field(
        default=None,
        gt=0,
        description="largest ε of all experiments, seeds and runs together on the node's data; "
        "needs delta",
    )
    delta: float | None = Field(
        default=None, gt=0, lt=1, description="δ of max_epsilon, well below 1 / (examples)"
    )
    max_rounds: int | None = Field(default=None, ge=1, description="most rounds of an experiment")
    min_noise_multiplier: float | None = Field(
        default=None, gt=0, description="least noise multiplier of the client"
    )
    plugin_digests: Digests | None = Field(
        default=None,
        description="allowed digests of plug-ins, as `fedsim deploy` prints them; []: built-in "
        "names only",
    )
    files: dict[str, Literal["all"] | Annotated[tuple[str, ...], Field(strict=False)]] = Field(
        default={},
        description="the only files of the node that experiments may read, by absolute path: the "
        "columns of a table that they may use, or all",
    )
    helpers: Digests | None = Field(
        default=None,
        description="fingerprints of the only helpers to which updates are sent; an update is then "
        "never sent in clear",
    )
    plan_digests: Digests | None = Field(
        default=None,
        description="allowed digests of privacy plans, as `fedsim node-policy --plan` prints them",
    )
    data_name: str | None = Field(
        default=None,
        pattern=NAME_PATTERN,
        max_length=64,
        description="one ledger of this name for all data of the node; without it, one for each "
        "digest of a data file",
    )
    trust: Trust = Field(
        default="local",
        description="whom the node trusts, and so against whom max_epsilon holds. local: nobody; "
        "distributed: that helpers and server do not all collude, with keys of helpers and "
        "clients; central: the server",
    )

    @field_validator("files")
    @classmethod
    def _absolute(cls, files: dict[str, object]) -> dict[str, object]:
        for name in files:
            if not Path(name).is_absolute():
                raise ValueError(f"a file must have an absolute path, got {name!r}")
        return files

    @model_validator(mode="after")
    def _budget(self) -> Self:
        known = (self.helpers, self.plan_digests, self.require_secure_noise)
        if self.trust == "distributed" and not all(known):
            raise ValueError(
                "trust: distributed needs helpers, plan_digests and require_secure_noise: true; "
                "a sum hides a client from an active server only with known helpers, a known plan "
                "and noise that the server cannot compute"
            )
        if (self.max_epsilon is None) != (self.delta is None):
            names = ("max_epsilon", "delta")
            given, missing = names if self.delta is None else names[::-1]
            raise ValueError(f"{given} needs {missing}: a budget is an ε at a δ")
        if self.max_epsilon is None or self.delta is None:
            return self
        if not self.require_privacy:
            raise ValueError(
                "max_epsilon needs require_privacy: true, since an answer without privacy has no ε"
            )
        if not affords_anything(self.max_epsilon, self.delta):
            raise ValueError(
                f"max_epsilon {self.max_epsilon:g} at delta {self.delta:g} affords no release at "
                "all; raise one of them"
            )
        return self

    def lines(self) -> Iterator[str]:
        """Yield sentences on the requests that the policy allows."""
        yield f"answers {'private experiments only' if self.require_privacy else 'any experiment'}"
        if not self.require_secure_noise:
            yield (
                "also with seeded noise, which a server can subtract: for data that need "
                "protection, set require_secure_noise: true"
            )
        if self.max_epsilon is None:
            yield "without a limit on ε: set max_epsilon and delta"
        else:
            yield (
                f"at most ε = {self.max_epsilon:g} at δ = {self.delta:g} on "
                f"{self.data_name or 'its data'}, over all experiments, seeds and runs together"
            )
        yield {
            "local": "trusts nobody: a budget counts the client's own noise alone",
            "distributed": "trusts that helpers and server do not all collude: a budget counts the "
            "noise of a sum",
            "central": "trusts the server: it may get sums of this client without noise",
        }[self.trust]
        if self.plan_digests is not None:
            yield f"follows privacy plans of {len(self.plan_digests)} digests only"
        if self.max_rounds is not None:
            yield f"at most {self.max_rounds} rounds of an experiment"
        if self.min_noise_multiplier is not None:
            yield f"noise multipliers from {self.min_noise_multiplier:g}"
        if self.plugin_digests is None:
            yield "runs any plug-in of an experiment: set plugin_digests"
        else:
            yield f"runs plug-ins of {len(self.plugin_digests)} digests only"
        if self.helpers is not None:
            yield f"sends updates to {len(self.helpers)} helpers only, never in clear"
        for path, columns in self.files.items():
            yield f"reads {path}: {'all' if columns == 'all' else ', '.join(columns)}"
        if not self.files:
            yield "reads no file of this node: name data files in files"


def write_template(path: Path) -> None:
    """Write a commented template of a policy (`policy.yaml`), readable only by its user."""
    try:
        with open(path, "xb", opener=partial(os.open, mode=0o600)) as file:
            file.write(Path(__file__).with_name(POLICY_FILE).read_bytes())
    except FileExistsError as error:
        fix = "add --check to check it, or name a new file"
        raise DeploymentError(f"{path} exists and was left as it is; {fix}") from error
    except (OSError, ValueError) as error:  # ValueError: a NUL in the path
        reason = getattr(error, "strerror", None) or error
        raise DeploymentError(f"{path}: cannot be written: {reason}") from error


def load_policy(path: Path) -> NodePolicy:
    """Return the policy that a file contains; refuse a file that another user can change."""
    policy = read_checked(path, NodePolicy)
    refuse_open(path, is_policy=True)
    return policy


def policy_of_node(node_config: Mapping[str, object], state: Path) -> NodePolicy:
    """Return the policy of a node; without a policy file, log a warning and return the default."""
    path = configured_path(node_config, "policy")
    if path is None:
        path = state / POLICY_FILE
        if not os.path.lexists(path):  # a link that leads nowhere is a policy that is lost
            logger.warning(
                "this node has no policy: private experiments are answered without a limit; "
                "`fedsim node-policy %s` writes one",
                path,
            )
            return NodePolicy()
    try:
        return load_policy(path)
    except ExperimentError as error:
        logger.error("%s", error)
        raise DeploymentError(
            "this node's policy cannot be used, so nothing is answered; on the node, run: "
            f"fedsim node-policy {path} --check"
        ) from error
