"""Slurm as a source of machines, by its own commands.

An allocation that has GPUs can be made smaller, but never larger (decision 21). So a job is a *set*
of allocations: the first one with all its places, and one more of a single place for each spare.
None has a batch host: they are made by `salloc --no-shell --no-kill`, and the loss of any one
place, the first included, leaves the others alone. An agent is a step in its place.

Each allocation is tagged by its comment, `keepstep:<job>:<op>:<kind>[:<place it has replaced>]`,
and each step by its name. A reason that we give for a node's state begins with "keepstep: ".

An allocation that somebody else has made (`adopt`) is tagged in the same way, and is never ended by
us. If it has a batch script, the place of that script cannot be given back alone.

Setting a node DOWN is the fence: Slurm ends what runs there, and counts it as ended where it
cannot ask (decision 22).
"""

from __future__ import annotations

import re
import signal
import subprocess
import time
from pathlib import Path

import msgspec

from keepstep.adapters.schedule import slurm_cli as cli
from keepstep.errors import NoRight, NoSpare, TransientError, UsageError
from keepstep.model.schedule import (
    START,
    AgentStart,
    Ask,
    Capabilities,
    Constraints,
    Kind,
    Lease,
    Level,
    Place,
    Spare,
)

AT_ONCE_S = 5.0  # what is free or reserved is given at once, or somebody was faster
# Nodes that have just left an allocation say that they are idle long before they can be had.
IDLE_TRIES = 3
STEP_S = 30.0
LOOK_S = 0.05
STEP = "keepstep-"  # how names of our steps begin
LIVE = "PENDING,CONFIGURING,RUNNING"
NO_TAINT = (
    "without an operator's rights in Slurm nodes are neither drained nor set DOWN: a lost node is "
    "given up only when its ranks must have ended themselves"
)


