"""One job: events become facts, then `settle` looks at all facts and acts.

An event that cannot be true any more (an old generation, a process that is gone or fenced, an
answer to something that was not asked) changes nothing. See state.py for why there are no
callbacks, start.py for the beginning, migration.py for what an attempt is.
"""

from __future__ import annotations

from keepstep.core import (
    checkpoints,
    divergence,
    fallback,
    faults,
    operator,
    planned,
    processes,
    provision,
    restart,
    rewire,
    start,
    stopping,
    stragglers,
    understudies,
)
from keepstep.core.facts import Attempt, Worker
from keepstep.core.incidents import end_job, warn
from keepstep.core.migration import EXIT_GAVE_UP, recover
from keepstep.core.phases import all_filled
from keepstep.core.restart import agents_are_back
from keepstep.core.state import Job, Out
from keepstep.core.together import tell_ranks
from keepstep.core.workers import worker_said
from keepstep.model.agent_messages import (
    AgentMessage,
    CloseStore,
    Forget,
    Hello,
    KillNode,
    KillWorker,
    PathNoticed,
    PathsSeen,
    Progress,
    Stalled,
    StoreFailed,
    StoreOpened,
    Unstalled,
    WorkerExited,
    WorkerSaid,
    WorkersSaid,
    WorkerStarted,
    WorkerState,
)
from keepstep.model.commands import Release
from keepstep.model.job import AgentSaid, AgentsSaid, CoreInput
from keepstep.model.messages import Resumed
from keepstep.model.records import NodeJoined

MERE_NEWS = Progress | PathsSeen


def settle(job: Job, out: Out) -> None:
    for _ in range(200):
        if job.ended is not None or not _step(job, out):
            break
    else:
        raise AssertionError(f"job {job.id} does not come to rest")
    said = out.said
    if job.ended is None and not job.replayed:
        _release(job, out)
        _refill(job, out)
        provision.advance(job, out)
    job.rest = out.said == said


def follows_nothing(job: Job, out: Out, event: CoreInput) -> bool:
    """Most of what is ever said is how far the ranks are. It is not looked at, unless it ends a
    wait: ranks that have got on behind a commit, or in attach. Timers that it moves come later."""
    said = event.said if isinstance(event, AgentsSaid) else [event]
    if not all(isinstance(e, AgentSaid) and isinstance(e.message, MERE_NEWS) for e in said):
        return False
    if job.replayed or job.injects or job.mode != "running" or out.said:
        return False
    return job.attempt is None or (job.rest and not job.attempt.committed)


def _step(job: Job, out: Out) -> bool:
    """One look. True: something changed, look again."""
    if job.replayed:
        return agents_are_back(job, out)
    if job.divergence is not None:
        divergence.advance(job, out)
        return job.divergence is None
    attempt = job.attempt
    if len(job.owners) == job.spec.world and all(worker.done for worker in job.rank_owners()):
        end_job(job, out, "done", 0, "all ranks finished")
        return False
    if job.mode != "running" and attempt is None:
        mode = job.mode
        start.advance_start(job, out)
        return job.mode != mode
    faults.check_hang(job, out)
    if faults.broken(job):
        faults.recover_from(job, out)
        return True
    if attempt is None and job.stopping is not None:
        stopping.advance(job, out)
        return False
    if attempt is None:
        planned.next_move(job, out)
        if job.attempt is None:
            checkpoints.advance(job, out)
        return job.attempt is not None
    return _advance(job, out, attempt)


def _advance(job: Job, out: Out, attempt: Attempt) -> bool:
    if attempt.committed:
        rewire.rewire(job, out, attempt)
        return job.attempt is not attempt
    if attempt.kind == "planned":
        planned.move(job, out, attempt)
    else:
        recover(job, out, attempt)
        _give_up(job, out, attempt)
        stopping.held_already(job, out, attempt)
    if job.ended is not None or job.attempt is not attempt:
        return True
    if attempt.phase != "COMMIT":
        return faults.broken(job)
    rewire.commit(job, out, attempt)
    if attempt.kind == "resume":
        start.started(job, out)
    return True


def _give_up(job: Job, out: Out, attempt: Attempt) -> None:
    if job.ended is not None:
        return
    incident = attempt.incident
    if incident.give_up and attempt.tick is not None and job.checkpoint_tick == attempt.tick:
        where = f"; the state of tick {attempt.tick} is in {job.checkpoint}"
        end_job(job, out, "failed", EXIT_GAVE_UP, incident.give_up + where)
        return
    if incident.give_up and attempt.no_checkpoint:
        end_job(job, out, "failed", EXIT_GAVE_UP, f"{incident.give_up}; {attempt.no_checkpoint}")
        return
    if attempt.kind != "resume" or all_filled(job, attempt):
        return
    if not processes.may_get_spare(job) and not (job.asks and incident.fell_back):
        why = "not enough healthy slots to resume in"
        if not fallback.no_room(job, out, why):
            end_job(job, out, "failed", EXIT_GAVE_UP, why)


