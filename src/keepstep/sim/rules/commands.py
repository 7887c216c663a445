"""Commands that leave: their records are on the disk, and whoever hears them is the right one."""

from __future__ import annotations

from keepstep.model import agent_messages, commands
from keepstep.sim.ground.violation import ensure
from keepstep.sim.rules.generations import Generations
from keepstep.sim.world.world import World


class Commands:
    def __init__(self, world: World, generations: Generations) -> None:
        self.world = world
        self.book = world.book
        self._generations = generations
        # rank -> newcomer that was assigned it last, and by which process of the orchestrator
        self._seats: dict[int, tuple[str, int]] = {}

    def sent(self, node: str, command: agent_messages.AgentCommand) -> None:
        """On its way: its record is on the disk, or it needs none."""
        if isinstance(command, agent_messages.KillWorker):
            self.book.killed.add(command.worker)
            self._check_alarm(command.worker)
        elif isinstance(command, agent_messages.Forget):
            needed = [w for w in command.workers if w in self.book.owners.values()]
            ensure(not needed, f"the side state of {needed} is dropped and still needed")
        elif isinstance(command, agent_messages.StartWorker):
            ensure(command.worker in self.book.placed, f"{command.worker} started, not on record")
        elif isinstance(command, agent_messages.OpenStore):
            known = self._generations.opened(command.generation)
            ensure(known, f"store {command.generation} opened, not on record")
        elif isinstance(command, agent_messages.Tell):
            self._told(command.worker, command.command)
        elif isinstance(command, agent_messages.TellRanks):
            self._told_together(node, command)

    def _told_together(self, node: str, command: agent_messages.TellRanks) -> None:
        workers = self.world.orchestrator.core.state(self.world.plan.job).workers
        for process in self.world.nodes[node].processes.values():
            skipped = process.id in command.besides or process.id in self.book.killed
            worker = workers.get(process.id)
            ranked = process.rank >= 0 and (worker is None or worker.role != "understudy")
            if process.alive and ranked and not skipped:
                self._told(process.id, command.command)

    def _check_alarm(self, worker: str) -> None:
        """False alarm: a healthy rank is fenced in a world where only other processes are hurt."""
        if not self.world.plan.only_processes or worker not in self.book.owners.values():
            return
        process = self.world.ranks.get(worker)
        job = self.world.orchestrator.core.state(self.world.plan.job)
        if process is None or job.mode != "running" or job.ended or job.capacity.yields:
            return
        healthy = process.alive and not (process.hung or process.stopped or process.was_stopped)
        ensure(not healthy, f"{worker} (rank {process.rank}) is fenced and was healthy")

    def _told(self, worker: str, command: commands.WorkerCommand) -> None:
        ensure(
            worker not in self.book.ended,
            f"{type(command).__name__} to {worker}, which has ended on record",
        )
        if isinstance(command, commands.Swap):
            ensure(command.generation in self.book.commits, f"swap {command.generation}: no record")
            ensure(worker in self.book.owners.values(), f"swap to {worker}, which owns nothing")
        elif isinstance(command, commands.Leave):
            ensure(
                worker not in self.book.owners.values(), f"{worker} told to leave, but owns a rank"
            )
        elif isinstance(command, commands.Decide):
            ensure(
                self.book.decided.get(command.generation) == command.tick,
                f"decide {command.generation} at {command.tick}: not on record",
            )
        elif isinstance(command, commands.Abort | commands.Hold | commands.Stage):
            ensure(
                command.generation in self.book.attempts or command.generation in self.book.stops,
                f"{type(command).__name__} {command.generation}: not on record",
            )
        elif isinstance(command, commands.Assign) and not command.presumed:
            self._check_seat(command.rank, worker)
            process = self.world.ranks.get(worker)
            built = process.rank if process is not None else -1
            ensure(built in (-1, command.rank), f"{worker} was built as rank {built}")
            if process is not None and self._generations.is_newest(command.generation):
                bad = {process.node.name, process.place} & self.book.tainted
                fresh = process.mode == "parked"
                ensure(not (bad and fresh), f"{worker} is given a rank in tainted {process.place}")

    def _check_seat(self, rank: int, worker: str) -> None:
        epoch = self.world.orchestrator.epoch
        old, given = self._seats.get(rank, ("", epoch))
        self._seats[rank] = worker, epoch
        over = old in ("", worker) or old in self.book.killed | self.book.ended
        job = self.world.orchestrator.core.state(self.world.plan.job)
        before, process = job.workers.get(old), self.world.ranks.get(old)
        # An understudy whose Assign was lost with the orchestrator is an understudy still, and a
        # spare that never heard of it is free for any rank. One that did hear of it is ended when
        # its agent tells so: before that, a new orchestrator cannot know.
        over = over or before is None or not before.usable or before.role == "understudy"
        if process is not None and given != epoch:
            away = job.nodes[process.node.name].state != "connected"
            over = over or process.rank != rank or away
        owner = old in self.book.owners.values()
        ensure(over or owner, f"rank {rank} is given to {worker} and still to {old}")
