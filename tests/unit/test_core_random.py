"""Random histories: any fault at any time, answers in any order between nodes.

One seed is one history. While it runs, the world checks after every outcome that no rank has two
owners, that generations grow, that there is one decision per attempt and that nothing is told to
the dead. Then everything is healed, and the job has to train again or to have ended for a reason
that justifies it.
"""

from __future__ import annotations

import random
from collections import Counter

import pytest
from test_core_support import ENDED, SECOND, FakeWorker, World, job_spec

from keepstep.core.orchestrator import Outcome
from keepstep.errors import UsageError
from keepstep.model import messages as m
from keepstep.model import records as r
from keepstep.model.job import CoreInput, Drain, Migrate, Taint, Untaint, Wake

# Ends that a random history may deserve; anything else is a bug.
DESERVED = {
    "fell_back": ("no rank is left alive",),
    "failed": (
        "died 3 times",
        "newcomers failed",
        "lost their connections",
        "never all attached",
        "no node is left",
        "did not open the store in time",
    ),
}


class Chaos(World):
    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.events = self.fresh = 0
        nodes, spares = self.random.choice(
            [("n0:2 n1:2 n2:2", 1), ("n0:3 n1:3 n2:3", 2), ("n0:2 n1:2 n2:3 n3:1", 3)]
        )
        super().__init__(job_spec(nodes=nodes, spares=spares))

    def handle(self, event: CoreInput) -> Outcome:
        self.events += 1
        outcome = super().handle(event)
        for record in outcome.records:
            if isinstance(record, r.NodeLost):
                # Its ranks reach nobody for the stall timeout and end themselves.
                for worker in self.workers.values():
                    worker.alive = worker.alive and worker.node != record.node
        return outcome

    def deliver(self) -> None:
        """One answer: in order per node, any order between nodes."""
        nodes = sorted({event.node for event in self.queue})
        if not nodes:
            return
        node = self.random.choice(nodes)
        event = next(event for event in self.queue if event.node == node)
        self.queue.remove(event)
        if self.nodes[node].joined:
            self.handle(event)

    def train(self) -> None:
        """A step, or one that some ranks have finished while others wait in its fence."""
        running = [w for w in self.workers.values() if w.alive and w.state == "running"]
        ranks = {w.rank: w for w in running if not w.mute}
        if len(ranks) != self.spec.world or len({w.generation for w in running}) != 1:
            return
        workers = list(ranks.values())
        top = max(w.tick for w in workers)
        waiting = [w for w in workers if w.in_fence]
        if waiting and any(w.tick == top and not w.in_fence for w in workers):
            for worker in waiting:  # the others finish it
                worker.tick, worker.in_fence = worker.tick + 1, False
            return
        passed = set(self.random.sample(range(len(workers)), self.random.randint(0, len(workers))))
        for index, worker in enumerate(workers):
            worker.in_fence = index not in passed
            worker.tick += 1 if index in passed else 0

    def alive(self) -> list[FakeWorker]:
        return [w for w in self.workers.values() if w.alive]

    def live_nodes(self) -> list[str]:
        return sorted(name for name, node in self.nodes.items() if node.alive)

    # -------------------------------------------------------------- faults

    def fault(self) -> None:
        kinds = "worker worker worker agent back back node new migrate drain taint untaint comm"
        kind = self.random.choice([*kinds.split(), "stop", "restart", "time"])
        getattr(self, f"fault_{kind}")()

    def fault_worker(self) -> None:
        if self.alive():
            worker = self.random.choice(self.alive())
            (self.die_silently if self.random.random() < 0.5 else self._crash)(worker)

    def _crash(self, worker: FakeWorker) -> None:
        self.exit(worker, -9)

    def fault_agent(self) -> None:
        joined = [name for name in self.live_nodes() if self.nodes[name].joined]
        if joined:
            self.lose_agent(self.random.choice(joined), lose_answers=self.random.random() < 0.5)

    def fault_back(self) -> None:
        away = [name for name in self.live_nodes() if not self.nodes[name].joined]
        if away:
            self.join(self.random.choice(away))

    def fault_node(self) -> None:
        if len(self.live_nodes()) > 2 and self.random.random() < 0.5:
            self.kill_node(self.random.choice(self.live_nodes()))

    def fault_new(self) -> None:
        if len(self.live_nodes()) < 4:
            self.fresh += 1
            self.join(f"m{self.fresh}", slots=2)

    def _try(self, event: CoreInput) -> None:
        try:
            self.handle(event)
        except UsageError as error:
            assert error.hint

    def fault_migrate(self) -> None:
        self._try(Migrate(job="j", ranks=[self.random.randrange(4)]))

    def fault_drain(self) -> None:
        if self.random.random() < 0.3:
            self._try(Drain(job="j", node=self.random.choice(sorted(self.nodes))))

    def fault_taint(self) -> None:
        if self.random.random() < 0.5:
            slot = f"{self.random.choice(sorted(self.nodes))}/{self.random.randrange(2)}"
            self._try(Taint(job="j", target=slot, reason="random"))

    def fault_untaint(self) -> None:
        for node in self.view.nodes:
            if node.taints:
                self._try(Untaint(job="j", target=node.node))
            for slot in range(node.slots):
                if any(taint.startswith(f"{node.node}/{slot}:") for taint in node.taints):
                    self._try(Untaint(job="j", target=f"{node.node}/{slot}"))

    def fault_comm(self) -> None:
        running = [w for w in self.alive() if w.state == "running"]
        if running:
            worker = self.random.choice(running)
            worker.error_kind = "comm"
            failure = m.Failure(
                generation=worker.generation, error_kind="comm", error="reset", version=0
            )
            self.say(worker, failure)

    def fault_stop(self) -> None:
        if self.alive() and self.random.random() < 0.3:
            self.random.choice(self.alive()).mute = True

    def fault_restart(self) -> None:
        if self.random.random() < 0.3:
            self.restart_core()

    def fault_time(self) -> None:
        deadline = self.core.deadline()
        if deadline is not None:
            self.now = max(self.now, min(deadline, self.now + 20 * SECOND))
        self.handle(Wake())

    # -------------------------------------------------------------- healing

    def heal(self) -> None:
        self.random = random.Random(0)
        for _ in range(40):
            self.rejoin()
            self.fault_untaint()
            if len(self.live_nodes()) < 5:
                self.fault_new_forced()
            self.run(400)
            self.notice_stopped()
            self.run(400)
            self.train()
            self.progress()
            self.run(400)
            if self.view.state in ENDED:
                return
        self.settle_fence()

    def settle_fence(self) -> None:
        for _ in range(100):
            if len({(w.tick, w.in_fence) for w in self.owners()}) > 1:
                self.train()

    def fault_new_forced(self) -> None:
        self.fresh += 1
        self.join(f"m{self.fresh}", slots=3)

    def notice_stopped(self) -> None:
        """What agents see when somebody stands still: everybody else waits for it."""
        owners = self.owners()
        if not any(worker.mute for worker in owners):
            return
        for worker in owners:
            self.agent_says(
                worker.node,
                m.Stalled(
                    worker=worker.id,
                    rank=worker.rank,
                    version=worker.tick,
                    tick=worker.tick,
                    marks=1,
                    where="fence",
                    heartbeat_age_ns=0,
                    stopped=worker.mute,
                    cpu_busy=False,
                ),
            )


