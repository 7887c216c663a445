"""REST from the command line: errors of the other side become KeepstepErrors of this one.

Several orchestrators may share a store. A standby answers with the address of the active one, so
every client has a list of addresses, which grows by what it is told, and asks the one that answered
last first.

Beyond loopback it is TLS, and the only authority believed is the orchestrator's own: its
certificate lies in the registry on the same machine, or is fetched and compared with the
fingerprint in the token before anything secret is sent (`fetch_ca`).
"""

from __future__ import annotations

import hmac
from collections.abc import Iterator, Sequence
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
from keepstep.errors import NotActive, PermanentError, TransientError, UsageError
from keepstep.orchestrator.registry import Entry
from keepstep.orchestrator.requests import ErrorBody, StandbyBody

T = TypeVar("T")

CONNECT_S = 5.0
ANSWER_S = 30.0
NOT_SENT = (httpx.ConnectError, httpx.ConnectTimeout)
UNAVAILABLE = 503
NAMED = {"sni_hostname": ORCHESTRATOR_NAME}  # the name its certificate must bear; unused in http


class NoJob(UsageError):
    """There is no such job now; there may be one later."""


class JobHasEnded(UsageError):
    """And another one of its name will never be."""


class Hosts:
    """Addresses of orchestrators, the likeliest first."""

    def __init__(self, urls: Sequence[str]) -> None:
        self._urls = list(urls)
        self._failure: TransientError | None = None

    def __iter__(self) -> Iterator[str]:
        """Each once, those that are learnt on the way included."""
        asked: set[str] = set()
        while left := [url for url in self._urls if url not in asked]:
            asked.add(left[0])
            yield left[0]

    @property
    def likeliest(self) -> str:
        return self._urls[0]

    def answered(self, url: str) -> None:
        self._failure = None
        self._urls.remove(url)
        self._urls.insert(0, url)

    def failed(self, url: str, error: TransientError) -> None:
        self._failure = error
        self._urls.remove(url)
        self._urls.append(url)
        if isinstance(error, NotActive) and error.active and error.active not in self._urls:
            self._urls.insert(0, error.active)

    def failure(self) -> TransientError:
        assert self._failure is not None
        return self._failure


class Client:
    """Blocking, for the operator commands."""

    def __init__(self, urls: str | Sequence[str], token: str, ca: str = "") -> None:
        urls = [urls] if isinstance(urls, str) else urls
        self._hosts = Hosts([checked(url) for url in urls])
        self._http = httpx.Client(**settings(token, ca))

    @property
    def url(self) -> str:
        """Of the one that answered last."""
        return self._hosts.likeliest

    @classmethod
    def of(cls, entry: Entry) -> Client:
        return cls(entry.url, entry.token, entry.ca)

    def get(self, path: str, kind: type[T], **query: Any) -> T:
        return self._ask("GET", path, kind, params=query)

    def post(self, path: str, body: Any, kind: type[T]) -> T:
        return self._ask("POST", path, kind, content=msgspec.json.encode(body))

    def _ask(self, method: str, path: str, kind: type[T], **given: Any) -> T:
        for url in self._hosts:
            try:
                answer = decoded(
                    self._http.request(method, url + path, extensions=NAMED, **given), kind
                )
            except httpx.TransportError as error:
                self._hosts.failed(url, unreachable(url, error))
                if not may_ask_again(method, error):
                    break
            except NotActive as error:
                self._hosts.failed(url, error)
            else:
                self._hosts.answered(url)
                return answer
        raise self._hosts.failure()


class AsyncClient:
    """The same for the launcher, which shares its event loop with an embedded orchestrator."""

    def __init__(self, urls: Sequence[str], token: str, ca: str = "") -> None:
        self._hosts = Hosts([checked(url) for url in urls])
        self._http = httpx.AsyncClient(**settings(token, ca))

    async def get(self, path: str, kind: type[T], **query: Any) -> T:
        return await self._ask("GET", path, kind, params=query)

    async def post(self, path: str, body: Any, kind: type[T]) -> T:
        return await self._ask("POST", path, kind, content=msgspec.json.encode(body))

    async def _ask(self, method: str, path: str, kind: type[T], **given: Any) -> T:
        for url in self._hosts:
            try:
                said = await self._http.request(method, url + path, extensions=NAMED, **given)
                answer = decoded(said, kind)
            except httpx.TransportError as error:
                self._hosts.failed(url, unreachable(url, error))
                if not may_ask_again(method, error):
                    break
            except NotActive as error:
                self._hosts.failed(url, error)
            else:
                self._hosts.answered(url)
                return answer
        raise self._hosts.failure()

    async def close(self) -> None:
        await self._http.aclose()


def may_ask_again(method: str, error: httpx.TransportError) -> bool:
    """What changes something is not sent twice, unless it was certainly not sent at all."""
    return method == "GET" or isinstance(error, NOT_SENT)


def settings(token: str, ca: str) -> dict[str, Any]:
    headers = {"content-type": "application/json"}
    if token:
        headers["authorization"] = f"Bearer {token}"
    return {
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
    except httpx.TransportError as error:
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
    if response.status_code == 410:
        raise JobHasEnded(said.error, hint=said.hint)
    if response.status_code < 500:
        raise UsageError(said.error, hint=said.hint)
    try:
        standby = msgspec.json.decode(response.content, type=StandbyBody)
        raise NotActive(standby.error, hint=standby.hint, active=standby.active)
    except msgspec.DecodeError:
        pass
    if response.status_code == UNAVAILABLE:
        raise TransientError(said.error, hint=said.hint)
    raise PermanentError(said.error, hint=said.hint)


def unreachable(url: str, error: Exception) -> TransientError:
    return TransientError(
        f"no orchestrator answers at {url}: {error or type(error).__name__}",
        hint="is it running? `keepstep orchestrator --id NAME` starts one",
    )
