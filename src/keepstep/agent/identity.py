"""What a node got when it joined, kept in a private folder: its key, certificate and secrets.

The folder is all that an agent needs to come back: started again with it, the agent is the same
node of the same job.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import msgspec

from keepstep.adapters.identity.private_files import private_folder, read_private, write_private
from keepstep.adapters.transport.tls import job_name
from keepstep.errors import UsageError
from keepstep.model.messages import Address, TlsFiles

KEY, CERTIFICATE, CA, NOTE = "node.key", "node.crt", "ca.crt", "node.json"


class Identity(msgspec.Struct, frozen=True, kw_only=True):
    job: str
    node: str
    token: str  # names the node to the orchestrator
    job_token: str  # for blob and state channels
    orchestrator: Address
    url: str
    directory: str
    stall_timeout_ns: int
    slots: int = 0  # as the job's spec says; 0: it says nothing
    other_orchestrators: list[Address] = []  # of which one may be active instead
    other_urls: list[str] = []


def folder(home: Path, job: str, node: str) -> Path:
    return home / "nodes" / f"{job}.{node}"


def save(path: Path, identity: Identity, *, key: bytes, certificate: str, ca: str) -> None:
    private_folder(path)
    write_private(path / KEY, key)
    write_private(path / CERTIFICATE, certificate.encode())
    write_private(path / CA, ca.encode())
    write_private(path / NOTE, msgspec.json.encode(identity))  # last: all is there


def load(path: Path) -> Identity | None:
    """None where no node has joined yet."""
    if not (path / NOTE).exists():
        return None
    try:
        return msgspec.json.decode(read_private(path / NOTE), type=Identity)
    except msgspec.DecodeError as error:
        raise UsageError(
            f"{path / NOTE} is damaged: {error}", hint=f"remove {path} and join again"
        ) from error


def remove(path: Path) -> None:
    shutil.rmtree(path, ignore_errors=True)


def ca_of(path: Path) -> str:
    return read_private(path / CA).decode()


def tls_files(path: Path, job: str) -> TlsFiles:
    return TlsFiles(
        certificate=str(path / CERTIFICATE),
        key=str(path / KEY),
        ca=str(path / CA),
        peers=job_name(job),
    )
