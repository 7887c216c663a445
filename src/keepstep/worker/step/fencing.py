"""The fence of a step or section, as one rank goes through it.

    publish   the side state of tick+1 goes to the page, shards to the vault
    meet      wait for the device, then for all ranks: words of each are compared (fence.py), now
              and then digests of what replicas share. Passed: the transaction is committed

Whatever fails on the way is an interruption: recovery decides whether the transaction is tried
again (Retry) or committed all the same, because another rank has passed.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable
from typing import Any

import msgspec
import torch

from keepstep.errors import KeepstepError, UsageError
from keepstep.worker.device.guard import SKIP, Guard
from keepstep.worker.groups import groups
from keepstep.worker.groups.unseen import Unseen
from keepstep.worker.script import results
from keepstep.worker.state import witness
from keepstep.worker.state.placements import GradientPlacement
from keepstep.worker.step.call import Call
from keepstep.worker.step.live_rank import LiveRank
from keepstep.worker.step.pace import OwnTime
from keepstep.worker.step.recovery import Recovery, Retry


class Fencing:
    def __init__(
        self, live: LiveRank, recovery: Recovery, call: Call, roll_back: Callable[[], None]
    ) -> None:
        self.live = live
        self.recovery = recovery
        self.call = call
        self.guard = Guard()
        self.own = OwnTime(live.page)
        self.placement = GradientPlacement(live.parameters)
        self.unseen = Unseen()
        self.foresight: dict[str, results.Foresight] = {}  # by site
        self.usual: dict[str, int] = {}  # site -> backward passes of its last step
        self._roll_back = roll_back

    def publish(self, updating: bool, result: bytes | None = None) -> None:
        """`result`, if the function has ended; otherwise it may be foreseen."""
        live = self.live
        if updating:
            self.placement.align()
            self.live.boundary.fenced()
        if result is None and self.call.step:
            result = self.foreseen()
        self.call.result = result
        self.call.fenced, self.call.updating = True, updating
        self.usual[self.call.site] = self.call.backwards
        live.publisher.ahead.wait()
        if live.injector:
            live.injector.point("before_fence", live.version)
        try:
            if live.aborted():
                raise ConnectionAbortedError("aborted before the fence")
            if self.call.step:
                live.changes.fence(self.call.site, updating)
                live.publisher.store_shards(updating)
            live.streams.leaving(self.call.site)
            self.call.variables = live.variables.capture()
            side_state = self._side_state()
            live.publisher.ahead.judge(side_state)
            live.publisher.publish(live.tick + 1, side_state)
        except KeepstepError as error:
            self.call.refused = error
            raise
        except (RuntimeError, OSError) as error:
            self._fence_failed(error)

    def meet(self, wait_for_device: Callable[[Callable[[], bool]], None]) -> bool:
        """Whether the fence was passed. If it was not, it was decided to commit all the same;
        otherwise Retry is raised."""
        live = self.live
        passed = True
        try:
            wait_for_device(self._aborted)
            live.side.complete_note()
            if self.call.step:
                live.side.publish_locals()
                live.publisher.await_shards(self.call.updating, self._let_device_go)
            live.page.where("fence")
            self.call.in_fence = True
            self._all_ranks_here()
        except KeepstepError as error:
            self.call.refused = error
            raise
        except (RuntimeError, OSError) as error:
            passed = False
            self.guard.close()  # recovery waits for the device
            self._fence_failed(error)
        self.call.passed = self.live.tracker.behind_fence = True
        if passed and not live.alone:
            self.unseen.passed(self.call.site)
        live.page.where("apply")
        self.own.passed()
        return passed

    def _aborted(self) -> bool:
        """While the device is at work."""
        self.live.side.complete_note()
        return self.live.aborted()

    def _let_device_go(self) -> None:
        """An update that it holds back is not made, but later and by the host."""
        self.guard.decide(SKIP)

    def _all_ranks_here(self) -> None:
        live = self.live
        # Before the second step DDP has not settled its buckets: no planned boundary there.
        word = live.version + self.call.step >= 2
        held = live.channel.inbox.hold_generation if word else -1
        snapshot = live.channel.inbox.snapshot if word else -1
        if live.alone:
            self.call.hold, self.call.snapshot = held, snapshot
            return
        # Words of all ranks, and of each the least and the greatest.
        mine = (
            live.tick,
            live.generation,
            zlib.crc32(self.call.site.encode()),
            held,
            snapshot,
        )
        rates_ = rates(live.optimizers.values())
        words = live.agreement.words(self.call.about_to, rates_)
        if live.injector:
            live.injector.point("in_fence", live.version)
        replicated = live.replicated
        low, high = groups.fence((*mine, *words, replicated.unmet, *replicated.words()))
        self._not_aborted()
        if low[:3] != high[:3]:
            raise UsageError(
                f"rank {live.rank} is in {self.call.site!r} (tick {live.tick}) while another rank "
                "is in another step or section",
                hint="all ranks must call the same steps and sections in the same order",
            )
        differs = live.agreement.judge(self.call.site, low[5:8], high[5:8])
        if differs:
            table = live.agreement.table(self.call.about_to, rates_)
            self.recovery.diverged(differs, self.call.site, table=table, agreed=live.version)
        if high[8] or not replicated.agree(low[9:]):
            self._compare_objects()
        self._compare_replicas()
        replicated.met()
        # One planned move runs at a time; a lower number is of one that has been given up.
        self.call.hold = high[3]
        self.call.snapshot = high[4]

    def _undisturbed(self) -> bool:
        """Whether nothing can have been lost: before the first fence all is as scripts build it."""
        live = self.live
        return not live.replicated.fresh or live.generation == 0 or live.tick == 0

    def _compare_objects(self) -> None:
        """Somebody has registered an object, or has just come, or has one otherwise."""
        live, replicated = self.live, self.live.replicated
        self._let_device_go()  # what is looked at, and published, may lie behind the update
        if replicated.keep_alone(self._gather(replicated.holdings()), self._undisturbed()):
            live.publisher.publish(live.tick + 1, self._side_state())

    def _compare_replicas(self) -> None:
        """The state as of the entry of this transaction: it has not been changed since, or the
        fence would not be where it is."""
        live = self.live
        replicated = live.replicated
        if not replicated.due(live.tick):
            return
        undisturbed = self._undisturbed()
        mine = replicated.found(full=replicated.fresh or live.tick in witness.EARLY)
        if self._differing(mine) or replicated.wrong:
            table = replicated.table()
            table = witness.of_classes(table, self._differing(witness.by_class(table)))
            names = self._differing(table)
            if undisturbed:
                found, names = names, replicated.keep_apart(names)
                if names != found:  # more of this rank's own than was published
                    live.publisher.publish(live.tick + 1, self._side_state())
            if names:
                agreed = replicated.agreed
                self.recovery.diverged("replicas", self.call.site, table=table, agreed=agreed)
                replicated.ignored |= {name.partition("|")[0] for name in names}
        replicated.fresh, replicated.agreed, replicated.wrong = False, live.version, set()

    def _differing(self, mine: dict[str, str]) -> set[str]:
        """Classes, or names, under which ranks bring different hashes; alike on all ranks."""
        found = groups.extremes(mine)
        self._not_aborted()
        return witness.differing(found)

    def _gather(self, mine: dict[str, str]) -> list[dict[str, str]]:
        found = groups.gather(msgspec.msgpack.encode(mine))
        self._not_aborted()
        return [msgspec.msgpack.decode(one) for one in found]

    def _not_aborted(self) -> None:
        """Or what was heard means nothing."""
        if self.live.aborted():
            raise ConnectionAbortedError("aborted in the fence")

    def _fence_failed(self, error: BaseException) -> None:
        verdict = self.recovery.interrupted(
            error, in_fence=self.call.in_fence, roll_back=self._roll_back
        )
        if verdict != "COMMIT":
            raise Retry
        self.recovery.owed_by = self.call.site

    def _side_state(self) -> bytes:
        return self.live.side.make(
            self.call.site,
            self.call.step,
            self.call.updating,
            result=self.call.result,
            variables=self.call.variables,
            rest=self.rest() if self.call.updating else None,
        )

    def rest(self) -> list[dict[str, Any]] | None:
        """What the newcomer of a rank that is lost behind this fence needs to finish the step."""
        call = self.call.function
        code, arguments = getattr(call, "code", None), getattr(call, "arguments", {})

        def knows(thing: Any) -> bool:
            return self.live.known.knows(thing) or self.live.variables.hold(thing)

        live = self.live
        return live.side.behind.locals_of(
            self.call.site, code, arguments, knows, live.known.lying_with
        )

    def foreseen(self) -> bytes | None:
        foresight = self.foresight.setdefault(self.call.site, results.Foresight())
        return foresight.at_fence(getattr(self.call.function, "code", None))


def rates(optimizers: Iterable[torch.optim.Optimizer]) -> list[list[Any]]:
    """Learning rates; one that lies on a device is not waited for."""
    return [[rate(group.get("lr")) for group in o.param_groups] for o in optimizers]


def rate(rate: Any) -> Any:
    if isinstance(rate, torch.Tensor):
        return rate.tolist() if rate.device.type == "cpu" else "on a device"
    return rate
