"""Runs one job: submit it, keep its agents, show what happens, leave nothing behind.

The launcher talks REST to the orchestrator even when that is embedded in the same event loop, so
there is one way for a job to be run. It owns what the orchestrator cannot know for sure: the
agents' processes. When one ends, its session is swept and only then is the node reported dead.

Ends: the job ends (the agents are told by the orchestrator and exit); a signal cancels it (kill
after 3 s, at once on the second signal; SIGTERM waits for a checkpoint, where the job writes any);
an embedded orchestrator fails (nothing could be decided any more). An *external* orchestrator that
does not answer ends nothing: training goes on.
"""

from __future__ import annotations

import asyncio
import os
import shlex
import signal
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

import msgspec

from keepstep.agent import identity, leftovers
from keepstep.cli.client import AsyncClient
from keepstep.cli.find import Reached
from keepstep.cli.join import LOOPBACK, Membership, by_certificate
from keepstep.cli.output import (
    LogTail,
    Output,
    closed_text,
    closing_text,
    opened_text,
    progress_text,
)
from keepstep.cli.processes import (
    AgentProcess,
    become_subreaper,
    reap_orphans,
    start_agent,
    sweep,
    sweep_beside,
)
from keepstep.errors import KeepstepError, TransientError, UsageError
from keepstep.model.job import JobSpec
from keepstep.model.views import IncidentView, JobView
from keepstep.orchestrator.main import ENDED, Orchestrator
from keepstep.orchestrator.requests import CancelRequest, Ok, Watch

CANCEL_GRACE_S = 3.0
CANCEL_POST_S = 1.0
STOP_S_MIN = 60.0  # what the core gives a stop with a checkpoint, at least: Job.build_ns
AGENTS_END_S = 15.0  # after the job's end; agents give their workers less than that
TAIL_S = 0.1
PROGRESS_S = 0.5
WATCH_S = 20.0
RETRY_S = 0.5
INFRASTRUCTURE_FAILED = 3


class LaunchNote(msgspec.Struct, frozen=True, kw_only=True):
    """DIRECTORY/launch.json: what a node that joins later must know."""

    job: str
    cwd: str
    script: list[str]
    stall_timeout_ns: int


