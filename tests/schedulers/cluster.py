"""A real, private Slurm cluster on this machine: several nodes, accounting, GPUs that are none.

Debian's slurmd may run many times on one machine, each as a node with a port of its own. Nothing
in /etc is read or written: SLURM_CONF names a folder that is removed at the end (see guard.py).
All nodes share this machine's network and files, so faults of the network cannot be shown here.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil

GUARD = Path(__file__).parent / "guard.py"
PROGRAMS = ("munged", "slurmctld", "slurmd", "slurmdbd", "mariadbd", "mariadb-install-db", "salloc")
START_S = 60.0
NODES = 6
RESERVED = "keepstep-spares"
RACKS = {"c1": "r1", "c2": "r1", "c3": "r2", "c4": "r2", "c5": "r1", "c6": "r2"}


def missing() -> str:
    """Why there can be no cluster here; empty if there can."""
    if os.geteuid() != 0:
        return "SKIPPED slurm: a private cluster needs root"
    lacking = [name for name in PROGRAMS if shutil.which(name) is None]
    if lacking:
        return f"SKIPPED slurm: no {', '.join(lacking)}; run make setup-slurm"
    return ""


def until(condition: Callable[[], Any], what: str, deadline_s: float = START_S) -> Any:
    end = time.monotonic() + deadline_s
    while not (value := condition()):
        if time.monotonic() > end:
            raise TimeoutError(f"waited {deadline_s:g} s for {what}")
        time.sleep(0.05)
    return value


def free_ports(count: int) -> list[int]:
    with contextlib.ExitStack() as opened:
        sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
        for one in sockets:
            opened.enter_context(one)
        return [int(one.getsockname()[1]) for one in sockets]


class Cluster:
    def __init__(self) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="keepstep-slurm-"))
        self.folder.chmod(0o755)
        for name in ("etc", "state", "log", "run", "munge", "dev", "db"):
            (self.folder / name).mkdir()
        self.conf = self.folder / "etc" / "slurm.conf"
        self.env = {"SLURM_CONF": str(self.conf)}
        self.nodes = [f"c{i}" for i in range(1, NODES + 1)]
        self._controller, self._accounting, self._database, *self._ports = free_ports(3 + NODES)
        self._pids: dict[str, int] = {}
        self._guard = subprocess.Popen(
            [sys.executable, str(GUARD), str(self.folder)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self._write_files()
        try:
            self._start_all()
        except BaseException:
            self.remove()
            raise

    # ----------------------------------------------------------------------- daemons

    def _start(self, name: str, *command: str, user: str | None = None) -> None:
        assert self._guard.stdin is not None and self._guard.stdout is not None
        log = str(self.folder / "log" / f"{name}.out")
        asked = {"command": command, "env": self.env, "log": log, "user": user}
        self._guard.stdin.write(json.dumps(asked) + "\n")
        self._guard.stdin.flush()
        self._pids[name] = int(self._guard.stdout.readline())

    def _start_all(self) -> None:
        where = self.folder
        munge = ["--key-file", where / "etc/munge.key", "--socket", where / "munge/munge.sock"]
        munge += ["--pid-file", where / "run/munged.pid", "--seed-file", where / "run/munge.seed"]
        munge += ["--log-file", where / "log/munged.log", "--num-threads", "2"]
        self._start("munged", "munged", "--foreground", "--force", *map(str, munge))
        self._start_database()
        self._start("slurmdbd", "slurmdbd", "-D")
        until(lambda: self._said("sacctmgr", "-i", "add", "cluster", "keepstep"), "slurmdbd")
        self.start_controller()
        for node in self.nodes:
            self.start_node(node)
        until(lambda: self.states() == dict.fromkeys(self.nodes, "idle"), "idle nodes")

    def _start_database(self) -> None:
        data, sock = self.folder / "db", self.folder / "run" / "mysql.sock"
        shutil.chown(data, "mysql")
        (self.folder / "run").chmod(0o777)
        install = ["mariadb-install-db", "--no-defaults", "--user=mysql", f"--datadir={data}"]
        install += ["--auth-root-authentication-method=normal", "--skip-test-db"]
        made = subprocess.run(install, capture_output=True, text=True)
        assert made.returncode == 0, made.stdout + made.stderr
        command = ["mariadbd", "--no-defaults", f"--datadir={data}", f"--socket={sock}"]
        command += [f"--port={self._database}", "--bind-address=127.0.0.1", "--skip-name-resolve"]
        command += ["--innodb-buffer-pool-size=64M", "--innodb-flush-log-at-trx-commit=0"]
        self._start("mariadbd", *command, user="mysql")
        words = (
            "create user slurm@'127.0.0.1' identified by 'slurm'; create database slurm_acct; "
            "grant all on slurm_acct.* to slurm@'127.0.0.1';"
        )
        until(lambda: self._said("mariadb", "-S", str(sock), "-u", "root", "-e", words), "MariaDB")

    def start_controller(self) -> None:
        self._start("slurmctld", "slurmctld", "-D")
        until(lambda: self._said("scontrol", "ping") and "UP" in self.ask("scontrol", "ping"), "it")

    def stop_controller(self) -> None:
        self._kill("slurmctld")

    def start_node(self, node: str) -> None:
        self._start(f"slurmd-{node}", "slurmd", "-D", "-N", node)

    def crash_node(self, node: str) -> None:
        """As if its power were cut: its slurmd, its steps and all that they started."""
        victims = [psutil.Process(self._pids[f"slurmd-{node}"])]
        for step in (self.folder / "run" / f"spool-{node}").glob(f"{node}_*"):
            title = f"slurmstepd: [{step.name.partition('_')[2]}]"
            for process in psutil.Process(self._guard.pid).children(recursive=True):
                with contextlib.suppress(psutil.NoSuchProcess):
                    if title in " ".join(process.cmdline()):
                        victims += [process, *process.children(recursive=True)]
        for process in victims:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()

    def _kill(self, name: str) -> None:
        process = psutil.Process(self._pids[name])
        process.send_signal(signal.SIGKILL)
        until(lambda: not process.is_running() or process.status() == "zombie", f"end of {name}")

    def remove(self) -> None:
        assert self._guard.stdin is not None
        self._guard.stdin.close()
        self._guard.wait(60)

    # ----------------------------------------------------------------------- asking

    def run(self, *command: str, user: str | None = None) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            command,
            env={**os.environ, **self.env},
            capture_output=True,
            text=True,
            timeout=60,
            cwd=self.folder / "run",
            user=user,
        )

    def ask(self, *command: str) -> str:
        done = self.run(*command)
        assert done.returncode == 0, f"{command}: {done.stderr}"
        return done.stdout.strip()

    def _said(self, *command: str) -> bool:
        return self.run(*command).returncode == 0

    def states(self) -> dict[str, str]:
        lines = self.ask("sinfo", "-h", "-N", "-p", "train", "-o", "%N|%T").splitlines()
        return dict(line.split("|", 1) for line in lines)

    def jobs(self, states: str = "RUNNING") -> list[str]:
        """Names of jobs and their nodes."""
        return self.ask("squeue", "-h", "-t", states, "-o", "%j|%N").splitlines()

    @contextlib.contextmanager
    def clean(self) -> Iterator[None]:
        """Afterwards all nodes are idle again, whatever was done to them."""
        try:
            yield
        finally:
            self.run("scancel", "-u", "root")
            for node in self.nodes:
                if not psutil.pid_exists(pid := self._pids[f"slurmd-{node}"]) or (
                    psutil.Process(pid).status() == "zombie"
                ):
                    self.start_node(node)
            until(self._resumed, "idle nodes")

    def _resumed(self) -> bool:
        if RESERVED in self.ask("scontrol", "-o", "show", "reservation"):
            self.run("scontrol", "delete", f"ReservationName={RESERVED}")  # not while it is used
            return False
        for node, state in self.states().items():
            if state.rstrip("*") not in ("idle", "completing", "allocated", "mixed"):
                self.run("scontrol", "update", f"NodeName={node}", "State=RESUME")
        return self.states() == dict.fromkeys(self.nodes, "idle")

    # ----------------------------------------------------------------------- files

    def _write_files(self) -> None:
        where, host = self.folder, socket.gethostname().partition(".")[0]
        key = where / "etc/munge.key"
        key.write_bytes(os.urandom(128))
        key.chmod(0o400)
        for number in range(4):
            os.mknod(where / f"dev/gpu{number}", 0o666 | 0o020000, os.makedev(1, 3))
        nodes = "\n".join(
            f"NodeName={node} NodeHostName={host} NodeAddr=127.0.0.1 Port={port} CPUs=4 "
            f"RealMemory=1000 Gres=gpu:{'a100' if node == self.nodes[-1] else 'h200'}:4 "
            f"Feature={'old' if node == self.nodes[-1] else 'new'},rack:{RACKS[node]} State=UNKNOWN"
            for node, port in zip(self.nodes, self._ports, strict=True)
        )
        h200, a100 = f"{self.nodes[0]},{','.join(self.nodes[1:-1])}", self.nodes[-1]
        (where / "etc/gres.conf").write_text(
            f"NodeName={h200} Name=gpu Type=h200 File={where}/dev/gpu[0-3]\n"
            f"NodeName={a100} Name=gpu Type=a100 File={where}/dev/gpu[0-3]\n"
        )
        (where / "etc/cgroup.conf").write_text("CgroupAutomount=no\n")
        self.conf.write_text(
            SLURM.format(
                host=host,
                where=where,
                port=self._controller,
                accounting=self._accounting,
                nodes=nodes,
                all=",".join(self.nodes),
            )
        )
        dbd = where / "etc/slurmdbd.conf"
        dbd.write_text(SLURMDBD.format(where=where, port=self._accounting, database=self._database))
        dbd.chmod(0o600)


SLURM = """\
ClusterName=keepstep
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={port}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={where}/munge/munge.sock
CredType=cred/munge
StateSaveLocation={where}/state
SlurmdSpoolDir={where}/run/spool-%n
SlurmctldPidFile={where}/run/slurmctld.pid
SlurmdPidFile={where}/run/slurmd-%n.pid
SlurmctldLogFile={where}/log/slurmctld.log
SlurmdLogFile={where}/log/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SwitchType=switch/none
MpiDefault=none
SlurmdParameters=config_overrides
SchedulerType=sched/backfill
SchedulerParameters=bf_interval=2,sched_interval=2,sched_min_interval=0,batch_sched_delay=0
ReturnToService=1
SlurmdTimeout=60
InactiveLimit=0
KillWait=2
MinJobAge=300
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
JobRequeue=1
AccountingStorageType=accounting_storage/slurmdbd
AccountingStorageHost=localhost
AccountingStoragePort={accounting}
AccountingStoragePass={where}/munge/munge.sock
AccountingStorageTRES=gres/gpu
GresTypes=gpu
{nodes}
PartitionName=train Nodes={all} Default=YES MaxTime=INFINITE PriorityTier=100 PreemptMode=OFF
PartitionName=low Nodes={all} MaxTime=INFINITE PriorityTier=1 PreemptMode=REQUEUE GraceTime=0
"""

SLURMDBD = """\
AuthType=auth/munge
AuthInfo=socket={where}/munge/munge.sock
DbdHost=localhost
DbdPort={port}
SlurmUser=root
StorageType=accounting_storage/mysql
StorageHost=127.0.0.1
StoragePort={database}
StorageUser=slurm
StoragePass=slurm
StorageLoc=slurm_acct
LogFile={where}/log/slurmdbd.log
PidFile={where}/run/slurmdbd.pid
"""
