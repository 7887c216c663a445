"""A worker process: the worker's side of the protocol with opaque numbers in place of tensors.

It follows keepstep.worker step by step (channel, transaction, recovery, newcomer, stager): the
daemon thread is `take`, the main thread is `mode` with the timers of its epoch, and `pump` is the
main thread looking into its inbox. A mode:

    rank      init compute publish fence apply | grace failing deciding held | done
    newcomer  starting parked building arrived warming joining copying swapping
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from keepstep.model import messages as m
from keepstep.model.page import NEWEST, Sample
from keepstep.sim import training
from keepstep.sim.groups import Group
from keepstep.sim.net import MS, SECOND

if TYPE_CHECKING:
    from keepstep.sim.node import SimNode
    from keepstep.sim.world import World

Blob = tuple[int, int, int]  # tick, version, own

# A repeated command of the same generation whose work is done is answered again.
ANSWERS: dict[type[m.Message], type[m.Message]] = {
    m.Abort: m.Report,
    m.Decide: m.Held,
    m.Hold: m.Held,
    m.Stage: m.Staged,
    m.Copy: m.Copied,
    m.Swap: m.Swapped,
}
WHERE = {
    "init": "starting",
    "publish": "fence",
    "grace": "fence",
    "failing": "fence",
    "deciding": "fence",
    "arrived": "building",
    "warming": "building",
    "joining": "held",
    "copying": "held",
    "swapping": "held",
}
TICK_CHECKPOINT = -3
SURVIVES_ABORT = (m.Swap, m.Assign, m.Position, m.Leave)


class Rank:
    def __init__(self, world: World, node: SimNode, start: m.StartWorker, pid: int) -> None:
        self.world = world
        self.node = node
        self.id = start.worker
        self.slot = start.slot
        self.rank = start.rank
        self.pid = pid
        # process
        self.alive = True
        self.stopped = False
        self.stopped_at = 0
        self.was_stopped = False
        self.hung = False
        self.slow = 1
        self.error = ""  # to be raised in the next computation: "device" or "user"
        self.mode = "starting"
        self.epoch = 0
        self.backlog: list[tuple[Callable[..., None], tuple[Any, ...]]] = []
        # channel
        self.abort_generation = -1
        self.hold_generation = -1
        self.inbox: list[m.WorkerCommand] = []
        self.answers: dict[type[m.Message], m.Message] = {}
        self.buddy = start.buddy
        # seat
        self.tick = self.version = 0
        self.generation = start.generation if start.rank >= 0 else 0
        self.shared = training.first_shared()
        self.own = training.first_own(start.rank)
        self.group: Group | None = None
        self.staged: Group | None = None
        self.stage_asked = -1
        self.in_fence = False
        self.owed = -1
        self.alone = False
        self.done = False
        self.finished_script = False
        self.resumed = -1
        self.report_generation = -1
        self.held_generation = -1
        self.copy: m.Copy | None = None
        self.error_kind = ""
        self.computing = False
        # page
        self.marks = self.tick_marks = 0
        self.stepping = False
        self.hold = False
        self.commit_ns = 0
        self.master = start.master
        wait = SECOND // 2 + world.random.randrange(SECOND)
        self.after(wait, self._started)

    # ------------------------------------------------------------------ process

    def after(self, ns: int, work: Callable[..., None], *args: Any) -> None:
        """Main thread: void when it has gone on to something else."""
        self.world.after(ns * self.slow, self._due, self.epoch, work, args)

    def _due(self, epoch: int, work: Callable[..., None], args: tuple[Any, ...]) -> None:
        if not self.alive or epoch != self.epoch or self.hung:
            return
        if self.stopped:
            self.backlog.append((self._due, (epoch, work, args)))
        else:
            work(*args)

    def thread(self, work: Callable[..., None], *args: Any) -> None:
        """Another thread of the process, now."""
        if not self.alive:
            return
        if self.stopped:
            self.backlog.append((self.thread, (work, *args)))
        else:
            work(*args)

    def go(self, mode: str) -> None:
        self.mode = mode
        self.epoch += 1

    def say(self, message: m.WorkerMessage) -> None:
        self.answers[type(message)] = message
        self.node.said(self, message)

    def stop(self) -> None:
        if self.alive and not self.stopped:
            self.stopped, self.stopped_at = True, self.world.now
            self.was_stopped = True

    def resume(self) -> None:
        if self.stopped:
            self.stopped = False
            backlog, self.backlog = self.backlog, []
            for work, args in backlog:
                work(*args)

    def exit(self, code: int, tail: str = "") -> None:
        if not self.alive:
            return
        self.alive = False
        self.leave_group()
        self.node.process_ended(self, code, tail)

    def crash(self, why: str) -> None:
        """The worker would raise LocalProtocolError: the protocol was broken."""
        self.world.checker.violated(f"{self.id} (rank {self.rank}) in {self.mode}: {why}")
        self.exit(1, why)

    def fail(self, kind: Any) -> None:
        """Its script raises before it takes part in anything, and ends."""
        error = f"RuntimeError: {kind}"
        self.say(m.Failure(generation=self.generation, error_kind=kind, error=error, version=0))
        self.exit(1, error)

    def sample(self) -> Sample | None:
        if self.mode == "starting":
            return None
        return Sample(
            heartbeat_ns=self.stopped_at if self.stopped else self.world.now,
            progress_ns=0,
            marks=self.marks,
            version=self.version,
            tick=self.tick,
            generation=self.generation,
            where=WHERE.get(self.mode, self.mode),
            stepping=self.stepping,
            commit_ns=self.commit_ns,
            step_ns=0,
            hold=self.hold,
            tick_marks=self.tick_marks,
        )

    def _started(self) -> None:
        if self.rank < 0:
            self.go("parked")
            self.say(m.Parked(where="train.py:7", warm_ns=1))
            self.pump()
            return
        self.go("init")
        self.stage_asked = self.generation
        self._meet(self.generation, self.master)

    # ------------------------------------------------------------------ daemon thread

    def take(self, command: m.WorkerCommand) -> None:
        generation: int = getattr(command, "generation", -1)
        if 0 <= generation < self.abort_generation:
            return
        kind = type(command)
        if self._answered(kind, generation):
            return
        if kind is m.Abort:
            self.abort_generation = generation
            self.hold_generation = -1
            self.inbox = [c for c in self.inbox if not self._stale(c)]
            self._on_abort()
        elif kind is m.Stage:
            assert isinstance(command, m.Stage)
            if self.stage_asked != generation:
                self.stage_asked = generation
                self._meet(generation, command.store)
        elif kind is m.Hold:
            self.hold_generation = generation
        elif kind is m.Buddy:
            assert isinstance(command, m.Buddy)
            self.buddy = command.address
        elif kind is m.Arm or kind is m.Welcome:
            pass
        else:
            if kind is m.Release and self.hold_generation <= generation:
                self.hold_generation = -1
            self.inbox.append(command)
            self.pump()

    def _answered(self, kind: type[m.Message], generation: int) -> bool:
        if kind is m.Assign or kind is m.Position:
            answer = self.answers.get(m.Arrived if kind is m.Assign else m.Ready)
        else:
            wanted = ANSWERS.get(kind)
            answer = self.answers.get(wanted) if wanted is not None else None
            if answer is not None and getattr(answer, "generation", None) != generation:
                answer = None
        if answer is None or (kind is m.Hold and not self.hold):
            return False
        self.node.said(self, answer)  # type: ignore[arg-type]
        return True

    def _stale(self, command: m.WorkerCommand) -> bool:
        generation: int = getattr(command, "generation", self.abort_generation)
        return generation < self.abort_generation and not isinstance(command, SURVIVES_ABORT)

    def _on_abort(self) -> None:
        if self.staged is not None and self.staged.generation < self.abort_generation:
            self.staged = None
        if self.rank < 0 or self.mode in ("starting", "init"):
            return
        if self.generation < self.abort_generation:
            self.leave_group()
        if not self.hung:
            self._notice_abort()

    def _notice_abort(self) -> None:
        """What the main thread waits for fails, or is taken as a reason to stop waiting."""
        if self.mode in ("publish", "fence"):
            self._interrupted("comm", self.mode == "fence")
        elif self.mode in ("grace", "failing"):
            self._report()
        else:
            self.pump()

    def leave_group(self) -> None:
        if self.group is not None:
            self.group.leave(self)

    def aborted(self) -> bool:
        return self.abort_generation > self.generation

    def _meet(self, generation: int, store: m.Address) -> None:
        host = self.world.store_at(store)
        self.world.net.ask(
            self.node.name,
            host,
            lambda: host.stores.get(generation),
            lambda found: self.thread(self._found, generation, found),
            lambda why: self.stage_failed(generation, why),
        )

    def _found(self, generation: int, store: Any) -> None:
        if store is None or not store.open:
            self.stage_failed(generation, "connection refused")
        elif self.abort_generation <= generation:
            store.meet(self)

    def stage_failed(self, generation: int, why: str) -> None:
        self.thread(self._stage_failed, generation, why)

    def _stage_failed(self, generation: int, why: str) -> None:
        if self.mode == "init":
            self.exit(1, f"RuntimeError: no process group: {why}")
        elif self.abort_generation <= generation and self.stage_asked == generation:
            self.stage_asked = -1
            self.say(m.StageFailed(generation=generation, error=why))

    def met(self, group: Group) -> None:
        self.thread(self._met, group)

    def _met(self, group: Group) -> None:
        generation = group.generation
        if group.left:
            self._stage_failed(generation, "a peer is gone")
        elif self.mode == "init":
            self.group = group
            self.say(_attached(generation))
            self._begin()
        elif self.abort_generation > generation or self.stage_asked != generation:
            group.leave(self)
        else:
            self.staged = group
            self.say(m.Staged(generation=generation))

    # ------------------------------------------------------------------ transaction

    def _begin(self) -> None:
        self.in_fence = False
        if self.tick >= self.world.target:
            self.done = True
            self.go("done")
            self.say(m.Done(tick=self.tick, version=self.version))
            self.pump()
            return
        if self.aborted():
            self.computing = False
            self._interrupted("", False)
            return
        self.go("compute")
        self.computing = self.stepping = True
        self.marks += 1
        spread = self.world.random.randrange(self.world.plan.step_ns // 4)
        self.after(self.world.plan.step_ns + spread, self._computed)

    def _computed(self) -> None:
        self.marks += 1
        if self.error:
            kind, self.error = self.error, ""
            self._interrupted(kind, False)
            return
        if self.aborted():
            self._interrupted("comm", False)
            return
        tick = self.tick
        version = self.version + training.is_step(tick)
        blob = (tick + 1, version, training.next_own(self.own, tick, self.rank))
        self.node.publish(self, blob)
        self._publish(blob, self._enter_fence)

    def _publish(self, blob: Blob, then: Callable[[], None]) -> None:
        """To the buddy, acknowledged. An Abort interrupts it: the fence is then not reached."""
        if self.buddy is None:
            then()
            return
        if self.mode != "publish":
            self.go("publish")
        self._put(blob, then, self.epoch)

    def _put(self, blob: Blob, then: Callable[[], None], epoch: int) -> None:
        address = self.buddy
        if address is None:
            then()
            return
        node = self.world.blobs_at(address)
        self.world.net.ask(
            self.node.name,
            node,
            lambda: node.copies.put(self.rank, blob[0], blob),  # type: ignore[arg-type]
            lambda _: self._due(epoch, then, ()),
            lambda why: self._due(epoch, self._buddy_lost, (why, blob, then)),
        )

    def _buddy_lost(self, why: str, blob: Blob, then: Callable[[], None]) -> None:
        self.say(m.BuddyLost(generation=self.generation, error=why))
        self.hold = True
        self.after(SECOND, self._put, blob, self._published(then), self.epoch)

    def _published(self, then: Callable[[], None]) -> Callable[[], None]:
        def go_on() -> None:
            self.hold = False
            then()

        return go_on

    def _enter_fence(self) -> None:
        self.go("fence")
        self.marks += 1
        self.in_fence = True
        held = self.hold_generation
        word = held if held >= 0 and self.version + training.is_step(self.tick) >= 2 else -1
        if self.alone:
            self.after(MS, self._alone_passed, word)
            return
        assert self.group is not None
        value = training.contribution(self.shared, self.own, self.tick, self.rank)
        self.group.enter(self, value, word)

    def _alone_passed(self, word: int) -> None:
        """Everyone else has finished: their contributions come from nowhere but the truth."""
        run = self.world.truth
        run.upto(self.tick + 1)
        self._apply(run.shared[self.tick + 1], word)

    def fence_passed(self, group: Group, tick: int) -> None:
        if self.mode == "fence" and self.tick == tick and self.group is group:
            self._due(self.epoch, self._passed, (group, tick))

    def _passed(self, group: Group, tick: int) -> None:
        values = group.complete(tick)
        assert values is not None
        shared = training.next_shared(self.shared, tick, values)
        word = group.hold_word(tick)
        if self.world.random.random() < 0.1:  # an update that takes its time
            self.go("apply")
            self.after(self.world.random.randrange(20 * MS), self._apply, shared, word)
        else:
            self._apply(shared, word)

    def _apply(self, shared: int, word: int) -> None:
        self.in_fence = False
        self.computing = False
        self.own = training.next_own(self.own, self.tick, self.rank)
        self.version += training.is_step(self.tick)
        self.tick += 1
        self.shared = shared
        self.marks += 1
        self.tick_marks = self.marks
        self.commit_ns = self.world.now
        self.world.checker.committed(self)
        if self.resumed == self.generation:
            self.resumed = -1
            self.say(_resumed(self))
        if self.owed >= 0:
            generation, self.owed = self.owed, -1
            self._hold(generation)
        elif word >= 0:
            self._hold(word)
        else:
            self._begin()

    def connection_lost(self, group: Group) -> None:
        if self.group is group:
            self.thread(self._connection_lost, group)

    def _connection_lost(self, group: Group) -> None:
        if self.group is not group or self.hung:
            return
        group.left.add(-1)  # whatever is entered from now on fails
        if self.mode == "fence":
            self._interrupted("comm", True)

    # ------------------------------------------------------------------ recovery

    def _interrupted(self, kind: str, in_fence: bool) -> None:
        self.in_fence = in_fence
        self.error_kind = kind
        if self.aborted():
            self._report()
        elif kind == "comm":
            self.go("grace")
            self.after(200 * MS, self._announce)
        else:
            self._announce()

    def _announce(self) -> None:
        self.go("failing")
        self.hold = True
        self.after(5 * SECOND, self._announce)
        kind: Any = self.error_kind
        self.say(
            m.Failure(
                generation=self.generation,
                error_kind=kind,
                error=f"RuntimeError: {kind}",
                version=self.version,
            )
        )
        if self.aborted():
            self._report()

    def _report(self) -> None:
        if self.hung:
            return
        self.leave_group()
        self.hold = True
        self.report_generation = self.abort_generation
        self.go("deciding")
        kind: Any = self.error_kind
        self.say(
            m.Report(
                generation=self.abort_generation,
                tick=self.tick,
                version=self.version,
                in_fence=self.in_fence,
                computing=self.computing,
                error_kind=kind,
                error=f"RuntimeError: {kind}" if kind else "",
                done=self.done,
            )
        )
        self.pump()

    def _decided(self, tick: int) -> None:
        generation = self.report_generation
        if tick == self.tick + 1 and self.in_fence:
            values = self.group.complete(self.tick) if self.group is not None else None
            if values is None:
                self.crash(f"told to apply tick {self.tick}, whose collective never completed")
                return
            self.owed = generation
            self.hold = False
            self.go("apply")
            shared = training.next_shared(self.shared, self.tick, values)
            self.after(5 * MS, self._apply, shared, -1)
            return
        if tick != self.tick:
            self.crash(f"at tick {self.tick} told to go to {tick}")
            return
        self.in_fence = False
        self.go("apply")
        self.after(5 * MS + self.world.random.randrange(20 * MS), self._hold, generation)

    def _hold(self, generation: int) -> None:
        self.computing = False
        self.go("held")
        self.hold = True
        self.held_generation = generation
        self.say(
            m.Held(
                generation=generation,
                tick=self.tick,
                version=self.version,
                serve=m.Address(self.id, generation),
                pid=self.pid,
                done=self.done,
            )
        )
        self.pump()

    def _swap(self, command: m.Swap) -> None:
        self.hold = False
        if not command.solo and not self.done:
            group, self.staged = self.staged, None
            if group is None or group.generation != command.generation:
                if self.abort_generation <= command.generation:
                    self.crash(f"no groups are staged for generation {command.generation}")
                    return
                group = None
            self.leave_group()
            self.group = group
        self.alone = command.solo
        if command.generation < self.generation:
            self.world.checker.violated(f"{self.id} goes back to {command.generation}")
        self.generation = self.resumed = command.generation
        if self.hold_generation <= command.generation:
            self.hold_generation = -1
        if not command.same_buddy:
            self.buddy = command.buddy
        self.error_kind = ""
        self.stepping = True
        self.tick_marks = self.marks
        self.world.checker.swapped(self)
        self.say(m.Swapped(generation=command.generation, swap_ns=1))
        blob = (self.tick, self.version, self.own)
        if self.done or self.aborted():
            self._begin()
        else:
            self.node.publish(self, blob)
            self._publish(blob, self._begin)

    # ------------------------------------------------------------------ inbox

    def pump(self) -> None:
        if not self.alive or self.hung:
            return
        handler = PUMPS.get(self.mode)
        if handler is not None:
            handler(self)

    def _find(self, kinds: Any, generation: int | None = None) -> Any:
        for index, command in enumerate(self.inbox):
            if not isinstance(command, kinds):
                continue
            named = getattr(command, "generation", None)
            later = isinstance(command, m.Release) and named is not None
            if generation is None or named is None or named == generation:
                del self.inbox[index]
                return command
            if later and named >= generation:
                del self.inbox[index]
                return command
        return None

    def _pump_parked(self) -> None:
        command = self._find((m.Assign, m.Finish, m.Leave))
        if isinstance(command, m.Assign):
            self.rank = command.rank
            self.own = 0
            self.buddy = command.buddy
            self.go("building")
            self.assigned = command
            self.after(SECOND // 2 + self.world.random.randrange(2 * SECOND), self._arrive)
        elif command is not None:
            self.exit(0)

    def _arrive(self) -> None:
        self.go("arrived")
        self.say(_attached(self.assigned.generation))
        self.say(m.Arrived(generation=self.assigned.generation))
        self.pump()

    def _pump_arrived(self) -> None:
        command = self._find((m.Position, m.Finish, m.Leave))
        if isinstance(command, m.Position):
            self.go("warming")
            if command.tick == TICK_CHECKPOINT:
                self._positioned(self._from_checkpoint())
            elif command.tick == 0:
                self._positioned(None)
            else:
                self._fetch(command.holders, command.tick, self._positioned)
        elif command is not None:
            self.exit(0)

    def _positioned(self, blob: Blob | None, silent: bool = False) -> None:
        if blob is not None:
            self.tick, self.version, self.own = blob
        self.after(SECOND // 4 + self.world.random.randrange(SECOND), self._ready)

    def _ready(self) -> None:
        self.go("joining")
        generation = self.assigned.generation
        self.say(m.Ready(generation=generation, arrived_ns=1, warm_ns=1))
        self.pump()

    def _fetch(
        self, holders: list[m.Address], tick: int, then: Callable[..., None], silent: bool = False
    ) -> None:
        """Ask every holder in turn; None when no one has it, or when somebody did not answer."""
        if not holders:
            self.after(5 * SECOND if silent else 0, then, None, silent)
            return
        node = self.world.blobs_at(holders[0])
        epoch = self.epoch

        def answered(blob: Blob | None) -> None:
            if blob is not None:
                self._due(epoch, then, (blob,))
            else:
                self._due(epoch, self._fetch, (holders[1:], tick, then, silent))

        def failed(why: str) -> None:
            self._due(epoch, self._fetch, (holders[1:], tick, then, True))

        self.world.net.ask(
            self.node.name, node, lambda: node.blob(self.rank, tick), answered, failed
        )

    def _pump_joining(self) -> None:
        command = self._find((m.Copy, m.Finish, m.Leave))
        if isinstance(command, m.Copy):
            self.go("copying")
            self.copy = command
            if command.checkpoint:
                wait = self.world.plan.copy_ns
                self.after(wait, self._copied, self._from_checkpoint(), None)
            elif command.tick == 0:
                self._pull((0, 0, training.first_own(self.rank)), list(command.sources))
            else:
                self._fetch(command.holders, command.tick, self._fetched)
        elif command is not None:
            self.exit(0)

    def _fetched(self, blob: Blob | None, silent: bool = False) -> None:
        assert self.copy is not None
        if blob is None and silent:
            self._copy_failed("side-state-unreachable", "somebody did not answer")
        elif blob is None:
            self._copy_failed(
                "side-state-missing", f"side state {self.copy.tick} is held by nobody"
            )
        else:
            self._pull(blob, list(self.copy.sources))

    def _pull(self, blob: Blob, sources: list[m.Source], lost: int = -1) -> None:
        assert self.copy is not None
        if not sources:
            self._copy_failed("source-lost", "no source is left", lost)
            return
        wait = self.world.plan.copy_ns // 2 + self.world.random.randrange(self.world.plan.copy_ns)
        self.after(wait, self._pulled, blob, sources)

    def _pulled(self, blob: Blob, sources: list[m.Source]) -> None:
        assert self.copy is not None
        source = self.world.ranks.get(sources[0].serve.host)
        copy = self.copy
        serves = (
            source is not None
            and source.alive
            and not source.stopped
            and source.mode == "held"
            and source.held_generation == sources[0].serve.port
            and source.tick == copy.tick
            and self.world.net.both_ways(self.node.name, source.node.name)
        )
        if not serves or source is None:
            wait = 0 if source is not None and not source.alive else 3 * SECOND
            self.after(wait, self._pull, blob, sources[1:], sources[0].rank)
            return
        self._copied(blob, source)

    def _from_checkpoint(self) -> Blob:
        tick, truth = self.world.plan.resume_tick, self.world.truth
        return tick, truth.version[tick], truth.own[tick][self.rank]

    def _copied(self, blob: Blob, source: Rank | None) -> None:
        assert self.copy is not None
        self.tick, self.version, self.own = blob
        self.shared = source.shared if source is not None else self.world.truth.shared[self.tick]
        self.node.publish(self, blob)
        self.go("swapping")
        self.say(
            m.Copied(
                generation=self.copy.generation,
                tick=self.tick,
                bytes_copied=1,
                copy_ns=1,
                sources=[source.rank] if source is not None else [],
                side_state="own-agent" if source is not None else "checkpoint",
            )
        )
        self.pump()

    def _copy_failed(self, reason: Any, error: str, source: int = -1) -> None:
        assert self.copy is not None
        self.go("joining")
        generation = self.copy.generation
        self.say(m.CopyFailed(generation=generation, reason=reason, error=error, source=source))
        self.pump()

    def _pump_swapping(self) -> None:
        assert self.copy is not None
        command = self._find((m.Swap, m.Finish, m.Leave), self.copy.generation)
        if isinstance(command, m.Swap):
            self._swap(command)
        elif command is not None:
            self.exit(0)
        elif self.abort_generation > self.copy.generation:
            self.go("joining")
            self.pump()

    def _pump_deciding(self) -> None:
        command = self._find((m.Decide, m.Leave, m.Finish), self.report_generation)
        if isinstance(command, m.Decide):
            self._decided(command.tick)
        elif command is not None:
            self.exit(0)
        elif self.abort_generation > self.report_generation:
            self._report()

    def _pump_held(self) -> None:
        kinds = (m.Swap, m.Release, m.Leave, m.Checkpoint, m.Finish)
        while self.mode == "held" and self.alive:
            command = self._find(kinds, self.held_generation)
            if command is None:
                break
            if isinstance(command, m.Checkpoint):
                self.world.after(SECOND, self.thread, self._checkpointed, command)
            elif isinstance(command, m.Swap):
                self._swap(command)
                return
            elif isinstance(command, m.Release):
                self.hold, self.staged = False, None
                self._begin()
                return
            else:
                self.exit(0)
                return
        if self.mode == "held" and self.abort_generation > self.held_generation:
            self.error_kind = ""
            self._report()

    def _checkpointed(self, command: m.Checkpoint) -> None:
        if self.mode == "held" and self.held_generation == command.generation:
            generation = command.generation
            self.say(m.Checkpointed(generation=generation, path=command.path, bytes_written=1))

    def _pump_done(self) -> None:
        command = self._find((m.Finish, m.Leave))
        if command is not None:
            self.exit(0)
        elif self.aborted():
            self._interrupted("", False)


PUMPS: dict[str, Callable[[Rank], None]] = {
    "parked": Rank._pump_parked,
    "arrived": Rank._pump_arrived,
    "joining": Rank._pump_joining,
    "swapping": Rank._pump_swapping,
    "deciding": Rank._pump_deciding,
    "held": Rank._pump_held,
    "done": Rank._pump_done,
}


def _attached(generation: int) -> m.Attached:
    return m.Attached(
        generation=generation, groups=["0"], parameters=1, bytes_state=8, redundant=True
    )


def _resumed(rank: Rank) -> m.Resumed:
    return m.Resumed(
        generation=rank.generation,
        tick=rank.tick,
        version=rank.version,
        last_commit_ns=0,
        first_commit_ns=rank.world.now,
        median_step_ns=rank.world.plan.step_ns,
    )


def newest(blobs: list[Blob], tick: int) -> Blob | None:
    if tick == NEWEST:
        return max(blobs, default=None)
    return next((blob for blob in blobs if blob[0] == tick), None)
