"""Entries of the public registry of deployments of differential privacy (registry.opendp.org).

An entry is a YAML file. Read by fedsim, it is one release with the guarantee that it declares.
"""

from collections.abc import Mapping
from typing import Any

from fedsim.account.foreign import EventError
from fedsim.accountant import ZCDP, EpsilonDelta, NonPrivate, PrivacyLedger


def registry_ledger(entry: Mapping[str, Any]) -> PrivacyLedger:
    """Return the ledger of an entry: one release with the declared guarantee.

    `rho` is a zCDP guarantee; `epsilon` with `delta` (0 if absent) an approximate one. Of an entry
    with both, `rho` counts, from which the other follows. An entry without either is of tier 1 and
    declares nothing: its ε is infinite.

    Raises:
        EventError: a parameter is not a number, or out of its range.
    """
    loss = entry["deployment"].get("privacy_loss") or {}
    parameters = loss.get("privacy_parameters") or {}
    units = loss.get("number_of_privacy_units", 1)
    if units != 1:
        raise EventError(
            f"the entry is for {units} privacy units at once; give the guarantee of one"
        )
    try:
        if "rho" in parameters:
            return PrivacyLedger().record(ZCDP(parameters["rho"]))
        if "epsilon" in parameters:
            delta = parameters.get("delta", 0.0)
            return PrivacyLedger().record(EpsilonDelta(parameters["epsilon"], delta))
    except (TypeError, ValueError) as error:
        raise EventError(f"deployment.privacy_loss.privacy_parameters: {error}") from error
    return PrivacyLedger().record(NonPrivate())
