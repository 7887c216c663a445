"""REST from the command line: errors of the other side become KeepstepErrors of this one.

Beyond loopback it is TLS, and the only authority believed is the orchestrator's own: its
certificate lies in the registry on the same machine, or is fetched and compared with the
fingerprint in the token before anything secret is sent (`fetch_ca`).
"""

from __future__ import annotations

import hmac
from typing import Any, TypeVar
from urllib.parse import urlsplit

import httpx
import msgspec

from keepstep.adapters.transport.tls import (
    ORCHESTRATOR_NAME,
    believing_anyone,
    is_loopback,
    trusting,
)
from keepstep.errors import PermanentError, TransientError, UsageError
from keepstep.orchestrator.registry import Entry
from keepstep.orchestrator.requests import ErrorBody

T = TypeVar("T")

CONNECT_S = 5.0
ANSWER_S = 30.0
RETRYABLE = (httpx.TransportError,)
NAMED = {"sni_hostname": ORCHESTRATOR_NAME}  # the name its certificate must bear; unused in http


class NoJob(UsageError):
    """There is no such job now; there may be one later."""


class Client:
    """Blocking, for the operator commands."""

    def __init__(self, url: str, token: str, ca: str = "") -> None:
        self.url = url
        self._http = httpx.Client(**settings(url, token, ca))

    @classmethod
    def of(cls, entry: Entry) -> Client:
        return cls(entry.url, entry.token, entry.ca)

    def get(self, path: str, kind: type[T], **query: Any) -> T:
        try:
            return decoded(self._http.get(path, params=query, extensions=NAMED), kind)
        except RETRYABLE as error:
            raise unreachable(self.url, error) from error

    def post(self, path: str, body: Any, kind: type[T]) -> T:
        try:
            content = msgspec.json.encode(body)
            return decoded(self._http.post(path, content=content, extensions=NAMED), kind)
        except RETRYABLE as error:
            raise unreachable(self.url, error) from error


class AsyncClient:
    """The same for the launcher, which shares its event loop with an embedded orchestrator."""

    def __init__(self, url: str, token: str, ca: str = "") -> None:
        self.url = url
        self._http = httpx.AsyncClient(**settings(url, token, ca))

    async def get(self, path: str, kind: type[T], **query: Any) -> T:
        try:
            return decoded(await self._http.get(path, params=query, extensions=NAMED), kind)
        except RETRYABLE as error:
            raise unreachable(self.url, error) from error

    async def post(self, path: str, body: Any, kind: type[T]) -> T:
        try:
            content = msgspec.json.encode(body)
            return decoded(await self._http.post(path, content=content, extensions=NAMED), kind)
        except RETRYABLE as error:
            raise unreachable(self.url, error) from error

    async def close(self) -> None:
        await self._http.aclose()


def settings(url: str, token: str, ca: str) -> dict[str, Any]:
    headers = {"content-type": "application/json"}
    if token:
        headers["authorization"] = f"Bearer {token}"
    return {
        "base_url": checked(url),
        "headers": headers,
        "timeout": httpx.Timeout(ANSWER_S, connect=CONNECT_S),
        # Without a certificate to compare with, nobody can be believed.
        "verify": trusting(cadata=ca) if ca else True,
        # A proxy from the environment must never see the token, nor loopback requests.
        "trust_env": False,
    }


def checked(url: str) -> str:
    """`url` without its last slash; refused if what is sent could be read on its way."""
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise UsageError(f"{url} is no address of an orchestrator", hint="https://HOST:PORT")
    if parts.scheme == "http" and not is_loopback(parts.hostname):
        raise UsageError(
            f"{url} is beyond loopback and not encrypted",
            hint=f"https://{parts.netloc}, with a token of `keepstep token create`",
        )
    return url.rstrip("/")


def fetch_ca(url: str, fingerprint: str) -> str:
    """The authority's certificate, from whoever answers at `url`, if it is the one we look for."""
    from keepstep.adapters.identity.authority import fingerprint as fingerprint_of

    options: Any = {"timeout": httpx.Timeout(ANSWER_S, connect=CONNECT_S), "trust_env": False}
    try:
        with httpx.Client(verify=believing_anyone(), **options) as http:
            ca = decoded(http.get(f"{checked(url)}/v1/ca"), str)
    except RETRYABLE as error:
        raise unreachable(url, error) from error
    if not hmac.compare_digest(fingerprint_of(ca), fingerprint):
        raise UsageError(
            f"whoever answers at {url} is not the orchestrator that made this token",
            hint="check the address; after `rm` of its authority all tokens must be made anew",
        )
    return ca


def decoded(response: httpx.Response, kind: type[T]) -> T:
    if response.is_success:
        try:
            return msgspec.json.decode(response.content, type=kind)
        except msgspec.DecodeError as error:
            raise PermanentError(
                f"the answer of {response.url} is not understood: {error}",
                hint="is that address an orchestrator of the same Keepstep version?",
            ) from error
    try:
        said = msgspec.json.decode(response.content, type=ErrorBody)
    except msgspec.DecodeError:
        said = ErrorBody(error=f"{response.url} answered {response.status_code}")
    if response.status_code == 404:
        raise NoJob(said.error, hint=said.hint)
    if response.status_code < 500:
        raise UsageError(said.error, hint=said.hint)
    raise PermanentError(said.error, hint=said.hint)


def unreachable(url: str, error: Exception) -> TransientError:
    return TransientError(
        f"no orchestrator answers at {url}: {error or type(error).__name__}",
        hint="is it running? `keepstep orchestrator --id NAME` starts one",
    )
