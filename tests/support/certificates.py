"""Certificates and tokens in files, as an operator has them."""

import os
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import trustme
from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    load_pem_private_key,
)

from protos.transport.credentials import TlsFiles


class Authority:
    """A CA that writes certificates into a folder, over those that are there.

    Args:
        folder: Gets ca.pem, and for each name that it issues to NAME.pem and NAME.key.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        self._ca = trustme.CA()
        replace(self.ca, self._ca.cert_pem.bytes())

    @property
    def ca(self) -> Path:
        return self.folder / "ca.pem"

    def issue(self, name: str, *identities: str, **dates: datetime) -> TlsFiles:
        """Returns the files of one side, which trusts this CA; `dates` are not_before, not_after."""
        issued = self._ca.issue_cert(*identities, **dates)
        files = TlsFiles(self.folder / f"{name}.pem", self.folder / f"{name}.key", self.ca)
        assert files.cert is not None
        assert files.key is not None
        replace(files.cert, b"".join(pem.bytes() for pem in issued.cert_chain_pems))
        replace(files.key, issued.private_key_pem.bytes())
        return files

    def issue_to_person(self, common_name: str) -> TlsFiles:
        """Returns the files of a client whose only alternative name is one of a directory's."""
        key, now = ec.generate_private_key(ec.SECP256R1()), datetime.now(UTC)
        user = x509.OtherName(x509.ObjectIdentifier("1.3.6.1.4.1.311.20.2.3"), b"\x0c\x01u")
        builder = x509.CertificateBuilder(
            issuer_name=x509.load_pem_x509_certificate(self._ca.cert_pem.bytes()).subject,
            subject_name=x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, common_name)]),
            public_key=key.public_key(),
            serial_number=x509.random_serial_number(),
            not_valid_before=now - timedelta(days=1),
            not_valid_after=now + timedelta(days=1),
        ).add_extension(x509.SubjectAlternativeName([user]), critical=False)
        ca_key: Any = load_pem_private_key(self._ca.private_key_pem.bytes(), None)
        certificate = builder.sign(ca_key, hashes.SHA256())
        files = [self.folder / f"{common_name}.pem", self.folder / f"{common_name}.key"]
        replace(files[0], certificate.public_bytes(Encoding.PEM))
        plain = Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()
        replace(files[1], key.private_bytes(*plain))
        return TlsFiles(*files, self.ca)


def replace(path: Path, content: bytes) -> None:
    """Replaces a file at once, as one should."""
    fresh = path.with_name(path.name + ".new")
    fresh.write_bytes(content)
    os.replace(fresh, path)
