"""The ledger on SQLite, for one machine: a file per orchestrator.

WAL with synchronous=FULL: a committed transaction is on disk, and readers (status after the end,
verify of a live ledger) never block the one writer. A second writer is kept out by a lock on a
file beside the database, which the kernel drops when its holder dies: that is the lease, and it
needs no clock. The token in `head` grows with every writer's first append; it is there for the
case that somebody removes the lock file under a living writer.
"""

from __future__ import annotations

import fcntl
import os
import sqlite3
from collections.abc import Collection, Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

from keepstep.adapters.store.chain import (
    COLUMNS,
    Head,
    LedgerRow,
    VerifyResult,
    chain,
    check_rows,
    decode,
    link,
    verify_rows,
)
from keepstep.errors import KeepstepError, PermanentError, StoreUnavailable, UsageError
from keepstep.model.records import Record
from keepstep.ports.ledger import LedgerMember

__all__ = ["SqliteLedger", "VerifyResult", "chain", "mapped_errors", "read_records", "verify"]

SCHEMA = """
CREATE TABLE IF NOT EXISTS records (
    seq INTEGER PRIMARY KEY,
    at_ns INTEGER NOT NULL,
    job TEXT NOT NULL,
    kind TEXT NOT NULL,
    body BLOB NOT NULL,
    prev_hash BLOB NOT NULL,
    hash BLOB NOT NULL
);
CREATE TABLE IF NOT EXISTS head (
    one INTEGER PRIMARY KEY CHECK (one = 1),
    token INTEGER NOT NULL,
    seq INTEGER NOT NULL,
    hash BLOB NOT NULL
);
INSERT OR IGNORE INTO head
    SELECT 1, 0, coalesce(max(seq), 0), coalesce(
        (SELECT hash FROM records ORDER BY seq DESC LIMIT 1), zeroblob(32)) FROM records;
"""
LOCK_SUFFIX = ".lock"
BUSY_S = 1.0
DAMAGED = ("not a database", "malformed", "no such table", "no such column")
# Nothing is wrong with the ledger: there is no room or no access at the moment.
PASSING = (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_FULL, sqlite3.SQLITE_IOERR, sqlite3.SQLITE_CANTOPEN)


class SqliteLedger:
    """The one writer of a ledger file. Not thread-safe: it lives on the event loop's thread."""

    lease_s = None

    def __init__(self, path: Path) -> None:
        self.path = path
        self._me: LedgerMember | None = None
        self._token: int | None = None  # taken with the first append
        self._lock_fd = _lock(path)
        try:
            self._db = _connect_writer(path)
            with mapped_errors(path):
                self._head = self._read_head()[1]
        except BaseException:
            os.close(self._lock_fd)
            raise

    @property
    def name(self) -> str:
        return str(self.path)

    @property
    def seq(self) -> int:
        """Number of the newest record, over all runs of this ledger."""
        return self._head.seq

    @property
    def token(self) -> int | None:
        return self._token

    # ----------------------------------------------------------------------- lease

    def enroll(self, me: LedgerMember) -> str:
        self._me = me
        return ""

    def acquire(self, *, take: bool = True) -> LedgerMember:
        assert self._me is not None, "enroll first"
        return self._me  # whoever has this object has the lock

    def renew(self) -> list[LedgerMember]:
        """Nothing expires; what is tried is whether the file can be written again."""
        with mapped_errors(self.path), self._transaction():
            self._fence(None)
        return [] if self._me is None else [self._me]

    def release(self) -> None:
        pass  # `close` drops the lock

    # ----------------------------------------------------------------------- records

    def append(self, records: Sequence[Record]) -> None:
        if not records:
            return
        rows = link(records, self._head)
        head = Head(rows[-1].seq, rows[-1].hash)
        with mapped_errors(self.path), self._transaction():
            self._fence(head)
            self._db.executemany(f"INSERT INTO records ({COLUMNS}) VALUES (?,?,?,?,?,?,?)", rows)
        self._head = head

    def load(self) -> list[Record]:
        with mapped_errors(self.path):
            self._head = self._read_head()[1]
            return check_rows(self.name, _rows(self._db), self._head)

    def read(self) -> Iterator[Record]:
        return _decode_rows(self._db, self.path)

    def close(self) -> None:
        if self._lock_fd < 0:
            return
        self._db.close()
        os.close(self._lock_fd)
        self._lock_fd = -1

    @contextmanager
    def _transaction(self) -> Iterator[None]:
        token = self._token
        self._db.execute("BEGIN IMMEDIATE")
        try:
            yield
            self._db.execute("COMMIT")
        except BaseException:
            self._token = token
            if self._db.in_transaction:
                self._db.execute("ROLLBACK")
            raise

    def _fence(self, head: Head | None) -> None:
        """Inside a transaction: still the one writer? Then the head moves on to `head`."""
        token, found = self._read_head()
        moved = head is not None and found != self._head
        if moved or self._token not in (None, token):
            raise PermanentError(
                f"ledger {self.path} is being written by another orchestrator",
                hint="was its .lock file removed? stop one of the two that use this id",
            )
        if self._token is None:
            self._token = token + 1
        row = (self._token, *(head or found))
        self._db.execute("UPDATE head SET token = ?, seq = ?, hash = ?", row)

    def _read_head(self) -> tuple[int, Head]:
        row = self._db.execute("SELECT token, seq, hash FROM head").fetchone()
        if row is None:
            raise sqlite3.DatabaseError("malformed: its head is missing")
        return int(row[0]), Head(int(row[1]), bytes(row[2]))


