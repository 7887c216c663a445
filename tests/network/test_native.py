"""The failover logic alone, and the whole plugin under sanitizers."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from tests.network.rig import binaries, library, rig, run

ASAN = ("-O1", "-fsanitize=address,undefined", "-fno-sanitize-recover=all")
TSAN = ("-O1", "-fsanitize=thread")
WORLDS = int(os.environ.get("KEEPSTEP_NET_WORLDS", "100"))
# Sanitizers end a process with this code when they have seen anything.
REPORTED = {
    "ASAN_OPTIONS": "exitcode=66:detect_leaks=0",
    "TSAN_OPTIONS": "exitcode=66:report_thread_leaks=0",
}


@pytest.mark.parametrize("flags", [(), ASAN], ids=["plain", "asan"])
def test_failover_logic_in_random_worlds_and_under_fuzzing(flags: tuple[str, ...]) -> None:
    ended = subprocess.run(
        [str(binaries(*flags) / "test_failover"), str(WORLDS)], capture_output=True, text=True
    )
    assert ended.returncode == 0, ended.stderr[-4000:]
    assert f"{WORLDS} worlds" in ended.stdout and "fuzzing" in ended.stdout


@pytest.mark.usefixtures("can_make_networks")
@pytest.mark.parametrize("helpers", ["0", "1"])
@pytest.mark.parametrize("flags", [ASAN, TSAN], ids=["asan", "tsan"])
def test_transport_is_clean_under_sanitizers(
    folder: Path, flags: tuple[str, ...], helpers: str
) -> None:
    """Traffic, a lost link, a reset and a clean end, with every check switched on."""
    env = {**REPORTED, "KEEPSTEP_NET_HELPERS": helpers}
    with rig(folder) as made:
        words = ("--size", "mix", "--messages", "1500", "--verify", "1")
        sender, receiver = made.pair(*words, extra=flags, **env)
        made.link(made.machines[0], 0, False)
        made.reset(made.machines[1], 1)
        made.link(made.machines[0], 0, True)
        sent, received = sender.result(), receiver.result()
        sent.assert_clean()
        received.assert_clean()
        assert made.heard("path-down"), "the faults never fired"
        assert sender.close() == 0, sender.log.read_text()[-4000:]
        assert receiver.close() == 0, receiver.log.read_text()[-4000:]


def test_only_the_tables_are_exported_and_only_libc_is_needed() -> None:
    said = run("nm", "-D", "--defined-only", str(library())).stdout
    names = {line.split()[-1] for line in said.splitlines()}
    assert names == {"ncclNetPlugin_v6", "ncclNetPlugin_v8", "ncclNetPlugin_v11"}
    dynamic = run("readelf", "-d", str(library())).stdout
    needed = [line for line in dynamic.splitlines() if "NEEDED" in line]
    assert all("libc.so" in line or "ld-linux" in line or "libm.so" in line for line in needed)
    assert "NODELETE" in dynamic
