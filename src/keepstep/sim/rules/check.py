"""What must hold, looked at after every event. A violation ends the world.

Safety: one owner per rank; generations only grow; no committed step is lost or applied twice;
records are durable before their effects; no two migrations of one rank; a fenced process never
trains again. Content: every commit of every rank is compared with the undisturbed run. What must
happen soon: prompt.py. What is shown and what a restart finds: beliefs.py. The end of a world is
judged by whoever plays it (play/).

The rules are independent of each other but for what stands in the world's book. A world tells this
class what happens, and it tells the rules, in an order that matters only for which one speaks up
first.
"""

from __future__ import annotations

from keepstep.core.control import Core, Outcome
from keepstep.core.state import Job
from keepstep.model import agent_messages
from keepstep.model import messages as m
from keepstep.model.job import AgentSaid, CoreInput
from keepstep.model.records import Record
from keepstep.sim.rules import counts
from keepstep.sim.rules.beliefs import Beliefs
from keepstep.sim.rules.commands import Commands
from keepstep.sim.rules.fallbacks import Fallbacks
from keepstep.sim.rules.generations import Generations
from keepstep.sim.rules.incidents import Incidents
from keepstep.sim.rules.prompt import Prompt
from keepstep.sim.rules.stragglers import Stragglers
from keepstep.sim.rules.trained import Trained
from keepstep.sim.world.world import World


class Checker:
    """As ground/surroundings.py says what rules are told."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.generations = Generations(world)
        self.incidents = Incidents(world)
        self.prompt = Prompt(world)
        self.beliefs = Beliefs(world, self.prompt)
        self.commands = Commands(world, self.generations)
        self.trained = Trained(world)
        self.stragglers = Stragglers(world)
        self._readers = (self.generations, self.incidents, Fallbacks(world), self.prompt)

    # ------------------------------------------------------------------ the orchestrator

    def durable(self, records: list[Record]) -> None:
        for record in records:
            for reader in self._readers:
                reader.durable(record)

    def replayed(self, job: Job, disk: list[Record]) -> None:
        self.beliefs.replayed(job, disk)

    def handled(self, core: Core, given: CoreInput, outcome: Outcome) -> None:
        for record in outcome.records:
            self.stragglers.decided(record)
        if not core.knows(self.world.plan.job):
            return
        job = core.state(self.world.plan.job)
        # Mere progress makes nobody special; if it does, the next event shows it.
        progress = isinstance(given, AgentSaid) and isinstance(
            given.message, agent_messages.Progress
        )
        if not progress or outcome.records:
            counts.sorted_in(job)
        if job.attempt is not None:
            counts.counted(job, job.attempt)

    def sent(self, node: str, command: agent_messages.AgentCommand) -> None:
        self.commands.sent(node, command)
        if isinstance(command, agent_messages.KillWorker):
            self.prompt.killed(command.worker)

    def acted(self, job: Job) -> None:
        self.beliefs.look(job)
        if not self.world.orchestrator.cut_short:
            self.prompt.acted(job)

    # ------------------------------------------------------------------ nodes

    def refused(self, node: str, worker: str) -> None:
        self.prompt.refused(self.world.nodes[node], worker)

    def spawned(self, worker: str) -> None:
        self.trained.spawned(self.world.ranks[worker])

    def fenced(self, node: str) -> None:
        self.trained.fenced(self.world.nodes[node])

    def forced(self, worker: str) -> None:
        self.prompt.forced(self.world.ranks[worker])

    # ------------------------------------------------------------------ ranks

    def said(self, worker: str, message: m.WorkerMessage) -> None:
        self.generations.said(worker, message)

    def acknowledged(self, node: str, rank: int, tick: int) -> None:
        self.trained.acknowledged(node, rank, tick)

    def swapped(self, worker: str) -> None:
        self.trained.swapped(self.world.ranks[worker])

    def committed(self, worker: str) -> None:
        process = self.world.ranks[worker]
        self.trained.committed(process)
        self.prompt.committed(process)
        self.world.on_commit()

    def went_on(self, worker: str) -> None:
        self.incidents.went_on(worker)

    # ------------------------------------------------------------------ whoever plays the world

    def before_healing(self) -> None:
        self.prompt.deferred()

    def at_rest(self) -> None:
        self.prompt.forgotten()
