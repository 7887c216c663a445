"""A connection to PostgreSQL that never makes anybody wait for long; its errors in plain words."""

from __future__ import annotations

import contextlib
import os
import socket
import threading
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import psycopg
from psycopg import errors as pg
from psycopg.conninfo import conninfo_to_dict

from keepstep.errors import PermanentError, StoreUnavailable, UsageError

T = TypeVar("T")
Connection = psycopg.Connection[tuple[Any, ...]]

CONNECT_S = 2
LIMIT_S = 2.0
EVIDENCE = "it is evidence, so it was not touched; use another database"


class StoreSession:
    """One connection, made when it is needed. It does not survive an error.

    Threads take turns: a renewal may still wait for its answer when the process says goodbye."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._name = shown(url)
        self._db: Connection | None = None
        self._turn = threading.Lock()
        self.timed_out = False

    def run(self, work: Callable[[Connection], T], limit_s: float = LIMIT_S) -> T:
        with self._turn, mapped_errors(self._name):
            self.timed_out = False
            if self._db is None or self._db.closed:
                self._db = connect(self._url)
            try:
                with limited(self._db, limit_s, self._note_timeout):
                    return work(self._db)
            except psycopg.Error:
                self.close()
                raise

    def _note_timeout(self) -> None:
        self.timed_out = True

    def close(self) -> None:
        if self._db is not None:
            self._db.close()
            self._db = None


@contextlib.contextmanager
def limited(
    db: Connection, limit_s: float, on_timeout: Callable[[], None] = lambda: None
) -> Iterator[None]:
    """Whoever waits on this connection for too long gets an error instead of an answer."""

    def sever() -> None:
        on_timeout()
        with contextlib.suppress(OSError, psycopg.Error):
            waiting = socket.socket(fileno=os.dup(db.fileno()))
            with waiting:
                waiting.shutdown(socket.SHUT_RDWR)

    timer = threading.Timer(limit_s, sever)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def connect(url: str) -> Connection:
    wanted = _parsed(url)
    wanted.setdefault("connect_timeout", CONNECT_S)
    wanted.setdefault("application_name", "keepstep")
    wanted.setdefault("target_session_attrs", "read-write")  # of several hosts, the primary
    db = psycopg.connect(**wanted, autocommit=True)
    try:
        with limited(db, LIMIT_S):
            db.execute(f"SET lock_timeout = {int(LIMIT_S * 1000)}")
            # Whatever the server's default: a record that was acknowledged is on disk.
            db.execute(
                "SELECT set_config('synchronous_commit', 'on', false) "
                "WHERE current_setting('synchronous_commit') = 'off'"
            )
    except BaseException:
        db.close()
        raise
    return db


@contextlib.contextmanager
def mapped_errors(name: str) -> Iterator[None]:
    """PostgreSQL's errors, in the words of an operator."""
    try:
        yield
    except (pg.UndefinedTable, pg.UndefinedColumn, pg.UndefinedFunction, pg.DatatypeMismatch) as e:
        raise PermanentError(
            f"{name} holds no ledger of this Keepstep: {_words(e)}", hint=EVIDENCE
        ) from e
    except (pg.InsufficientPrivilege, pg.InvalidSchemaName) as e:
        raise PermanentError(
            f"ledger {name} cannot be used: {_words(e)}",
            hint="the role needs CREATE on the schema once, and then to read and write "
            "the tables keepstep_*",
        ) from e
    except (psycopg.OperationalError, psycopg.InterfaceError, pg.ReadOnlySqlTransaction) as e:
        said = _words(e)
        if "authentication failed" in said or "does not exist" in said or "pg_hba" in said:
            raise UsageError(
                f"{name} refuses us: {said}", hint="check user, password and database of --store"
            ) from e
        raise StoreUnavailable(
            f"the store {name} cannot be reached: {said}",
            hint="training goes on and migrations wait until it is back",
        ) from e
    except psycopg.Error as e:
        raise PermanentError(f"ledger {name} cannot be used: {_words(e)}", hint=EVIDENCE) from e


def _words(error: Exception) -> str:
    return " ".join(str(error).split()) or type(error).__name__


def _parsed(url: str) -> dict[str, Any]:
    try:
        return dict(conninfo_to_dict(url))
    except psycopg.ProgrammingError as error:
        # The text of the error may repeat the password, so only its kind is told.
        raise UsageError(
            "--store is not an address that PostgreSQL understands",
            hint="postgresql://USER@HOST:PORT/DATABASE; the password may be in ~/.pgpass",
        ) from error


def shown(url: str) -> str:
    """The address without what must not be seen."""
    known = _parsed(url)
    host = known.get("host") or known.get("hostaddr") or "localhost"
    port = f":{known['port']}" if known.get("port") else ""
    return f"postgresql://{host}{port}/{known.get('dbname') or known.get('user') or ''}"
