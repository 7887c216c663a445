"""Runs one job: submit it, keep its agents, let a narrator say what happens, leave nothing behind.

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
import signal
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

import msgspec

from keepstep.agent import identity, leftovers
from keepstep.cli.agent_processes import (
    AgentProcess,
    become_subreaper,
    reap_orphans,
    start_agent,
    sweep,
    sweep_beside,
)
from keepstep.cli.client import AsyncClient
from keepstep.cli.find import Reached
from keepstep.cli.join import LOOPBACK, Membership, by_certificate
from keepstep.cli.narrator import Narrator
from keepstep.cli.output import Output
from keepstep.cli.surroundings import Surroundings
from keepstep.errors import KeepstepError, TransientError, UsageError
from keepstep.model.job import JobSpec
from keepstep.model.views import JobView
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
        around: Surroundings,
        output: Output,
        embedded: Orchestrator | None,
        agents: bool = True,
    ) -> None:
        """`agents`: the nodes are ours to start; else each is another machine's."""
        self._spec = spec
        self._client = client
        self._there = there
        self._around = around
        self._starts_agents = agents
        self._output = output
        self._embedded = embedded
        self._directory = Path(spec.directory)
        self._agents: list[AgentProcess] = []
        self._identities: list[Path] = []
        self._ended: set[str] = set()  # nodes whose agent was reaped and swept
        self._signal: int | None = None
        self._over = asyncio.Event()  # the job has ended, or must be given up
        self._killed = False
        self._tasks: set[asyncio.Task[None]] = set()
        self._narrator = Narrator(spec, output)

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
                    self._around.home,
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
                environ=self._around.environ,
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
            self._narrator.learn(seen)
            if seen.job.state in ENDED:
                self._over.set()
                return

    async def _follow_logs(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            self._narrator.show_lines(loop.time())
            # Orphans of killed ranks (loader workers) end here, in nobody else's care. Where no
            # agent is ours, other children may be, and whoever started them waits for them.
            if self._starts_agents:
                reap_orphans(a.process.pid for a in self._agents)
            await asyncio.sleep(TAIL_S)

    async def _show_progress(self) -> None:
        while True:
            try:
                view = await self._client.get(f"/v1/jobs/{self._spec.job}", JobView)
                self._narrator.show_progress(view)
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
        self._narrator.show_lines(asyncio.get_running_loop().time(), last=True)
        await self._last_look()
        view = self._narrator.view
        if view is not None:
            self._narrator.close(view)
        if self._signal is not None:
            return 128 + self._signal
        if view is None or view.exit_code is None:
            return INFRASTRUCTURE_FAILED
        return view.exit_code

    async def _last_look(self) -> None:
        """The end may have come between two looks (a kill at once, a quick cancel)."""
        view = self._narrator.view
        if view is not None and view.state in ENDED:
            return
        try:
            async with asyncio.timeout(CANCEL_POST_S):
                path = f"/v1/jobs/{self._spec.job}/watch"
                self._narrator.learn(await self._client.get(path, Watch, since=0, wait_s=0))
        except (KeepstepError, TimeoutError):
            pass
