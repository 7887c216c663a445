"""HOME/orchestrators/<id>.json: how commands on this machine find an orchestrator and its token.

The file is the only place where the token is written down, so it is private (0600) and replaced
in one piece. It outlives a killed orchestrator on purpose: the next start under the same id takes
ports and token from it, and the agents find everything where it was. A reader therefore trusts a
file only while its process lives; the start time beside the pid tells a reused pid apart.
"""

from __future__ import annotations

import os
import re
import socket
import stat
from pathlib import Path

import msgspec

from keepstep.errors import UsageError
from keepstep.model.messages import Address

ID_PATTERN = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")


class Entry(msgspec.Struct, frozen=True, kw_only=True):
    id: str
    url: str
    stream: Address
    token: str
    pid: int
    pid_started: int  # clock ticks since boot
    jobs: list[str] = []
    embedded: bool = False  # in a launcher: never started again
    ca: str = ""  # certificate (PEM) of its authority, where it listens beyond loopback
    host: str = ""  # whose pid that is: the folder may be on a shared file system


def entry_path(home: Path, id: str) -> Path:
    return home / "orchestrators" / f"{id}.json"


def ledger_path(home: Path, id: str) -> Path:
    return home / "ledgers" / f"{id}.db"


def check_id(id: str) -> None:
    """Ids name files, so they are plain words."""
    if not ID_PATTERN.fullmatch(id):
        raise UsageError(
            f"{id!r} cannot be an id",
            hint="use letters, digits, '.', '_' and '-', at most 100 of them",
        )


def prepare_home(home: Path) -> None:
    """The state directory and its parts, private to this user."""
    try:
        for folder in (home, home / "orchestrators", home / "ledgers", home / "jobs"):
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            if not os.access(folder, os.W_OK | os.X_OK):
                raise PermissionError(13, "Permission denied")
    except OSError as error:
        raise UsageError(
            f"the state directory {home} is not writable: {error.strerror}",
            hint="set KEEPSTEP_HOME to a directory that you may write to",
        ) from error


def write(home: Path, entry: Entry) -> None:
    path = entry_path(home, entry.id)
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        fd = os.open(draft, os.O_CREAT | os.O_WRONLY | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        with os.fdopen(fd, "wb") as file:
            file.write(msgspec.json.format(msgspec.json.encode(entry)) + b"\n")
        os.replace(draft, path)
    except OSError as error:
        raise UsageError(
            f"cannot write {path}: {error.strerror}",
            hint="set KEEPSTEP_HOME to a directory that you may write to",
        ) from error


def remove(home: Path, id: str) -> None:
    entry_path(home, id).unlink(missing_ok=True)


def read(home: Path, id: str) -> Entry | None:
    """The entry of `id`, of a live or a dead process; None where there is none to be trusted."""
    path = entry_path(home, id)
    try:
        # A token that others could have written or read is no token.
        if path.stat().st_mode & (stat.S_IRWXG | stat.S_IRWXO):
            return None
        return msgspec.json.decode(path.read_bytes(), type=Entry)
    except (OSError, msgspec.DecodeError):
        return None


def live(home: Path) -> list[Entry]:
    """Entries whose process is alive, as far as can be seen from here, newest file first."""
    try:
        paths = [p for p in (home / "orchestrators").glob("*.json") if not p.name.startswith(".")]
        paths.sort(key=lambda p: p.stat().st_mtime_ns, reverse=True)
    except OSError:
        return []
    entries = (read(home, path.stem) for path in paths)
    return [e for e in entries if e is not None and is_alive(e)]


def forget_dead(home: Path) -> None:
    """Entries of killed launchers are of no use to anybody; their tokens need not lie around."""
    for entry in dead_embedded(home):
        remove(home, entry.id)


def dead_embedded(home: Path) -> list[Entry]:
    """Of launchers of this machine that were killed."""
    entries = [read(home, path.stem) for path in (home / "orchestrators").glob("*.json")]
    return [
        entry
        for entry in entries
        if entry is not None
        and entry.embedded
        and entry.host in ("", socket.gethostname())
        and not is_alive(entry)
    ]


def is_alive(entry: Entry) -> bool:
    """Of another machine (or pod) that shares the folder only asking it would tell."""
    if entry.host not in ("", socket.gethostname()):
        return True
    return process_started(entry.pid) == entry.pid_started


def process_started(pid: int) -> int | None:
    """Start time of a process that is not a zombie, as the kernel counts it."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    # The command name may hold spaces and brackets; the fields after its last bracket are plain.
    fields = text.rpartition(")")[2].split()
    return None if fields[0] in "ZX" else int(fields[19])
