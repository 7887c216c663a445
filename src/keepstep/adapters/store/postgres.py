"""The ledger on PostgreSQL, shared by several orchestrators of which one is active.

`keepstep_head` has one row: the lease (who, token, until when) and the head of the chain. Taking
the lease adds one to the token. An append is a single statement that moves the head on *if* token,
holder and head are still those the writer knows, and inserts the records if it did:

* both happen or neither does, and no transaction can be left open by a client that vanished;
* a row has one version at a time, so a take-over either waits for the append or comes first, and
  then the append finds nothing to change: a former writer cannot write;
* a server that forgot records (a replica that lagged was promoted) has another head, and that is
  found with the first append instead of leaving a gap.

Outcomes can be unknown: the connection broke between the statement and its answer. Once, at once,
it is looked up (head moved on: it is there; not: it is written again). If that does not work either
the caller hears StoreUnavailable and calls `load` when the store is back.

Times are the server's clock_timestamp(). A server's clock that is set back would make a lease last
longer than its time, so whoever asks for it first cuts it down to that; one that jumps ahead ends a
lease early, which costs a take-over and, thanks to the token, nothing else.

Two connections, because they are used by two threads: appends wait on the event loop's, the lease
is kept by another. No wait is longer than `LIMIT_S`: a server that is stopped, not closed, answers
nothing and breaks no connection, so a timer breaks it.
"""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import Collection, Iterator, Sequence
from typing import Any, LiteralString

from keepstep.adapters.store.chain import (
    COLUMNS,
    EMPTY,
    Head,
    VerifyResult,
    check_rows,
    decode,
    link,
    verify_rows,
)
from keepstep.adapters.store.postgres_session import (
    EVIDENCE,
    LIMIT_S,
    Connection,
    StoreSession,
    connect,
    limited,
    mapped_errors,
    shown,
)
from keepstep.errors import NotActive, PermanentError, StoreUnavailable, UsageError
from keepstep.model.messages import Address
from keepstep.model.records import Record
from keepstep.ports.ledger import LedgerMember

LEASE_S = 10.0
READ_ROWS = 2000
READ_LIMIT_S = 15.0  # for so many rows
CREATE_LOCK = 0x6B656570  # advisory; two orchestrators may start on an empty database together

SCHEMA: tuple[LiteralString, ...] = (
    """
    CREATE TABLE IF NOT EXISTS keepstep_records (
        seq bigint PRIMARY KEY, at_ns bigint NOT NULL, job text NOT NULL, kind text NOT NULL,
        body bytea NOT NULL, prev_hash bytea NOT NULL, hash bytea NOT NULL)
    """,
    """
    CREATE TABLE IF NOT EXISTS keepstep_members (
        id text PRIMARY KEY, instance text NOT NULL, url text NOT NULL,
        host text NOT NULL, port integer NOT NULL, lease interval NOT NULL,
        seen_at timestamptz NOT NULL)
    """,
    """
    CREATE TABLE IF NOT EXISTS keepstep_head (
        one boolean PRIMARY KEY CHECK (one), seq bigint NOT NULL, hash bytea NOT NULL,
        secret text NOT NULL, token bigint NOT NULL,
        id text NOT NULL, instance text NOT NULL, url text NOT NULL,
        host text NOT NULL, port integer NOT NULL, lease interval NOT NULL,
        renewed_at timestamptz NOT NULL, expires_at timestamptz NOT NULL)
    """,
)
FIRST_HEAD = """
    INSERT INTO keepstep_head VALUES (true, 0, %s, %s, 0, '', '', '', '', 0, '0', now(), now())
    ON CONFLICT DO NOTHING
"""
APPEND = """
    WITH moved AS (
        UPDATE keepstep_head SET seq = %(seq)s, hash = %(hash)s
        WHERE token = %(token)s AND instance = %(instance)s AND hash = %(before)s RETURNING one)
    INSERT INTO keepstep_records (seq, at_ns, job, kind, body, prev_hash, hash)
    SELECT row.* FROM moved, unnest(
        %(seqs)s::bigint[], %(ats)s::bigint[], %(jobs)s::text[], %(kinds)s::text[],
        %(bodies)s::bytea[], %(befores)s::bytea[], %(hashes)s::bytea[]) AS row
"""
# Only one's own row, or one whose process has not been seen for its own lease's time.
ENROLL = """
    INSERT INTO keepstep_members AS old
    VALUES (%(id)s, %(instance)s, %(url)s, %(host)s, %(port)s, %(lease)s, clock_timestamp())
    ON CONFLICT (id) DO UPDATE SET instance = excluded.instance, url = excluded.url,
        host = excluded.host, port = excluded.port, lease = excluded.lease,
        seen_at = excluded.seen_at
    WHERE old.instance = excluded.instance OR old.seen_at + old.lease <= clock_timestamp()
"""
SET_BACK: tuple[LiteralString, ...] = (
    """
    UPDATE keepstep_head SET renewed_at = clock_timestamp(), expires_at = clock_timestamp() + lease
    WHERE renewed_at > clock_timestamp() + interval '1 second'
    """,
    """
    UPDATE keepstep_members SET seen_at = clock_timestamp()
    WHERE seen_at > clock_timestamp() + interval '1 second'
    """,
)
ACQUIRE = """
    UPDATE keepstep_head SET token = token + 1, id = %(id)s, instance = %(instance)s,
        url = %(url)s, host = %(host)s, port = %(port)s, lease = %(lease)s,
        renewed_at = clock_timestamp(), expires_at = clock_timestamp() + %(lease)s
    WHERE expires_at <= clock_timestamp() OR instance = %(instance)s RETURNING token
"""
RENEW = """
    UPDATE keepstep_head
    SET renewed_at = clock_timestamp(), expires_at = clock_timestamp() + %(lease)s
    WHERE token = %(token)s AND instance = %(instance)s
"""
RELEASE = """
    UPDATE keepstep_head SET instance = '', expires_at = clock_timestamp()
    WHERE token = %(token)s AND instance = %(instance)s
"""
MEMBERS = """
    SELECT id, instance, url, host, port FROM keepstep_members
    WHERE seen_at + 3 * lease > clock_timestamp() ORDER BY id
"""


