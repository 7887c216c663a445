"""A simulated worker process: threads, inbox and page, without what it is for.

The daemon thread is `take`, the main thread is `mode` with the timers of its epoch, and `pump` is
the main thread looking into its inbox.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, ClassVar

from keepstep.model import messages as m
from keepstep.model.page import NEWEST, Sample
from keepstep.sim import training
from keepstep.sim.groups import Group
from keepstep.sim.net import SECOND
from keepstep.sim.pace import OwnTime

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
ECHOED = (m.Staged, m.StageFailed, m.Copied, m.Report, m.Held)
WHERE = {
    "init": "starting",
    "construct": "starting",
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
SURVIVES_ABORT = (m.Swap, m.Assign, m.Position, m.Leave)


class Process:
    # What the main thread does with its inbox, by mode.
    PUMPS: ClassVar[dict[str, Callable[[Any], None]]] = {}

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
        self.was_slow = False
        self.error = ""  # to be raised in the next computation: "device" or "user"
        self.mode = "starting"
        self.epoch = 0
        self.backlog: list[tuple[Callable[..., None], tuple[Any, ...]]] = []
        # channel
        self.abort_generation = -1
        self.hold_generation = -1
        self.snapshot_asked = -1  # number of a checkpoint
        self.inbox: list[m.WorkerCommand] = []
        self.answers: dict[type[m.Message], m.Message] = {}
        self.buddy, self.parity = start.buddy, start.parity
        # seat
        self.tick = self.version = 0
        self.generation = start.generation if start.rank >= 0 else 0
        self.shared = training.first_shared()
        self.own = training.first_own(start.rank)
        self.shard = training.first_shard(start.rank)
        self.group: Group | None = None
        self.staged: Group | None = None
        self.stage_asked = -1
        self.odd_groups = False
        self.builder_stuck = False  # its next groups are never finished
        self.in_fence = False
        self.fence_ns = 0  # since when it waits in it
        self.owed = -1
        self.snapshot = -1  # number of the last one taken
        self.saving = False
        self.alone = False
        self.done = False
        self.finished_script = False
        self.resumed = -1
        self.findings = 0  # of its witness
        self.go_on: Callable[[], None] = lambda: None  # what it was about to do then
        self.report_generation = -1
        self.held_generation = -1
        self.copy: m.Copy | None = None
        self.error_kind = ""
        self.computing = False
        # page
        self.marks = self.tick_marks = 0
        self.stepping = False
        self.hold = False
        self.asked_ns = 0
        self.commit_ns = 0
        self.pace = OwnTime()
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

    def _echo(self) -> None:
        """What it answered in older attempts once more, late: as if that had been on its way."""
        for kind in ECHOED:
            if kind in self.answers:
                wait = self.world.random.randrange(3 * SECOND)
                self.world.after(wait, self._repeat, self.answers[kind])

    def _repeat(self, answer: Any) -> None:
        if self.alive and not self.stopped:
            self.node.said(self, answer)

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
            asked_ns=self.asked_ns,
            own_ns=self.pace.own_ns,
            own_steps=self.pace.steps,
        )

    def _started(self) -> None:
        raise NotImplementedError

    def leave_group(self) -> None:
        raise NotImplementedError

    # ------------------------------------------------------------------ daemon thread

    def take(self, command: m.WorkerCommand) -> None:
        generation = _generation(command)
        if 0 <= generation < self.abort_generation:
            return
        kind = type(command)
        if isinstance(command, m.Assign) and self.rank not in (-1, command.rank):
            self.exit(1)  # built as another rank
            return
        if self._answered(kind, generation) or self._saved_before(command):
            if isinstance(command, m.Swap) and not command.same_buddy:
                self.buddy, self.parity = command.buddy, command.parity
            return
        if kind is m.Abort:
            if self.world.echoes and generation > self.abort_generation:
                self._echo()
            self.abort_generation = generation
            self.hold_generation = self.snapshot_asked = -1
            self.inbox = [c for c in self.inbox if not self._stale(c)]
            self._on_abort()
        elif kind is m.Stage:
            assert isinstance(command, m.Stage)
            if self.stage_asked != generation:
                self.stage_asked = generation
                self._meet(generation, command.store)
        elif isinstance(command, m.Snapshot):
            self.snapshot_asked = command.number
        elif isinstance(command, m.Seal):
            self.seal(command)
        elif kind is m.Hold:
            self.hold_generation = generation
        elif kind is m.Buddy:
            assert isinstance(command, m.Buddy)
            self.buddy, self.parity = command.address, command.parity
        elif kind is m.Arm or kind is m.Welcome:
            pass
        else:
            if kind is m.Release and self.hold_generation <= generation:
                self.hold_generation = -1
            if kind is m.Swap:
                told = (m.Swap, generation)
                self.inbox = [c for c in self.inbox if (type(c), _generation(c)) != told]
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

    def _saved_before(self, command: m.WorkerCommand) -> bool:
        saved = self.answers.get(m.Saved)
        if not isinstance(command, m.Snapshot) or not isinstance(saved, m.Saved):
            return False
        if saved.number == command.number:
            self.node.said(self, saved)
        return saved.number == command.number

    def _stale(self, command: m.WorkerCommand) -> bool:
        generation: int = getattr(command, "generation", self.abort_generation)
        return generation < self.abort_generation and not isinstance(command, SURVIVES_ABORT)

    def _on_abort(self) -> None:
        raise NotImplementedError

    def seal(self, command: m.Seal) -> None:
        raise NotImplementedError

    def _meet(self, generation: int, store: m.Address) -> None:
        raise NotImplementedError

    def aborted(self) -> bool:
        return self.abort_generation > self.generation

    # ------------------------------------------------------------------ inbox

    def pump(self) -> None:
        if not self.alive or self.hung:
            return
        handler = self.PUMPS.get(self.mode)
        if handler is not None:
            handler(self)

    def _find(self, kinds: Any, generation: int | None = None) -> Any:
        for index, command in enumerate(self.inbox):
            if not isinstance(command, kinds):
                continue
            named = getattr(command, "generation", None)
            later = isinstance(command, m.Release | m.Leave) and named is not None
            if generation is None or named is None or named == generation:
                del self.inbox[index]
                return command
            if later and named >= generation:
                del self.inbox[index]
                return command
        return None


def _generation(command: m.WorkerCommand) -> int:
    generation: int = getattr(command, "generation", -1)
    return generation


def newest(blobs: list[Blob], tick: int) -> Blob | None:
    if tick == NEWEST:
        return max(blobs, default=None)
    return next((blob for blob in blobs if blob[0] == tick), None)
