"""Side state sent ahead of the fence, so that the buddy has it when the fence is reached.

What a rank publishes before its fence hardly ever changes between the beginning of the last
backward pass and the fence. So a thread captures, encodes and sends it while the main thread is in
that pass, which does not need the interpreter. At the fence the main thread makes the side state
as ever. If it is the same, byte by byte, only the acknowledgement is left to be read, and that has
been there for long. If it is not, it is put as ever, under the same tick and over the same
connection, and takes the place of what was sent ahead: a wrong guess costs time and nothing else.

The main thread waits for this one before it touches anything that is captured here.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable

PAUSE = 64  # transactions without a guess after a wrong one


class Ahead:
    def __init__(self) -> None:
        self._work: queue.SimpleQueue[Callable[[], bytes]] = queue.SimpleQueue()
        self._idle = threading.Event()
        self._idle.set()
        self._thread: threading.Thread | None = None
        self._guess: bytes | None = None
        self._pause = 0

    def worthwhile(self) -> bool:
        self._pause = max(self._pause - 1, 0)
        return self._pause == 0 and self._idle.is_set()

    def begin(self, work: Callable[[], bytes]) -> None:
        """`work` sends what it guesses, and returns it."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="keepstep-ahead", daemon=True)
            self._thread.start()
        self._idle.clear()
        self._work.put(work)

    def wait(self) -> None:
        self._idle.wait()

    def judge(self, truth: bytes) -> None:
        if self._guess is not None and self._guess != truth:
            self._pause = PAUSE
        self._guess = None

    def _run(self) -> None:
        while True:
            work = self._work.get()
            try:
                self._guess = work()
            except Exception:
                # The user's pass may be changing what is looked at here. Whatever is really wrong
                # is met again in the fence, where it can be told.
                self._pause = PAUSE
            finally:
                self._idle.set()