def read_records(path: Path, kinds: Collection[str] = ()) -> Iterator[Record]:
    """Records (of some kinds, or all) of a ledger that somebody else may be writing right now."""
    with closing(_connect_reader(path)) as db:
        yield from _decode_rows(db, path, kinds)


def verify(path: Path) -> VerifyResult:
    """Walk the whole chain; stop at the first row that does not fit."""
    with closing(_connect_reader(path)) as db, mapped_errors(path):
        db.execute("BEGIN")  # head and rows of one moment
        heads = db.execute("SELECT 1 FROM sqlite_master WHERE name = 'head'").fetchall()
        row = db.execute("SELECT seq, hash FROM head").fetchone() if heads else None
        head = Head(int(row[0]), bytes(row[1])) if row is not None else None
        return verify_rows(str(path), _rows(db), head)


@contextmanager
def mapped_errors(path: Path) -> Iterator[None]:
    """SQLite's errors, in the words of an operator."""
    try:
        yield
    except sqlite3.DatabaseError as error:
        text = str(error)
        if any(word in text for word in DAMAGED):
            raise PermanentError(
                f"ledger {path} is damaged or not a ledger: {text}",
                hint=f"see what is left with `keepstep ledger verify {path}`; move the file away "
                "to start with an empty one",
            ) from error
        kind: type[KeepstepError] = PermanentError
        if getattr(error, "sqlite_errorcode", 0) & 0xFF in PASSING:
            kind = StoreUnavailable
        raise kind(
            f"ledger {path} cannot be used: {text}",
            hint="check free space and permissions of the state directory (KEEPSTEP_HOME)",
        ) from error


def _rows(db: sqlite3.Connection) -> Iterator[LedgerRow]:
    cursor: Iterator[Any] = db.execute(f"SELECT {COLUMNS} FROM records ORDER BY seq")
    return cursor


def _decode_rows(
    db: sqlite3.Connection, path: Path, kinds: Collection[str] = ()
) -> Iterator[Record]:
    where = f"WHERE kind IN ({','.join('?' * len(kinds))})" if kinds else ""
    with mapped_errors(path):
        query = f"SELECT seq, body FROM records {where} ORDER BY seq"
        for seq, body in db.execute(query, tuple(kinds)):
            yield decode(str(path), seq, body)


def _connect_writer(path: Path) -> sqlite3.Connection:
    # SQLite creates its files with the umask; the ledger names scripts and nodes, so it is private.
    try:
        os.close(os.open(path, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600))
    except OSError as error:
        raise _not_writable(path, error) from error
    with mapped_errors(path):
        # `load` runs beside the event loop; the driver makes sure that nothing else does then.
        db = sqlite3.connect(path, BUSY_S, isolation_level=None, check_same_thread=False)
        try:
            _refuse_foreign(db, path)
            db.execute("PRAGMA journal_mode=WAL")
            db.execute("PRAGMA synchronous=FULL")
            db.executescript(SCHEMA)
        except BaseException:
            db.close()
            raise
    return db


def _refuse_foreign(db: sqlite3.Connection, path: Path) -> None:
    """A database of another program must not get our tables."""
    tables = [row[0] for row in db.execute("SELECT name FROM sqlite_master WHERE type = 'table'")]
    columns = ", ".join(row[1] for row in db.execute("PRAGMA table_info(records)"))
    if tables and columns != COLUMNS:
        raise PermanentError(
            f"{path} is a database, but not a ledger: it has the tables {', '.join(tables)}",
            hint="it was not touched; move it away, or use another --id",
        )


def _connect_reader(path: Path) -> sqlite3.Connection:
    if not path.is_file():
        raise UsageError(f"no ledger at {path}", hint="ledgers are in KEEPSTEP_HOME/ledgers")
    # Not `immutable`: a live writer's newest records are in the -wal file beside it.
    db = sqlite3.connect(f"file:{path}?mode=ro", uri=True, isolation_level=None)
    db.execute("PRAGMA query_only=ON")
    return db


def _lock(path: Path) -> int:
    try:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    except OSError as error:
        raise _not_writable(path, error) from error
    return lock_file(lock_path(path), f"ledger {path}")


def lock_path(path: Path) -> Path:
    return path.with_name(path.name + LOCK_SUFFIX)


def lock_file(path: Path, what: str) -> int:
    """An open file whose lock lasts as long as this process. UsageError: another has it."""
    try:
        fd = os.open(path, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise _not_writable(path, error) from error
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        os.close(fd)
        raise UsageError(
            f"{what} is in use by another orchestrator",
            hint="choose another --id, or stop the one that runs under this id",
        ) from error
    return fd


def _not_writable(path: Path, error: OSError) -> UsageError:
    return UsageError(
        f"cannot write the ledger {path}: {error.strerror}",
        hint="set KEEPSTEP_HOME to a directory that you may write to",
    )
