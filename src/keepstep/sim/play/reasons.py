"""Which reasons the core can give, and which of them any world has heard.

Every decision carries a sentence. All sentences are read from the core's own source: each string
or f-string that is not a docstring, an assertion or a refusal of an operator's request. A world
hears a sentence when a record says it. One that no world hears is a decision that nobody tests.
"""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Iterable
from pathlib import Path

import keepstep.core

# Views and measurements: words about what is, not why something is done.
NOT_DECISIONS = frozenset({"job_views.py", "move_plan.py", "timeline.py", "control.py"})
WORDS_MIN = 3
LENGTH_MAX = 300


class _Sentences(ast.NodeVisitor):
    def __init__(self, file: str) -> None:
        self.file = file
        self.found: dict[str, re.Pattern[str]] = {}

    def visit_Raise(self, node: ast.Raise) -> None:
        """A refusal or an assertion."""

    def visit_Assert(self, node: ast.Assert) -> None:
        """Never said."""

    def visit_Expr(self, node: ast.Expr) -> None:
        if not isinstance(node.value, ast.Constant):  # a docstring
            self.generic_visit(node)

    def visit_Call(self, node: ast.Call) -> None:
        if not (isinstance(node.func, ast.Name) and node.func.id in ("refuse", "UsageError")):
            self.generic_visit(node)

    def visit_JoinedStr(self, node: ast.JoinedStr) -> None:
        parts = [p.value if isinstance(p, ast.Constant) else "..." for p in node.values]
        self._add(node.lineno, [str(part) for part in parts])

    def visit_Constant(self, node: ast.Constant) -> None:
        if isinstance(node.value, str):
            self._add(node.lineno, [node.value])

    def _add(self, line: int, parts: list[str]) -> None:
        text = "".join(parts)
        if len(text.replace("...", " ").split()) < WORDS_MIN:
            return
        while parts[0] == "...":
            parts = parts[1:]
        while parts[-1] == "...":
            parts = parts[:-1]
        parts = [parts[0].lstrip(), *parts[1:]]
        parts = [*parts[:-1], parts[-1].rstrip()]
        pattern = "".join(".*" if part == "..." else re.escape(part) for part in parts)
        self.found[f"{self.file}: {text}"] = re.compile(pattern, re.DOTALL)


@functools.cache
def sentences() -> dict[str, re.Pattern[str]]:
    found: dict[str, re.Pattern[str]] = {}
    folder = Path(next(iter(keepstep.core.__path__)))
    for path in sorted(folder.glob("*.py")):
        if path.name not in NOT_DECISIONS:
            visitor = _Sentences(path.name)
            visitor.visit(ast.parse(path.read_text()))
            found |= visitor.found
    return found


@functools.lru_cache(maxsize=50_000)
def _heard_in(text: str) -> tuple[str, ...]:
    return tuple(name for name, pattern in sentences().items() if pattern.search(text))


def heard(texts: Iterable[str]) -> frozenset[str]:
    """Sentences that occur in what the records say; numbers do not matter. What is long was put
    together from parts that were heard before: its end is what is new."""
    plain = {re.sub(r"\d+", "0", text[-LENGTH_MAX:]) for text in texts}
    return frozenset(name for text in sorted(plain) for name in _heard_in(text))
