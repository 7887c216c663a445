"""Holds the processes of a test's cluster: `guard.py FOLDER` reads commands, ends all at the end.

Slurm's step daemons leave their parents, so whoever wants to end them must inherit them: this
process is a subreaper. It ends everything below it, and removes the folder, when its stdin ends,
which a kill -9 of the test run does too. Each line of stdin is a program to start, as JSON.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import psutil

PR_SET_CHILD_SUBREAPER = 36


def main(folder: str) -> None:
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    os.setsid()  # Ctrl-C in the terminal is not for us: the end of stdin is
    signal.signal(signal.SIGCHLD, lambda *_: None)
    for line in sys.stdin:
        asked = json.loads(line)
        with Path(asked["log"]).open("ab") as log:
            process = subprocess.Popen(
                asked["command"],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env={**os.environ, **asked["env"]},
                user=asked["user"],
            )
        print(process.pid, flush=True)
    end_all()
    shutil.rmtree(folder, ignore_errors=True)


def end_all() -> None:
    """Until nothing is left: what is killed may have left children that come to us."""
    me = psutil.Process()
    while below := me.children(recursive=True):
        for process in below:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        psutil.wait_procs(me.children(), timeout=1)
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass


main(sys.argv[1])
