"""What every ledger store must do, run against all of them."""

from __future__ import annotations

import contextlib
import sqlite3
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from keepstep.adapters.store import chain, sqlite
from keepstep.errors import (
    KeepstepError,
    NotActive,
    PermanentError,
    StoreUnavailable,
    UsageError,
)
from keepstep.model.messages import Address
from keepstep.model.records import NodeJoined, Record, Tainted
from keepstep.ports.ledger import LedgerMember, LedgerStore

LEASE_S = 1.0


def records(count: int, first: int = 1) -> list[Record]:
    return [
        Tainted(job="j", at_ns=i, target=f"n{i}", reason="test")
        for i in range(first, first + count)
    ]


def member(id: str, instance: str = "") -> LedgerMember:
    stream = Address("127.0.0.1", 7000 + ord(id[0]))
    return LedgerMember(id=id, instance=instance or f"{id}-1", url=f"http://{id}", stream=stream)


class Place:
    """Where one ledger is kept, and how to get at it in every way."""

    name: str

    def __init__(self) -> None:
        self._opened: list[Any] = []

    def open(self) -> Any: ...
    def verify(self) -> chain.VerifyResult: ...
    def read(self, kinds: tuple[str, ...] = ()) -> list[Record]: ...
    def tamper(self, statement: str) -> None: ...

    def active(self, id: str = "a") -> Any:
        """A store that has the lease and has read the ledger."""
        store = self.open()
        store.enroll(member(id))
        assert store.acquire().id == id
        store.load()
        return store

    def written(self, count: int) -> list[Record]:
        store, given = self.active(), records(count)
        store.append(given[:2])
        store.append(given[2:])
        store.release()
        store.close()
        return given

    def close(self) -> None:
        for store in self._opened:
            store.close()


class SqlitePlace(Place):
    name = "sqlite"

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.path = folder / "one.db"

    def open(self) -> LedgerStore:
        store = sqlite.SqliteLedger(self.path)
        self._opened.append(store)
        return store

    def verify(self) -> chain.VerifyResult:
        return sqlite.verify(self.path)

    def read(self, kinds: tuple[str, ...] = ()) -> list[Record]:
        return list(sqlite.read_records(self.path, kinds))

    def tamper(self, statement: str) -> None:
        with contextlib.closing(sqlite3.connect(self.path)) as db, db:
            db.execute(statement)


class PostgresPlace(Place):
    name = "postgres"

    def __init__(self, url: str) -> None:
        super().__init__()
        self.url = url

    def open(self) -> LedgerStore:
        from keepstep.adapters.store.postgres import PostgresLedger

        store = PostgresLedger(self.url, lease_s=LEASE_S)
        self._opened.append(store)
        return store

    def verify(self) -> chain.VerifyResult:
        from keepstep.adapters.store import postgres

        return postgres.verify(self.url)

    def read(self, kinds: tuple[str, ...] = ()) -> list[Record]:
        from keepstep.adapters.store import postgres

        return list(postgres.read_records(self.url, kinds))

    def query(self, statement: str) -> list[Any]:
        import psycopg

        with psycopg.connect(self.url, autocommit=True) as db:
            cursor = db.execute(statement)
            return cursor.fetchall() if cursor.description else []

    def tamper(self, statement: str) -> None:
        statement = statement.replace("records", "keepstep_records")
        statement = statement.replace(" head", " keepstep_head")
        statement = statement.replace("zeroblob(32)", "decode(repeat('00', 32), 'hex')")
        statement = statement.replace(
            "replace(body, 'test', 'west')",
            "convert_to(replace(convert_from(body, 'UTF8'), 'test', 'west'), 'UTF8')",
        )
        self.query(statement)


