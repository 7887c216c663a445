"""REST for operators and launchers, described by OpenAPI at /v1/openapi.json.

Every route needs the bearer token, the description included, but /healthz and the two by which a
node of another machine joins (there over TLS, and the second asks for a token itself). Bodies are
the same msgspec structs that the rest of Keepstep uses, so their schemas are put into the
description from there. Everything that changes something becomes one input of the core, and the
answer is sent when its records are durable.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING

import msgspec
from fastapi import Depends, FastAPI, Request, Response
from fastapi.responses import JSONResponse

from keepstep.errors import NotActive, UsageError
from keepstep.model import job as inputs
from keepstep.model.agent_messages import Examined
from keepstep.model.records import IncidentOpened
from keepstep.model.schedule import Ask
from keepstep.model.views import IncidentView, JobView, OfferView, PlanView
from keepstep.orchestrator import overview, registry, rest, web
from keepstep.orchestrator import requests as bodies
from keepstep.orchestrator.absent import NotFound
from keepstep.orchestrator.rest import Guard, Routes, Unauthorized, bearer, describe, encoded, read
from keepstep.runtime.driver import Driver

if TYPE_CHECKING:
    from keepstep.orchestrator.join import Desk

log = logging.getLogger("keepstep.api")

WATCH_S_MAX = 60.0

Offers = Callable[[Ask], Awaitable[list[OfferView]]]
NEW_TOKEN = "`keepstep token create` on the orchestrator's machine makes a new one"
STRUCTS = (
    Examined,
    inputs.JobSpec,
    inputs.InjectSpec,
    JobView,
    IncidentView,
    bodies.MigrateRequest,
    bodies.DrainRequest,
    bodies.RebalanceRequest,
    bodies.TaintRequest,
    bodies.UntaintRequest,
    bodies.CancelRequest,
    bodies.ProceedRequest,
    bodies.SignalRequest,
    bodies.JoinRequest,
    bodies.JoinedBody,
    bodies.Ok,
    bodies.Asked,
    bodies.SignalTaken,
    bodies.Watch,
    bodies.SpareLine,
    bodies.NodeLine,
    PlanView,
    bodies.Info,
    bodies.ErrorBody,
    bodies.StandbyBody,
)


def build(
    driver: Driver,
    token: str,
    info: Callable[[], bodies.Info],
    desk: Desk | None = None,
    examine: Callable[[str, str], Awaitable[Examined]] | None = None,
    offers: Offers | None = None,
) -> FastAPI:
    """`desk` is there if nodes can join from other machines; `examine` asks a node, `offers` the
    scheduler."""
    app = FastAPI(title="Keepstep", openapi_url=None, docs_url=None, redoc_url=None)
    guard = [Depends(bearer(token, desk))]
    _add_info(Routes(app, guard), info)
    add = Routes(app, [*guard, Depends(active(driver))])
    _add_reading(add, driver)
    _add_operating(add, driver)
    _add_planning(add, driver, offers)
    _add_signals(add, driver)
    if examine is not None:
        _add_examining(add, driver, examine)
    of_nodes = Routes(app, [Depends(bearer(token, desk, nodes=True))])
    _add_nodes(of_nodes, driver)
    if desk is not None:
        _add_joining(Routes(app, []), desk, bearer(token, desk), active(driver))

    @app.get("/healthz")
    async def healthz() -> Response:
        return encoded(bodies.Ok(ok=not driver.failed.done()))

    @app.get("/v1/openapi.json", dependencies=guard, include_in_schema=False)
    async def openapi() -> Response:
        return JSONResponse(describe(app, STRUCTS))

    rest.add_errors(app)
    return app


def _add_info(add: Routes, info: Callable[[], bodies.Info]) -> None:
    @add("GET", "/v1/orchestrator", answer=bodies.Info)
    async def orchestrator() -> Response:
        return encoded(info())


def _add_reading(add: Routes, driver: Driver) -> None:
    @add("GET", "/v1/jobs", answer=list[JobView])
    async def jobs() -> Response:
        return encoded(views(driver))

    @add("GET", "/v1/jobs/{job}", answer=JobView)
    async def job_view(job: str) -> Response:
        return encoded(find(driver, job))

    @add("GET", "/v1/jobs/{job}/watch", answer=bodies.Watch)
    async def watch(job: str, since: int = 0, wait_s: float = 20.0) -> Response:
        check(driver, job)
        change = await driver.wait_change(job, since, min(max(wait_s, 0.0), WATCH_S_MAX))
        incidents = list(driver.core.incidents(job))
        return encoded(bodies.Watch(change=change, job=find(driver, job), incidents=incidents))

    @add("GET", "/v1/jobs/{job}/incidents", answer=list[IncidentView])
    async def job_incidents(job: str) -> Response:
        check(driver, job)
        return encoded(driver.core.incidents(job))

    @add("GET", "/v1/incidents", answer=list[IncidentView])
    async def incidents() -> Response:
        return encoded(driver.core.incidents(None))

    @add("GET", "/v1/spares", answer=list[bodies.SpareLine])
    async def spares() -> Response:
        return encoded(overview.spare_lines(views(driver)))

    @add("GET", "/v1/nodes", answer=list[bodies.NodeLine])
    async def nodes() -> Response:
        return encoded(overview.node_lines(views(driver)))


def _add_planning(add: Routes, driver: Driver, offers: Offers | None) -> None:
    async def answer(given: inputs.Migrate | inputs.Drain | inputs.Rebalance) -> Response:
        plan, ask = driver.core.plan(given)
        if ask is not None and offers is not None:
            plan = merged(plan, await offers(ask))
        return encoded(plan)

    @add("POST", "/v1/jobs/{job}/migrate/plan", body=bodies.MigrateRequest, answer=PlanView)
    async def migrate(request: Request, job: str) -> Response:
        check(driver, job)
        asked = await read(request, bodies.MigrateRequest)
        return await answer(inputs.Migrate(job=job, ranks=asked.ranks, reason=asked.reason))

    @add("POST", "/v1/jobs/{job}/drain/plan", body=bodies.DrainRequest, answer=PlanView)
    async def drain(request: Request, job: str) -> Response:
        check(driver, job)
        asked = await read(request, bodies.DrainRequest)
        return await answer(inputs.Drain(job=job, node=asked.node, reason=asked.reason))

    @add("POST", "/v1/jobs/{job}/rebalance/plan", body=bodies.RebalanceRequest, answer=PlanView)
    async def rebalance(request: Request, job: str) -> Response:
        check(driver, job)
        await read(request, bodies.RebalanceRequest)
        return await answer(inputs.Rebalance(job=job))


def _add_operating(add: Routes, driver: Driver) -> None:
    @add("POST", "/v1/jobs", body=inputs.JobSpec, answer=JobView, status=201)
    async def submit(request: Request) -> Response:
        spec = await read(request, inputs.JobSpec)
        registry.check_id(spec.job)  # it names files and is part of addresses
        driver.submit(inputs.Submit(spec=spec))
        return encoded(find(driver, spec.job), status=201)

    @add("POST", "/v1/jobs/{job}/migrate", body=bodies.MigrateRequest, answer=bodies.Asked)
    async def migrate(request: Request, job: str) -> Response:
        check(driver, job)
        asked = await read(request, bodies.MigrateRequest)
        given = inputs.Migrate(job=job, ranks=asked.ranks, reason=asked.reason)
        return opened(driver, given)

    @add("POST", "/v1/jobs/{job}/drain", body=bodies.DrainRequest, answer=bodies.Asked)
    async def drain(request: Request, job: str) -> Response:
        check(driver, job)
        asked = await read(request, bodies.DrainRequest)
        return opened(driver, inputs.Drain(job=job, node=asked.node, reason=asked.reason))

    @add("POST", "/v1/jobs/{job}/rebalance", body=bodies.RebalanceRequest, answer=bodies.Asked)
    async def rebalance(request: Request, job: str) -> Response:
        check(driver, job)
        await read(request, bodies.RebalanceRequest)
        return opened(driver, inputs.Rebalance(job=job))

    @add("POST", "/v1/jobs/{job}/taint", body=bodies.TaintRequest, answer=bodies.Ok)
    async def taint(request: Request, job: str) -> Response:
        check(driver, job)
        asked = await read(request, bodies.TaintRequest)
        return done(driver, inputs.Taint(job=job, target=asked.target, reason=asked.reason))

    @add("POST", "/v1/jobs/{job}/untaint", body=bodies.UntaintRequest, answer=bodies.Ok)
    async def untaint(request: Request, job: str) -> Response:
        check(driver, job)
        asked = await read(request, bodies.UntaintRequest)
        return done(driver, inputs.Untaint(job=job, target=asked.target))

    @add("POST", "/v1/jobs/{job}/inject", body=inputs.InjectSpec, answer=bodies.Ok)
    async def inject(request: Request, job: str) -> Response:
        check(driver, job)
        asked = await read(request, inputs.InjectSpec)
        return done(driver, inputs.InjectNow(job=job, inject=asked))

    @add("POST", "/v1/jobs/{job}/cancel", body=bodies.CancelRequest, answer=bodies.Ok)
    async def cancel(request: Request, job: str) -> Response:
        check(driver, job)
        asked = await read(request, bodies.CancelRequest)
        given = inputs.Cancel(
            job=job,
            reason=asked.reason,
            exit_code=asked.exit_code,
            checkpoint=asked.checkpoint,
        )
        return done(driver, given)

    @add("POST", "/v1/jobs/{job}/proceed", body=bodies.ProceedRequest, answer=bodies.Ok)
    async def proceed(request: Request, job: str) -> Response:
        check(driver, job)
        asked = await read(request, bodies.ProceedRequest)
        return done(driver, inputs.ProceedAnyway(job=job, by=asked.by))


def _add_nodes(add: Routes, driver: Driver) -> None:
    @add("POST", "/v1/jobs/{job}/nodes/{node}/dead", answer=bodies.Ok)
    async def node_dead(job: str, node: str) -> Response:
        check(driver, job)
        return done(driver, inputs.NodeDead(job=job, node=node))


def _add_examining(
    add: Routes, driver: Driver, examine: Callable[[str, str], Awaitable[Examined]]
) -> None:
    @add("GET", "/v1/jobs/{job}/nodes/{node}/host", answer=Examined)
    async def host(job: str, node: str) -> Response:
        check(driver, job)
        return encoded(await examine(job, node))


def _add_joining(
    add: Routes, desk: Desk, operator: Guard, decides: Callable[[], Awaitable[None]]
) -> None:
    """Both are for those who have no credentials yet, and neither tells them anything secret: a
    certificate is public, and joining takes a token in the request."""

    @add("GET", "/v1/ca", answer=str)
    async def ca() -> Response:
        return encoded(desk.authority.certificate)

    @add("POST", "/v1/join", body=bodies.JoinRequest, answer=bodies.JoinedBody)
    async def join(request: Request) -> Response:
        asked = await read(request, bodies.JoinRequest)
        kept = await asyncio.to_thread(desk.may_join, asked.token)
        if kept is None and not asked.token:
            await operator(request)
        elif kept is None and not await asyncio.to_thread(desk.is_operator, asked.token):
            raise Unauthorized("the token is wrong or has expired", hint=NEW_TOKEN)
        web.admit(request.scope)
        await decides()
        joined = desk.join(asked, kept)
        log.info("%s: node %s may join", joined.job, joined.node)
        return encoded(joined)


def _add_signals(add: Routes, driver: Driver) -> None:
    @add("POST", "/v1/signals", body=bodies.SignalRequest, answer=bodies.SignalTaken)
    async def signal(request: Request) -> Response:
        asked = await read(request, bodies.SignalRequest)
        target = signal_target(find(driver, asked.job), asked)
        log.info("%s: signal %s about %s: %s", asked.job, asked.kind, target, asked.reason)
        if asked.severity == "info":
            driver.submit(
                inputs.Note(job=asked.job, target=target, signal=asked.kind, reason=asked.reason)
            )
            return encoded(bodies.SignalTaken(action="noted", target=target))
        reason = f"{asked.kind}: {asked.reason}"
        driver.submit(inputs.Taint(job=asked.job, target=target, reason=reason))
        return encoded(bodies.SignalTaken(action="tainted", target=target))


def signal_target(view: JobView, asked: bodies.SignalRequest) -> str:
    named = [bool(asked.node), bool(asked.slot), asked.rank >= 0]
    if sum(named) != 1:
        raise UsageError("a signal names exactly one of node, slot and rank")
    if asked.rank >= 0:
        slots = [one.slot for one in view.ranks if one.rank == asked.rank]
        if not slots:
            raise UsageError(
                f"job {view.job} has no rank {asked.rank}", hint=f"ranks are 0 to {view.world - 1}"
            )
        return slots[0]
    return asked.node or asked.slot


def merged(plan: PlanView, found: list[OfferView]) -> PlanView:
    """What costs nobody anything, then what other jobs here would yield, then the rest."""
    dear = [one for one in found if one.kind == "preempt"]
    cheap = [one for one in found if one.kind != "preempt"]
    return msgspec.structs.replace(plan, offers=[*cheap, *plan.offers, *dear])


# --------------------------------------------------------------------------- jobs


def active(driver: Driver) -> Callable[[], Awaitable[None]]:
    """A standby knows nothing about jobs; it says who does."""

    async def check() -> None:
        if isinstance(driver.away, NotActive):
            raise driver.away.with_traceback(None)

    return check


def views(driver: Driver) -> list[JobView]:
    known = driver.core.jobs()
    if driver.away is None:
        return known
    said = f"{driver.away.message}; training goes on, migrations wait; this is the last state known"
    return [msgspec.structs.replace(view, control=said) for view in known]


def find(driver: Driver, job: str) -> JobView:
    check(driver, job)
    return next(view for view in views(driver) if view.job == job)


def check(driver: Driver, job: str) -> None:
    """That it exists. To see a job takes a look at all its ranks, and is not needed for that."""
    if not driver.core.knows(job):
        known = ", ".join(view.job for view in views(driver)) or "none"
        raise NotFound(f"no such job: {job}", hint=f"jobs here: {known}")


def done(driver: Driver, given: inputs.CoreInput) -> Response:
    driver.submit(given)
    return encoded(bodies.Ok())


def opened(driver: Driver, given: inputs.Migrate | inputs.Drain | inputs.Rebalance) -> Response:
    """The first incident opened is the one asked for; others may follow from it."""
    records = driver.submit(given).records
    incident = next(one.incident for one in records if isinstance(one, IncidentOpened))
    return encoded(bodies.Asked(incident=incident))
