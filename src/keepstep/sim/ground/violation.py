"""A rule of the world is broken."""

from __future__ import annotations

from typing import NoReturn


class Violation(AssertionError):
    """Something happened that must never happen."""


def violated(what: str) -> NoReturn:
    raise Violation(what)


def ensure(condition: bool, what: str) -> None:
    if not condition:
        raise Violation(what)