class PostgresLedger:
    """One orchestrator's way to the shared ledger. `append` on one thread, the lease on another."""

    def __init__(self, url: str, *, lease_s: float = LEASE_S) -> None:
        self.name = shown(url)
        self.lease_s = lease_s
        self._url = url
        self._writing = StoreSession(url)
        self._leasing = StoreSession(url)
        self._head = EMPTY
        self._token = 0
        self._me: dict[str, Any] = {}
        try:
            self._leasing.run(_create)
        except BaseException:
            self.close()
            raise

    @property
    def seq(self) -> int:
        return self._head.seq

    @property
    def token(self) -> int:
        """Of the lease as this process knows it; 0: it never had one."""
        return self._token

    # ----------------------------------------------------------------------- lease

    def enroll(self, me: LedgerMember) -> str:
        self._me = {
            "id": me.id,
            "instance": me.instance,
            "url": me.url,
            "host": me.stream.host,
            "port": me.stream.port,
            "lease": f"{self.lease_s} seconds",
        }

        def work(db: Connection) -> tuple[str, str]:
            for statement in SET_BACK:
                db.execute(statement)
            taken = db.execute(ENROLL, self._me).rowcount == 0
            where = db.execute("SELECT url FROM keepstep_members WHERE id = %s", [me.id]).fetchone()
            secret = db.execute("SELECT secret FROM keepstep_head").fetchone()
            return str(secret[0]) if secret else "", str(where[0]) if taken and where else ""

        secret, taken_by = self._leasing.run(work)
        if taken_by:
            raise UsageError(
                f"orchestrator {me.id} runs already, at {taken_by}",
                hint="give every orchestrator of this store an --id of its own",
            )
        return secret

    def acquire(self, *, take: bool = True) -> LedgerMember:
        def work(db: Connection) -> tuple[Any, ...]:
            for statement in SET_BACK:
                db.execute(statement)
            db.execute(ENROLL, self._me)
            taken = db.execute(ACQUIRE, self._me).fetchone() if take else None
            self._token = int(taken[0]) if taken is not None else self._token
            return self._holder(db)

        return _member(self._leasing.run(work))

    def renew(self) -> list[LedgerMember]:
        def work(db: Connection) -> list[tuple[Any, ...]] | tuple[Any, ...]:
            db.execute(ENROLL, self._me)
            kept = db.execute(RENEW, {**self._me, "token": self._token}).rowcount == 1
            return db.execute(MEMBERS).fetchall() if kept else self._holder(db)

        found = self._leasing.run(work)
        if isinstance(found, tuple):
            raise _lost(self._me["id"], _member(found))
        return [_member(row) for row in found]

    def release(self) -> None:
        def work(db: Connection) -> None:
            db.execute(RELEASE, {**self._me, "token": self._token})
            db.execute("DELETE FROM keepstep_members WHERE instance = %(instance)s", self._me)

        if self._me:
            with contextlib.suppress(StoreUnavailable, PermanentError):
                self._leasing.run(work)

    def _holder(self, db: Connection) -> tuple[Any, ...]:
        row = db.execute("SELECT id, instance, url, host, port FROM keepstep_head").fetchone()
        if row is None:
            raise PermanentError(f"ledger {self.name} has lost its head", hint=EVIDENCE)
        return row

    # ----------------------------------------------------------------------- records

    def append(self, records: Sequence[Record]) -> None:
        if not records:
            return
        rows = link(records, self._head)
        head = Head(rows[-1].seq, rows[-1].hash)
        names = ("seqs", "ats", "jobs", "kinds", "bodies", "befores", "hashes")
        values: dict[str, Any] = {name: list(column) for name, column in zip(names, zip(*rows))}
        values |= {"seq": head.seq, "hash": head.hash, "before": self._head.hash}
        values |= {"token": self._token, "instance": self._me.get("instance", "")}

        def write(db: Connection) -> bool:
            return db.execute(APPEND, values).rowcount == len(rows)

        def look_and_write(db: Connection) -> bool:
            return self._is_there(db, head) or write(db)

        try:
            written = self._writing.run(write)
        except StoreUnavailable:
            if self._writing.timed_out:
                raise  # a second wait would stop the event loop for as long again
            written = self._writing.run(look_and_write)
        if not written:
            self._explain()
        self._head = head

    def _is_there(self, db: Connection, head: Head) -> bool:
        row = db.execute("SELECT seq, hash FROM keepstep_head").fetchone()
        return row is not None and (row[0], bytes(row[1])) == head

    def _explain(self) -> None:
        """Nothing was written: raise why."""
        holder = _member(self._writing.run(self._holder))
        if holder.instance != self._me.get("instance"):
            raise _lost(str(self._me.get("id", "")), holder)
        raise PermanentError(
            f"ledger {self.name} was changed by others: it does not end with record "
            f"{self._head.seq} as it was written",
            hint="was a replica promoted that had not received everything? see "
            "`keepstep ledger verify`, then start the orchestrator again",
        )

    def load(self) -> list[Record]:
        with _snapshot(self._url) as db:
            self._head = _read_head(db, self.name)
            return check_rows(
                self.name, _rows(db, f"SELECT {COLUMNS} FROM keepstep_records"), self._head
            )

    def read(self) -> Iterator[Record]:
        return read_records(self._url)

    def close(self) -> None:
        self._writing.close()
        self._leasing.close()


