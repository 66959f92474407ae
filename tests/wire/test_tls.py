"""Faults of a certificate are found where it lies, before anything is started, and said with what to do."""

import os
import ssl
from pathlib import Path

import pytest

from relight.errors import UsageError
from relight.wire.connection.tls import Tls, TlsFiles, prove_certificate, rehearse
from tests.certificates import Authority


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("ca"))


@pytest.fixture(scope="module")
def good(authority: Authority) -> TlsFiles:
    return authority.issue("good", "127.0.0.1", "node0.example")


def refusal(files: TlsFiles, *names: str) -> str:
    with pytest.raises(UsageError) as raised:
        prove_certificate(files, *names)
    return str(raised.value)


def test_a_good_certificate_is_good_for_each_of_its_names(good: TlsFiles) -> None:
    assert prove_certificate(good, "127.0.0.1", "node0.example").files == good


@pytest.mark.parametrize("name", ["10.0.0.7", "node1.example"])
def test_another_name(good: TlsFiles, name: str) -> None:
    said = refusal(good, name)
    assert f"certificate is not valid for '{name}'" in said
    assert "issue one with this name or address as a subject alternative name" in said


def test_expired(authority: Authority) -> None:
    assert "this certificate has expired: renew it" in refusal(authority.issue("old", "a", expired=True), "a")


def test_of_another_authority(authority: Authority, tmp_path: Path) -> None:
    other = Authority(tmp_path)
    said = refusal(other.issue("host", "a", authority=authority), "a")
    assert "is not signed by the authority in --tls-ca: give all hosts the same authority" in said


@pytest.mark.parametrize("field", ["authority", "certificate", "key"])
def test_a_file_that_is_not_there(good: TlsFiles, field: str) -> None:
    files = TlsFiles(**{**{name: getattr(good, name) for name in good.__struct_fields__}, field: "/nowhere/x.pem"})
    assert "/nowhere/x.pem: No such file or directory" in refusal(files)


def test_a_key_of_another_certificate(authority: Authority, good: TlsFiles) -> None:
    other = authority.issue("other", "a")
    said = refusal(TlsFiles(authority=good.authority, certificate=good.certificate, key=other.key))
    assert "key values mismatch" in said


def test_a_key_that_others_can_read(authority: Authority) -> None:
    files = authority.issue("open", "a")
    os.chmod(files.key, 0o644)
    assert "can be read by others; chmod 600 it" in refusal(files)


def test_something_else_than_a_certificate(good: TlsFiles, tmp_path: Path) -> None:
    (tmp_path / "text.pem").write_text("hello")
    files = TlsFiles(authority=str(tmp_path / "text.pem"), certificate=good.certificate, key=good.key)
    assert "cannot be used" in refusal(files)


def test_a_renewed_certificate_counts_from_the_next_connection_on(authority: Authority) -> None:
    tls = Tls(authority.issue("renewed", "before.example"))
    rehearse(tls, "before.example")
    authority.issue("renewed", "after.example")
    rehearse(tls, "after.example")
    with pytest.raises(ssl.SSLCertVerificationError):
        rehearse(tls, "before.example")


def test_one_that_is_half_renewed_does_not_count_yet(authority: Authority) -> None:
    files = authority.issue("half", "before.example")
    tls = Tls(files)
    kept = Path(files.key).read_bytes()
    authority.issue("half", "after.example")
    renewed = Path(files.key).read_bytes()
    Path(files.key).write_bytes(kept)
    rehearse(tls, "before.example")
    Path(files.key).write_bytes(renewed)
    rehearse(tls, "after.example")
