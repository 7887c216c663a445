"""The certificate authority of one orchestrator, and a node's request to it.

The authority lives in HOME/authorities/<id>, is made at the first start that needs it and stays:
its fingerprint is in every join token. Orchestrators that share a store have one authority
together, whose key is in the store and in no file. It signs two kinds of certificates and nothing
else, one for the orchestrator itself (anew at every start) and one per node of a job. A node's key
is made on the node and never leaves it; of a request only the public key is used, so a node cannot
choose what its certificate says. What a certificate says is explained in transport.tls.

There is no revocation list: a node's certificate is good for one node of one job, and ends with it.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path

from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from keepstep.adapters.identity.private_files import private_folder, read_private, write_private
from keepstep.adapters.transport.tls import ORCHESTRATOR_NAME, job_name, node_uri
from keepstep.errors import UsageError
from keepstep.model.messages import TlsFiles

AUTHORITY_DAYS = 3650
LEAF_DAYS = 825
CLOCK_SKEW = timedelta(minutes=10)
COMMON_NAME_MAX = 64  # of X.509

CA_KEY, CA_CERTIFICATE = "ca.key", "ca.crt"
SERVER_KEY, SERVER_CERTIFICATE = "server.key", "server.crt"


def folder(home: Path, id: str) -> Path:
    return home / "authorities" / id


class Authority:
    def __init__(self, path: Path, key: ec.EllipticCurvePrivateKey, ca: x509.Certificate) -> None:
        self.path = path
        self._key = key
        self._ca = ca

    @classmethod
    def open(cls, path: Path) -> Authority:
        """The authority in `path`, made now if there is none. One process at a time."""
        private_folder(path)
        if not (path / CA_CERTIFICATE).exists():
            key, ca = _new(path.name)
            # The certificate last: where it is, the key is too.
            write_private(path / CA_KEY, key)
            write_private(path / CA_CERTIFICATE, ca)
        elif not (path / CA_KEY).exists():
            raise UsageError(
                f"the key of the authority in {path} is in a shared store",
                hint="name it with --store or KEEPSTEP_STORE, or use another --id",
            )
        return cls._of(path, read_private(path / CA_KEY), read_private(path / CA_CERTIFICATE))

    @classmethod
    def shared(cls, path: Path, keep: Callable[[bytes, bytes], tuple[bytes, bytes]]) -> Authority:
        """The one of all who share a store. `keep` takes a key and its certificate and returns
        those that were kept first. An authority of our own is offered, so that nodes which have
        joined under it stay; `path` then holds only what is needed to serve."""
        private_folder(path)
        mine = cls.open(path) if (path / CA_KEY).exists() else None
        offered = _new("of a shared store")
        if mine is not None:
            offered = _private_pem(mine._key), mine.certificate.encode()
        key, ca = keep(*offered)
        if mine is not None and fingerprint(ca.decode()) != mine.fingerprint:
            raise UsageError(
                f"the authority in {path} is not the one in the store",
                hint=f"remove {path}: nodes that have joined under it must join again",
            )
        write_private(path / CA_CERTIFICATE, ca)
        (path / CA_KEY).unlink(missing_ok=True)
        return cls._of(path, key, ca)

    @classmethod
    def _of(cls, path: Path, key_pem: bytes, ca_pem: bytes) -> Authority:
        try:
            key = serialization.load_pem_private_key(key_pem, None)
            ca = x509.load_pem_x509_certificate(ca_pem)
        except ValueError as error:
            raise UsageError(
                f"the authority in {path} is damaged: {error}",
                hint="restore it, or remove it: all nodes must join again then",
            ) from error
        assert isinstance(key, ec.EllipticCurvePrivateKey)
        return cls(path, key, ca)

    @property
    def certificate(self) -> str:
        return _pem(self._ca)

    @property
    def fingerprint(self) -> str:
        return fingerprint(self.certificate)

    def serve_as(self, hosts: list[str]) -> TlsFiles:
        """A fresh certificate for the orchestrator. `hosts` are for other clients than ours."""
        key = ec.generate_private_key(ec.SECP256R1())
        names: list[x509.GeneralName] = [x509.DNSName(ORCHESTRATOR_NAME)]
        names += [_general_name(host) for host in hosts]
        issued = self._sign(
            key.public_key(), "keepstep orchestrator", names, [ExtendedKeyUsageOID.SERVER_AUTH]
        )
        write_private(self.path / SERVER_KEY, _private_pem(key))
        write_private(self.path / SERVER_CERTIFICATE, _pem(issued).encode())
        return TlsFiles(
            certificate=str(self.path / SERVER_CERTIFICATE),
            key=str(self.path / SERVER_KEY),
            ca=str(self.path / CA_CERTIFICATE),
            peers=ORCHESTRATOR_NAME,
        )

    def sign_node(self, request: str, job: str, node: str) -> str:
        """`request` is a PEM signing request; it proves that the node has the key."""
        try:
            asked = x509.load_pem_x509_csr(request.encode())
            public = asked.public_key()
            right = asked.is_signature_valid
        except (ValueError, TypeError, InvalidSignature) as error:
            raise UsageError(f"the signing request is malformed: {error}") from error
        if not right or not isinstance(public, ec.EllipticCurvePublicKey):
            raise UsageError(
                "the signing request is not acceptable", hint="it must be signed by a P-256 key"
            )
        names: list[x509.GeneralName] = [
            x509.UniformResourceIdentifier(node_uri(job, node)),
            x509.DNSName(job_name(job)),
        ]
        uses = [ExtendedKeyUsageOID.CLIENT_AUTH, ExtendedKeyUsageOID.SERVER_AUTH]
        return _pem(self._sign(public, node, names, uses))

    def _sign(
        self,
        public: ec.EllipticCurvePublicKey,
        name: str,
        names: list[x509.GeneralName],
        uses: list[x509.ObjectIdentifier],
    ) -> x509.Certificate:
        ours = self._ca.extensions.get_extension_for_class(x509.SubjectKeyIdentifier).value
        builder = _builder(name, self._ca.subject, public, LEAF_DAYS)
        builder = builder.add_extension(x509.BasicConstraints(False, None), critical=True)
        builder = builder.add_extension(_usage(signs=False), critical=True)
        builder = builder.add_extension(x509.ExtendedKeyUsage(uses), critical=False)
        builder = builder.add_extension(x509.SubjectAlternativeName(names), critical=False)
        builder = builder.add_extension(
            x509.AuthorityKeyIdentifier.from_issuer_subject_key_identifier(ours), critical=False
        )
        return builder.sign(self._key, hashes.SHA256())


def fingerprint(certificate: str) -> str:
    """SHA-256 of a PEM certificate, in hex. UsageError if it is none."""
    try:
        return (
            x509.load_pem_x509_certificate(certificate.encode()).fingerprint(hashes.SHA256()).hex()
        )
    except ValueError as error:
        raise UsageError(f"this is no certificate: {error}") from error


def new_node_key(node: str) -> tuple[bytes, str]:
    """A private key in PEM, and the signing request for it."""
    key = ec.generate_private_key(ec.SECP256R1())
    request = x509.CertificateSigningRequestBuilder(_name(node)).sign(key, hashes.SHA256())
    return _private_pem(key), request.public_bytes(serialization.Encoding.PEM).decode()


def _new(name: str) -> tuple[bytes, bytes]:
    """A key and its certificate, in PEM."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = f"keepstep authority {name}"
    builder = _builder(name, _name(name), key.public_key(), AUTHORITY_DAYS)
    builder = builder.add_extension(x509.BasicConstraints(True, 0), critical=True)
    builder = builder.add_extension(_usage(signs=True), critical=True)
    return _private_pem(key), _pem(builder.sign(key, hashes.SHA256())).encode()


def _builder(
    name: str, issuer: x509.Name, public: ec.EllipticCurvePublicKey, days: int
) -> x509.CertificateBuilder:
    now = datetime.now(UTC)
    builder = x509.CertificateBuilder(issuer, _name(name), public, x509.random_serial_number())
    builder = builder.not_valid_before(now - CLOCK_SKEW).not_valid_after(now + timedelta(days=days))
    return builder.add_extension(x509.SubjectKeyIdentifier.from_public_key(public), critical=False)


def _name(text: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, text[:COMMON_NAME_MAX])])


def _usage(*, signs: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=not signs,
        key_cert_sign=signs,
        crl_sign=signs,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        encipher_only=False,
        decipher_only=False,
    )


def _general_name(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        return x509.DNSName(host)


def _pem(certificate: x509.Certificate) -> str:
    return certificate.public_bytes(serialization.Encoding.PEM).decode()


def _private_pem(key: ec.EllipticCurvePrivateKey) -> bytes:
    return key.private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.NoEncryption(),
    )