def _release(job: Job, out: Out) -> None:
    if job.release_due is not None:
        tell_ranks(out, Release(generation=job.release_due))
        job.release_due = None
    for worker in job.watched_owners():
        due = worker.release_due
        if due is not None and (not worker.usable or out.tell(worker, Release(generation=due))):
            worker.release_due = None


def _refill(job: Job, out: Out) -> None:
    attempt = job.attempt
    if job.mode in ("waiting", "opening"):
        return
    if job.forget_due and attempt is None and not job.incidents:
        job.forget_due = False
        rewire.forget_dead(job, out)
    if attempt is None and job.spec.understudies:
        processes.end_left_over(job, out)
        understudies.keep(job, out)
    if attempt is None or attempt.kind == "planned":
        taken = len(attempt.newcomers) if attempt is not None and not attempt.committed else 0
        processes.refill(job, out, planned.pending_ranks(job) - taken, forced=False)
    elif attempt.committed or attempt.incident.give_up:
        processes.refill(job, out, 0, forced=True)
    else:
        unfilled = sum(1 for rank in attempt.moving if rank not in attempt.newcomers)
        processes.refill(job, out, unfilled, forced=True)


# ------------------------------------------------------------------ agents


def agent_joined(job: Job, out: Out, name: str, hello: Hello) -> None:
    node = job.nodes[name]
    if node.state != "connected" or node.session != hello.session:
        joined = NodeJoined(
            job=job.id, at_ns=out.now, node=name, slots=hello.slots, labels=hello.labels
        )
        out.record(joined)
        provision.apply(job, joined)
    node.state = "connected"
    moved = (node.blobs, node.pid) != (hello.blobs, hello.pid)
    node.blobs, node.pid, node.session = hello.blobs, hello.pid, hello.session
    node.slots, node.labels = hello.slots, hello.labels
    processes.ask_holders_again(job)
    there = {state.worker: state for state in hello.workers}
    for worker in job.placed_on.get(name, ()):
        worker.stalled = None  # that it is over may be lost; what still stands is told again
    for worker in [w for w in job.placed_on.get(name, ()) if w.alive]:
        state = there.get(worker.id)
        if state is not None:
            _adopt(job, out, worker, state)
        elif worker.running:
            processes.worker_ended(
                job, out, worker, -1, "was gone when its agent came back", "process-exit"
            )
            exited(job, out, worker, "was gone when its agent came back")
        elif worker.start is not None and worker.killed_at is None:
            out.send(name, worker.start)
        else:
            processes.worker_ended(job, out, worker, -1, "was never started", "process-exit")
    for known in there:
        stray = job.workers.get(known)
        if stray is not None and not stray.alive:
            # It was given up with its node: until it is gone its slot is taken.
            stray.alive, stray.role, stray.killed_at = True, "unwanted", out.now
            out.send(name, KillWorker(worker=known))
        elif stray is None:
            out.send(name, KillWorker(worker=known))
    _sweep(job, out, name, hello)
    starting = job.mode == "starting" and job.spec.redundancy == "parity"
    if (job.mode == "running" or starting) and not job.replayed:
        if moved or job.lonely:
            _offer_buddy(job, out, name, ("", name) if moved else ("",))
        for owner in job.owners_on(name):
            if owner.usable and owner.buddy_due:
                restart.tell_buddy(job, out, owner)
        checkpoints.agent_joined(job, out, name)


def _offer_buddy(job: Job, out: Out, name: str, lost: tuple[str, ...]) -> None:
    """A node that is new or back, or an agent that was started anew and has lost the copies it
    kept: whoever had none, or had it here, is told where to put its side state from now on."""
    job.lonely = False
    for _, owner in job.owning():
        parity = job.spec.redundancy == "parity" and owner.parity in lost
        if owner.usable and owner.node != name and (owner.buddy in lost or parity):
            restart.tell_buddy(job, out, owner)


