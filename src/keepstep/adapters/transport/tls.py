"""TLS between machines: who is believed to be whom.

Every orchestrator has a certificate authority of its own (adapters.identity), and nothing else is
trusted: neither the system's authorities nor the names and addresses of machines. Certificates
say what their owner *is*, by names that no machine in the world has:

    orchestrator.keepstep          only the orchestrator's, checked by agents and by REST clients
    <digest of job>.job.keepstep   a node of that job, checked by its peers (side state, tensors)
    keepstep:<job>/<node>          a URI; the orchestrator compares it with what an agent claims

So a node can neither pose as the orchestrator nor as a node of another job, wherever it listens,
and addresses may change, be translated or be tunnelled. Plain text is for loopback only.
"""

from __future__ import annotations

import hashlib
import ipaddress
import ssl
from typing import Any
from urllib.parse import quote, unquote

from keepstep.errors import UsageError
from keepstep.model.messages import TlsFiles

ORCHESTRATOR_NAME = "orchestrator.keepstep"
_URI_SCHEME = "keepstep:"


def is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def job_name(job: str) -> str:
    return f"{hashlib.sha256(job.encode()).hexdigest()[:40]}.job.keepstep"


def node_uri(job: str, node: str) -> str:
    return f"{_URI_SCHEME}{quote(job, safe='')}/{quote(node, safe='')}"


def node_of(certificate: Any) -> tuple[str, str] | None:
    """(job, node) from what `getpeercert()` gives for a verified certificate."""
    for kind, value in (certificate or {}).get("subjectAltName", ()):
        if kind == "URI" and value.startswith(_URI_SCHEME):
            job, _, node = value.removeprefix(_URI_SCHEME).partition("/")
            return unquote(job), unquote(node)
    return None


def server_context(files: TlsFiles, *, clients: bool) -> ssl.SSLContext:
    """`clients`: only those with a certificate of the same authority are let in."""
    context = _modern(ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER))
    _load(context, files)
    if clients:
        context.load_verify_locations(files.ca)
        context.verify_mode = ssl.CERT_REQUIRED
    return context


def client_context(files: TlsFiles) -> ssl.SSLContext:
    """For a node: shows its certificate. The server's name is given when connecting."""
    context = trusting(cafile=files.ca)
    _load(context, files)
    return context


def trusting(*, cafile: str | None = None, cadata: str | None = None) -> ssl.SSLContext:
    """Believes this authority and no other; shows nothing."""
    context = _modern(ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT))
    try:
        context.load_verify_locations(cafile=cafile, cadata=cadata)
    except (OSError, ValueError) as error:
        raise UsageError(f"the authority's certificate cannot be used: {error}") from error
    return context


def believing_anyone() -> ssl.SSLContext:
    """Only to fetch an authority's certificate, which is then compared with a fingerprint."""
    context = _modern(ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT))
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    return context


def _modern(context: ssl.SSLContext) -> ssl.SSLContext:
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    return context


def _load(context: ssl.SSLContext, files: TlsFiles) -> None:
    try:
        context.load_cert_chain(files.certificate, files.key)
    except OSError as error:
        raise UsageError(
            f"the certificate {files.certificate} or its key cannot be used: {error}",
            hint="remove that directory and join again",
        ) from error
