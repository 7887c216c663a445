"""What must hold, looked at after every event. A violation ends the world.

Safety: one owner per rank; generations only grow; no committed step is lost or applied twice;
records are durable before their effects; no two migrations of one rank; a fenced process never
trains again. Content: every commit of every rank is compared with the undisturbed run. At the end:
the job is done (or ended for a reason that the world justifies), and nothing has leaked.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import msgspec

from keepstep.core.orchestrator import Core
from keepstep.core.phases import has_held, has_reported
from keepstep.core.placement import CRASHES_MAX
from keepstep.core.rewire import has_resumed
from keepstep.core.state import Attempt, Job
from keepstep.model import messages as m
from keepstep.model import records as r
from keepstep.sim.beliefs import Beliefs
from keepstep.sim.losses import recoverable
from keepstep.sim.net import SECOND
from keepstep.sim.prompt import Prompt

if TYPE_CHECKING:
    from keepstep.sim.node import SimNode
    from keepstep.sim.process import Process
    from keepstep.sim.world import World


class Violation(AssertionError):
    """Something happened that must never happen."""


class Checker:
    def __init__(self, world: World) -> None:
        self.world = world
        self.beliefs = Beliefs(self)
        self.prompt = Prompt(self)
        # what is on the disk
        self.placed: set[str] = set()
        self.joined: set[str] = set()
        self.ended_on_record: set[str] = set()
        self.attempts: dict[int, r.AttemptStarted] = {}
        self.decided: dict[int, int] = {}
        self.commits: dict[int, r.Committed] = {}
        self.owners: dict[int, str] = {}
        self.generation = -1
        self.generation_max = -1
        self.begun: set[int] = set()
        self.stage_failures: set[tuple[int, str]] = set()  # (generation, worker)
        self.job_ended: r.JobEnded | None = None
        self.open_incidents: dict[str, r.IncidentOpened] = {}
        self.sealed: r.CheckpointSealed | None = None
        self.sealed_before: r.CheckpointSealed | None = None
        self.resume_tick = world.plan.resume_tick  # of the checkpoint that ranks start from
        self.victims: dict[str, set[int]] = {}  # of every incident, with those it was widened by
        # what was sent
        self.killed: set[str] = set()
        # rank -> newcomer that was assigned it last, and by which process of the orchestrator
        self.seats: dict[int, tuple[str, int]] = {}
        # what happened
        self.best: dict[int, int] = {}  # rank -> highest tick any of its processes committed
        self.commit_count = 0
        self.preempted: list[tuple[int, int]] = []
        self.tainted: set[str] = set()
        self.closed: set[str] = set()
        self.stops: set[int] = set()  # generations in which ranks hold to end
        self.doubtful: set[str] = set()  # incidents in which numbers differed
        self.accepted_ticks: set[int | None] = set()
        self.stands = ""  # numbers differ, and nobody has said what is to be done
        self.gave: dict[tuple[str, int], list[int]] = {}  # (node, rank) -> ticks it acknowledged

    def violated(self, what: str) -> None:
        raise Violation(what)

    def ensure(self, condition: bool, what: str) -> None:
        if not condition:
            raise Violation(what)

    # ------------------------------------------------------------------ the ledger

    def durable(self, records: list[r.Record]) -> None:
        for record in records:
            check = getattr(self, f"_on_{type(record).__name__}", None)
            if check is not None:
                check(record)
            self.prompt.durable(record)

    def _new_generation(self, generation: int) -> None:
        self.ensure(
            generation > self.generation_max,
            f"generation {generation} after {self.generation_max}: generations only grow",
        )
        self.generation_max = generation

    def _on_StartBegun(self, record: r.StartBegun) -> None:
        self._new_generation(record.generation)
        self.begun.add(record.generation)
        self.generation = record.generation
        self.owners.clear()

    def _on_Placed(self, record: r.Placed) -> None:
        self.ensure(record.worker not in self.placed, f"{record.worker} is used twice")
        self.placed.add(record.worker)
        if record.rank >= 0:
            self.owners[record.rank] = record.worker

    def _on_WorkerEnded(self, record: r.WorkerEnded) -> None:
        self.ended_on_record.add(record.worker)

    def _on_NodeJoined(self, record: r.NodeJoined) -> None:
        self.joined.add(record.node)

    def _on_NodeLost(self, record: r.NodeLost) -> None:
        node = self.world.nodes.get(record.node)
        well = node is None or not node.alive or not self.world.plan.only_processes
        well = well or record.node not in self.joined  # a late one, of which nobody has heard
        self.ensure(well, f"{record.node} is called lost, and nothing ails it")
        for worker in self.placed:
            if worker.startswith(f"{record.node}."):
                self.ended_on_record.add(worker)

    def _check_repeated(self, record: r.AttemptStarted) -> None:
        """An attempt fails only by what was said in it."""
        last = max(self.attempts, default=-1)
        blamed = re.match(r"process groups could not be built: (\S+\.w\d+): ", record.reason)
        said = blamed is None or (last, blamed[1]) in self.stage_failures
        self.ensure(said, f"{last} is repeated, but nobody failed in it: {record.reason}")

    def _on_AttemptStarted(self, record: r.AttemptStarted) -> None:
        self._new_generation(record.generation)
        self._check_repeated(record)
        self.ensure(not self.stands, f"an attempt, and the job stands: {self.stands}")
        self.attempts[record.generation] = record
        self.ensure(record.incident not in self.closed, f"an attempt for closed {record.incident}")

    def _on_Decided(self, record: r.Decided) -> None:
        self.ensure(record.generation == self.generation_max, "decided for an old attempt")
        self.ensure(record.generation not in self.decided, "two decisions in one attempt")
        moving = (
            self.attempts[record.generation].ranks if record.generation in self.attempts else []
        )
        for rank, worker in sorted(self.owners.items()):
            process = self.world.ranks.get(worker)
            if process is not None and process.alive and rank not in moving:
                stopped = process.report_generation >= record.generation
                self.ensure(stopped, f"decided, but {worker} (rank {rank}) has not stopped for it")
        self.decided[record.generation] = record.tick

    def _on_CheckpointSealed(self, record: r.CheckpointSealed) -> None:
        self.ensure(record.path in self.world.saved, f"{record.path} is on record, not on disk")
        self.sealed_before, self.sealed = self.sealed, record

    def _on_FellBack(self, record: r.FellBack) -> None:
        """Only if nothing else is left, and to the newest one that can be read. Then everything is
        as it was."""
        differs = self.world.differs_at is not None and "numbers differ" in record.reason
        if differs:
            self.world.differs_at, self.stands = None, ""
        needless = "" if differs else recoverable(self.world, record.tick)
        self.ensure(not needless, f"needless fall-back ({record.reason}): {needless}")
        again = f"{record.path} cannot be read" in record.reason
        self.ensure(not again, f"back to {record.path}, which cannot be read")
        before = self.sealed_before
        spoiled = self.sealed is not None and self.sealed.path == self.world.spoiled
        if spoiled and before is not None and before.path == record.path:
            self.sealed, self.sealed_before = before, None
        sealed = self.sealed
        newest = sealed is not None and (sealed.path, sealed.tick) == (record.path, record.tick)
        self.ensure(newest, f"back to {record.path}, and the newest one is {sealed}")
        truth = self.world.truth.version
        most = truth[max(self.best.values())] - truth[record.tick]
        self.ensure(record.steps_lost <= most, f"{record.steps_lost} steps lost of {most}")
        self.resume_tick = record.tick
        self.best = dict.fromkeys(self.best, record.tick)
        self.owners.clear()
        self.gave.clear()

    def _on_StopBegun(self, record: r.StopBegun) -> None:
        self._new_generation(record.generation)
        self.stops.add(record.generation)

    def _on_DivergenceFound(self, record: r.DivergenceFound) -> None:
        self.ensure(self.world.differs_at == record.tick, f"nobody found {record.text}")
        self.ensure(not self.stands, f"found again: {record.text}")
        self.doubtful |= {record.incident, record.move} - {""}
        self.stands = record.text

    def _on_DivergenceAccepted(self, record: r.DivergenceAccepted) -> None:
        self.stands = ""
        self.accepted_ticks.add(record.tick if record.tick >= 0 else self.world.differs_at)

    def went_on(self, process: Process) -> None:
        """It was told so only after it was on record that it may be."""
        accepted = process.tick in self.accepted_ticks
        self.ensure(accepted, f"{process.id} goes on, and nobody has accepted what differs")

    def _on_Tainted(self, record: r.Tainted) -> None:
        self.tainted.add(record.target)

    def _on_Untainted(self, record: r.Untainted) -> None:
        self.tainted.discard(record.target)

    def _on_SignalSeen(self, record: r.SignalSeen) -> None:
        """While one rank hangs, no healthy one is blamed for it."""
        if record.signal != "hang":
            return
        blamed = self.world.ranks[record.worker]
        owners = [self.world.ranks[worker] for worker in self.owners.values()]
        hung = [p.id for p in owners if p.alive and (p.hung or p.stopped)]
        guilty = blamed.hung or blamed.stopped or blamed.slow > 1
        ill = self.world.net.disturbed or any(p.slow > 1 for p in owners)
        if guilty or ill:
            return
        if hung:
            self.violated(f"{record.worker} is blamed for a hang of {', '.join(hung)}")
        if all(fault.kind in ("crash", "migrate", "drain") for fault in self.world.plan.faults):
            self.violated(f"{record.worker} is blamed for a hang, and nobody hangs")

    def _on_IncidentOpened(self, record: r.IncidentOpened) -> None:
        for other in self.open_incidents.values():
            both = set(other.victims) & set(record.victims)
            planned = other.trigger != "unplanned" and record.trigger != "unplanned"
            self.ensure(
                not (both and planned), f"{record.incident} and {other.incident} move {both}"
            )
        self.open_incidents[record.incident] = record
        self.victims[record.incident] = set(record.victims)
        if record.trigger == "pre-emptive":
            self.preempted.append((record.at_ns, len(record.victims)))
            minute = [n for at, n in self.preempted if at > record.at_ns - 60_000_000_000]
            most = max(self.world.plan.ranks // 5, self.world.plan.per_node)
            storm = len(minute) > 1 and sum(minute) > most
            self.ensure(not storm, f"{sum(minute)} ranks told to move in one minute: a storm")

    def _on_IncidentWidened(self, record: r.IncidentWidened) -> None:
        self.victims[record.incident] |= set(record.victims)

    def _on_IncidentClosed(self, record: r.IncidentClosed) -> None:
        self.ensure(record.view.id not in self.closed, f"{record.view.id} is closed twice")
        self.closed.add(record.view.id)
        self.open_incidents.pop(record.view.id, None)
        self.ensure(bool(record.view.reason), f"{record.view.id} closed without a reason")
        differed = record.view.id in self.doubtful
        named = differed == (record.view.outcome == "DIVERGED")
        self.ensure(named, f"{record.view.id} is called {record.view.outcome}")
        gave_up = record.view.outcome == "ABORTED" and "gave up after" in record.view.reason
        hit = len(self.world.fired_faults)
        deserved = hit >= 3 or self.world.plan.step_ns > 60 * SECOND
        self.ensure(not gave_up or deserved, f"a move was given up after {hit} faults")

    def _on_Committed(self, record: r.Committed) -> None:
        generation = record.generation
        self.ensure(generation == self.generation_max, f"committed old generation {generation}")
        self.ensure(generation in self.attempts, f"commit {generation} without an attempt")
        kind = self.attempts[generation].kind
        workers = list({**self.owners, **record.placement}.values())
        self.ensure(len(set(workers)) == len(workers), "one process owns two ranks")
        known = self.world.orchestrator.core.state(self.world.plan.job).workers
        places = {known[worker].place for worker in workers}
        self.ensure(len(places) == len(workers), "one slot gives two seats")
        tick = record.tick if kind != "resume" else self.resume_tick
        whole = min((self.best.get(rank, 0) for rank in range(self.world.plan.ranks)), default=0)
        self.ensure(tick >= whole, f"committed tick {tick}, but all ranks had finished {whole}")
        if kind == "unplanned":
            self.ensure(self.decided.get(generation) == tick, "committed without its decision")
        for rank, worker in sorted({**self.owners, **record.placement}.items()):
            old = self.owners.get(rank)
            if old is not None and old != worker:
                self._check_replaced(rank, old, kind)
            self._check_new(rank, worker, tick, generation)
        moved = {rank for rank, w in record.placement.items() if self.owners.get(rank) != w}
        blamed = self.victims[record.incident]
        self.ensure(moved <= blamed, f"{record.incident} is about {blamed}, and moves {moved}")
        for name, incident in self.open_incidents.items():
            left = [rank for rank in incident.victims if rank not in moved]
            self.open_incidents[name] = msgspec.structs.replace(incident, victims=left)
        self.owners.update(record.placement)
        self.commits[generation] = record
        self.generation = generation

    def _check_replaced(self, rank: int, old: str, kind: str) -> None:
        process = self.world.ranks[old]
        on_record = kind == "planned" or old in self.ended_on_record
        self.ensure(on_record, f"rank {rank} is replaced, and the end of {old} is not on record")
        if not process.alive:
            return
        if kind == "planned":
            self.ensure(process.mode == "held", f"{old} leaves rank {rank} but is {process.mode}")
            return
        if process.hold or process.mode in ("joining", "swapping") or process.node.paused:
            # It has left its groups and does nothing without a command: it may outlive its loss,
            # as its agent cannot tell whether its state is the only one left.
            return
        self.ensure(
            False, f"rank {rank} has two owners: {old} is alive ({process.mode}) and was replaced"
        )

    def _check_new(self, rank: int, worker: str, tick: int, generation: int) -> None:
        process = self.world.ranks.get(worker)
        if process is None or not process.alive or process.done:
            return
        self.ensure(process.rank == rank, f"{worker} is rank {process.rank}, not {rank}")
        self.ensure(
            process.tick == tick,
            f"committed tick {tick}, but {worker} (rank {rank}) stands at {process.tick}",
        )
        copied = process.copy is not None and process.copy.generation == generation
        there = process.held_generation == generation or (process.mode == "swapping" and copied)
        self.ensure(there, f"committed {generation}, but {worker} (rank {rank}) is {process.mode}")
        alone = any(self.world.ranks[w].done for w in self.owners.values() if w in self.world.ranks)
        staged = process.staged is not None and process.staged.generation == generation
        self.ensure(alone or staged, f"committed {generation}, but {worker} has no groups for it")

    def _on_JobEnded(self, record: r.JobEnded) -> None:
        self.job_ended = record
        self.world.job_ended(record)

    def handled(self, core: Core, progress: bool) -> None:
        """What the core keeps at hand is what it would find if it walked over all workers. Mere
        `progress` makes nobody special; if it does, the next event shows it."""
        if not core.knows(self.world.plan.job):
            return
        job = core.state(self.world.plan.job)
        if not progress:
            self._sorted_in(job)
        if job.attempt is not None:
            self._counted(job, job.attempt)

    def _sorted_in(self, job: Job) -> None:
        special, owners, count = job.special, job.owners, 0
        for worker in job.workers.values():
            if not worker.ordinary:
                count += 1
                if worker.id not in special:
                    self.violated(f"{worker.id} is special, and not among {set(special)}")
            elif owners.get(worker.rank) != worker.id:
                self.violated(f"{worker.id} is ordinary and owns nothing")
        if count != len(special):
            self.violated(f"{count} workers are special, not {set(special)}")

    def _counted(self, job: Job, attempt: Attempt) -> None:
        if attempt.committed:
            owners = list(job.seated())
            swapped = sum(w.swapped < attempt.generation for w in owners)
            resumed = sum(not has_resumed(w, attempt.generation) for w in owners)
            counts, found = (attempt.swaps, attempt.resumes), (swapped, resumed)
        else:
            owners = [job.workers[job.owners[rank]] for rank in attempt.members]
            reported = sum(not has_reported(w, attempt) for w in owners)
            held = sum(not has_held(w, attempt) for w in owners)
            counts, found = (attempt.reports, attempt.holds), (reported, held)
        left = tuple(tally.left for tally in counts)
        self.ensure(left == found, f"{left} answers are missing by count, {found} in fact")

    # ------------------------------------------------------------------ effects

    def sent(self, node: str, command: m.AgentCommand) -> None:
        """On its way: its record is on the disk, or it needs none."""
        if isinstance(command, m.KillWorker):
            self.killed.add(command.worker)
            self._check_alarm(command.worker)
            self.prompt.killed(command.worker)
        elif isinstance(command, m.Forget):
            needed = [w for w in command.workers if w in self.owners.values()]
            self.ensure(not needed, f"the side state of {needed} is dropped and still needed")
        elif isinstance(command, m.StartWorker):
            self.ensure(command.worker in self.placed, f"{command.worker} started, not on record")
        elif isinstance(command, m.OpenStore):
            known = command.generation in self.attempts or command.generation in self.begun
            self.ensure(known, f"store {command.generation} opened, not on record")
        elif isinstance(command, m.Tell):
            self._told(command.worker, command.command)
        elif isinstance(command, m.TellRanks):
            self._told_together(node, command)

    def _told_together(self, node: str, command: m.TellRanks) -> None:
        workers = self.world.orchestrator.core.state(self.world.plan.job).workers
        for process in self.world.nodes[node].processes.values():
            skipped = process.id in command.besides or process.id in self.killed
            worker = workers.get(process.id)
            ranked = process.rank >= 0 and (worker is None or worker.role != "understudy")
            if process.alive and ranked and not skipped:
                self._told(process.id, command.command)

    def _check_alarm(self, worker: str) -> None:
        """False alarm: a healthy rank is fenced in a world where only other processes are hurt."""
        if not self.world.plan.only_processes or worker not in self.owners.values():
            return
        process = self.world.ranks.get(worker)
        job = self.world.orchestrator.core.state(self.world.plan.job)
        if process is None or job.mode != "running" or job.ended or job.capacity.yields:
            return
        healthy = process.alive and not (process.hung or process.stopped or process.was_stopped)
        self.ensure(not healthy, f"{worker} (rank {process.rank}) is fenced and was healthy")

    def _told(self, worker: str, command: m.WorkerCommand) -> None:
        self.ensure(
            worker not in self.ended_on_record,
            f"{type(command).__name__} to {worker}, which has ended on record",
        )
        if isinstance(command, m.Swap):
            self.ensure(command.generation in self.commits, f"swap {command.generation}: no record")
            self.ensure(worker in self.owners.values(), f"swap to {worker}, which owns nothing")
        elif isinstance(command, m.Leave):
            self.ensure(
                worker not in self.owners.values(), f"{worker} told to leave, but owns a rank"
            )
        elif isinstance(command, m.Decide):
            self.ensure(
                self.decided.get(command.generation) == command.tick,
                f"decide {command.generation} at {command.tick}: not on record",
            )
        elif isinstance(command, m.Abort | m.Hold | m.Stage):
            self.ensure(
                command.generation in self.attempts or command.generation in self.stops,
                f"{type(command).__name__} {command.generation}: not on record",
            )
        elif isinstance(command, m.Assign) and not command.presumed:
            self._check_seat(command.rank, worker)
            process = self.world.ranks.get(worker)
            built = process.rank if process is not None else -1
            self.ensure(built in (-1, command.rank), f"{worker} was built as rank {built}")
            if process is not None and command.generation == self.generation_max:
                place = f"{process.node.name}/{process.slot}"
                bad = {process.node.name, place} & self.tainted
                fresh = process.mode == "parked"
                self.ensure(not (bad and fresh), f"{worker} is given a rank in tainted {place}")

    def _check_seat(self, rank: int, worker: str) -> None:
        epoch = self.world.orchestrator.epoch
        old, given = self.seats.get(rank, ("", epoch))
        self.seats[rank] = worker, epoch
        over = old in ("", worker) or old in self.killed | self.ended_on_record
        job = self.world.orchestrator.core.state(self.world.plan.job)
        before, process = job.workers.get(old), self.world.ranks.get(old)
        # An understudy whose Assign was lost with the orchestrator is an understudy still, and a
        # standby that never heard of it is free for any seat. One that did hear of it is ended when
        # its agent tells so: before that, a new orchestrator cannot know.
        over = over or before is None or not before.usable or before.role == "understudy"
        if process is not None and given != epoch:
            away = job.nodes[process.node.name].state != "connected"
            over = over or process.rank != rank or away
        owner = old in self.owners.values()
        self.ensure(over or owner, f"rank {rank} is given to {worker} and still to {old}")

    def acknowledged(self, node: str, rank: int, tick: int) -> None:
        """A buddy has taken a side state: it must have it until two later ones are acknowledged."""
        before = [one for one in self.gave.get((node, rank), ()) if one != tick]
        self.gave[node, rank] = [max(before), tick] if before else [tick]

    def obeyed(self, node: SimNode, command: m.AgentCommand) -> None:
        """A command reached its agent."""

    def spawned(self, node: SimNode, process: Process) -> None:
        """One process in a slot; only understudies share that of their standby."""
        workers = self.world.orchestrator.core.state(self.world.plan.job).workers
        place, mine = f"{node.name}/{process.slot}", workers.get(process.id)
        if place in self.world.bad_slots and mine is not None and mine.presumed < 0:
            self.world.bad_slots[place] += 1
            often = self.world.bad_slots[place] > CRASHES_MAX
            self.ensure(not often, f"{process.id} is started in {place}, where all have failed")
        for other in node.processes.values():
            if other is process or not other.alive or other.slot != process.slot:
                continue
            pair = [workers[one.id] for one in (other, process) if one.id in workers]
            shared = any(w.presumed >= 0 and w.role in ("understudy", "unwanted") for w in pair)
            self.ensure(shared, f"{process.id} started in the slot of {other.id}")

    # ------------------------------------------------------------------ ranks

    def said(self, process: Process, message: m.WorkerMessage) -> None:
        self.ensure(process.alive, f"{process.id} speaks after its end")
        if isinstance(message, m.StageFailed):
            self.stage_failures.add((message.generation, process.id))

    def ended(self, process: Process) -> None:
        pass

    def fenced(self, node: SimNode) -> None:
        """An agent ends its ranks by itself only when they stand still."""
        since = self.world.now - self.world.plan.stall_ns
        for process in node.processes.values():
            self.ensure(
                not process.alive or process.rank < 0 or process.commit_ns < since,
                f"{node.name} fences itself while {process.id} trains",
            )
            waits = process.mode in ("deciding", "held") and not (process.hung or process.stopped)
            self.ensure(
                not (process.alive and waits),
                f"{node.name} fences itself, and {process.id} held its state for the job",
            )

    def swapped(self, process: Process) -> None:
        """Content at resume: whoever takes part in a new generation is right from the start."""
        self.ensure(
            process.generation in self.commits,
            f"{process.id} swapped to {process.generation}, not on record",
        )
        self._check_content(process)

    def committed(self, process: Process) -> None:
        self.commit_count += 1
        rank, tick = process.rank, process.tick
        if process.id in self.ended_on_record:
            self.violated(f"{process.id} (rank {rank}) trains after its end is on record")
        owner = self.owners.get(rank)
        newer = self.generation > process.generation and owner != process.id
        if newer and not process.recovering.owes:
            self.violated(
                f"{process.id} trains as rank {rank} in {process.generation}, but {owner} owns it"
            )
        self._check_content(process)
        if tick > self.best.get(rank, -1):
            self.best[rank] = tick
        self.prompt.committed(process)
        self.world.on_commit()

    def _check_content(self, process: Process) -> None:
        truth, tick = self.world.truth, process.tick
        truth.upto(tick)
        right = (
            process.shared == truth.shared[tick]
            and process.own == truth.own[tick][process.rank]
            and process.version == truth.version[tick]
            and (not self.world.plan.parity or process.shard == truth.shard[tick][process.rank])
        )
        if not right:
            what = "shared" if process.shared != truth.shared[tick] else "own"
            self.violated(
                f"rank {process.rank} ({process.id}) has other {what} state at tick {tick} than "
                "the undisturbed run"
            )
