"""Runs the pure core: input -> decide -> make durable -> act.

One rule holds everything together: *records are durable before any effect runs*. `submit` does
the three steps without yielding to the event loop, so inputs are handled one at a time, in the
order they came, and no effect of a later decision overtakes the record of an earlier one. The
price is that an fsync stands on the loop; only decisions write records, progress does not.

What agents say (`hear`) waits for the end of the loop's turn, and the core looks once at all that
has come by then. Any other input is handled behind what was said before it.

Time is the wall clock, because deadlines and records must mean the same after a restart on the
same ledger; it is read once and then carried on by the monotonic clock, and starts no earlier than
the ledger ends, so that a clock set back neither reorders records nor stretches deadlines.

Acting on a decision that is not on disk could give a rank two owners. So whatever keeps a decision
from becoming durable ends this core, whose state is ahead of the ledger:

* for good (`failed`), if the ledger is damaged or the core trips over its own assertion;
* until `resume`, if the store is out of reach or another orchestrator has taken over (`away` says
  which). Whether the last append is there or not is then settled by reading: a fresh core replays
  what is durable, and the agents, who were cut off meanwhile, tell what happened since.

Training goes on without us in both cases.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Protocol

from keepstep.core.control import Core, Outcome, Send
from keepstep.errors import KeepstepError, PermanentError, TransientError
from keepstep.model.job import AgentSaid, AgentsSaid, CoreInput, Wake
from keepstep.model.records import Record
from keepstep.ports.ledger import Ledger

log = logging.getLogger("keepstep.driver")

# A deadline that is already over is still given to the loop, so that streams get their turn.
WAKE_NS_MIN = 1_000_000


class Delivery(Protocol):
    def deliver(self, sends: Iterable[Send]) -> None:
        """Hand commands to the nodes' streams; never blocks. Unreachable nodes lose them: the
        core issues what still matters again when the node joins."""


class Driver:
    def __init__(
        self,
        core: Core,
        ledger: Ledger,
        delivery: Delivery,
        *,
        wall_ns: Callable[[], int] = time.time_ns,
        monotonic_ns: Callable[[], int] = time.monotonic_ns,
    ) -> None:
        self.core = core
        self.failed: asyncio.Future[BaseException] = asyncio.get_running_loop().create_future()
        self.away: TransientError | None = None  # why nothing is decided at the moment
        self._ledger = ledger
        self._delivery = delivery
        self._monotonic_ns = monotonic_ns
        self._epoch_ns = wall_ns() - monotonic_ns()
        self._said: list[AgentSaid] = []  # not looked at yet
        self._timer: asyncio.TimerHandle | None = None
        self._timer_ns = 0  # the deadline it stands for
        self._changed = asyncio.Event()
        self._changes: dict[str, int] = {}
        self._seq = 0
        self._closed = False

    @property
    def running(self) -> bool:
        return not (self._closed or self.failed.done() or self.away is not None)

    def replay(self, records: Sequence[Record] | None = None) -> int:
        """Bring the core to where the ledger ends. Returns the number of records."""
        if records is None:
            records = list(self._ledger.read())
        self._changes.clear()
        self._seq = 0
        for record in records:
            self._note(record)
        newest_ns = max((record.at_ns for record in records), default=0)
        self._epoch_ns += max(0, newest_ns - self._now())
        self._feed(records)
        self._arm()
        return len(records)

    def pause(self, why: TransientError) -> None:
        """Decide nothing until `resume`; what the core shows is the last state known."""
        self.away = why
        self._said.clear()  # its agents are cut off, and will tell where they stand
        self._disarm()
        self._tell_watchers()

    def resume(self, core: Core, records: Sequence[Record]) -> int:
        """Begin (again) to decide, with a fresh core and all that is durable."""
        self.core = core
        count = self.replay(records)
        self.away = None
        self._tell_watchers()
        return count

    def hear(self, given: AgentSaid) -> None:
        """Have the core look at it before anything else is handled, and soon in any case."""
        if not self.running:
            return  # the agents keep what they have to say for the next start's inventory
        if not self._said:
            asyncio.get_running_loop().call_soon(self._look)
        self._said.append(given)

    def _look(self) -> None:
        """At what was said, in the order it came."""
        said, self._said = self._said, []
        for job, of_job in itertools.groupby(said, lambda one: one.job):
            heard = list(of_job)
            self._submit(heard[0] if len(heard) == 1 else AgentsSaid(job=job, said=heard))

    def submit(self, given: CoreInput) -> Outcome:
        """Handle one input. A KeepstepError is the core's refusal and changes nothing."""
        self._look()
        return self._handle(given)

    def _submit(self, given: AgentSaid | AgentsSaid | Wake) -> None:
        """Nobody waits for what comes of it. A failure for good is seen in `failed`."""
        if not self.running:
            return
        try:
            self._handle(given)
        except KeepstepError as error:
            log.warning("%s not used: %s", type(given).__name__, error.message)
        except Exception:
            log.debug("the driver failed", exc_info=True)

    def _handle(self, given: CoreInput) -> Outcome:
        if self.away is not None:
            raise self.away.with_traceback(None)
        if not self.running:
            raise PermanentError(
                "the orchestrator has stopped deciding", hint="start it again with the same --id"
            )
        try:
            outcome = self.core.handle(self._now(), given)
        except KeepstepError:
            raise
        except Exception as error:
            self.fail(error)
            raise
        try:
            self._ledger.append(outcome.records)
        except TransientError as error:
            log.error("nothing is decided until the ledger can be written: %s", error)
            self.pause(error)
            raise
        except Exception as error:
            self.fail(error)
            raise
        for record in outcome.records:
            self._note(record)
        if outcome.records:
            self._tell_watchers()
        self._delivery.deliver(outcome.sends)
        self._arm()
        return outcome

    def change(self, job: str) -> int:
        """Number of the newest record about `job` (0: none)."""
        return self._changes.get(job, 0)

    async def wait_change(self, job: str, since: int, timeout_s: float) -> int:
        """Until a record about `job` newer than `since` exists, or the time is over."""
        loop = asyncio.get_running_loop()
        end = loop.time() + timeout_s
        while self.change(job) <= since and not self._closed and loop.time() < end:
            try:
                await asyncio.wait_for(self._changed.wait(), end - loop.time())
            except TimeoutError:
                break
        return self.change(job)

    async def wait_any_change(self) -> None:
        """Until the next durable record, pause or resume; for ever once the driver is closed."""
        await self._changed.wait()
        if self._closed:
            await asyncio.get_running_loop().create_future()

    def close(self) -> None:
        self._closed = True
        self._changed.set()
        self._disarm()

    def fail(self, error: BaseException) -> None:
        """Stop deciding for good."""
        log.critical("the orchestrator stops deciding: %s", error)
        if not self.failed.done():
            self.failed.set_result(error)
        self.close()

    def _feed(self, records: Sequence[Record]) -> None:
        number = 0

        def counted() -> Iterator[Record]:
            nonlocal number
            for record in records:
                number += 1
                yield record

        try:
            self.core.replay(counted())
        except (LookupError, TypeError, ValueError) as error:
            # Whole and well chained, but not the history of these jobs.
            raise PermanentError(
                f"record {number} of the ledger does not fit to those before it: {error!r}",
                hint="it was written by another program or version; use another --id or store",
            ) from error

    def _tell_watchers(self) -> None:
        self._changed.set()
        if not self._closed:
            self._changed = asyncio.Event()

    def _note(self, record: Record) -> None:
        self._seq += 1
        self._changes[record.job] = self._seq

    def _now(self) -> int:
        return self._epoch_ns + self._monotonic_ns()

    def _disarm(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _arm(self) -> None:
        deadline_ns = self.core.deadline()
        if deadline_ns is None or self._closed:
            self._disarm()
            return
        if self._timer is not None:
            if self._timer_ns <= deadline_ns:
                return  # it comes first, finds that nothing is due and arms the next
            self._disarm()
        delay_ns = max(deadline_ns - self._now(), WAKE_NS_MIN)
        self._timer = asyncio.get_running_loop().call_later(delay_ns / 1e9, self._wake)
        self._timer_ns = deadline_ns

    def _wake(self) -> None:
        self._timer = None
        if not self.running:
            return
        now_ns = self._now()
        deadline_ns = self.core.deadline(now_ns)
        if deadline_ns is None or deadline_ns > now_ns:
            self._arm()
            return
        self._look()
        self._submit(Wake())
