"""A test run that is killed leaves no daemon and no folder behind."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import psutil

from tests.schedulers.cluster import GUARD, until

# Starts the guard and, through it, a process that leaves its parent; then waits to be killed.
TEST_RUN = """
import json, subprocess, sys
guard = subprocess.Popen([sys.executable, sys.argv[1], sys.argv[2]], stdin=-1, text=True)
script = f"(setsid sleep 600 & echo $! > {sys.argv[2]}/pid) & exit 0"
command = {"command": ["sh", "-c", script], "env": {}, "log": sys.argv[3], "user": None}
guard.stdin.write(json.dumps(command) + chr(10))
guard.stdin.flush()
guard.wait()
"""


def test_nothing_is_left_of_a_killed_test_run(tmp_path: Path) -> None:
    folder, log = tmp_path / "cluster", tmp_path / "log"
    folder.mkdir()
    words = [sys.executable, "-c", TEST_RUN, str(GUARD), str(folder), str(log)]
    killed = subprocess.Popen(words, stdout=subprocess.DEVNULL)
    file = folder / "pid"
    until(lambda: file.exists() and file.read_text().strip(), "a process")
    daemon = psutil.Process(int(file.read_text()))
    killed.send_signal(signal.SIGKILL)
    killed.wait()
    until(lambda: not daemon.is_running() and not folder.exists(), "the end of everything")
