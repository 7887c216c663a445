"""Files of a checkpoint: written whole or not at all."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Final

FORMAT: Final = 1


def put(path: Path, data: bytes) -> None:
    temporary = path.with_suffix(path.suffix + ".tmp")
    with temporary.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)
