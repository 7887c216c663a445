"""RDMA devices of this machine, as the kernel lists them. No verbs: only /sys is read."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from pathlib import Path

SYS = Path("/sys/class/infiniband")


@dataclass(frozen=True)
class Port:
    name: str  # mlx5_0/1
    active: bool
    link: str  # InfiniBand or Ethernet (RoCE)


def devices(root: Path = SYS) -> list[str]:
    return sorted(path.name for path in root.iterdir()) if root.is_dir() else []


def ports(root: Path = SYS) -> list[Port]:
    found = []
    for device in devices(root):
        for port in sorted((root / device / "ports").glob("*")):
            with contextlib.suppress(OSError):  # gone while we looked
                state = (port / "state").read_text()  # "4: ACTIVE"
                link = (port / "link_layer").read_text().strip()
                found.append(Port(f"{device}/{port.name}", "ACTIVE" in state, link))
    return found
