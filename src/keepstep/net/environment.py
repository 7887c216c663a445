"""Which network a rank uses, said by environment variables of NCCL and RCCL.

On Ethernet the plugin takes over, and NCCL_NET is set so that a plugin which does not load is an
error and not NCCL's own sockets in silence. On machines with RDMA devices the plugin would make
everything slower: there NCCL's own port failover is switched on, where NCCL has it.
"""

from __future__ import annotations

import importlib.metadata
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from keepstep.errors import UsageError
from keepstep.native import plugin
from keepstep.net import rdma

Mode = Literal["auto", "tcp"]
# What `keepstep run --net` was told; each agent finds out what it means on its machine.
MODE = "KEEPSTEP_NET"
NCCL_PACKAGES = ("nvidia-nccl-cu13", "nvidia-nccl-cu12")
PORT_FAILOVER = (2, 29)
PORT_RECOVERY = (2, 30)


@dataclass(frozen=True)
class Network:
    kind: Literal["plugin", "rdma"]
    variables: dict[str, str]
    words: str  # what is covered, in a sentence


def nccl_version() -> tuple[int, int] | None:
    """Of the library that torch would load; torch itself is not imported."""
    for package in NCCL_PACKAGES:
        try:
            major, minor, *_ = importlib.metadata.version(package).split(".")
        except importlib.metadata.PackageNotFoundError:
            continue
        return int(major), int(minor)
    return None


def is_rocm() -> bool:
    try:
        return "rocm" in importlib.metadata.version("torch")
    except importlib.metadata.PackageNotFoundError:
        return False


def plugin_environment() -> dict[str, str]:
    name = plugin.RCCL_NAME if is_rocm() else plugin.NCCL_NAME
    return {
        "NCCL_NET_PLUGIN": str(plugin.ensure() / name),
        "NCCL_NET": "Keepstep",
        # NCCL 2.28 and 2.29 unload a plugin with their last communicator, forget its name, and can
        # load it never again: a process that has lost all connections could not make new ones.
        "NCCL_NET_PLUGIN_REF_COUNT": "1",
    }


def check_mode(mode: Mode, root: Path = rdma.SYS) -> None:
    """The plugin is TCP: it must not replace RDMA by accident."""
    found = rdma.devices(root)
    if found and mode != "tcp":
        raise UsageError(
            f"this machine has RDMA devices ({', '.join(found)}), and the plugin is TCP",
            hint="--net=tcp takes TCP nevertheless; see `keepstep net env` for NCCL's own failover",
        )


def network(mode: Mode, root: Path = rdma.SYS, version: tuple[int, int] | None = None) -> Network:
    found = rdma.devices(root)
    if mode == "tcp" or not found:
        words = (
            "TCP over all paths, by Keepstep's plugin; faults of links are survived and reported"
        )
        return Network("plugin", plugin_environment(), words)
    version = version or nccl_version()
    named = f"RDMA ({', '.join(found)})"
    if version is None or version < PORT_FAILOVER:
        said = "unknown" if version is None else f"{version[0]}.{version[1]}"
        words = f"{named} by NCCL {said}: no port failover before 2.29; ports are watched"
        return Network("rdma", {}, words)
    variables = {"NCCL_IB_RESILIENCY_PORT_FAILOVER": "1"}
    words = f"{named} by NCCL's own port failover (needs two ports in one NIC group)"
    if version >= PORT_RECOVERY:
        variables["NCCL_IB_RESILIENCY_PORT_RECOVERY"] = "1"
    else:
        words += "; a port that comes back is used again from NCCL 2.30 on"
    return Network("rdma", variables, words)


def worker_network(env: Mapping[str, str], agent_socket: Path | None) -> dict[str, str]:
    """What a worker's environment gains; nothing if the job did not ask for a network."""
    if env.get(MODE) not in ("auto", "tcp"):
        return {}
    check_mode("tcp" if env[MODE] == "tcp" else "auto")
    said = {"KEEPSTEP_NET_AGENT": str(agent_socket)} if agent_socket is not None else {}
    return {**plugin_environment(), **said}
