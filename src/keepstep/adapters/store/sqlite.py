"""The ledger on SQLite: one row per record, each chained to the one before by a hash.

    hash(n) = sha256(hash(n-1) + body(n)),   hash(0) = 32 zero bytes

The body is the record as JSON, and the columns beside it (at_ns, job, kind) only repeat what the
body says so that people can query the file; `verify` checks both the chain and the repetition.
What a chain cannot show is a cut tail: the last rows may be missing without a trace, so whoever
needs to notice that keeps the last hash elsewhere (`verify` returns it).

WAL with synchronous=FULL: a committed transaction is on disk, and readers (status after the end,
verify of a live ledger) never block the one writer. A second writer is kept out by a lock on a
file beside the database, which the kernel drops when its holder dies.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import sqlite3
from collections.abc import Collection, Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import msgspec

from keepstep.errors import PermanentError, UsageError
from keepstep.model.records import Record

ZERO_HASH = bytes(32)
COLUMNS = "seq, at_ns, job, kind, body, prev_hash, hash"
SCHEMA = """
CREATE TABLE IF NOT EXISTS records (
    seq INTEGER PRIMARY KEY,
    at_ns INTEGER NOT NULL,
    job TEXT NOT NULL,
    kind TEXT NOT NULL,
    body BLOB NOT NULL,
    prev_hash BLOB NOT NULL,
    hash BLOB NOT NULL
)
"""
LOCK_SUFFIX = ".lock"


class VerifyResult(msgspec.Struct, frozen=True, kw_only=True):
    path: str
    ok: bool
    records: int  # rows whose link was found right, up to the first broken one
    broken_seq: int | None
    problem: str
    last_hash: str


class SqliteLedger:
    """The one writer of a ledger file. Not thread-safe: it lives on the event loop's thread."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lock_fd = _lock(path)
        self._encoder = msgspec.json.Encoder()
        try:
            self._db = _connect_writer(path)
            with mapped_errors(path):
                self._seq, self._last_hash = self._tail()
        except BaseException:
            os.close(self._lock_fd)
            raise

    @property
    def seq(self) -> int:
        """Number of the newest record, over all runs of this ledger."""
        return self._seq

    def append(self, records: Sequence[Record]) -> None:
        if not records:
            return
        seq, last_hash = self._seq, self._last_hash
        rows = []
        for record in records:
            body = self._encoder.encode(record)
            link = chain(last_hash, body)
            seq += 1
            rows.append((seq, record.at_ns, record.job, kind_of(record), body, last_hash, link))
            last_hash = link
        with mapped_errors(self.path):
            self._db.execute("BEGIN IMMEDIATE")
            try:
                self._db.executemany(
                    f"INSERT INTO records ({COLUMNS}) VALUES (?,?,?,?,?,?,?)", rows
                )
                self._db.execute("COMMIT")
            except BaseException:
                if self._db.in_transaction:
                    self._db.execute("ROLLBACK")
                raise
        self._seq, self._last_hash = seq, last_hash

    def read(self) -> Iterator[Record]:
        return _decode_rows(self._db, self.path)

    def close(self) -> None:
        if self._lock_fd < 0:
            return
        self._db.close()
        os.close(self._lock_fd)
        self._lock_fd = -1

    def _tail(self) -> tuple[int, bytes]:
        row = self._db.execute("SELECT seq, hash FROM records ORDER BY seq DESC LIMIT 1").fetchone()
        return (0, ZERO_HASH) if row is None else (int(row[0]), bytes(row[1]))


def read_records(path: Path, kinds: Collection[str] = ()) -> Iterator[Record]:
    """Records (of some kinds, or all) of a ledger that somebody else may be writing right now."""
    with closing(_connect_reader(path)) as db:
        yield from _decode_rows(db, path, kinds)


