"""Single stories of the plugin between machines: shapes of networks, ends of peers, bad input."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.network.rig import Harness, Rig, rig, wait_until
from tests.support.scripts import ROOT

pytestmark = pytest.mark.usefixtures("can_make_networks")

REMOTE_ERROR = 6


def finish(sender: Harness, receiver: Harness) -> None:
    sent, received = sender.result(), receiver.result()
    sent.assert_clean()
    received.assert_clean()
    assert sent.lane("send")["messages"] == received.lane("receive")["messages"]
    assert sender.close() == 0 and receiver.close() == 0


def paths_used(made: Rig, harness: str) -> dict[int, int]:
    """Bytes that were sent over each path, by the plugin's own count."""
    latest = {e["path"]: e["sent_bytes"] for e in made.heard("stats") if e["harness"] == harness}
    return {path: count for path, count in latest.items() if count}


@pytest.mark.parametrize("paths,v6", [(1, False), (3, False), (8, False), (2, True)])
def test_messages_of_all_sizes_arrive_over_any_number_of_paths(
    folder: Path, paths: int, v6: bool
) -> None:
    with rig(folder, paths=paths, v6=v6) as made:
        sender, receiver = made.pair("--size", "mix", "--messages", "800", "--verify", "2")
        sent, received = sender.result(), receiver.result()
        sent.assert_clean()
        received.assert_clean()
        wait_until(lambda: len(paths_used(made, "h1")) == paths, "all paths to be used", 5)
        assert sender.close() == 0 and receiver.close() == 0
        # A clean end is no fault: nobody is told of one.
        assert not made.heard("path-down", "all-down", "gave-up"), made.story()


def helper_ns(harness: Harness) -> int | None:
    """Processor time of the thread that reads large messages; None: there is none."""
    for task in Path(f"/proc/{harness.pid}/task").iterdir():
        if (task / "comm").read_text() == "keepstep-read\n":
            return int((task / "schedstat").read_text().split()[0])
    return None


def test_a_helper_reads_large_messages_and_leaves_small_ones_alone(folder: Path) -> None:
    """Also while paths are cut, and what is sent for a second time meets it."""
    with rig(folder) as made:

        def spent(size: int, messages: int, helpers: str) -> int | None:
            words = ("--size", str(size), "--messages", str(messages), "--verify", "2")
            ends = made.pair(*words, KEEPSTEP_NET_HELPERS=helpers)
            made.reset(made.machines[1], 1)
            sent, received = (end.result() for end in ends)
            sent.assert_clean()
            received.assert_clean()
            used = helper_ns(ends[1])
            assert [end.close() for end in ends] == [0, 0]
            return used

        asleep, awake = spent(4096, 500, "1"), spent(524288, 60, "1")
        assert asleep is not None and awake is not None
        assert awake > 2_000_000 and awake > 5 * asleep, f"{asleep} ns, {awake} ns"
        assert spent(524288, 10, "0") is None


def test_three_machines_in_a_ring_survive_a_lost_link(folder: Path) -> None:
    with rig(folder, machines=3) as made:
        names = made.machines
        stop = folder / "stop"
        members = [
            made.start(
                name,
                *("--listen", str(folder / f"handle-{name}")),
                *("--connect", str(folder / f"handle-{names[(i + 1) % 3]}")),
                *("--size", "mix", "--stop", str(stop)),
            )
            for i, name in enumerate(names)
        ]
        for member in members:
            member.ready()
        # The others do not see this link go down: the machine itself tells its sender.
        made.link(names[1], 1, False)
        wait_until(
            lambda: any(e["reason"] == "lost by the peer" for e in made.heard("path-down")),
            "a sender to hear from its peer of a lost path",
        )
        made.link(names[1], 1, True)
        stop.touch()
        for member in members:
            member.result().assert_clean()
        assert [member.close() for member in members] == [0, 0, 0]


