"""What orchestrators that share a store share beside the ledger: their authority and its tokens.

The first one that listens beyond loopback puts its authority there and the others take it, so that
a node believes whichever is active, and a token that one of them made is known to all. The
authority's key is in the table as it is: whoever may read it can pose as anybody, as whoever reads
the secret in keepstep_head can already. Of a token there is only a digest.
"""

from __future__ import annotations

from typing import LiteralString

from keepstep.adapters.store.postgres_session import Connection, StoreSession

CREATE_LOCK = 0x6B656571
SCHEMA: tuple[LiteralString, ...] = (
    """
    CREATE TABLE IF NOT EXISTS keepstep_authority (
        one boolean PRIMARY KEY CHECK (one), key bytea NOT NULL, certificate bytea NOT NULL)
    """,
    "CREATE TABLE IF NOT EXISTS keepstep_tokens (id text PRIMARY KEY, kept bytea NOT NULL)",
)


class SharedIdentity:
    """Keeps an authority (identity.authority.Keeper) and tokens (identity.tokens.Shelf)."""

    def __init__(self, url: str) -> None:
        self._session = StoreSession(url)

    def close(self) -> None:
        self._session.close()

    # ----------------------------------------------------------------------- the authority

    def keep(self, key: bytes, certificate: bytes) -> tuple[bytes, bytes]:
        """Those that are there already, else these."""

        def work(db: Connection) -> tuple[bytes, bytes]:
            _create(db)
            db.execute(
                "INSERT INTO keepstep_authority VALUES (true, %s, %s) ON CONFLICT DO NOTHING",
                [key, certificate],
            )
            row = db.execute("SELECT key, certificate FROM keepstep_authority").fetchone()
            assert row is not None, "it was put there, or was there before"
            return bytes(row[0]), bytes(row[1])

        return self._session.run(work)

    def certificate(self) -> str:
        """ "" as long as no orchestrator of this store has listened beyond loopback."""

        def work(db: Connection) -> str:
            if _missing(db):
                return ""
            row = db.execute("SELECT certificate FROM keepstep_authority").fetchone()
            return bytes(row[0]).decode() if row is not None else ""

        return self._session.run(work)

    # ----------------------------------------------------------------------- its tokens

    def write(self, id: str, kept: bytes) -> None:
        insert: LiteralString = "INSERT INTO keepstep_tokens VALUES (%s, %s)"
        self._session.run(lambda db: db.execute(insert, [id, kept]))

    def read(self, id: str) -> bytes | None:
        query: LiteralString = "SELECT kept FROM keepstep_tokens WHERE id = %s"
        row = self._session.run(lambda db: db.execute(query, [id]).fetchone())
        return bytes(row[0]) if row is not None else None

    def ids(self) -> list[str]:
        query: LiteralString = "SELECT id FROM keepstep_tokens ORDER BY id"
        return [str(row[0]) for row in self._session.run(lambda db: db.execute(query).fetchall())]

    def remove(self, id: str) -> bool:
        delete: LiteralString = "DELETE FROM keepstep_tokens WHERE id = %s"
        return self._session.run(lambda db: db.execute(delete, [id]).rowcount == 1)


def _missing(db: Connection) -> bool:
    row = db.execute("SELECT to_regclass('keepstep_tokens') IS NULL").fetchone()
    return row is not None and bool(row[0])


def _create(db: Connection) -> None:
    if _missing(db):  # else the right to create is not needed
        with db.transaction():
            db.execute("SELECT pg_advisory_xact_lock(%s)", [CREATE_LOCK])
            for statement in SCHEMA:
                db.execute(statement)
