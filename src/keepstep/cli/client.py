"""REST from the command line: errors of the other side become KeepstepErrors of this one."""

from __future__ import annotations

from typing import Any, TypeVar

import httpx
import msgspec

from keepstep.errors import PermanentError, TransientError, UsageError
from keepstep.orchestrator.registry import Entry
from keepstep.orchestrator.requests import ErrorBody

T = TypeVar("T")

CONNECT_S = 5.0
ANSWER_S = 30.0
RETRYABLE = (httpx.TransportError,)


class Client:
    """Blocking, for the operator commands."""

    def __init__(self, url: str, token: str) -> None:
        self.url = url
        self._http = httpx.Client(**settings(url, token))

    @classmethod
    def of(cls, entry: Entry) -> Client:
        return cls(entry.url, entry.token)

    def get(self, path: str, kind: type[T], **query: Any) -> T:
        try:
            return decoded(self._http.get(path, params=query), kind)
        except RETRYABLE as error:
            raise unreachable(self.url, error) from error

    def post(self, path: str, body: Any, kind: type[T]) -> T:
        try:
            return decoded(self._http.post(path, content=msgspec.json.encode(body)), kind)
        except RETRYABLE as error:
            raise unreachable(self.url, error) from error


class AsyncClient:
    """The same for the launcher, which shares its event loop with an embedded orchestrator."""

    def __init__(self, url: str, token: str) -> None:
        self.url = url
        self._http = httpx.AsyncClient(**settings(url, token))

    async def get(self, path: str, kind: type[T], **query: Any) -> T:
        try:
            return decoded(await self._http.get(path, params=query), kind)
        except RETRYABLE as error:
            raise unreachable(self.url, error) from error

    async def post(self, path: str, body: Any, kind: type[T]) -> T:
        try:
            return decoded(await self._http.post(path, content=msgspec.json.encode(body)), kind)
        except RETRYABLE as error:
            raise unreachable(self.url, error) from error

    async def close(self) -> None:
        await self._http.aclose()


def settings(url: str, token: str) -> dict[str, Any]:
    return {
        "base_url": url,
        "headers": {"authorization": f"Bearer {token}", "content-type": "application/json"},
        "timeout": httpx.Timeout(ANSWER_S, connect=CONNECT_S),
        # A proxy from the environment must never see the token, nor loopback requests.
        "trust_env": False,
    }


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
    if response.status_code < 500:
        raise UsageError(said.error, hint=said.hint)
    raise PermanentError(said.error, hint=said.hint)


def unreachable(url: str, error: Exception) -> TransientError:
    return TransientError(
        f"no orchestrator answers at {url}: {error or type(error).__name__}",
        hint="is it running? `keepstep orchestrator --id NAME` starts one",
    )
