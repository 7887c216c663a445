"""Where checkpoints go and come from: the words of `keepstep run` about them, checked."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import msgspec

from keepstep.errors import UsageError

HOUR_NS = 3_600_000_000_000
AUTO = "auto"


class PeriodicOptions(msgspec.Struct, frozen=True, kw_only=True):
    directory: str = ""  # "": none are written
    interval_ns: int = 0  # 0: from what one costs
    mttf_ns: int = 0  # 0: from the number of nodes


def check_periodic(
    directory: str | None, interval: str, mttf_h: float | None, job: str, resume: str
) -> PeriodicOptions:
    interval_ns = _interval_ns(interval)
    if mttf_h is not None and not 0 < mttf_h < 1e6:
        raise UsageError(f"--mttf is {mttf_h:g}: it must be above 0", hint="give it in hours")
    if directory is None:
        if interval_ns or mttf_h is not None:
            option = "--checkpoint-interval" if interval_ns else "--mttf"
            hint = "say where to write them: --checkpoint-dir DIR"
            raise UsageError(f"{option} without periodic checkpoints", hint=hint)
        return PeriodicOptions()
    own = Path(directory).absolute() / job
    try:
        own.mkdir(parents=True, exist_ok=True)
        writable = os.access(own, os.W_OK)
    except OSError as error:
        raise UsageError(
            f"--checkpoint-dir {directory}: {error.strerror}",
            hint="give a directory that every node can write to",
        ) from error
    if not writable:
        raise UsageError(f"--checkpoint-dir {directory} is not writable")
    if complete(own) and not resume:
        raise UsageError(
            f"--checkpoint-dir {directory} has checkpoints of an earlier job {job}",
            hint=f"--resume {own} goes on from them; or choose another --job-id",
        )
    return PeriodicOptions(
        directory=str(own),
        interval_ns=interval_ns,
        mttf_ns=int(mttf_h * HOUR_NS) if mttf_h is not None else 0,
    )


def _interval_ns(interval: str) -> int:
    if interval == AUTO:
        return 0
    try:
        seconds = float(interval)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds < 1e9:
        raise UsageError(
            f"--checkpoint-interval is {interval!r}", hint="a number of seconds above 0, or auto"
        )
    return max(1, int(seconds * 1e9))


def manifest(path: Path) -> dict[str, Any] | None:
    """None: it is not complete, or no checkpoint at all."""
    try:
        found = json.loads((path / "manifest.json").read_bytes())
    except (OSError, ValueError):
        return None
    if not isinstance(found, dict) or "tick" not in found:
        return None
    # Ranks write their parts by themselves, the side state last; before the first step there is
    # none.
    ranks = range(found.get("world", 0) if found["tick"] else 0)
    return found if all((path / f"rank-{rank}.side").exists() for rank in ranks) else None


def complete(parent: Path) -> list[Path]:
    """Complete checkpoints in a directory of a job, or in one of several jobs; the newest last."""
    folders = [*parent.glob("checkpoint-*"), *parent.glob("*/checkpoint-*")]
    found = [(path, made) for path in folders if (made := manifest(path)) is not None]

    def age(one: tuple[Path, dict[str, Any]]) -> tuple[float, int]:
        written = one[1].get("written_at")
        if not isinstance(written, float):  # a just-in-time checkpoint does not say
            written = (one[0] / "manifest.json").stat().st_mtime
        return written, int(one[1]["tick"])

    return [path for path, _ in sorted(found, key=age)]


def check_resume(resume: str | None, world: int) -> str:
    """The checkpoint to start from: the directory itself, or the newest complete one in it."""
    if resume is None:
        return ""
    path = Path(resume).absolute()
    hint = "name a --checkpoint-dir, or the checkpoint-<tick> directory that a held job reported"
    if not path.is_dir():
        raise UsageError(f"--resume {resume}: no such directory", hint=hint)
    if manifest(path) is None:
        inside = complete(path)
        if not inside:
            raise UsageError(
                f"--resume {resume}: this is no complete checkpoint (manifest.json, or the part of "
                "a rank, is not there), and there is none in it",
                hint=hint,
            )
        path = inside[-1]
    ranks = (manifest(path) or {}).get("world")
    if ranks != world:
        raise UsageError(
            f"--resume {path}: it was written by {ranks} ranks, and this job has {world}",
            hint="resume with the same number of ranks",
        )
    return str(path)