@pytest.fixture(params=["sqlite", "postgres"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Place]:
    if request.param == "sqlite":
        made: Place = SqlitePlace(tmp_path)
    else:
        made = PostgresPlace(request.getfixturevalue("postgres").store())
    yield made
    made.close()


@pytest.fixture
def shared(postgres: Any) -> Iterator[PostgresPlace]:
    place = PostgresPlace(postgres.store())
    yield place
    place.close()


# --------------------------------------------------------------------------- all stores: the chain


def test_what_was_appended_is_read_back_in_order(place: Place) -> None:
    given = place.written(5)
    store = place.open()
    assert list(store.read()) == given == store.load() == place.read()
    assert store.seq == 5


def test_reopened_ledger_continues_the_chain(place: Place) -> None:
    place.written(3)
    store = place.active()
    store.append([NodeJoined(job="j", at_ns=9, node="n9", slots=1)])
    result = place.verify()
    assert result.ok and result.records == 4 and result.broken_seq is None


def test_both_stores_write_the_same_chain(tmp_path: Path, shared: PostgresPlace) -> None:
    one = SqlitePlace(tmp_path)
    assert one.written(5) == shared.written(5)
    assert one.verify().last_hash == shared.verify().last_hash


def test_empty_ledger_verifies(place: Place) -> None:
    place.active()
    assert place.verify().ok and place.verify().records == 0


@pytest.mark.parametrize(
    ("statement", "seq", "word"),
    [
        ("UPDATE records SET body = replace(body, 'test', 'west') WHERE seq = 3", 3, "body"),
        ("UPDATE records SET hash = zeroblob(32) WHERE seq = 2", 2, "hash"),
        ("UPDATE records SET prev_hash = zeroblob(32) WHERE seq = 4", 4, "follow"),
        ("UPDATE records SET at_ns = 77 WHERE seq = 5", 5, "columns"),
        ("UPDATE records SET kind = 'Untainted' WHERE seq = 1", 1, "columns"),
        ("UPDATE records SET job = 'other' WHERE seq = 1", 1, "columns"),
        ("DELETE FROM records WHERE seq = 3", 4, "missing"),
        ("DELETE FROM records WHERE seq >= 4", 4, "end is missing"),
        ("DELETE FROM records", 1, "end is missing"),
        ("UPDATE head SET seq = 4", 5, "added by others"),
    ],
)
def test_every_change_is_found_at_its_record_and_not_obeyed(
    place: Place, statement: str, seq: int, word: str
) -> None:
    place.written(5)
    place.tamper(statement)
    result = place.verify()
    assert not result.ok and result.broken_seq == seq and word in result.problem
    assert result.records <= seq
    store = place.open()
    store.enroll(member("a"))
    store.acquire()
    with pytest.raises(PermanentError, match=f"broken at record {seq}") as caught:
        store.load()
    assert caught.value.hint
    assert place.verify() == result, "evidence is not touched"


def test_unreadable_record_names_its_number(place: Place) -> None:
    place.written(3)
    place.tamper("UPDATE records SET body = '{}' WHERE seq = 2")
    with pytest.raises(PermanentError, match="record 2"):
        place.read()


def test_a_live_ledger_can_be_read_and_verified_beside_its_writer(place: Place) -> None:
    store = place.active()
    store.append(records(3))
    assert place.verify().records == 3
    assert len(place.read()) == len(place.read(("Tainted",))) == 3
    assert place.read(("NodeJoined",)) == []


def test_many_records_at_once_are_one_append(place: Place) -> None:
    store, given = place.active(), records(5_000)
    store.append(given)
    store.append([])
    assert place.read() == given and place.verify().ok


# --------------------------------------------------------------------------- all stores: one writer


def test_the_token_grows_with_every_writer(place: Place) -> None:
    tokens = []
    for round in range(3):
        store = place.active()
        store.append(records(1, first=round + 1))
        tokens.append(store.token)
        store.release()
        store.close()
    assert tokens == [1, 2, 3]


def second_sqlite_writer(place: SqlitePlace) -> Any:
    (place.path.parent / "one.db.lock").unlink()  # or else it is refused at once
    return place.active("b")


def second_postgres_writer(place: Place) -> Any:
    place.tamper("UPDATE head SET expires_at = now() - interval '1 hour'")
    return place.active("b")


def test_a_former_writer_can_not_write_after_another_took_over(place: Place) -> None:
    old = place.active("a")
    old.append(records(2))
    new = second_sqlite_writer(place) if isinstance(place, SqlitePlace) else (
        second_postgres_writer(place)
    )  # fmt: skip
    new.append(records(2, first=3))
    for _ in range(2):
        with pytest.raises((NotActive, PermanentError)):
            old.append(records(1, first=5))
        with pytest.raises((NotActive, PermanentError)):
            old.renew()
    new.append(records(1, first=5))
    assert place.read() == records(5) and place.verify().ok


def test_second_writer_is_refused_or_told_who_is_active(place: Place) -> None:
    first = place.active("a")
    if isinstance(place, SqlitePlace):
        with pytest.raises(UsageError, match="in use"):
            place.open()
    else:
        second = place.open()
        second.enroll(member("b"))
        assert second.acquire() == member("a")
        with pytest.raises(NotActive):
            second.append(records(1))
    first.append(records(1))
    first.renew()


# --------------------------------------------------------------------------- SQLite


def test_sqlite_append_is_one_transaction(tmp_path: Path) -> None:
    place = SqlitePlace(tmp_path)
    store = place.active()
    store.append(records(1))
    place.tamper(
        "CREATE TRIGGER refuse BEFORE INSERT ON records WHEN NEW.seq = 3 "
        "BEGIN SELECT RAISE(ABORT, 'disk full'); END"
    )
    with pytest.raises(PermanentError, match="disk full"):
        store.append(records(2, first=2))
    place.tamper("DROP TRIGGER refuse")
    assert len(place.read()) == 1 and place.verify().ok
    store.append(records(2, first=2))
    assert place.verify().records == 3
    place.close()


def test_sqlite_without_room_is_unavailable_and_goes_on_later(tmp_path: Path) -> None:
    place = SqlitePlace(tmp_path)
    store = place.active()
    store.append(records(1))
    with contextlib.closing(sqlite3.connect(place.path, isolation_level=None)) as other:
        other.execute("BEGIN IMMEDIATE")
        with pytest.raises(StoreUnavailable, match="locked"):
            store.append(records(1, first=2))
        with pytest.raises(StoreUnavailable):
            store.renew()
        other.execute("ROLLBACK")
    store.renew()
    assert store.load() == records(1)
    store.append(records(1, first=2))
    assert place.verify().records == 2
    place.close()


def test_sqlite_database_of_another_program_is_not_touched(tmp_path: Path) -> None:
    place = SqlitePlace(tmp_path)
    place.tamper("CREATE TABLE recipes (name TEXT)")
    before = place.path.read_bytes()
    with pytest.raises(PermanentError, match="recipes"):
        place.open()
    assert place.path.read_bytes() == before


# --------------------------------------------------------------------------- PostgreSQL: the lease


def until(condition: Callable[[], Any], deadline_s: float = 10.0) -> Any:
    end = time.monotonic() + deadline_s
    while not (value := condition()):
        assert time.monotonic() < end
        time.sleep(0.02)
    return value


def test_standby_takes_over_when_the_lease_ends_and_not_before(shared: PostgresPlace) -> None:
    first, second = shared.active("a"), shared.open()
    second.enroll(member("b"))
    end = time.monotonic() + 1.5 * LEASE_S
    while time.monotonic() < end:
        assert {one.id for one in first.renew()} == {"a", "b"}
        assert second.acquire().id == "a"
        time.sleep(LEASE_S / 10)
    since = time.monotonic()
    until(lambda: second.acquire().id == "b")
    assert time.monotonic() - since > 0.5 * LEASE_S
    with pytest.raises(NotActive, match="b is active") as caught:
        first.renew()
    assert caught.value.active == "http://b"


def test_released_lease_is_free_at_once(shared: PostgresPlace) -> None:
    first, second = shared.active("a"), shared.open()
    second.enroll(member("b"))
    first.release()
    assert second.acquire().id == "b"


def test_lease_that_nobody_took_is_renewed_after_its_time(shared: PostgresPlace) -> None:
    store = shared.active("a")
    time.sleep(1.3 * LEASE_S)
    store.append(records(1))
    assert store.renew() and store.token == 1


def test_all_share_one_secret(shared: PostgresPlace) -> None:
    secrets = {shared.open().enroll(member(id)) for id in "abc"}
    assert len(secrets) == 1 and len(secrets.pop()) > 30


def test_same_identity_twice_is_refused_while_the_first_lives(shared: PostgresPlace) -> None:
    first, twin = shared.active("a"), shared.open()
    with pytest.raises(UsageError, match="runs already") as caught:
        twin.enroll(member("a", "a-2"))
    assert "--id" in caught.value.hint
    first.append(records(1))
    first.renew()
    time.sleep(1.3 * LEASE_S)  # as if it had been killed
    twin.enroll(member("a", "a-2"))
    assert twin.acquire().instance == "a-2"
    with pytest.raises(NotActive):
        first.append(records(1, first=2))


def test_clock_of_the_server_set_back_does_not_lengthen_a_lease(shared: PostgresPlace) -> None:
    """Seen from the server, lease and members are from the future: the same as a clock set back."""
    shared.active("a")
    second = shared.open()
    second.enroll(member("b"))
    for table, columns in (
        ("keepstep_head", ("renewed_at", "expires_at")),
        ("keepstep_members", ("seen_at",)),
    ):
        moved = ", ".join(f"{column} = {column} + interval '1 hour'" for column in columns)
        shared.query(f"UPDATE {table} SET {moved}")
    assert second.acquire().id == "a", "its time is cut down, not taken away"
    until(lambda: second.acquire().id == "b", 3 * LEASE_S)
    twin = shared.open()
    twin.enroll(member("a", "a-2"))


def test_only_one_of_many_gets_the_lease(shared: PostgresPlace) -> None:
    """And every append of every former holder is refused: the chain has no gap and no branch."""
    stores = [shared.open() for _ in range(4)]
    for id, store in zip("abcd", stores):
        store.enroll(member(id))
    began, wrote = time.monotonic(), [0] * len(stores)

    def going_on() -> bool:
        """For a while, and until each of them has had it."""
        took = time.monotonic() - began
        return took < (60.0 if min(wrote) == 0 else 3.0)

    def compete(number: int) -> None:
        store = stores[number]
        while going_on():
            if store.acquire().id != "abcd"[number]:
                continue
            store.load()
            with contextlib.suppress(NotActive):
                while going_on():
                    store.append(records(1, first=store.seq + 1))
                    wrote[number] += 1

    def expire() -> None:
        while going_on():
            shared.query("UPDATE keepstep_head SET expires_at = now()")
            time.sleep(0.02)

    threads = [threading.Thread(target=compete, args=(i,)) for i in range(len(stores))]
    threads.append(threading.Thread(target=expire))
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert shared.read() == records(sum(wrote)) and shared.verify().ok
    assert shared.query("SELECT token FROM keepstep_head")[0][0] > 5 and min(wrote) > 0


# --------------------------------------------------------------------------- PostgreSQL: away


def test_broken_connection_is_not_noticed(shared: PostgresPlace) -> None:
    store = shared.active()
    store.append(records(1))
    for _ in range(2):
        shared.query(
            "SELECT pg_terminate_backend(pid) FROM pg_stat_activity "
            "WHERE datname = current_database() AND pid <> pg_backend_pid()"
        )
        store.append(records(1, first=store.seq + 1))
    assert shared.read() == records(3) and shared.verify().ok


def test_append_whose_answer_was_lost_is_not_written_twice(shared: PostgresPlace) -> None:
    store = shared.active()
    store.append(records(1))
    session, real = store._writing, store._writing.run
    lost = iter([True])

    def run(work: Any, *more: Any) -> Any:
        value = real(work, *more)
        if next(lost, False):
            session.close()
            raise StoreUnavailable("the answer was lost")
        return value

    session.run = run
    store.append(records(2, first=2))
    store.append(records(1, first=4))
    assert shared.read() == records(4) and shared.verify().ok


def test_server_down_is_unavailable_and_what_happened_is_settled_by_load(
    postgres: Any, shared: PostgresPlace
) -> None:
    store = shared.active()
    store.append(records(2))
    postgres.stop()
    try:
        with pytest.raises(StoreUnavailable, match="cannot be reached") as caught:
            store.append(records(1, first=3))
        assert "training goes on" in caught.value.hint
        with pytest.raises(StoreUnavailable):
            store.renew()
        store.release()
    finally:
        postgres.start()
    store.renew()
    assert store.load() == records(2)
    store.append(records(1, first=3))
    assert shared.read() == records(3) and shared.verify().ok


def test_server_that_stands_still_costs_a_bounded_time(
    postgres: Any, shared: PostgresPlace
) -> None:
    store = shared.active()
    store.append(records(2))
    postgres.freeze()
    try:
        for action in (lambda: store.append(records(1, first=3)), store.renew, store.load):
            since = time.monotonic()
            with pytest.raises(StoreUnavailable):
                action()
            assert time.monotonic() - since < 8.0
    finally:
        postgres.thaw()
    store.renew()
    found = store.load()
    assert found in (records(2), records(3)), "it may or may not have been written"
    store.append(records(1, first=len(found) + 1))
    assert shared.verify().ok


def test_server_that_forgot_records_is_noticed_with_the_next_append(shared: PostgresPlace) -> None:
    """As after the promotion of a replica that lagged."""
    store = shared.active()
    store.append(records(3))
    shared.query(
        "UPDATE keepstep_head SET seq = 2, hash = (SELECT hash FROM keepstep_records WHERE seq = 2)"
    )
    shared.query("DELETE FROM keepstep_records WHERE seq = 3")
    assert shared.verify().ok
    with pytest.raises(PermanentError, match="does not end with record 3"):
        store.append(records(1, first=4))
    assert shared.verify().records == 2


# --------------------------------------------------------------------------- PostgreSQL: bad input


def refused(url: str) -> KeepstepError:
    from keepstep.adapters.store.postgres import PostgresLedger

    with pytest.raises(KeepstepError) as caught:
        store = PostgresLedger(url)
        store.load()
    assert caught.value.hint
    return caught.value


def test_addresses_that_lead_nowhere(postgres: Any) -> None:
    good = postgres.url("postgres")
    wrong = good.replace(":" + good.split(":")[2].split("@")[0], ":wrong-password")
    assert isinstance(refused(wrong), UsageError)
    assert isinstance(refused(postgres.url("no_such_database")), UsageError)
    assert isinstance(refused(good.replace(str(postgres.port), "1")), StoreUnavailable)
    error = refused("postgresql://u:secret-word@[broken")
    assert isinstance(error, UsageError) and "secret-word" not in str(error)


def test_password_is_never_shown(postgres: Any) -> None:
    url = postgres.url("no_such_database")
    password = url.split(":")[2].split("@")[0]
    error = refused(url)
    assert password not in str(error) and "127.0.0.1" in str(error)


def test_tables_of_another_program_are_not_used(shared: PostgresPlace) -> None:
    shared.query("CREATE TABLE keepstep_records (recipe text)")
    assert isinstance(refused(shared.url), PermanentError)
    assert shared.query("SELECT * FROM keepstep_records") == []


def test_role_without_rights_is_told_which(postgres: Any, shared: PostgresPlace) -> None:
    shared.query("CREATE ROLE guest LOGIN PASSWORD 'guest'")
    schema = shared.query("SELECT current_schema()")[0][0]
    for rights in ("nothing", "usage"):
        if rights == "usage":
            shared.query(f"GRANT USAGE ON SCHEMA {schema} TO guest")
        refused_guest(shared)


def refused_guest(shared: PostgresPlace) -> None:
    host = shared.url.split("@")[1]
    error = refused(f"postgresql://guest:guest@{host}")
    assert isinstance(error, PermanentError) and "CREATE" in error.hint
