"""The network plugin under NCCL itself: two ranks on one GPU that take each other for other nodes.

Different NCCL_HOSTIDs make NCCL refuse shared memory and peer access, so that everything goes over
the network: over NCCL's own sockets first, then over the plugin with two loopback addresses as
paths. A path is cut by the plugin's control socket: links cannot be touched here.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from keepstep.net.environment import plugin_environment
from keepstep.worker.__main__ import QUIET_NCCL

pytestmark = pytest.mark.gpu

SCRIPT = Path(__file__).with_name("net_ranks.py")
DEADLINE_S = 180.0
# Each proves a step of the way to the plugin, in NCCL's own words.
PROOF = ("Loaded net plugin Keepstep (v11)", "Using network Keepstep", "via NET/Keepstep/0")
ISOLATED = {
    "NCCL_SOCKET_IFNAME": "lo",
    "NCCL_IB_DISABLE": "1",
    "NCCL_P2P_DISABLE": "1",
    "NCCL_SHM_DISABLE": "1",
    "NCCL_MNNVL_ENABLE": "0",
    "NCCL_NVLS_ENABLE": "0",
    "NCCL_MAX_NCHANNELS": "2",
    "NCCL_DEBUG": "INFO",
    "NCCL_DEBUG_SUBSYS": "INIT,NET,ENV",
    **QUIET_NCCL,  # as in a rank
}


class Ranks:
    def __init__(self, folder: Path, mode: str, **env: str) -> None:
        self.folder = folder
        folder.mkdir()
        self.agent = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)  # of rank 0
        self.agent.bind(str(folder / "agent-0"))
        self.agent.settimeout(DEADLINE_S)
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        self.processes = []
        for rank in range(2):
            environment = {
                **os.environ,
                **ISOLATED,
                "NCCL_HOSTID": f"keepstep-{rank}",
                "RANK": str(rank),
                "WORLD_SIZE": "2",
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(port),
                "KEEPSTEP_NET_CONTROL": str(folder / f"control-{rank}"),
                "KEEPSTEP_NET_AGENT": str(folder / f"agent-{rank}"),
                **env,
            }
            with (folder / f"log-{rank}").open("w") as log:
                self.processes.append(
                    subprocess.Popen(
                        [sys.executable, str(SCRIPT), str(folder), mode],
                        env=environment,
                        stdout=log,
                        stderr=log,
                    )
                )

    def log(self, rank: int) -> str:
        return (self.folder / f"log-{rank}").read_text(errors="replace")

    def until_running(self) -> None:
        end = time.monotonic() + DEADLINE_S
        while not all((self.folder / f"looping-{rank}").exists() for rank in range(2)):
            assert time.monotonic() < end and self.alive(), self.log(0)[-6000:]
            time.sleep(0.01)

    def alive(self) -> bool:
        return all(process.poll() is None for process in self.processes)

    def tell(self, rank: int, words: str) -> None:
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sock:
            sock.sendto(words.encode(), str(self.folder / f"control-{rank}"))

    def until_said(self, event: str, path: int) -> None:
        """By rank 0 to its agent."""
        while True:
            said = json.loads(self.agent.recv(65536))
            if (said["event"], said["path"]) == (event, path):
                return

    def results(self) -> list[dict[str, Any]]:
        codes = [process.wait(timeout=DEADLINE_S) for process in self.processes]
        assert codes == [0, 0], self.log(0)[-6000:] + self.log(1)[-6000:]
        files = [self.folder / f"result-{rank}.json" for rank in range(2)]
        return [json.loads(file.read_text()) for file in files]

    def kill(self) -> None:
        self.agent.close()
        for process in self.processes:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            process.wait()


def plugin_ranks(folder: Path, mode: str, **env: str) -> Ranks:
    paths = {"KEEPSTEP_NET_PATHS": "127.0.0.1,127.0.0.2"}
    return Ranks(folder, mode, **plugin_environment(), **paths, **env)


def test_collectives_are_bit_equal_to_nccls_own_sockets(tmp_path: Path) -> None:
    plain = Ranks(tmp_path / "socket", "collectives", NCCL_NET="Socket")
    expected = plain.results()
    ours = plugin_ranks(tmp_path / "plugin", "collectives")
    assert ours.results() == expected
    for rank in range(2):
        for line in PROOF:
            assert line in ours.log(rank), f"NCCL did not say {line!r}"
        assert "via NET/Keepstep" not in plain.log(rank)


def test_a_path_cut_in_mid_collective_changes_no_result(tmp_path: Path) -> None:
    quiet = plugin_ranks(tmp_path / "quiet", "loop")
    quiet.until_running()
    (quiet.folder / "stop").touch()
    expected = quiet.results()
    ranks = plugin_ranks(tmp_path / "cut", "loop")
    try:
        ranks.until_running()
        for path in (0, 1) * 3:
            ranks.tell(0, f"cut {path}")
            ranks.until_said("path-down", path)
            ranks.tell(0, f"heal {path}")
            ranks.until_said("path-up", path)
        assert ranks.alive()
        (ranks.folder / "stop").touch()
        seen = ranks.results()
    finally:
        ranks.kill()
    assert [one["digest"] for one in seen] == [one["digest"] for one in expected]


def test_all_paths_cut_past_the_deadline_end_in_an_error_that_can_be_survived(
    tmp_path: Path,
) -> None:
    ranks = plugin_ranks(tmp_path / "all", "survive", KEEPSTEP_NET_DEADLINE_S="3")
    try:
        ranks.until_running()
        for path in range(2):
            ranks.tell(0, f"cut {path}")
            ranks.tell(1, f"cut {path}")
        seen = ranks.results()
    finally:
        ranks.kill()
    for rank, one in enumerate(seen):
        assert "ncclRemoteError" in one["error"], one
        assert one["alive_after_abort"] is True, one
        assert "no path to the peer worked for too long: giving up" in ranks.log(rank)
