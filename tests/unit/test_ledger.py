"""The ledger: order, durability in one transaction, and a chain that shows every change."""

from __future__ import annotations

import os
import sqlite3
import stat
from pathlib import Path

import pytest

from keepstep.adapters.store.sqlite import SqliteLedger, chain, read_records, verify
from keepstep.errors import PermanentError, UsageError
from keepstep.model.records import NodeJoined, Record, Tainted


def records(count: int, job: str = "j") -> list[Record]:
    return [Tainted(job=job, at_ns=i, target=f"n{i}", reason="test") for i in range(1, count + 1)]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "ledgers" / "one.db"


def written(path: Path, count: int) -> list[Record]:
    ledger = SqliteLedger(path)
    given = records(count)
    ledger.append(given[:2])
    ledger.append(given[2:])
    ledger.close()
    return given


def tamper(path: Path, statement: str) -> None:
    db = sqlite3.connect(path)
    with db:
        db.execute(statement)
    db.close()


def test_what_was_appended_is_read_back_in_order(path: Path) -> None:
    given = written(path, 5)
    ledger = SqliteLedger(path)
    assert list(ledger.read()) == given
    assert ledger.seq == 5
    ledger.close()


def test_reopened_ledger_continues_the_chain(path: Path) -> None:
    written(path, 3)
    ledger = SqliteLedger(path)
    ledger.append([NodeJoined(job="j", at_ns=9, node="n9", slots=1)])
    ledger.close()
    result = verify(path)
    assert result.ok and result.records == 4 and result.broken_seq is None


def test_hash_is_sha256_of_previous_hash_and_body(path: Path) -> None:
    written(path, 2)
    db = sqlite3.connect(path)
    rows = db.execute("SELECT body, prev_hash, hash FROM records ORDER BY seq").fetchall()
    db.close()
    assert rows[0][1] == bytes(32)
    assert rows[1][1] == rows[0][2]
    assert all(chain(previous, body) == link for body, previous, link in rows)


def test_empty_ledger_verifies(path: Path) -> None:
    SqliteLedger(path).close()
    assert verify(path).ok


@pytest.mark.parametrize(
    ("statement", "seq", "word"),
    [
        ("UPDATE records SET body = replace(body, 'test', 'west') WHERE seq = 3", 3, "body"),
        ("UPDATE records SET hash = zeroblob(32) WHERE seq = 2", 2, "hash"),
        ("UPDATE records SET prev_hash = zeroblob(32) WHERE seq = 4", 4, "follow"),
        ("DELETE FROM records WHERE seq = 3", 4, "missing"),
        ("UPDATE records SET at_ns = 77 WHERE seq = 5", 5, "columns"),
        ("UPDATE records SET kind = 'Untainted' WHERE seq = 1", 1, "columns"),
        ("UPDATE records SET job = 'other' WHERE seq = 1", 1, "columns"),
    ],
)
def test_every_change_is_found_at_its_record(
    path: Path, statement: str, seq: int, word: str
) -> None:
    written(path, 5)
    tamper(path, statement)
    result = verify(path)
    assert not result.ok
    assert result.broken_seq == seq
    assert word in result.problem
    assert result.records < seq


def test_a_live_ledger_can_be_read_and_verified_beside_its_writer(path: Path) -> None:
    ledger = SqliteLedger(path)
    ledger.append(records(3))
    assert verify(path).records == 3
    assert len(list(read_records(path))) == 3
    assert len(list(read_records(path, ["Tainted"]))) == 3
    assert list(read_records(path, ["NodeJoined"])) == []
    ledger.close()


def test_second_writer_is_refused(path: Path) -> None:
    ledger = SqliteLedger(path)
    with pytest.raises(UsageError, match="in use"):
        SqliteLedger(path)
    ledger.close()
    SqliteLedger(path).close()


def test_files_are_private(path: Path) -> None:
    ledger = SqliteLedger(path)
    ledger.append(records(1))
    modes = {p.name: stat.S_IMODE(p.stat().st_mode) for p in path.parent.iterdir()}
    ledger.close()
    assert len(modes) >= 3 and set(modes.values()) == {0o600}, modes


def test_append_is_one_transaction(path: Path) -> None:
    ledger = SqliteLedger(path)
    ledger.append(records(1))
    ledger._db.execute(
        "CREATE TRIGGER refuse BEFORE INSERT ON records WHEN NEW.seq = 3 "
        "BEGIN SELECT RAISE(ABORT, 'disk full'); END"
    )
    with pytest.raises(PermanentError, match="disk full"):
        ledger.append(records(2))
    ledger._db.execute("DROP TRIGGER refuse")
    assert len(list(ledger.read())) == 1
    ledger.append(records(2))
    ledger.close()
    assert verify(path).records == 3


def test_file_that_is_no_database_is_refused_with_a_hint(path: Path) -> None:
    path.parent.mkdir()
    path.write_bytes(b"this is not a ledger" * 500)
    with pytest.raises(PermanentError, match="not a ledger") as caught:
        SqliteLedger(path)
    assert "ledger verify" in caught.value.hint
    with pytest.raises(PermanentError):
        verify(path)


def test_damaged_page_is_refused(path: Path) -> None:
    ledger = SqliteLedger(path)
    for _ in range(20):
        ledger.append(records(50))
    ledger.close()
    data = bytearray(path.read_bytes())
    data[4096 : 4096 * 3] = os.urandom(4096 * 2)
    path.write_bytes(data)
    with pytest.raises(PermanentError):
        verify(path)


def test_missing_ledger_is_a_usage_error(path: Path) -> None:
    with pytest.raises(UsageError, match="no ledger"):
        verify(path)


def test_directory_that_cannot_be_written_is_a_usage_error(tmp_path: Path) -> None:
    blocker = tmp_path / "file"
    blocker.write_text("")
    with pytest.raises(UsageError, match="cannot write") as caught:
        SqliteLedger(blocker / "x.db")
    assert "KEEPSTEP_HOME" in caught.value.hint


def test_unreadable_record_names_its_number(path: Path) -> None:
    written(path, 3)
    tamper(path, "UPDATE records SET body = '{}' WHERE seq = 2")
    with pytest.raises(PermanentError, match="record 2"):
        list(read_records(path))
