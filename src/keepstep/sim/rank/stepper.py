"""A rank that makes transactions: computes, publishes, meets the others in the fence, applies.

Modes: init construct attaching compute publish fence diverged apply
"""

from __future__ import annotations

from collections.abc import Callable

from keepstep.model import messages as m
from keepstep.sim.ground import training
from keepstep.sim.ground.groups import Group
from keepstep.sim.ground.memory import Blob
from keepstep.sim.ground.violation import ensure
from keepstep.sim.rank.witness import Doubter
from keepstep.sim.times import MS, SECOND


class Stepper(Doubter):
    error = ""  # to be raised in the next computation: "device" or "user"
    computing = False
    in_fence = False
    fence_ns = 0  # since when it waits in it
    alone = False
    resumed = -1

    # ------------------------------------------------------------------ attach

    def _first_met(self, group: Group) -> None:
        if self.world.plan.model_ns:
            self.go("construct")
            self.after(self.world.plan.model_ns, self._attach, group)
        else:
            self._attached(group.generation)

    def _attach(self, group: Group) -> None:
        """Whoever comes waits for all others."""
        self.go("attaching")
        members = group.members.values()
        if all(member.mode == "attaching" for member in members):
            for member in members:
                member.all_came(group)

    def all_came(self, group: Group) -> None:
        self.thread(self._attached, group.generation)

    def _attached(self, generation: int) -> None:
        self.say(self.attached(generation))
        self.connect_shard()
        self._begin()

    def attached(self, generation: int) -> m.Attached:
        members = {"0": list(range(self.world.plan.ranks))}
        if self.odd_groups:
            members["1"] = [self.rank, (self.rank + 1) % self.world.plan.ranks]
        return m.Attached(
            generation=generation,
            groups=sorted(members),
            parameters=1,
            bytes_state=8,
            redundant=True,
            kept_bytes=8 * self.has_shard,
            members=members,
        )

    # ------------------------------------------------------------------ transaction

    def _begin(self) -> None:
        self.in_fence = False
        if self.tick >= self.world.target:
            self.done = True
            self.run(self.recovering.linger(), lambda _: self.exit(0))
            return
        if self.aborted():
            self.computing = False
            self._interrupted("", False)
            return
        ensure(not self.alone, f"rank {self.rank} begins a step alone")
        self.go("compute")
        self.computing = self.page.stepping = True
        self.page.marks += 1
        self.begin_shard()
        plan = self.world.plan
        step_ns = plan.step_ns + self.world.random.randrange(plan.step_ns // 4)
        step_ns *= self.world.ills.dragged.get(self.place, 1)
        self.page.pace.begins(self.world.now)
        for pulse_ns in range(plan.stall_ns // 2, step_ns, plan.stall_ns // 2):
            self.after(pulse_ns, self._get_on)  # a long step shows that it gets on
        self.after(step_ns, self._computed)

    def _get_on(self) -> None:
        self.page.marks += 1

    def _computed(self) -> None:
        self.page.marks += 1
        self.page.pace.meets(self.world.now)
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
        self.node.memory.publish(self.id, self.rank, blob)
        self._publish(blob, self.secure_shard)

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
            lambda: node.memory.keep_copy(self.rank, self.generation, blob),
            lambda _: self._acknowledged(node.name, blob, then, epoch),
            lambda why: self._due(epoch, self._buddy_lost, (why, blob, then)),
        )

    def _acknowledged(self, node: str, blob: Blob, then: Callable[[], None], epoch: int) -> None:
        self.world.rules.acknowledged(node, self.rank, blob[0])
        self._due(epoch, then, ())

    def _buddy_lost(self, why: str, blob: Blob, then: Callable[[], None]) -> None:
        self.say(m.BuddyLost(generation=self.generation, error=why))
        self.page.hold, self.page.asked_ns = True, self.world.now
        self.after(SECOND, self._put, blob, self._published(then), self.epoch)

    def _published(self, then: Callable[[], None]) -> Callable[[], None]:
        def go_on() -> None:
            self.page.hold, self.page.asked_ns = False, 0
            then()

        return go_on

    def _enter_fence(self) -> None:
        self.go("fence")
        self.fence_ns = self.world.now
        self.page.marks += 1
        self.in_fence = True
        held = self.inbox.hold_generation
        settled = self.version + training.is_step(self.tick) >= 2
        word = held if held >= 0 and settled else -1
        assert self.group is not None
        value = training.contribution(self.shared, self.own, self.tick, self.rank)
        self.group.enter(self, value, word, self.inbox.snapshot if settled else -1)

    def fence_passed(self, group: Group, tick: int) -> None:
        if self.mode == "fence" and self.tick == tick and self.group is group:
            self._due(self.epoch, self._passed, (group, tick))

    def _passed(self, group: Group, tick: int) -> None:
        self.doubt(tick, lambda: self._go_on(group, tick))

    def _go_on(self, group: Group, tick: int) -> None:
        values = group.complete(tick)
        assert values is not None
        shared = training.next_shared(self.shared, tick, values)
        word, number = group.hold_word(tick), group.snapshot_word(tick)
        if self.world.random.random() < 0.1:  # an update that takes its time
            self.go("apply")
            self.after(self.world.random.randrange(20 * MS), self._apply, shared, word, number)
        else:
            self._apply(shared, word, number)

    def _apply(self, shared: int, word: int, number: int = -1) -> None:
        self.in_fence = False
        self.computing = False
        self.own = training.next_own(self.own, self.tick, self.rank)
        self.apply_to_shard()
        self.version += training.is_step(self.tick)
        self.tick += 1
        self.shared = shared
        self.page.marks += 1
        self.page.tick_marks = self.page.marks
        self.page.commit_ns = self.world.now
        self.world.rules.committed(self.id)
        if self.resumed == self.generation:
            self.resumed = -1
            self.say(self._told_resumed())
        if self.recovering.owes:
            self._hold(self.recovering.pay())
        elif word >= 0:
            self._hold(word)
        else:
            if number > self.snapshot:
                self.take_part(number)
            self._begin()

    def _hold(self, generation: int) -> None:
        raise NotImplementedError

    def _told_resumed(self) -> m.Resumed:
        return m.Resumed(
            generation=self.generation,
            tick=self.tick,
            version=self.version,
            last_commit_ns=0,
            first_commit_ns=self.world.now,
            median_step_ns=self.world.plan.step_ns,
        )
