"""The environment a worker starts with: what torchrun sets, plus what its launch needs.

Settings that only the worker reads go into its Welcome instead (`worker_settings`), also those
that a user sets as variables.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import psutil  # type: ignore[import-untyped]

from keepstep.adapters.transport.tls import is_loopback
from keepstep.model import trace
from keepstep.model.agent_messages import StartWorker
from keepstep.model.commands import WorkerSettings
from keepstep.net.environment import worker_network

TOKEN = "KEEPSTEP_TOKEN"

# Absent for a spare: it parks at the first question about them.
_OF_A_RANK = ("RANK", "GROUP_RANK")


def worker_environment(
    base: Mapping[str, str],
    start: StartWorker,
    *,
    job: str,
    bind: str,
    network: Path | None = None,
    segments: Path | None = None,
) -> dict[str, str]:
    """What the job asks for beats what is inherited; what the protocol needs beats both."""
    env = {**base, **start.env}
    for name in (*_OF_A_RANK, TOKEN):
        env.pop(name, None)
    env |= worker_network(env, network)
    env.setdefault("OMP_NUM_THREADS", "1")
    env.setdefault("PYTHONHASHSEED", "0")
    # Left alone, gloo resolves the machine's name, which may be an address nobody else can reach.
    if not is_loopback(bind):
        if interface := interface_of(bind):
            env.setdefault("GLOO_SOCKET_IFNAME", interface)
    elif is_loopback(start.master.host):
        env.setdefault("GLOO_SOCKET_IFNAME", "lo")
    env |= {
        "KEEPSTEP_GENERATION": str(start.generation),
        "WORLD_SIZE": str(start.world),
        "LOCAL_RANK": str(start.slot),
        "LOCAL_WORLD_SIZE": str(start.local_world),
        "MASTER_ADDR": start.master.host,
        "MASTER_PORT": str(start.master.port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_RESTART_COUNT": "0",
        "TORCHELASTIC_RUN_ID": job,
        "PYTHONUNBUFFERED": "1",
    }
    if start.transparent:
        env["KEEPSTEP_MODE"] = "transparent"
        env.setdefault("ONEDNN_JIT_PROFILE", "0")  # it keeps a file open that no other place has
        # What no snapshot holds: multicast and shared allocations of NCCL, and connections that it
        # keeps beyond its communicators. And NCCL remembers the machine on which it began: each
        # rank is one of its own for it, wherever it goes.
        for name in ("NVLS", "CUMEM", "CUMEM_HOST", "RAS"):
            env.setdefault(f"NCCL_{name}_ENABLE", "0")
        env.setdefault("NCCL_HOSTID", f"keepstep-{start.rank}")
        if segments is not None:
            env["KEEPSTEP_SEGMENTS"] = str(segments)
    if start.rank >= 0:
        env["RANK"] = str(start.rank)
        env["GROUP_RANK"] = str(start.rank // max(1, start.local_world))
    return env


def worker_settings(env: Mapping[str, str], start: StartWorker) -> WorkerSettings:
    """`env`: what the worker is started with."""
    steps = env.get(trace.STEPS_MAX, "0")
    return WorkerSettings(
        redundancy=start.redundancy,
        vault_lanes=env.get("KEEPSTEP_VAULT_LANES", "auto"),
        vault_slice=env.get("KEEPSTEP_VAULT_SLICE", "auto"),
        trace=env.get(trace.FOLDER, ""),
        steps_max=int(steps) if steps.isdecimal() else 0,
    )


def interface_of(address: str) -> str | None:
    """The network interface that has this address."""
    for name, addresses in psutil.net_if_addrs().items():
        if any(one.address.partition("%")[0] == address for one in addresses):
            return str(name)
    return None
