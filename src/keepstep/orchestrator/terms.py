"""Active, standby or suspended: the terms of office of an orchestrator.

    standby -- the lease is free --> active -- it was taken --> standby
                                      |  ^
                store out of reach    v  |  it answers, and the lease is still ours
                                   suspended

Every term begins the same way as a restart: a fresh core replays the ledger, and the agents come
and tell what happened since. So there is one way to recover, and it is also the one that settles
whether a write whose answer was lost is there.

The store fences writes, whatever we believe. What it can not fence is that agents listen to us. So
when we could not renew for a lease's time, counted by our own steady clock from *before* the last
renewal was asked for, we cut the agents off before anybody else can be active, and refuse them
until we know more. An agent that hears no Alive for that time leaves by itself: this process may be
stopped and unable to cut anything off.

With an election (ports.election) only who is elected takes the lease of the store, and asks to be
elected only after the store has answered. An active one that hears of another leader gives its
lease back; one that cannot ask stays, for the store still says that it is the one (decision 26).

A store without a lease time (SQLite) is ours as long as we live; it can only be out of reach.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Literal

from keepstep.core.control import Core
from keepstep.errors import (
    KeepstepError,
    NoRight,
    NotActive,
    StoreUnavailable,
    TransientError,
    UsageError,
)
from keepstep.orchestrator.server import AgentServer
from keepstep.ports.election import Election
from keepstep.ports.ledger import LedgerMember, LedgerStore
from keepstep.runtime.driver import Driver

log = logging.getLogger("keepstep.terms")

RETRY_S = 0.5
RENEWALS = 4  # per lease
LOOKS = 8  # of a standby, per lease
LOOK_S_MAX = 1.0  # one that ends in order is not missed for long
TWIN_LEASES = 1.5  # a killed predecessor of our id is forgotten by then, a living twin is not

Role = Literal["active", "standby", "suspended"]


async def enroll(store: LedgerStore, me: LedgerMember) -> str:
    """Join those who share the store; see Lease.enroll.

    A predecessor under the same id that was killed looks alive for a while: it is waited for."""
    lease_s = store.lease_s or 0.0
    end = time.monotonic() + TWIN_LEASES * lease_s
    while True:
        try:
            return await asyncio.to_thread(store.enroll, me)
        except UsageError as error:
            if time.monotonic() >= end:
                raise
            log.info("%s; waiting in case it was killed", error.message)
        await asyncio.sleep(lease_s / LOOKS)


class Terms:
    def __init__(
        self,
        store: LedgerStore,
        driver: Driver,
        agents: AgentServer,
        me: LedgerMember,
        *,
        election: Election | None = None,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self.members = [me]
        self.active_url = ""
        self._store = store
        self._driver = driver
        self._agents = agents
        self._me = me
        self._election = election
        self._asking: asyncio.Task[str] | None = None  # who leads, while we are active
        self._monotonic = monotonic
        # Of its own: a renewal must not wait for others who ask the store.
        self._lessee = ThreadPoolExecutor(1, "keepstep-lease")
        self._ours = False
        self._until = 0.0
        if store.lease_s is not None:
            agents.silence_ns_max = int(store.lease_s * 1e9)

    @property
    def role(self) -> Role:
        if not self._ours:
            return "standby"
        return "active" if self._driver.away is None else "suspended"

    async def begin(self) -> None:
        """The first try. Raises what makes the ledger unusable; it is not touched then."""
        if await self._try_acquire(first=True):
            await self._take_office()

    async def run(self) -> None:
        """For as long as the process lives, or until the ledger can not be trusted."""
        while True:
            try:
                if self._ours:
                    await self._hold_office()
                else:
                    await self._stand_by()
            except KeepstepError as error:
                self._driver.fail(error)
                return

    # ----------------------------------------------------------------------- standby

    async def _stand_by(self) -> None:
        assert self._store.lease_s is not None
        await asyncio.sleep(min(self._store.lease_s / LOOKS, LOOK_S_MAX))
        try:
            if await self._try_acquire():
                await self._take_office()
        except StoreUnavailable as error:
            self._pause(error if self._ours else self._not_active(error.message))

    async def _try_acquire(self, *, first: bool = False) -> bool:
        why = await self._why_not_elected(first) if self._election is not None else ""
        began = self._monotonic()
        holder = await asyncio.to_thread(self._store.acquire, take=not why)
        self._ours = not why and holder.instance == self._me.instance
        self.active_url = holder.url
        if self._ours:
            self._until = began + (self._store.lease_s or 0.0)
        elif holder.instance:
            why = f"orchestrator {holder.id} is active at {holder.url}"
        if not self._ours:
            self._pause(self._not_active(why or "nobody is active"))
        return self._ours

    async def _why_not_elected(self, first: bool) -> str:
        """ "" if we lead. A missing right is said at the start; later it may only seem to be."""
        assert self._election is not None
        await asyncio.to_thread(self._store.acquire, take=False)  # who cannot write must not lead
        try:
            leader = await asyncio.to_thread(self._election.campaign)
        except (TransientError, NoRight) as error:
            if first and isinstance(error, NoRight):
                raise
            return f"nobody says who leads ({error.message})"
        return f"{leader} leads" if leader else ""

    def _not_active(self, why: str) -> NotActive:
        return NotActive(
            f"orchestrator {self._me.id} is standby: {why}",
            hint="ask the active one; this one takes over when that is gone",
            active=self.active_url,
        )

    async def _take_office(self) -> None:
        records = await asyncio.to_thread(self._store.load)
        self._agents.drop()  # the new core will know them only if they come again
        count = self._driver.resume(Core(), records)
        log.info("orchestrator %s is active, %d records replayed", self._me.id, count)

    # ----------------------------------------------------------------------- active

    async def _hold_office(self) -> None:
        """Until the lease is lost."""
        while True:
            await self._until_due()
            if self._driver.away is not None:
                self._agents.drop()  # at once: what they say now would be lost
            try:
                if isinstance(self._driver.away, NotActive):
                    raise self._driver.away  # an append has noticed first
                await self._renew()
                await self._check_who_leads()
                if self._driver.away is not None:
                    await self._take_office()
            except NotActive as lost:
                self._step_down(lost)
                return
            except StoreUnavailable as error:
                if self._driver.away is not None:
                    self._pause(error)  # for the newest words

    async def _until_due(self) -> None:
        """Until the next renewal, or until something is to be put right."""
        if self._driver.away is None:
            lease_s = self._store.lease_s
            limit_s = None if lease_s is None else lease_s / RENEWALS
            if lease_s is not None and self._monotonic() > self._until - lease_s * 0.5:
                limit_s = RETRY_S  # the last renewal did not work
            try:
                async with asyncio.timeout(limit_s):
                    while self._driver.away is None:
                        await self._driver.wait_any_change()
            except TimeoutError:
                pass
        else:
            await asyncio.sleep(RETRY_S)

    async def _renew(self) -> None:
        began = self._monotonic()
        asking = asyncio.get_running_loop().run_in_executor(self._lessee, self._store.renew)
        if self._store.lease_s is not None:
            await asyncio.wait({asking}, timeout=max(0.0, self._until - began))
            if not asking.done() and self._driver.away is None:
                self._pause(StoreUnavailable(f"the store {self._store.name} does not answer"))
        self.members = await asking
        self._until = began + (self._store.lease_s or 0.0)
        self._agents.beat()

    async def _check_who_leads(self) -> None:
        """Beside the renewals, which must not wait for it. Raises NotActive."""
        if self._election is None or (self._asking is not None and not self._asking.done()):
            return
        if self._asking is not None and (leader := self._asking.result()):
            loop = asyncio.get_running_loop()
            await loop.run_in_executor(self._lessee, self._store.release)
            raise NotActive(f"{leader} leads", hint="ask that one")
        self._asking = asyncio.create_task(self._stay_elected(self._election))

    async def _stay_elected(self, election: Election) -> str:
        try:
            return await asyncio.to_thread(election.campaign)
        except (TransientError, NoRight) as error:
            log.info("nobody says who leads: %s", error.message)
            return ""

    # ----------------------------------------------------------------------- neither

    def _pause(self, why: TransientError) -> None:
        before = self._driver.away
        if before is None or before.message != why.message:
            log.warning("%s", why.message)
        self._driver.pause(why)
        self._agents.drop()

    def _step_down(self, lost: NotActive) -> None:
        self._ours, self._asking = False, None
        self.active_url = lost.active
        self._pause(self._not_active(f"it lost its lease ({lost.message})"))
        self._driver.core = Core()  # what it knew grows old from now on
