"""One authority and one set of tokens for all orchestrators that share a store."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("psycopg", reason="needs psycopg: pip install 'keepstep[postgres]'")

from keepstep.adapters.identity.authority import Authority
from keepstep.adapters.identity.tokens import Tokens
from keepstep.adapters.store.shared_identity import SharedIdentity
from keepstep.cli.main import invoke
from keepstep.errors import StoreUnavailable, UsageError

HOUR_NS = 3600 * 10**9


@pytest.fixture
def url(postgres: Any) -> str:
    return str(postgres.store())


@pytest.fixture
def shared(url: str) -> Iterator[SharedIdentity]:
    it = SharedIdentity(url)
    yield it
    it.close()


def test_all_who_start_together_take_the_same_authority(url: str, tmp_path: Path) -> None:
    found: list[Authority] = []

    def start(id: str) -> None:
        it = SharedIdentity(url)
        found.append(Authority.shared(tmp_path / id, it.keep))
        it.close()

    threads = [threading.Thread(target=start, args=(id,)) for id in "abcd"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 4 and len({one.fingerprint for one in found}) == 1
    for id in "abcd":
        assert sorted(path.name for path in (tmp_path / id).iterdir()) == ["ca.crt"]
    # What one signs, the others' certificate vouches for.
    keys = {one._key.private_numbers().private_value for one in found}
    assert len(keys) == 1


def test_an_authority_that_was_there_before_the_store_is_kept(
    shared: SharedIdentity, tmp_path: Path
) -> None:
    mine = Authority.open(tmp_path / "a")
    assert Authority.shared(tmp_path / "a", shared.keep).fingerprint == mine.fingerprint
    assert not (tmp_path / "a" / "ca.key").exists()
    assert Authority.shared(tmp_path / "a", shared.keep).fingerprint == mine.fingerprint
    assert Authority.shared(tmp_path / "b", shared.keep).fingerprint == mine.fingerprint
    Authority.open(tmp_path / "c")
    with pytest.raises(UsageError, match="not the one in the store"):
        Authority.shared(tmp_path / "c", shared.keep)
    assert (tmp_path / "c" / "ca.key").exists()
    with pytest.raises(UsageError, match="is in a shared store"):
        Authority.open(tmp_path / "a")


def test_a_token_of_one_is_known_to_all_until_it_is_revoked(
    shared: SharedIdentity, url: str, tmp_path: Path
) -> None:
    authority = Authority.shared(tmp_path / "a", shared.keep)
    text, kept = Tokens(shared).create(
        authority.fingerprint, role="join", now_ns=0, ttl_ns=HOUR_NS, node="n1"
    )
    other = SharedIdentity(url)
    try:
        assert Tokens(other).check(text, "join", 1) == kept
        assert Tokens(other).check(text, "operator", 1) is None
        assert Tokens(other).check(text[:-1] + "!", "join", 1) is None
        assert [one.id for one in Tokens(other).all()] == [kept.id]
        Tokens(other).remove(kept.id)
        with pytest.raises(UsageError, match="no token"):
            Tokens(other).remove(kept.id)
    finally:
        other.close()
    assert Tokens(shared).check(text, "join", 1) is None


def test_secrets_of_tokens_are_not_in_the_store(
    shared: SharedIdentity, url: str, tmp_path: Path
) -> None:
    import psycopg

    authority = Authority.shared(tmp_path / "a", shared.keep)
    text, _ = Tokens(shared).create(authority.fingerprint, role="join", now_ns=0, ttl_ns=HOUR_NS)
    with psycopg.connect(url) as db:
        rows = db.execute("SELECT kept FROM keepstep_tokens").fetchall()
    assert len(rows) == 1 and text.rpartition(".")[2].encode() not in bytes(rows[0][0])


def test_token_commands_use_the_store(
    url: str,
    shared: SharedIdentity,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("KEEPSTEP_HOME", str(tmp_path))
    monkeypatch.setenv("KEEPSTEP_STORE", url)
    assert invoke(["token", "create"]) == 2
    assert "has listened beyond loopback" in capsys.readouterr().err
    authority = Authority.shared(tmp_path / "authorities" / "a", shared.keep)
    assert invoke(["token", "create"]) == 0
    token = capsys.readouterr().out.strip()
    assert token.split(".")[1] == authority.fingerprint
    assert Tokens(shared).check(token, "join", 0) is not None
    assert invoke(["token", "revoke", token.split(".")[2]]) == 0
    assert Tokens(shared).check(token, "join", 0) is None
    capsys.readouterr()
    monkeypatch.delenv("KEEPSTEP_STORE")
    assert invoke(["token", "create"]) == 2
    assert "--store or KEEPSTEP_STORE" in capsys.readouterr().err


def test_a_store_that_is_away_is_no_wrong_token() -> None:
    away = SharedIdentity("postgresql://u@127.0.0.1:1/x")
    with pytest.raises(StoreUnavailable):
        Tokens(away).check("ks1." + "0" * 64 + "." + "0" * 12 + ".x", "join", 0)
