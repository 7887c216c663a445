"""From a plugin's datagram to an agent's ear, and the commands about it."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from keepstep.agent import leftovers
from keepstep.agent.main import _network_limits
from keepstep.agent.network import NetworkEvents, socket_path
from keepstep.core.agent.network import SECOND
from keepstep.errors import UsageError
from keepstep.model.network import PathEvent
from keepstep.net.rdma import Port


def listening(path: Path, *datagrams: bytes, expected: int) -> list[PathEvent]:
    """What comes of these datagrams."""
    heard: list[PathEvent] = []

    async def run() -> None:
        events = NetworkEvents(path, heard.append)
        assert events.open()
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender:
            for one in datagrams:
                await asyncio.to_thread(sender.sendto, one, str(path))
        for _ in range(1000):
            if len(heard) >= expected:
                break
            await asyncio.sleep(0.005)
        events.close()

    asyncio.run(run())
    return heard


def test_words_are_heard_and_garbage_is_not(folder: Path) -> None:
    word = {"event": "path-down", "pid": 7, "interface": "eth1", "something": "newer"}
    path = folder / "private" / "s"
    heard = listening(
        path,
        *(b"", b"\xff\xfe", b"[]", b'{"event": 3, "pid": "x"}', os.urandom(500)),
        json.dumps(word).encode(),
        expected=1,
    )
    assert [(e.event, e.pid, e.interface) for e in heard] == [("path-down", 7, "eth1")]
    assert not path.exists()


def test_a_folder_that_others_can_enter_is_refused(folder: Path) -> None:
    (folder / "open").mkdir()
    (folder / "open").chmod(0o755)

    async def run() -> bool:
        return NetworkEvents(folder / "open" / "s", lambda _: None).open()

    assert asyncio.run(run()) is False


def test_the_socket_of_the_next_agent_is_where_the_last_one_was(folder: Path) -> None:
    first = socket_path("job", "n0", folder)
    assert first == socket_path("job", "n0", folder)
    assert len({first, socket_path("job", "n1", folder), socket_path("job2", "n0", folder)}) == 3
    assert len(str(socket_path("j" * 200, "n" * 200, folder))) < 100


def test_the_socket_of_a_killed_agent_is_removed_by_whoever_reaps_it(folder: Path) -> None:
    path = socket_path("job", "n0", folder)
    path.parent.mkdir(mode=0o700, exist_ok=True)
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as left:
        left.bind(str(path))
    leftovers.remove("job", "n0", folder)
    assert not path.exists()
    leftovers.remove("job", "n0", folder)  # one that has gone by itself


def test_rdma_ports_that_change_are_words_too() -> None:
    heard: list[PathEvent] = []
    events = NetworkEvents(Path("/nowhere"), heard.append)
    for active in (True, False, False, True):
        events.compare([Port("mlx5_0/1", active, "InfiniBand")])
    assert [e.event for e in heard if e.event != "port"] == ["link-down", "link-up"]


def test_limits_come_from_the_environment_and_nonsense_is_refused() -> None:
    limits = _network_limits({"KEEPSTEP_NET_FLAPS": "7", "KEEPSTEP_NET_DOWN_S": "9"})
    assert (limits.flaps, limits.down_ns) == (7, 9 * SECOND)
    with pytest.raises(UsageError, match="KEEPSTEP_NET_WINDOW_S=soon"):
        _network_limits({"KEEPSTEP_NET_WINDOW_S": "soon"})


def test_net_env_names_a_library_that_is_there() -> None:
    command = [sys.executable, "-m", "keepstep", "net", "env", "--tcp"]
    said = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    lines = dict(line.removeprefix("export ").split("=", 1) for line in said.stdout.splitlines())
    assert lines["NCCL_NET"] == "Keepstep" and Path(lines["NCCL_NET_PLUGIN"]).is_file()
    other = Path(lines["NCCL_NET_PLUGIN"]).with_name("librccl-net-keepstep.so")
    assert other.read_bytes() == Path(lines["NCCL_NET_PLUGIN"]).read_bytes()
    assert "TCP" in said.stderr


def test_net_status_without_a_job_says_so(folder: Path) -> None:
    said = subprocess.run(
        [sys.executable, "-m", "keepstep", "net", "status"],
        env={**os.environ, "KEEPSTEP_HOME": str(folder)},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert said.returncode in (2, 3) and "hint:" in said.stderr
