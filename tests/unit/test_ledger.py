"""The ledger as files: private, and refused when damaged. The rest: integration/test_ledgers."""

from __future__ import annotations

import os
import sqlite3
import stat
from pathlib import Path

import pytest

from keepstep.adapters.store.sqlite import SqliteLedger, chain, read_records, verify
from keepstep.cli import past_jobs
from keepstep.errors import PermanentError, UsageError
from keepstep.model.records import Record, Tainted


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


def test_hash_is_sha256_of_previous_hash_and_body(path: Path) -> None:
    written(path, 2)
    db = sqlite3.connect(path)
    rows = db.execute("SELECT body, prev_hash, hash FROM records ORDER BY seq").fetchall()
    db.close()
    assert rows[0][1] == bytes(32)
    assert rows[1][1] == rows[0][2]
    assert all(chain(previous, body) == link for body, previous, link in rows)


def test_files_are_private(path: Path) -> None:
    ledger = SqliteLedger(path)
    ledger.append(records(1))
    modes = {p.name: stat.S_IMODE(p.stat().st_mode) for p in path.parent.iterdir()}
    ledger.close()
    assert len(modes) >= 3 and set(modes.values()) == {0o600}, modes


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


@pytest.mark.parametrize("part", [0.3, 0.6, 0.9])
def test_truncated_file_is_refused(path: Path, part: float) -> None:
    ledger = SqliteLedger(path)
    for _ in range(20):
        ledger.append(records(50))
    ledger.close()
    data = path.read_bytes()
    path.write_bytes(data[: int(len(data) * part)])
    with pytest.raises(PermanentError):
        verify(path)
    with pytest.raises(PermanentError):
        SqliteLedger(path).load()


def test_missing_ledger_is_a_usage_error(path: Path) -> None:
    with pytest.raises(UsageError, match="no ledger"):
        verify(path)


def test_directory_that_cannot_be_written_is_a_usage_error(tmp_path: Path) -> None:
    blocker = tmp_path / "file"
    blocker.write_text("")
    with pytest.raises(UsageError, match="cannot write") as caught:
        SqliteLedger(blocker / "x.db")
    assert "KEEPSTEP_HOME" in caught.value.hint


def test_a_ledger_is_not_newer_for_having_been_read(tmp_path: Path) -> None:
    home = tmp_path
    for age, name in enumerate(("new", "old")):
        written(home / "ledgers" / f"{name}.db", 2)
        os.utime(home / "ledgers" / f"{name}.db", (1e9 - age, 1e9 - age))
    assert len(list(read_records(home / "ledgers" / "old.db", ()))) == 2
    assert [ledger.stem for ledger in past_jobs.ledgers(home)] == ["new", "old"]
