"""Tokens that leave the orchestrator's machine, and secrets derived from its own.

    ks1.<fingerprint of the authority>.<id>.<secret>

A token says whom to believe before anything secret is sent: whoever holds it compares the
authority's certificate with the fingerprint first. The orchestrator keeps a digest of the secret
only, in a private file or in the store that it shares with others. A *join* token lets nodes join
until it expires, and nothing else; an *operator* token does whatever the orchestrator's own does.

A node that has joined gets two secrets, both derived from the orchestrator's own token, so that
there is nothing more to be kept: one names the node to the orchestrator, the other is common to
the nodes of its job.
"""

from __future__ import annotations

import hashlib
import hmac
import re
import secrets
from pathlib import Path
from typing import Literal, Protocol

import msgspec

from keepstep.adapters.identity.private_files import private_folder, read_private, write_private
from keepstep.errors import UsageError

Role = Literal["join", "operator"]
VERSION = "ks1"
_ID = re.compile(r"[0-9a-f]{12}")
_FINGERPRINT = re.compile(r"[0-9a-f]{64}")


class Token(msgspec.Struct, frozen=True, kw_only=True):
    """What a token says, seen from outside."""

    fingerprint: str
    id: str
    secret: str


class KeptToken(msgspec.Struct, frozen=True, kw_only=True):
    """What the orchestrator keeps of it."""

    id: str
    role: Role
    digest: str
    expires_at_ns: int  # wall clock
    node: str = ""  # join: only under this name


def parse(text: str) -> Token | None:
    """None for the short kind, which is only used on the orchestrator's own machine."""
    parts = text.strip().split(".")
    if parts[0] != VERSION:
        return None
    if len(parts) != 4 or not _FINGERPRINT.fullmatch(parts[1]) or not _ID.fullmatch(parts[2]):
        raise UsageError("the token is damaged", hint="keepstep token create prints a whole one")
    return Token(fingerprint=parts[1], id=parts[2], secret=parts[3])


class TokenShelf(Protocol):
    """Where tokens are kept: a folder, or a store that several orchestrators share."""

    def write(self, id: str, kept: bytes) -> None: ...

    def read(self, id: str) -> bytes | None: ...

    def ids(self) -> list[str]: ...

    def remove(self, id: str) -> bool:
        """False if it is not there."""


class Folder:
    """One private file per token."""

    def __init__(self, authority: Path) -> None:
        self._path = authority / "tokens"

    def write(self, id: str, kept: bytes) -> None:
        write_private(private_folder(self._path) / f"{id}.json", kept)

    def read(self, id: str) -> bytes | None:
        try:
            return read_private(self._path / f"{id}.json")
        except UsageError:
            return None

    def ids(self) -> list[str]:
        return sorted(path.stem for path in self._path.glob("*.json"))

    def remove(self, id: str) -> bool:
        there = (self._path / f"{id}.json").exists()
        (self._path / f"{id}.json").unlink(missing_ok=True)
        return there


class Tokens:
    def __init__(self, shelf: TokenShelf) -> None:
        self._shelf = shelf

    def create(
        self, fingerprint: str, *, role: Role, now_ns: int, ttl_ns: int, node: str = ""
    ) -> tuple[str, KeptToken]:
        secret = secrets.token_urlsafe(32)
        kept = KeptToken(
            id=secrets.token_hex(6),
            role=role,
            digest=_digest(secret),
            expires_at_ns=now_ns + ttl_ns,
            node=node,
        )
        self._shelf.write(kept.id, msgspec.json.encode(kept))
        return f"{VERSION}.{fingerprint}.{kept.id}.{secret}", kept

    def check(self, text: str, role: Role, now_ns: int) -> KeptToken | None:
        """The token, if it is one of ours, of this role, and not expired."""
        try:
            token = parse(text)
        except UsageError:
            return None
        kept = self._read(token.id) if token is not None else None
        if token is None or kept is None or kept.role != role:
            return None
        if not hmac.compare_digest(kept.digest, _digest(token.secret)):
            return None
        return kept if now_ns < kept.expires_at_ns else None

    def all(self) -> list[KeptToken]:
        found = [self._read(id) for id in self._shelf.ids()]
        return sorted((one for one in found if one is not None), key=lambda k: k.expires_at_ns)

    def remove(self, id: str) -> None:
        if not _ID.fullmatch(id) or not self._shelf.remove(id):
            raise UsageError(f"no token {id}", hint="keepstep token list")

    def _read(self, id: str) -> KeptToken | None:
        data = self._shelf.read(id)
        try:
            return msgspec.json.decode(data, type=KeptToken) if data is not None else None
        except msgspec.DecodeError:
            return None


def _digest(secret: str) -> str:
    return hashlib.sha256(secret.encode()).hexdigest()


def node_secret(own: str, job: str, node: str) -> str:
    return _derived(own, "node", job, node)


def job_secret(own: str, job: str) -> str:
    return _derived(own, "job", job)


def _derived(own: str, *words: str) -> str:
    return hmac.digest(own.encode(), msgspec.json.encode(words), "sha256").hex()
