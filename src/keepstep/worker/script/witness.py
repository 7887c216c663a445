"""Names what a step reads, that changes from step to step, and that no newcomer gets."""

from __future__ import annotations

from typing import Any


class Witness:
    def begins(self, function: Any) -> None: ...
    def ends(self, graph: Any) -> None: ...
    def unknown(self, graph: Any) -> list[str]:
        return []
