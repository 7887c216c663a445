"""Where records become durable. `append` returns only when they are."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Protocol

from keepstep.model.records import Record


class Ledger(Protocol):
    def append(self, records: Sequence[Record]) -> None: ...

    def read(self) -> Iterator[Record]: ...

    def close(self) -> None: ...