def _adopt(job: Job, out: Out, worker: Worker, state: WorkerState) -> None:
    """What the worker was told before the stream broke may be lost: everything that is not
    answered will be asked again."""
    worker.running = True
    note_progress(job, out, worker, state)
    _seen_resumed(job, worker, state)
    worker.swapped = max(worker.swapped, state.generation)
    attempt = job.attempt
    owning = job.owners.get(worker.rank) == worker.id
    if attempt is not None and attempt.committed and owning:
        attempt.swaps.note(worker.rank, worker.swapped >= attempt.generation)
    if worker.role == "spare" and not worker.parked and state.where == "parked":
        worker.parked = "unknown"
    elif worker.role == "understudy" and state.where not in ("", "starting"):
        worker.parked = worker.parked or "unknown"
    if state.where == "done":
        worker.done = True
    answered = {"forget"}
    answered |= {"assign"} if worker.arrived else set()
    answered |= {"position"} if worker.ready is not None else set()
    worker.asked = {what: when for what, when in worker.asked.items() if what in answered}
    worker.synced = job.tellings
    worker.buddy_heard = False
    if job.attempt is not None:
        job.attempt.alone[worker.id] = worker
    worker.resync = worker.swap is not None and worker.swapped < worker.swap.generation
    if worker.killed_at is not None:
        out.send(worker.node, KillWorker(worker=worker.id))
    elif worker.role in ("spare", "understudy") and state.rank >= 0:
        # It was joining when the orchestrator was restarted. What all ranks are told would be told
        # to it as well.
        worker.role = "unwanted"
        out.kill(worker)


def _sweep(job: Job, out: Out, name: str, hello: Hello) -> None:
    """Things that are asked without an answer, and could be lost with a stream."""
    node = job.nodes[name]
    if job.saves.fallen_before:
        out.send(name, Forget(workers=[], before=job.saves.fallen_before))
    attempt = job.attempt
    if attempt is not None and attempt.store is None and attempt.store_node == name:
        attempt.store_asked_at = 0
    if job.mode == "opening" and job.store_node == name:
        job.store_asked_at = 0
    keep = {job.generation} | ({attempt.generation} if attempt is not None else set())
    if job.mode == "opening":
        keep.add(job.generation_max)
    node.stores |= set(hello.stores)
    for generation in sorted(node.stores - keep):
        out.send(name, CloseStore(generation=generation))
        node.stores.discard(generation)
    for dead, _ in hello.retained:
        if dead in job.workers:
            job.workers[dead].asked.pop("forget", None)  # if it was told, that was lost
            job.forget_due = True
    if attempt is None and not job.incidents:
        # This very Hello may be the news of a rank's death: its side state is needed now.
        needed = set(job.owners.values())
        stale = [worker for worker, _ in hello.retained if worker not in needed]
        if stale:
            out.send(name, Forget(workers=stale))
    for owner in job.owners_on(name):
        if owner.usable and owner.release_due is None:
            released = job.released
            if released is not None and released > job.generation and attempt is None:
                owner.release_due = released


def agent_gone(job: Job, out: Out, name: str) -> None:
    node = job.nodes[name]
    if node.state == "connected":
        node.state = "disconnected"
        node.gone_at = out.now


def agent_said(job: Job, out: Out, name: str, message: AgentMessage) -> None:
    if isinstance(message, WorkerSaid):
        _relayed(job, out, name, message)
    elif isinstance(message, WorkersSaid):
        for one in message.said:
            _relayed(job, out, name, one)
    elif isinstance(message, WorkerExited):
        worker = _worker(job, name, message.worker)
        if worker is not None:
            _worker_exited(job, out, worker, message)
    elif isinstance(message, WorkerStarted):
        worker = _worker(job, name, message.worker)
        if worker is not None:
            worker.running, worker.pid = True, message.pid
    elif isinstance(message, Progress):
        for state in message.workers:
            worker = _worker(job, name, state.worker)
            if worker is not None:
                note_progress(job, out, worker, state)
                _seen_resumed(job, worker, state)
        _after_progress(job, out, name)
        stragglers.look(job, out)
    elif isinstance(message, Stalled | Unstalled):
        worker = _worker(job, name, message.worker)
        if worker is not None:
            worker.stalled = message if isinstance(message, Stalled) else None
            if worker.stalled is None:
                job.hang_warned = False
    elif isinstance(message, StoreOpened | StoreFailed):
        _store_answered(job, out, name, message)
    elif isinstance(message, PathNoticed):
        operator.path_noticed(job, out, name, message)
    elif isinstance(message, PathsSeen):
        job.nodes[name].paths = message.paths


def _relayed(job: Job, out: Out, name: str, message: WorkerSaid) -> None:
    worker = _worker(job, name, message.worker)
    if worker is not None and worker.usable:
        worker.running = True
        worker_said(job, out, worker, message.said)