class SlurmScheduler:
    name = "slurm"

    def __init__(self) -> None:
        self._seen: dict[str, Place] = {}
        self._operator: bool | None = None

    # ----------------------------------------------------------------------- looking

    def capabilities(self) -> Capabilities:
        if self._operator is None:
            self._operator = cli.is_operator()
        kinds = cli.run("scontrol", "show", "config")
        preempt = re.search(r"^PreemptType\s*=\s*(preempt/none|\(null\))", kinds, re.MULTILINE)
        return Capabilities(
            taint=self._operator,
            preempt=preempt is None,
            shrink=True,
            lacks=[] if self._operator else [NO_TAINT],
        )

    def check(self, constraints: Constraints, kinds: list[Kind], count: int = 1) -> None:
        lines = cli.run("sinfo", "-h", "-N", "-a", "-o", "%R|%N|%G").splitlines()
        rows = [line.split("|", 2) for line in lines]
        partition, wanted = constraints.partition, constraints.gpu_type
        if partition and partition not in {row[0] for row in rows}:
            names = ", ".join(sorted({row[0] for row in rows}))
            raise UsageError(f"Slurm has no partition {partition}", hint=f"partitions: {names}")
        where = f" in partition {partition}" if partition else ""
        there = {row[1]: cli.gpu_type(row[2]) for row in rows if partition in ("", row[0])}
        if wanted and wanted not in there.values():
            types = ", ".join(sorted({one for one in there.values() if one})) or "none"
            raise UsageError(
                f"no node{where} has GPUs of type {wanted}", hint=f"types there: {types}"
            )
        fit = [name for name, kind in there.items() if wanted in ("", kind)]
        if len(fit) < count:
            raise UsageError(
                f"{count} nodes are wanted, and there are {len(fit)}{where}", hint="see sinfo -N"
            )
        if "reserved" in kinds and constraints.reservation:
            known = list(cli.reserved())
            if constraints.reservation not in known:
                raise UsageError(
                    f"Slurm has no reservation {constraints.reservation}",
                    hint=f"reservations: {', '.join(known) or 'none'}",
                )
        # Whatever else Slurm has to say against it: account, QOS, features, numbers.
        cli.run("srun", "--test-only", f"-N{count}", *_wanted(constraints), "true")

    def places(self) -> list[Place]:
        return list(cli.read_places().values())

    def watch(self) -> list[Place]:
        now = cli.read_places()
        news = [place for name, place in now.items() if self._seen.get(name) != place]
        self._seen = now
        return news

    def leases(self, job: str = "") -> list[Lease]:
        return [lease for lease in cli.read_leases(LIVE) if job in ("", lease.job)]

    def spares(self, ask: Ask) -> list[Spare]:
        found: list[Spare] = []
        ask = self._inside(ask)
        for kind in ask.kinds:
            if kind == "reserved" and ask.constraints.reservation:
                free = {place.name for place in self.places() if place.state == "free"}
                listed = cli.reserved().get(ask.constraints.reservation, [])
                found += [Spare(place=name, kind=kind) for name in listed if name in free]
            elif kind == "idle":
                found += [Spare(place=name, kind=kind) for name in self._idle(ask)]
        return [spare for spare in found if spare.place not in ask.avoid]

    def _idle(self, ask: Ask) -> list[str]:
        """Those first that share no failure domain with what they replace."""
        words = ["sinfo", "-h", "-N", "-t", "IDLE", "-o", "%N|%T|%G|%f"]
        if ask.constraints.partition:
            words += ["-p", ask.constraints.partition]
        # A node of a reservation that has just begun still says that it is idle.
        kept = {name for names in cli.reserved().values() for name in names}
        found: dict[str, int] = {}
        for line in cli.run(*words).splitlines():
            name, state, gres, features = line.split("|", 3)
            if state != "idle" or name in kept or name in found or ask.only not in ("", name):
                continue
            if ask.constraints.gpu_type not in ("", cli.gpu_type(gres)):
                continue
            if ask.constraints.features and ask.constraints.features not in features.split(","):
                continue
            found[name] = len(ask.apart.items() & cli.labels(features).items())
        return sorted(found, key=lambda name: found[name])

    # ----------------------------------------------------------------------- leases

    def acquire(self, ask: Ask, timeout_s: float) -> Lease:
        end = time.monotonic() + timeout_s
        if (before := self._of(ask.job, ask.op)) is not None:
            if before.places:
                return before
            self.release(before)  # it waits for somebody who was killed
        tried: list[str] = []
        ask = self._inside(ask)
        for kind in ask.kinds:
            tries, why = self._tries(kind, ask)
            for flags in tries:
                limit_s = max(LOOK_S, end - time.monotonic())
                if kind in ("reserved", "idle"):
                    limit_s = min(AT_ONCE_S, limit_s)
                why = self._allocate(ask, kind, flags, limit_s)
                if not why and (lease := self._of(ask.job, ask.op)) is not None:
                    return lease
            tried.append(f"{kind}: {why or 'it was cancelled'}")
        raise NoSpare(f"Slurm has no place for job {ask.job} ({'; '.join(tried)})")

    def _inside(self, ask: Ask) -> Ask:
        """What is outside of the domain that is asked for is avoided."""
        if not ask.near:
            return ask
        places = self.places()
        outside = {one.name for one in places if not ask.near.items() <= one.labels.items()}
        return msgspec.structs.replace(ask, avoid=sorted(outside | set(ask.avoid)))

    def _of(self, job: str, op: str) -> Lease | None:
        return next((lease for lease in self.leases(job) if lease.op == op), None)

    def _tries(self, kind: Kind, ask: Ask) -> tuple[list[list[str]], str]:
        """Flags to try in turn, or why that is of no use."""
        avoid = ["--exclude", ",".join(ask.avoid)] if ask.avoid else []
        if kind == "reserved":
            if not ask.constraints.reservation:
                return [], "no reservation is named"
            if not any(one.kind == kind for one in self.spares(ask)):
                return [], "all of its nodes are used"
            return [[*avoid, f"--reservation={ask.constraints.reservation}"]], ""
        if kind == "idle":
            free = [name for name in self._idle(ask) if name not in ask.avoid]
            if len(free) < ask.count:
                return [], "no node is idle"
            # By name: anything else could cost somebody else their nodes.
            firsts = range(0, len(free) - ask.count + 1, ask.count)
            names = [",".join(free[i : i + ask.count]) for i in firsts[:IDLE_TRIES]]
            return [[f"--nodelist={one}"] for one in names], ""
        if kind == "preempt" and not self.capabilities().preempt:
            return [], "preemption is switched off"
        return [avoid], ""

    def _allocate(self, ask: Ask, kind: Kind, flags: list[str], limit_s: float) -> str:
        """Why not; empty if it was given."""
        command = ["salloc", "--no-shell", "--no-kill", "--exclusive", f"--nodes={ask.count}"]
        command += [f"--job-name=keepstep-{ask.job}"]
        command += [f"--comment={cli.TAG}:{ask.job}:{ask.op}:{kind}"]
        command += [*_wanted(ask.constraints), *flags]
        # Its own session: the signals of a terminal are for us to act on.
        process = subprocess.Popen(
            command,
            env=cli.environment(),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        try:
            _, said = process.communicate(timeout=limit_s)
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGINT)  # takes the request back
            process.communicate()
            return f"nothing within {limit_s:g} s"
        except BaseException:  # Ctrl-C: it may have been given in this moment
            process.send_signal(signal.SIGINT)
            process.wait()
            self.abort_swap(ask.job, ask.op)
            raise
        if process.returncode == 0:
            return ""
        error = cli.refusal(command, said)
        if isinstance(error, UsageError) and kind == "queue":
            raise error
        return error.message

    def adopt(self, job: str, allocation: str, count: int = 0) -> tuple[Lease, str]:
        """An allocation of this user that runs, and what is to be known about it."""
        found = cli.read_job(allocation)
        places = cli.expand(found.get("NodeList", ""))
        if found.get("JobState") != "RUNNING" or not places:
            state = found.get("JobState", "unknown")
            raise UsageError(f"allocation {allocation} is {state}", hint="it must be RUNNING")
        if not found.get("UserId", "").startswith(f"{cli.me()}("):
            raise UsageError(f"allocation {allocation} is somebody else's", hint="see squeue --me")
        if any(lease.id == allocation for lease in self.leases()):
            raise UsageError(
                f"allocation {allocation} belongs to a job of Keepstep already",
                hint="`squeue -o '%i %k'` says which",
            )
        if len(places) < count:
            raise UsageError(
                f"{count} nodes are wanted, and allocation {allocation} has {len(places)}",
                hint="lower -N or --spare-nodes",
            )
        comment = f"{cli.TAG}:{job}:{START}:{cli.ADOPTED}"
        cli.run("scontrol", "update", f"JobId={allocation}", f"Comment={comment}")
        note = ""
        if found.get("BatchFlag") == "1":
            host = found.get("BatchHost", places[0])
            note = f"allocation {allocation} has a batch script on {host}, whose loss ends it"
        lease = Lease(id=allocation, job=job, op=START, kind="queue", places=places, adopted=True)
        return lease, note

    def _let_go(self, lease: Lease) -> None:
        """It is as it was found, but for the places that were given back."""
        end = time.monotonic() + STEP_S
        for step, name in cli.read_steps(lease.id, lease.places):
            if name.startswith(STEP):
                cli.run("scancel", step)
        while any(name.startswith(STEP) for _, name in cli.read_steps(lease.id, lease.places)):
            if time.monotonic() > end:
                raise TransientError(f"steps of allocation {lease.id} do not end")
            time.sleep(LOOK_S)
        cli.run("scontrol", "update", f"JobId={lease.id}", "Comment=")

    def release(self, lease: Lease) -> None:
        if lease.adopted:
            self._let_go(lease)
            return
        cli.run("scancel", lease.id)
        end = time.monotonic() + STEP_S
        while any(one.id == lease.id for one in self.leases(lease.job)):
            if time.monotonic() > end:
                raise TransientError(f"allocation {lease.id} does not end")
            time.sleep(LOOK_S)

    def commit_swap(self, job: str, place: str, op: str = "") -> None:
        for lease in self.leases(job):
            if place not in lease.places:
                continue
            rest = [one for one in lease.places if one != place]
            if lease.adopted and self._is_batch_host(lease, place):
                continue  # it stays, empty: without it the allocation would end
            if rest:
                cli.run("scontrol", "update", f"JobId={lease.id}", f"NodeList={','.join(rest)}")
            else:
                self.release(lease)
        new = self._of(job, op) if op else None
        if new is not None and new.instead_of != place:
            comment = f"{cli.TAG}:{job}:{op}:{new.kind}:{place}"
            cli.run("scontrol", "update", f"JobId={new.id}", f"Comment={comment}")

    def _is_batch_host(self, lease: Lease, place: str) -> bool:
        found = cli.read_job(lease.id)
        return found.get("BatchFlag") == "1" and found.get("BatchHost") == place

    def abort_swap(self, job: str, op: str) -> None:
        if (lease := self._of(job, op)) is not None:
            self.release(lease)

    # ----------------------------------------------------------------------- agents

    def start_agent(self, place: str, agent: AgentStart) -> None:
        lease = next((one for one in self.leases(agent.job) if place in one.places), None)
        if lease is None:
            raise TransientError(f"job {agent.job} has no allocation with {place}")
        step = _step(agent.node)
        if any(name == step for _, name in cli.read_steps(lease.id)):
            return
        command = ["srun", f"--jobid={lease.id}", "--no-kill", "--kill-on-bad-exit=0", "-N1", "-n1"]
        command += ["-w", place, "--overlap", "--whole", f"--job-name={step}", "--unbuffered"]
        command += [f"--chdir={agent.directory}", *agent.command]
        Path(agent.log).parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        with Path(agent.log).open("ab") as log:
            process = subprocess.Popen(
                command,
                env={**cli.environment(), **agent.env},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,  # the step outlives us, and is found again by its name
            )
        end = time.monotonic() + STEP_S
        while not any(name == step for _, name in cli.read_steps(lease.id)):
            if process.poll() is not None:
                said = Path(agent.log).read_text(errors="replace")[-2000:]
                raise cli.refusal(command, said)
            if time.monotonic() > end:
                raise TransientError(f"srun did not start {step} on {place}")
            time.sleep(LOOK_S)

    def stop_agent(self, job: str, node: str) -> None:
        for lease in self.leases(job):
            for step, name in cli.read_steps(lease.id):
                if name == _step(node):
                    cli.run("scancel", step)

    def show(self, job: str, ranks: dict[str, list[int]]) -> None:
        """Comments of allocations say which place has replaced which; a step has no comment."""

    # ----------------------------------------------------------------------- taints

    def taint(self, place: str, level: Level, reason: str) -> None:
        now = cli.read_places().get(place)
        if now is None:
            raise UsageError(f"Slurm has no node {place}", hint="sinfo -N")
        if now.state == "down" or (now.state == "degraded" and level == "degraded"):
            return  # whoever said so had a reason of their own
        if not self.capabilities().taint:
            raise NoRight(f"{place} cannot be tainted", hint=NO_TAINT)
        state = "DRAIN" if level == "degraded" else "DOWN"
        words = cli.MARK + " ".join(reason.split())[:200]
        cli.run("scontrol", "update", f"NodeName={place}", f"State={state}", f"Reason={words}")

    def untaint(self, place: str) -> bool:
        now = cli.read_places().get(place)
        if now is None or not now.ours or now.state not in ("degraded", "down"):
            return False
        if not self.capabilities().taint:
            raise NoRight(f"{place} cannot be untainted", hint=NO_TAINT)
        cli.run("scontrol", "update", f"NodeName={place}", "State=RESUME")
        return True


def _step(node: str) -> str:
    return f"{STEP}{node}"


def _wanted(constraints: Constraints) -> list[str]:
    words = [
        f"--{name}={value}"
        for name, value in (
            ("partition", constraints.partition),
            ("account", constraints.account),
            ("qos", constraints.qos),
            ("constraint", constraints.features),
        )
        if value
    ]
    if constraints.gpus:
        kind = f"{constraints.gpu_type}:" if constraints.gpu_type else ""
        words.append(f"--gres=gpu:{kind}{constraints.gpus}")
    return words