def history(seed: int, length: int) -> Chaos:
    world = Chaos(seed)
    for _ in range(length):
        chance = world.random.random()
        if chance < 0.90:
            world.deliver()
        elif chance < 0.965:
            world.train()
        elif chance < 0.98:
            world.fault_time()
        else:
            world.fault()
        if world.core.jobs() and world.view.state in ENDED:
            break
    return world


def check(world: Chaos) -> str:
    if world.view.state not in ENDED:
        world.heal()
    view = world.view
    if view.state in ENDED:
        assert any(word in view.reason for word in DESERVED[view.state]), view.reason
        assert all(incident.outcome != "OPEN" for incident in world.incidents)
        return view.state
    world.assert_training()
    for incident in world.incidents:
        assert incident.outcome in ("RESOLVED", "ABORTED"), incident
        assert incident.reason and incident.steps_lost == 0
    return view.state


@pytest.mark.parametrize("block", range(4))
def test_any_history_of_faults_ends_in_training_or_for_a_reason(block: int) -> None:
    ends: Counter[str] = Counter()
    events = 0
    for seed in range(block * 10, block * 10 + 10):
        try:
            world = history(seed, length=600)
            ends[check(world)] += 1
        except Exception as error:
            error.add_note(f"seed {seed}")
            raise
        events += world.events
    assert events > 1_500
    assert ends["running"] >= 4, ends
