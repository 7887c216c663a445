"""Private files: written in one piece, readable by their owner only, refused if they are not."""

from __future__ import annotations

import os
import stat
from pathlib import Path

from keepstep.errors import UsageError


def private_folder(path: Path) -> Path:
    try:
        path.mkdir(parents=True, exist_ok=True, mode=0o700)
    except OSError as error:
        raise UsageError(
            f"cannot create {path}: {error.strerror}",
            hint="set KEEPSTEP_HOME to a directory that you may write to",
        ) from error
    return path


def write_private(path: Path, data: bytes) -> None:
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        fd = os.open(draft, os.O_CREAT | os.O_WRONLY | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        with os.fdopen(fd, "wb") as file:
            file.write(data)
        os.replace(draft, path)
    except OSError as error:
        raise UsageError(f"cannot write {path}: {error.strerror}") from error


def read_private(path: Path) -> bytes:
    """A secret that others could have read or replaced is none."""
    try:
        if path.stat().st_mode & (stat.S_IRWXG | stat.S_IRWXO):
            raise UsageError(
                f"{path} is open to others", hint="it is a secret: replace it, then chmod 600"
            )
        return path.read_bytes()
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror}") from error
