"""Real certificates, of authorities that live as long as the tests."""

import datetime
import os
from pathlib import Path

import pytest

from relight.wire.connection.tls import TlsFiles

trustme = pytest.importorskip("trustme", reason="trustme is not installed (make setup does)")
LONG_AGO = datetime.datetime(2001, 1, 1, tzinfo=datetime.UTC)


class Authority:
    """Issues certificates into a directory."""

    def __init__(self, directory: Path, name: str = "ca") -> None:
        directory.mkdir(parents=True, exist_ok=True)
        self._directory = directory
        self._ca = trustme.CA()
        self.path = directory / f"{name}.pem"
        self._ca.cert_pem.write_to_path(str(self.path))

    def issue(self, name: str, *hosts: str, expired: bool = False, authority: "Authority | None" = None) -> TlsFiles:
        """A certificate for these names and addresses, and the authority (another one, if given) to trust."""
        issued = self._ca.issue_cert(*hosts, not_after=LONG_AGO if expired else None, not_before=LONG_AGO)
        certificate, key = self._directory / f"{name}.pem", self._directory / f"{name}.key"
        certificate.unlink(missing_ok=True)
        key.unlink(missing_ok=True)
        for blob in issued.cert_chain_pems:
            blob.write_to_path(str(certificate), append=True)
        issued.private_key_pem.write_to_path(str(key))
        os.chmod(key, 0o600)
        trusted = (authority or self).path
        return TlsFiles(authority=str(trusted), certificate=str(certificate), key=str(key))


def flags(files: TlsFiles) -> tuple[str, ...]:
    """For `relight run`, `relight agent`, `relight weights gate` and `relay`."""
    return ("--tls-ca", files.authority, "--tls-cert", files.certificate, "--tls-key", files.key)