def read_records(url: str, kinds: Collection[str] = ()) -> Iterator[Record]:
    """Records (of some kinds, or all) of a ledger that somebody else may be writing right now."""
    name = shown(url)
    query: LiteralString = "SELECT seq, body FROM keepstep_records"
    with _snapshot(url) as db:
        rows = (
            _rows(db, f"{query} WHERE kind = ANY(%s)", [list(kinds)]) if kinds else _rows(db, query)
        )
        for seq, body in rows:
            yield decode(name, seq, body)


def verify(url: str) -> VerifyResult:
    """Walk the whole chain; stop at the first row that does not fit."""
    name = shown(url)
    with _snapshot(url) as db:
        head = _read_head(db, name)
        return verify_rows(name, _rows(db, f"SELECT {COLUMNS} FROM keepstep_records"), head)


def _create(db: Connection) -> None:
    with db.transaction():
        missing = db.execute("SELECT to_regclass('keepstep_head') IS NULL").fetchone()
        if missing is not None and missing[0]:
            db.execute("SELECT pg_advisory_xact_lock(%s)", [CREATE_LOCK])
            for statement in SCHEMA:
                db.execute(statement)
            db.execute(FIRST_HEAD, [EMPTY.hash, secrets.token_urlsafe(32)])


@contextlib.contextmanager
def _snapshot(url: str) -> Iterator[Connection]:
    """A connection of its own that sees one moment of the store."""
    with mapped_errors(shown(url)), contextlib.closing(connect(url)) as db:
        with limited(db, LIMIT_S):
            db.execute("BEGIN TRANSACTION ISOLATION LEVEL REPEATABLE READ READ ONLY")
        yield db


def _rows(db: Connection, query: LiteralString, values: Sequence[Any] = ()) -> Iterator[Any]:
    with db.cursor(name="keepstep") as cursor:
        with limited(db, READ_LIMIT_S):
            cursor.execute(f"{query} ORDER BY seq", values or None)
        while True:
            with limited(db, READ_LIMIT_S):
                rows = cursor.fetchmany(READ_ROWS)
            if not rows:
                return
            yield from rows


def _read_head(db: Connection, name: str) -> Head:
    with limited(db, LIMIT_S):
        row = db.execute("SELECT seq, hash FROM keepstep_head").fetchone()
    if row is None:
        raise PermanentError(f"ledger {name} has lost its head", hint=EVIDENCE)
    return Head(int(row[0]), bytes(row[1]))


def _member(row: Sequence[Any]) -> LedgerMember:
    return LedgerMember(id=row[0], instance=row[1], url=row[2], stream=Address(row[3], row[4]))


def _lost(me: str, holder: LedgerMember) -> NotActive:
    who = f"orchestrator {holder.id} is active" if holder.instance else "nobody is active"
    return NotActive(
        f"orchestrator {me} is not active: {who}{' at ' + holder.url if holder.url else ''}",
        hint="ask the active one",
        active=holder.url,
    )
