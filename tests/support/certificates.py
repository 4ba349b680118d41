"""Certificates and tokens in files, as an operator has them."""

import os
from datetime import datetime
from pathlib import Path

import trustme

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


def replace(path: Path, content: bytes) -> None:
    """Replaces a file at once, as one should."""
    fresh = path.with_name(path.name + ".new")
    fresh.write_bytes(content)
    os.replace(fresh, path)