def verify(path: Path) -> VerifyResult:
    """Walk the whole chain; stop at the first row that does not fit."""
    previous, count = ZERO_HASH, 0
    broken_seq: int | None = None
    problem = ""
    with closing(_connect_reader(path)) as db, mapped_errors(path):
        for row in db.execute(f"SELECT {COLUMNS} FROM records ORDER BY seq"):
            problem = _row_problem(row, expected_seq=count + 1, previous=previous)
            if problem:
                broken_seq = int(row[0])
                break
            previous = bytes(row[6])
            count += 1
    return VerifyResult(
        path=str(path),
        ok=not problem,
        records=count,
        broken_seq=broken_seq,
        problem=problem,
        last_hash=previous.hex(),
    )


def chain(previous: bytes, body: bytes) -> bytes:
    return hashlib.sha256(previous + body).digest()


def kind_of(record: Record) -> str:
    return str(type(record).__struct_config__.tag)


@contextmanager
def mapped_errors(path: Path) -> Iterator[None]:
    """SQLite's errors, in the words of an operator."""
    try:
        yield
    except sqlite3.DatabaseError as error:
        text = str(error)
        if "not a database" in text or "malformed" in text or "no such table" in text:
            raise PermanentError(
                f"ledger {path} is damaged or not a ledger: {text}",
                hint=f"see what is left with `keepstep ledger verify {path}`; move the file away "
                "to start with an empty one",
            ) from error
        raise PermanentError(
            f"ledger {path} cannot be used: {text}",
            hint="check free space and permissions of the state directory (KEEPSTEP_HOME)",
        ) from error


def _row_problem(row: Sequence[Any], *, expected_seq: int, previous: bytes) -> str:
    seq, at_ns, job, kind, body, prev_hash, link = row
    if seq != expected_seq:
        return f"record {expected_seq} is missing: the next one is {seq}"
    if bytes(prev_hash) != previous:
        return f"record {seq} does not follow record {seq - 1}: its previous hash differs"
    body = body.encode() if isinstance(body, str) else bytes(body)
    if chain(previous, body) != bytes(link):
        return f"the body of record {seq} was changed: its hash differs"
    try:
        said = msgspec.json.decode(body)
        repeated = (said["at_ns"], said["job"], said["type"])
    except (msgspec.DecodeError, KeyError, TypeError):
        return f"record {seq} is no record"
    if repeated != (at_ns, job, kind):
        return f"the columns of record {seq} do not repeat its body"
    return ""


def _decode_rows(
    db: sqlite3.Connection, path: Path, kinds: Collection[str] = ()
) -> Iterator[Record]:
    decoder: msgspec.json.Decoder[Record] = msgspec.json.Decoder(Record)
    where = f"WHERE kind IN ({','.join('?' * len(kinds))})" if kinds else ""
    with mapped_errors(path):
        query = f"SELECT seq, body FROM records {where} ORDER BY seq"
        for seq, body in db.execute(query, tuple(kinds)):
            try:
                yield decoder.decode(body)
            except msgspec.DecodeError as error:
                raise PermanentError(
                    f"record {seq} of ledger {path} cannot be read: {error}",
                    hint=f"check it with `keepstep ledger verify {path}`",
                ) from error


def _connect_writer(path: Path) -> sqlite3.Connection:
    # SQLite creates its files with the umask; the ledger names scripts and nodes, so it is private.
    try:
        os.close(os.open(path, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600))
    except OSError as error:
        raise _not_writable(path, error) from error
    with mapped_errors(path):
        db = sqlite3.connect(path, isolation_level=None)
        try:
            db.execute("PRAGMA journal_mode=WAL")
            db.execute("PRAGMA synchronous=FULL")
            db.execute(SCHEMA)
        except BaseException:
            db.close()
            raise
    return db


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
        name = path.with_name(path.name + LOCK_SUFFIX)
        fd = os.open(name, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise _not_writable(path, error) from error
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        os.close(fd)
        raise UsageError(
            f"ledger {path} is in use by another orchestrator",
            hint="choose another --id, or stop the one that runs under this id",
        ) from error
    return fd


def _not_writable(path: Path, error: OSError) -> UsageError:
    return UsageError(
        f"cannot write the ledger {path}: {error.strerror}",
        hint="set KEEPSTEP_HOME to a directory that you may write to",
    )