def test_chunks_that_overtake_each_other_are_put_in_order(folder: Path) -> None:
    """One path is twenty times slower: most messages end before earlier ones."""
    with rig(folder) as made:
        made.set_rate(made.machines[0], "p1", made.rate_mbit // 20)
        words = ("--size", "mix", "--messages", "400", "--verify", "2")
        sender, receiver = made.pair(*words)
        sent, received = sender.result(), receiver.result()
        sent.assert_clean()
        received.assert_clean()
        wait_until(lambda: len(paths_used(made, "h1")) == 2, "both paths to be used", 5)
        used = paths_used(made, "h1")
        assert used[0] > 2 * used[1], f"the slow path took too much: {used}"
        assert not made.heard("path-down"), "slow is not dead"
        assert sender.close() == 0 and receiver.close() == 0


def test_a_stopped_peer_is_no_dead_path(folder: Path) -> None:
    """Longer than any timer of the plugin, with windows full: the kernels still answer."""
    with rig(folder) as made:
        stop = folder / "stop"
        sender, receiver = made.pair("--size", "524288", "--stop", str(stop))
        os.kill(receiver.pid, signal.SIGSTOP)
        time.sleep(4)  # the length of the fault
        os.kill(receiver.pid, signal.SIGCONT)
        assert not made.heard("path-down", "path-suspect", "all-down"), made.story()
        stop.touch()
        finish(sender, receiver)


def test_a_killed_peer_ends_in_an_error_and_nothing_hangs(folder: Path) -> None:
    with rig(folder) as made:
        env = {"KEEPSTEP_NET_DEADLINE_S": "1.5"}
        sender, receiver = made.pair("--size", "mix", "--stop", str(folder / "never"), **env)
        killed_ns = time.monotonic_ns()
        os.kill(receiver.pid, signal.SIGKILL)
        lane = sender.result().lane("send")
        assert lane["error"] == REMOTE_ERROR
        assert 1.0 < (lane["error_at_ns"] - killed_ns) / 1e9 < 8
        assert made.heard("all-down") and made.heard("gave-up")
        begun = time.monotonic()
        assert sender.close() == 0
        assert time.monotonic() - begun < 2, "closing after an error waited for something"


@pytest.mark.parametrize("how", ["links", "drops"])
def test_all_paths_lost_for_good_end_in_an_error_on_both_sides(folder: Path, how: str) -> None:
    with rig(folder) as made:
        env = {"KEEPSTEP_NET_DEADLINE_S": "1.5"}
        ends = made.pair("--size", "524288", "--stop", str(folder / "never"), **env)
        for path in range(2):
            if how == "links":
                made.link(made.machines[0], path, False)
            else:
                made.drop(made.machines[0], path, True)
                made.drop(made.machines[1], path, True)
        for end, name in zip(ends, ("send", "receive")):
            assert end.result().lane(name)["error"] == REMOTE_ERROR
            assert end.close() == 0


def test_an_error_waits_for_the_deadline_and_a_path_that_heals_before_it_is_enough(
    folder: Path,
) -> None:
    with rig(folder) as made:
        stop = folder / "stop"
        sender, receiver = made.pair(
            "--size", "mix", "--stop", str(stop), KEEPSTEP_NET_DEADLINE_S="8"
        )
        for path in range(2):
            made.link(made.machines[1], path, False)
        wait_until(lambda: bool(made.heard("all-down")), "all paths to be seen down")
        time.sleep(2)  # the length of the fault
        made.link(made.machines[1], 1, True)
        wait_until(lambda: bool(made.heard("back")), "the path to be used again")
        stop.touch()
        finish(sender, receiver)


# ------------------------------------------------------------------------------------ bad input


def test_strangers_at_the_acceptor_change_nothing(folder: Path) -> None:
    """A port scanner, garbage, a wrong cookie, an oversized frame and silence, in mid-traffic."""
    with rig(folder) as made:
        stop = folder / "stop"
        sender, receiver = made.pair("--size", "mix", "--stop", str(stop))
        handle = (folder / "handle0").read_bytes()
        port = int.from_bytes(handle[22:24], "little")
        cookie = handle[4:20]
        hello = b"KS\x01\x00" + (16).to_bytes(4, "little") + (999).to_bytes(8, "little") + bytes(16)
        wrong = bytes(16)
        huge = b"KS\x03\x00" + b"\xff" * 28
        script = "import socket, sys\nfor data in {!r}:\n".format(
            [b"", b"GET / HTTP/1.0\r\n\r\n" * 9, os.urandom(4096), hello + wrong, huge * 4]
        ) + (
            f"    for address in ({made.address(0, 2)!r}, {made.address(1, 2)!r}):\n"
            f"        s = socket.create_connection((address, {port}), 5)\n"
            "        s.sendall(data)\n"
            "        s.settimeout(5)\n"
            "        try:\n"
            "            assert s.recv(1) == b'', 'an answer to a stranger'\n"
            "        except ConnectionResetError: pass\n"
        )
        asked = subprocess.run(
            ["ip", "netns", "exec", made.machines[0], "python3", "-c", script],
            capture_output=True,
            text=True,
            timeout=60,
        )
        assert asked.returncode == 0, asked.stderr
        # The right cookie with an epoch that is over is refused as well.
        old = hello[:8] + (1).to_bytes(8, "little") + bytes(16) + cookie
        replay = (
            "import socket\n"
            f"s = socket.create_connection(({made.address(0, 2)!r}, {port}), 5)\n"
            f"s.sendall({old!r})\n"
            "s.settimeout(5)\n"
            "try:\n    assert s.recv(1) == b''\nexcept ConnectionResetError: pass\n"
        )
        asked = subprocess.run(
            ["ip", "netns", "exec", made.machines[0], "python3", "-c", replay],
            capture_output=True,
            text=True,
            timeout=60,
        )
        assert asked.returncode == 0, asked.stderr
        assert not made.heard("path-down"), made.story()
        stop.touch()
        finish(sender, receiver)
        assert receiver.log.read_text().count("was refused") == 1, "said once"


@pytest.mark.parametrize(
    "paths,words",
    [
        ("eth77", "there is no interface or address eth77"),
        ("10.1.2.3", "there is no interface or address 10.1.2.3"),
        ("p0,,p1", "an entry is empty"),
        ("p0,p0", "names p0 twice"),
    ],
)
def test_wrong_paths_are_refused_with_a_sentence(folder: Path, paths: str, words: str) -> None:
    with rig(folder) as made:
        end = made.start(
            made.machines[0], "--listen", str(folder / "h"), "--size", "8", KEEPSTEP_NET_PATHS=paths
        )
        assert end.process.wait(timeout=30) == 3
        assert words in end.log.read_text() and "init failed" in end.log.read_text()


@pytest.mark.parametrize(
    "name,value,words",
    [
        ("KEEPSTEP_NET_DEADLINE_S", "soon", "is not a number"),
        ("KEEPSTEP_NET_HELPERS", "2", "is not 0, 1 or auto"),
    ],
)
def test_wrong_settings_are_refused_with_a_sentence(
    folder: Path, name: str, value: str, words: str
) -> None:
    with rig(folder) as made:
        end = made.start(
            made.machines[0], "--listen", str(folder / "h"), "--size", "8", **{name: value}
        )
        assert end.process.wait(timeout=30) == 3
        assert f"{name}={value} {words}" in end.log.read_text()


def test_mixed_families_use_what_matches_and_say_so(folder: Path) -> None:
    with rig(folder) as made:
        made.add_v6()
        handle = folder / "handle"
        words = ("--size", "mix", "--messages", "200")
        a, b = made.machines
        receiver = made.start(b, "--listen", str(handle), *words, KEEPSTEP_NET_PATHS="p0,p1")
        sender = made.start(a, "--connect", str(handle), *words, KEEPSTEP_NET_PATHS="p0,fd99:1::1")
        receiver.ready()
        sender.ready()
        finish(sender, receiver)
        assert "1 of which match in order and family" in sender.log.read_text()


def test_one_path_only_works_and_warns(folder: Path) -> None:
    with rig(folder, paths=1) as made:
        sender, receiver = made.pair("--size", "mix", "--messages", "100")
        finish(sender, receiver)
        assert "only one path" in sender.log.read_text()


def test_a_namespace_goes_when_the_test_is_killed(folder: Path) -> None:
    script = (
        "import os, signal, sys, pathlib\n"
        "from tests.network.rig import rig\n"
        "with rig(pathlib.Path(sys.argv[1])) as made:\n"
        "    print(made.machines[0], flush=True)\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    ended = subprocess.run(
        [sys.executable, "-c", script, str(folder)], capture_output=True, text=True, cwd=ROOT
    )
    name = ended.stdout.strip()
    assert ended.returncode == -signal.SIGKILL and name, ended.stderr
    wait_until(lambda: not Path("/run/netns", name).exists(), "the namespace to be removed")
