"""The general spare: run the script up to its first question about who it is.

Only questions by key park (`os.environ["RANK"]`, `.get`, `getenv`, `in`): libraries iterate the
whole environment while they are imported, and must not.
"""

from __future__ import annotations

import os
import traceback
from collections.abc import Callable

QUESTIONS = frozenset({"RANK", "GROUP_RANK", "ROLE_RANK"})

_NOT_THE_SCRIPT = ("/keepstep/", "<frozen", "/os.py", "_collections_abc")

_answer: Callable[[str], None] | None = None


class ParkingEnviron(os._Environ):  # type: ignore[type-arg]
    def __getitem__(self, key: str) -> str:
        global _answer
        if key in QUESTIONS and _answer is not None:
            answer, _answer = _answer, None
            answer(_asker())
        value: str = super().__getitem__(key)
        return value


def _asker() -> str:
    """File and line of the script's own question, for `keepstep status` and benchmarks."""
    for frame in reversed(traceback.extract_stack()):
        if not any(part in frame.filename for part in _NOT_THE_SCRIPT):
            return f"{os.path.basename(frame.filename)}:{frame.lineno}"
    return "?"


def park_at_questions(answer: Callable[[str], None]) -> None:
    """`answer(where)` is called once; it returns when the process has a live, with RANK set."""
    global _answer
    _answer = answer
    os.environ.__class__ = ParkingEnviron
