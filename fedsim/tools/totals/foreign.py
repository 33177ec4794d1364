"""Events in the notation of other tools, and of the registry of deployments, as fedsim's events.

- fedsim: `{"type": "PoissonSampled", "sampling_rate": q, "event": {...}}`.
- dp-accounting: `{"type": "PoissonSampledDpEvent", "sampling_probability": q, "event": {...}}`,
  with the names and fields of its event classes.
- Opacus: the `history` of an accountant's state: a list of `[noise_multiplier, sample_rate, n]`.
- registry.opendp.org: an entry is a YAML file, read as one release with the guarantee that it
  declares.
"""

from collections.abc import Callable, Mapping
from typing import Any

from fedsim.accountant import (
    ZCDP,
    Composed,
    EpsilonDelta,
    Event,
    FixedSizeSampled,
    Gaussian,
    NonPrivate,
    PoissonSampled,
    PrivacyLedger,
    SelfComposed,
    event_from_dict,
)
from fedsim.core.errors import InputError


class EventError(InputError):
    """An event that no accountant here knows; the message names it."""


def ledger_of(records: object) -> PrivacyLedger:
    """Return the ledger of a list of events, or of `{"event": EVENT, "count": n}`, or a mixture.

    Raises:
        EventError: an element is no event, or has a wrong value; its position is named.
    """
    if not isinstance(records, list):
        raise EventError(f"a ledger must be a list of events, got {records!r:.80}")
    ledger = PrivacyLedger()
    for place, record in enumerate(records):
        try:
            if isinstance(record, Mapping) and set(record) == {"event", "count"}:
                ledger.record(event_of(record["event"]), record["count"])
            else:
                ledger.record(event_of(record))
        except (KeyError, TypeError, ValueError) as error:
            what = f"key {error} is missing" if isinstance(error, KeyError) else error
            raise EventError(f"event {place}: {what}") from error
    return ledger


def opacus_ledger(history: Any) -> PrivacyLedger:
    """Return the ledger of the `history` of an accountant of Opacus.

    Guarantee: of the declared history, not of what ran: Opacus records Poisson sampling also where
    the loader shuffled (`poisson_sampling=False`).

    Raises:
        EventError: it is not a list of [noise_multiplier, sample_rate, steps].
    """
    ledger = PrivacyLedger()
    for place, entry in enumerate(history if isinstance(history, list) else [history]):
        try:
            noise, rate, steps = entry
            ledger.record(PoissonSampled(rate, Gaussian(noise)), steps)
        except (TypeError, ValueError) as error:
            raise EventError(
                f"history entry {place} must be [noise_multiplier, sample_rate, steps], got "
                f"{entry!r:.80}: {error}"
            ) from error
    return ledger


def event_of(record: Any) -> Event:
    """Return the event of a JSON object in the notation of fedsim or of dp-accounting.

    Raises:
        ValueError: it is no event; a key that is missing raises KeyError.
    """
    name = record.get("type") if isinstance(record, Mapping) else None
    if not isinstance(name, str) or not name.endswith(_SUFFIX):
        return event_from_dict(record)
    read = _DP_ACCOUNTING.get(name.removesuffix(_SUFFIX))
    if read is None:
        known = ", ".join(f"{known}{_SUFFIX}" for known in _DP_ACCOUNTING)
        raise EventError(f"no accounting rule for {name!r} of dp-accounting; known are {known}")
    return read(record)


def _fixed_size(record: Mapping[str, Any]) -> Event:
    return FixedSizeSampled(
        record["source_dataset_size"], record["sample_size"], event_of(record["event"])
    )


def _zcdp(record: Mapping[str, Any]) -> Event:
    if record.get("xi", 0.0):
        raise EventError(f"ZCDpEvent with xi={record['xi']!r} has no accounting rule here; only 0")
    return ZCDP(record["rho"])


_SUFFIX = "DpEvent"
_DP_ACCOUNTING: Mapping[str, Callable[[Mapping[str, Any]], Event]] = {
    "NoOp": lambda record: Composed(()),
    "NonPrivate": lambda record: NonPrivate(),
    "Gaussian": lambda record: Gaussian(record["noise_multiplier"]),
    "Laplace": lambda record: EpsilonDelta(1.0 / record["noise_multiplier"], 0.0),
    "EpsilonDelta": lambda record: EpsilonDelta(record["epsilon"], record["delta"]),
    "ZC": _zcdp,
    "PoissonSampled": lambda record: PoissonSampled(
        record["sampling_probability"], event_of(record["event"])
    ),
    "SampledWithoutReplacement": _fixed_size,
    "SelfComposed": lambda record: SelfComposed(event_of(record["event"]), record["count"]),
    "Composed": lambda record: Composed(tuple(map(event_of, record["events"]))),
}


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
