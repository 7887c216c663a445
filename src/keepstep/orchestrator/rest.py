"""How REST is spoken here: guarded routes with their schemas, limited bodies, errors as bodies.

api.py says which routes there are.
"""

from __future__ import annotations

import asyncio
import hmac
import math
from collections.abc import Awaitable, Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec
from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.openapi.utils import get_openapi
from starlette.exceptions import HTTPException

from keepstep.adapters.identity.tokens import node_secret
from keepstep.errors import KeepstepError, NotActive, TransientError, UsageError
from keepstep.model.wire import MALFORMED
from keepstep.orchestrator import requests as bodies
from keepstep.orchestrator import web
from keepstep.orchestrator.absent import Gone, NotFound

if TYPE_CHECKING:
    from keepstep.orchestrator.join import Desk

BODY_BYTES_MAX = 1 << 20
SCHEMAS = "#/components/schemas/{name}"

T = TypeVar("T")
Handler = Callable[..., Awaitable[Response]]
Guard = Callable[[Request], Awaitable[None]]


class TooLarge(UsageError):
    pass


class Unauthorized(UsageError):
    pass


STATUS: tuple[tuple[type[KeepstepError], int], ...] = (
    (NotFound, 404),
    (Gone, 410),
    (TooLarge, 413),
    (Unauthorized, 401),
    (UsageError, 400),
    (TransientError, 503),
    (KeepstepError, 500),
)


class Routes:
    """Adds guarded routes with their struct schemas; used as a decorator factory."""

    def __init__(self, app: FastAPI, guard: list[Any]) -> None:
        self._app = app
        self._guard = guard

    def __call__(
        self, method: str, path: str, *, answer: Any, body: Any = None, status: int = 200
    ) -> Callable[[Handler], Handler]:
        responses: dict[int | str, dict[str, Any]] = {
            status: {"description": "done", "content": content(answer)},
            400: {"description": "bad input", "content": content(bodies.ErrorBody)},
            401: {"description": "token missing or wrong", "content": content(bodies.ErrorBody)},
            404: {"description": "no such job", "content": content(bodies.ErrorBody)},
            503: {"description": "not now, or not here", "content": content(bodies.StandbyBody)},
        }
        extra = {"requestBody": {"required": True, "content": content(body)}} if body else None

        def decorate(handler: Handler) -> Handler:
            self._app.add_api_route(
                path,
                handler,
                methods=[method],
                dependencies=self._guard,
                response_model=None,
                status_code=status,
                responses=responses,
                openapi_extra=extra,
            )
            return handler

        return decorate


def content(kind: Any) -> dict[str, Any]:
    schema = msgspec.json.schema_components([kind], ref_template=SCHEMAS)[0][0]
    return {"application/json": {"schema": schema}}


def describe(app: FastAPI, structs: Sequence[Any]) -> dict[str, Any]:
    described = get_openapi(title=app.title, version="1", routes=app.routes)
    schemas = msgspec.json.schema_components(structs, ref_template=SCHEMAS)[1]
    parts = described.setdefault("components", {})
    parts.setdefault("schemas", {}).update(schemas)
    parts["securitySchemes"] = {"token": {"type": "http", "scheme": "bearer"}}
    described["security"] = [{"token": []}]
    return described


def bearer(token: str, desk: Desk | None, *, nodes: bool = False) -> Guard:
    """Lets operators through; with `nodes` also the node that the address names."""

    async def check(request: Request) -> None:
        given = request.headers.get("authorization", "").encode()
        expected = [f"Bearer {token}".encode()]
        if nodes:
            where = request.path_params
            own = node_secret(token, where["job"], where["node"])
            expected.append(f"Bearer {own}".encode())
        right = any(hmac.compare_digest(given, one) for one in expected)
        text = given.removeprefix(b"Bearer ").decode(errors="replace")
        if not right and desk is not None:
            right = await asyncio.to_thread(desk.is_operator, text)
        if not right:
            raise Unauthorized(
                "token missing or wrong",
                hint="send 'Authorization: Bearer TOKEN' with the token of "
                "KEEPSTEP_HOME/orchestrators/<id>.json",
            )
        web.admit(request.scope)

    return check


async def read(request: Request, kind: type[T]) -> T:
    """The body as `kind`, never more than the limit of it in memory."""
    data = bytearray()
    async for part in request.stream():
        data += part
        if len(data) > BODY_BYTES_MAX:
            raise TooLarge(f"the request is over {BODY_BYTES_MAX} bytes")
    try:
        return msgspec.json.decode(data, type=kind)
    except MALFORMED as error:
        raise UsageError(f"bad request: {error}", hint="see /v1/openapi.json") from error


def encoded(value: Any, status: int = 200) -> Response:
    return Response(msgspec.json.encode(value), status, media_type="application/json")


def add_errors(app: FastAPI) -> None:
    app.add_exception_handler(KeepstepError, _on_error)
    app.add_exception_handler(HTTPException, _on_http_error)
    app.add_exception_handler(RequestValidationError, _on_bad_query)


async def _on_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, KeepstepError)
    status = next(code for kind, code in STATUS if isinstance(error, kind))
    body = bodies.ErrorBody(error=error.message, hint=error.hint)
    if isinstance(error, NotActive):
        body = bodies.StandbyBody(
            error=error.message, hint=error.hint, standby=True, active=error.active
        )
    answer = encoded(body, status)
    if isinstance(error, TransientError):
        answer.headers["retry-after"] = str(math.ceil(error.retry_after_s))
    return answer


async def _on_http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    return encoded(bodies.ErrorBody(error=str(error.detail)), error.status_code)


async def _on_bad_query(request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestValidationError)
    first = error.errors()[0]
    said = f"bad request: {'.'.join(str(part) for part in first['loc'])}: {first['msg']}"
    return encoded(bodies.ErrorBody(error=said, hint="see /v1/openapi.json"), 400)
