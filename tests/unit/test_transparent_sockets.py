"""Sockets of processes that move: which are Python's own, and under which names they come back."""

from __future__ import annotations

import string
import subprocess
import sys

import pytest

from keepstep.agent.capsule import other_name

WATCHED = """
import ctypes, gc, os, socket
from keepstep.worker.groups import gloo, nccl
from keepstep.worker.transparent import transparent
early = socket.socket()
transparent.watch_sockets()
late = socket.create_server(("127.0.0.1", 0))
client = socket.create_connection(late.getsockname())
server, _ = late.accept()
detached = socket.socket().detach()
gc.freeze()  # as before a fork
foreign = ctypes.CDLL(None).socket(socket.AF_INET, socket.SOCK_STREAM, 0)
own = {early.fileno(), late.fileno(), client.fileno(), server.fileno(), detached}
assert own <= transparent.python_sockets(), (own, transparent.python_sockets())
assert foreign not in transparent.python_sockets()
nccl.used = True
os.register_at_fork(after_in_child=transparent._forget_connections)
if (pid := os.fork()) == 0:
    left = {number for number, _ in gloo.inet_sockets()}
    os._exit(0 if left == own else 1)
assert os.waitpid(pid, 0)[1] == 0
assert foreign in {number for number, _ in gloo.inet_sockets()}
print("good")
"""


def test_a_forked_child_keeps_what_python_has_opened_and_nothing_else() -> None:
    done = subprocess.run([sys.executable, "-c", WATCHED], capture_output=True, text=True)
    assert done.stdout == "good\n", done.stderr


@pytest.mark.parametrize(
    ("name", "other"),
    [
        ("@cuda-7", "@cuda-a"),
        ("@cuda-7@@@", "@cuda-a@@@"),
        ("@a", "@b"),
        ("@", ""),
        ("@@@@", ""),
        ("@caf\u00e9", ""),
    ],
)
def test_a_name_that_is_taken_becomes_another_one_of_its_length(name: str, other: str) -> None:
    assert other_name(name, {name}) == other
    assert not other or len(other) == len(name)
    taken = {f"@cuda-{letter}" for letter in string.ascii_letters}
    assert other_name("@cuda-7", taken) == ""
