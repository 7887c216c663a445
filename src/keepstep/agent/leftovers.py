"""What an agent leaves behind that was killed: removed by whoever reaps it."""

from __future__ import annotations

from pathlib import Path

from keepstep.agent.capsule import remove_images
from keepstep.agent.network import remove_socket, socket_path


def remove(job: str, node: str, directory: Path) -> None:
    remove_images(job, node)
    remove_socket(socket_path(job, node, directory))