def _worker(job: Job, node: str, worker_id: str) -> Worker | None:
    worker = job.workers.get(worker_id)
    if worker is None or worker.node != node or not worker.alive:
        return None
    return worker


def note_progress(job: Job, out: Out, worker: Worker, state: WorkerState) -> None:
    if state.tick > worker.tick:
        job.progress_at = out.now
    worker.pid = state.pid or worker.pid
    worker.generation = max(worker.generation, state.generation)
    worker.version = max(worker.version, state.version)
    worker.tick = max(worker.tick, state.tick)
    worker.where = state.where
    worker.steps_per_s = state.steps_per_s
    worker.own_ns, worker.own_steps = state.own_ns, state.own_steps


def _seen_resumed(job: Job, worker: Worker, state: WorkerState) -> None:
    """A Resumed may be lost with a stream and is not said twice; the step it stands for shows."""
    attempt = job.attempt
    if attempt is None or not attempt.committed or job.owners.get(worker.rank) != worker.id:
        return
    base = max(attempt.tick or 0, worker.copied.tick if worker.copied is not None else 0)
    if state.generation != attempt.generation or state.tick <= base:
        return
    worker.swapped = max(worker.swapped, state.generation)
    attempt.swaps.note(worker.rank)
    attempt.resumes.note(worker.rank)
    if not rewire.has_resumed(worker, attempt.generation):
        worker.resumed = Resumed(
            generation=attempt.generation,
            tick=state.tick,
            version=state.version,
            last_commit_ns=0,
            first_commit_ns=0,
            median_step_ns=0,
        )


def _after_progress(job: Job, out: Out, name: str) -> None:
    if job.mode == "starting" and job.attempt is None:
        # Attached may have been said while no orchestrator was listening.
        for worker in job.owners_on(name):
            worker.attached = worker.attached or worker.tick > 0
    for inject in list(job.injects.values()):
        if inject.action != "kill-node" or inject.step < 0 or inject.id in job.fired:
            continue
        there = [w for w in job.owners_on(name) if w.usable]
        if inject.node == name and any(w.version >= inject.step for w in there):
            processes.inject_fired(job, out, inject.id, f"{name} killed")
            out.send(name, KillNode())


def _worker_exited(job: Job, out: Out, worker: Worker, message: WorkerExited) -> None:
    tail = message.tail.strip().splitlines()
    how = f"signal {-message.code}" if message.code < 0 else f"code {message.code}"
    why = f"ended with {how}"
    worker.version = max(worker.version, message.version)
    worker.tick = max(worker.tick, message.tick)
    starting = job.mode == "starting" and job.attempt is None and worker.role == "rank"
    processes.worker_ended(job, out, worker, message.code, why, "process-exit")
    if starting:
        start.rank_exited(job, out, worker, message.code, message.tail)
    else:
        exited(job, out, worker, f"{why}{': ' + tail[-1] if tail else ''}")


def exited(job: Job, out: Out, worker: Worker, why: str) -> None:
    if worker.role == "newcomer":
        faults.newcomer_failed(job, out, worker, f"{worker.id} {why}")
    elif worker.role == "spare" and worker.killed_at is None:
        warn(job, out, f"spare {worker.id} in {worker.place} {why}")
    elif worker.role == "understudy" and worker.killed_at is None:
        understudies.lost(job, out, worker, why)


def _store_answered(job: Job, out: Out, name: str, message: StoreOpened | StoreFailed) -> None:
    attempt = job.attempt
    if isinstance(message, StoreOpened):
        if attempt is not None and attempt.generation == message.generation:
            if attempt.store is None and attempt.store_node == name and not attempt.committed:
                attempt.store = message.store
        else:
            start.store_opened(job, out, message)
        return
    job.nodes[name].stores.discard(message.generation)
    if attempt is not None and attempt.generation == message.generation:
        if attempt.store_node == name and not attempt.committed:
            faults.store_failed(job, out, attempt, message.error)
    elif job.mode == "starting" and message.generation == job.generation:
        # A rank that has yet to connect would try for as long as its rendezvous may take.
        start.restart(job, out, f"the store on {name} was lost: {message.error}")
    elif job.mode == "running" and message.generation == job.generation:
        # Process groups, once built, do not need it; each new generation brings its own.
        warn(job, out, f"the store on {name} was lost: {message.error}; training does not need it")
    elif job.mode == "opening" and message.generation == job.generation_max:
        start.store_failed(job, out, f"{name} could not open a store: {message.error}")