class Launcher:
    def __init__(
        self,
        spec: JobSpec,
        *,
        client: AsyncClient,
        there: Reached,
        home: Path,
        output: Output,
        embedded: Orchestrator | None,
        agents: bool = True,
    ) -> None:
        """`agents`: the nodes are ours to start; else each is another machine's."""
        self._spec = spec
        self._client = client
        self._there = there
        self._home = home
        self._starts_agents = agents
        self._output = output
        self._embedded = embedded
        self._directory = Path(spec.directory)
        self._agents: list[AgentProcess] = []
        self._identities: list[Path] = []
        self._ended: set[str] = set()  # nodes whose agent was reaped and swept
        self._view: JobView | None = None
        self._incidents: dict[str, IncidentView] = {}
        self._held_said: set[str] = set()
        self._noted_ns = 0
        self._state_before_end = ""
        self._signal: int | None = None
        self._over = asyncio.Event()  # the job has ended, or must be given up
        self._killed = False
        self._tasks: set[asyncio.Task[None]] = set()
        self._tail = LogTail(self._directory / "logs")

    async def run(self) -> int:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self._on_signal, number)
        if self._starts_agents:
            become_subreaper()
        try:
            self._prepare_directory()
            await self._client.post("/v1/jobs", self._spec, JobView)
            self._output.words(f"job {self._spec.job}, logs in {self._directory / 'logs'}")
            if self._starts_agents:
                await self._start_agents()
            elif self._spec.provision is None:
                self._say_how_to_join()
            self._spawn(self._watch())
            self._spawn(self._follow_logs())
            if self._output.live:
                self._spawn(self._show_progress())
            if self._embedded is not None:
                self._embedded.driver.failed.add_done_callback(self._on_embedded_failed)
            await self._over.wait()
            await self._wait_for_agents()
        finally:
            # Whatever happened above, nothing of this job runs after this line.
            self._kill_all()
            for task in self._tasks:
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)
            for number in (signal.SIGINT, signal.SIGTERM):
                loop.remove_signal_handler(number)
        return await self._close()

    # ----------------------------------------------------------------------- start

    def _prepare_directory(self) -> None:
        note = LaunchNote(
            job=self._spec.job,
            cwd=os.getcwd(),
            script=self._spec.script,
            stall_timeout_ns=self._spec.stall_timeout_ns,
        )
        try:
            (self._directory / "logs").mkdir(parents=True, exist_ok=True, mode=0o700)
            (self._directory / "launch.json").write_bytes(msgspec.json.encode(note))
        except OSError as error:
            raise UsageError(
                f"the job's directory {self._directory} is not writable: {error.strerror}",
                hint="choose another one with --log-dir",
            ) from error

    def _say_how_to_join(self) -> None:
        self._output.words(
            f"waiting for {len(self._spec.nodes)} nodes; on each machine: keepstep agent "
            f"--orchestrator {self._there.url} --token-file FILE --job {self._spec.job}",
            always=True,
        )

    async def _start_agents(self) -> None:
        loop = asyncio.get_running_loop()
        there, spec = self._there, self._spec
        for node in spec.nodes:
            if self._signal is not None:
                return
            member: Membership | None = None
            if there.ca:
                member = await asyncio.to_thread(
                    by_certificate,
                    self._home,
                    urls=there.urls,
                    ca=there.ca,
                    operator=there.token,
                    job=spec.job,
                    node=node.name,
                )
            agent = start_agent(
                streams=there.streams,
                token=there.token,
                bind=member.bind if member is not None else LOOPBACK,
                identity=member.identity if member is not None else None,
                job=self._spec.job,
                node=node.name,
                slots=node.slots,
                directory=self._directory,
                stall_timeout_ns=self._spec.stall_timeout_ns,
                environ=os.environ,
            )
            self._agents.append(agent)
            if member is not None and member.identity is not None:
                self._identities.append(member.identity)
            agent.watch(loop, lambda ended: self._spawn(self._agent_ended(ended)))

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._on_task_done)

    def _on_task_done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self._output.words(f"gives up: {error!r}", always=True)
            self._over.set()

    # ----------------------------------------------------------------------- agents

    async def _agent_ended(self, agent: AgentProcess) -> None:
        code = agent.process.wait()
        swept = await sweep_beside([agent.session])
        reap_orphans(a.process.pid for a in self._agents if a.alive)
        self._ended.add(agent.node)
        leftovers.remove(self._spec.job, agent.node, self._directory)
        if self._is_over():
            return
        if not swept:
            self._output.words(f"node {agent.node}: a process does not die", always=True)
            return  # not fenced: it would be a lie to call the node dead
        how = f"by signal {-code}" if code < 0 else f"with code {code}"
        self._output.words(f"node {agent.node} is lost: its agent ended {how}")
        if code > 0 and (words := agent.last_words()):
            self._output.raw_words(words)
        await self._report_dead(agent.node)

    async def _report_dead(self, node: str) -> None:
        path = f"/v1/jobs/{self._spec.job}/nodes/{node}/dead"
        while not self._is_over():
            try:
                await self._client.post(path, None, Ok)
                return
            except TransientError:
                await asyncio.sleep(RETRY_S)
            except KeepstepError as error:
                self._output.words(f"node {node}: {error}")
                return

    async def _wait_for_agents(self) -> None:
        limit_s = CANCEL_GRACE_S if self._signal is not None else AGENTS_END_S
        end = asyncio.get_running_loop().time() + limit_s
        while len(self._ended) < len(self._agents) and not self._killed:
            if asyncio.get_running_loop().time() > end:
                left = [a.node for a in self._agents if a.node not in self._ended]
                self._output.words(f"killing the agents of {', '.join(left)}: they do not end")
                return
            await asyncio.sleep(0.01)

    def _kill_all(self) -> None:
        self._killed = True
        sweep([agent.session for agent in self._agents])
        loop = asyncio.get_running_loop()
        for agent in self._agents:
            loop.remove_reader(agent.pidfd)
            agent.process.wait()
            if agent.process.stdin is not None:
                agent.process.stdin.close()
            leftovers.remove(self._spec.job, agent.node, self._directory)
        if self._starts_agents:
            reap_orphans(())
        for folder in self._identities:
            identity.remove(folder)

    # ----------------------------------------------------------------------- watching

    async def _watch(self) -> None:
        change, silent = 0, False
        path = f"/v1/jobs/{self._spec.job}/watch"
        while True:
            try:
                seen = await self._client.get(path, Watch, since=change, wait_s=WATCH_S)
            except TransientError as error:
                if not silent and not self._is_over():
                    self._output.words(f"{error.message}; training goes on, trying again")
                silent = True
                if self._starts_agents and len(self._ended) == len(self._agents):
                    self._output.words("no agent is left and no orchestrator answers", always=True)
                    self._over.set()
                    return
                await asyncio.sleep(RETRY_S)
                continue
            silent = False
            change = seen.change
            self._learn(seen)
            if seen.job.state in ENDED:
                self._over.set()
                return

    def _learn(self, seen: Watch) -> None:
        self._view = seen.job
        if seen.job.state not in ENDED:
            self._state_before_end = seen.job.state
        self._tail.learn(seen.job)
        for incident in seen.incidents:
            before = self._incidents.get(incident.id)
            if before is None:
                self._output.words(opened_text(incident))
            if incident.outcome != "OPEN" and (before is None or before.outcome == "OPEN"):
                self._output.words(closed_text(incident))
            self._incidents[incident.id] = incident
        for note in seen.job.notes:
            if note.at_ns > self._noted_ns:
                self._output.words(f"note: {note.text}")
        self._noted_ns = max((note.at_ns for note in seen.job.notes), default=self._noted_ns)
        self._say_held(seen.job)

    def _say_held(self, view: JobView) -> None:
        if view.state != "held":
            self._held_said.clear()
            return
        if view.divergence:
            self._say_diverged(view)
            return
        if "held" not in self._held_said:
            self._held_said.add("held")
            spare = f"a spare appears: keepstep agent --job {view.job} --slots 1"
            if self._spec.provision is not None:
                spare = f"{self._spec.provision.scheduler} gives a node"
            self._output.words(
                f"job {view.job} holds: {view.reason or 'no spare is left'}. Nothing is lost; it "
                f"goes on when {spare}",
                always=True,
            )
        if view.checkpoint and view.checkpoint not in self._held_said:
            self._held_said.add(view.checkpoint)
            self._output.words(f"just-in-time checkpoint: {view.checkpoint}", always=True)

    def _say_diverged(self, view: JobView) -> None:
        """At once and in any case: whoever does not look has `hold_ns` to."""
        if view.divergence in self._held_said or self._spec.policy.on_divergence != "hold":
            return
        self._held_said.add(view.divergence)
        hold_s = self._spec.policy.hold_ns / 1e9
        limit = f"; it ends in {hold_s:g} s if nobody does" if hold_s else ""
        self._output.words(
            f"job {view.job} holds, because numbers differ: {view.divergence}. Nothing is lost or "
            f"written. `keepstep stop --job {view.job}` ends it, `keepstep proceed --job "
            f"{view.job}` goes on all the same{limit}",
            always=True,
        )

    async def _follow_logs(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            self._output.lines(self._tail.poll(loop.time()))
            # Orphans of killed ranks (loader workers) end here, in nobody else's care. Where no
            # agent is ours, other children may be, and whoever started them waits for them.
            if self._starts_agents:
                reap_orphans(a.process.pid for a in self._agents)
            await asyncio.sleep(TAIL_S)

    async def _show_progress(self) -> None:
        while True:
            try:
                view = await self._client.get(f"/v1/jobs/{self._spec.job}", JobView)
                self._output.progress(progress_text(view, self._incidents.get(view.last_incident)))
            except KeepstepError:
                pass  # `_watch` says so
            await asyncio.sleep(PROGRESS_S)

    def _is_over(self) -> bool:
        return self._over.is_set() or self._killed

    def _on_embedded_failed(self, failed: asyncio.Future[BaseException]) -> None:
        if not failed.cancelled():
            self._output.words(f"the orchestrator failed: {failed.result()!r}", always=True)
        self._over.set()

    # ----------------------------------------------------------------------- ends

    def _on_signal(self, number: int) -> None:
        if self._signal is not None:
            self._kill_all()
            self._over.set()
            return
        self._signal = number
        name = signal.Signals(number).name
        # Somebody at a terminal wants it to end now; a scheduler's signal comes with some time.
        save = number == signal.SIGTERM and bool(self._spec.checkpoints)
        grace_s = CANCEL_GRACE_S
        if save:
            grace_s += max(self._spec.stall_timeout_ns / 1e9, STOP_S_MIN)
        what = "writing a checkpoint and ending the job" if save else "ending the job"
        self._output.words(f"{name}: {what} (again: kill at once)", always=True)
        asyncio.get_running_loop().call_later(grace_s, self._over.set)
        self._spawn(self._cancel(name, 128 + number, save))

    async def _cancel(self, name: str, exit_code: int, save: bool) -> None:
        asked = CancelRequest(reason=name, exit_code=exit_code, checkpoint=save)
        try:
            async with asyncio.timeout(CANCEL_POST_S):
                await self._client.post(f"/v1/jobs/{self._spec.job}/cancel", asked, Ok)
        except (KeepstepError, TimeoutError):
            self._over.set()  # nobody there to end it nicely

    async def _close(self) -> int:
        self._output.progress("")
        self._output.lines(self._tail.poll(asyncio.get_running_loop().time(), last=True))
        await self._last_look()
        view = self._view
        if view is None:
            return 128 + self._signal if self._signal else INFRASTRUCTURE_FAILED
        failed = view.exit_code != 0
        if view.state == "failed" and view.traceback:
            self._output.raw_words(view.traceback)
        self._output.words(closing_text(view, list(self._incidents.values())), always=failed)
        periodic = view.checkpoints.newest if view.checkpoints is not None else ""
        if (view.checkpoint or periodic) and failed:
            command = resume_command(self._spec, view.checkpoint or periodic)
            # A job that went on after it was held has left its checkpoint behind.
            exact = self._state_before_end == "held" or view.checkpoint in view.reason
            older = "" if view.checkpoint and exact else "an older checkpoint exists: "
            self._output.words(f"hint: {older}{command}", always=True)
        if self._signal is not None:
            return 128 + self._signal
        return INFRASTRUCTURE_FAILED if view.exit_code is None else view.exit_code

    async def _last_look(self) -> None:
        """The end may have come between two looks (a kill at once, a quick cancel)."""
        if self._view is not None and self._view.state in ENDED:
            return
        try:
            async with asyncio.timeout(CANCEL_POST_S):
                path = f"/v1/jobs/{self._spec.job}/watch"
                self._learn(await self._client.get(path, Watch, since=0, wait_s=0))
        except (KeepstepError, TimeoutError):
            pass


def resume_command(spec: JobSpec, checkpoint: str) -> str:
    """The same job again, from where it holds."""
    command = ["keepstep", "run", "--resume", checkpoint]
    command += ["--local-nodes", str(spec.world // spec.local_world)]
    command += ["--nproc-per-node", str(spec.local_world), "--spares", str(spec.spares)]
    command += ["--understudies", str(spec.understudies)] if spec.understudies else []
    if spec.checkpoints:
        command += ["--checkpoint-dir", os.path.dirname(spec.checkpoints)]
    command += ["--redundancy", spec.redundancy] if spec.redundancy != "auto" else []
    return shlex.join(command + spec.script)
