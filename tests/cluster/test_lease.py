"""The shell around a Lease: what it sends to an API server by TLS, and what it makes of the answers."""

import asyncio
import json
import ssl
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from relight.cluster import lease as shell
from relight.cluster.lease import LeaseError, LeaseKeeper, LeaseServer, check_name
from relight.core.lease import Read, Record, Write
from relight.errors import UsageError
from tests.certificates import Authority

PATH = "/apis/coordination.k8s.io/v1/namespaces/ml/leases/relight"
FOUND = {
    "metadata": {"name": "relight", "resourceVersion": "7"},
    "spec": {"holderIdentity": "a", "leaseTransitions": 3},
}


class Api:
    """A server with fixed answers that keeps the requests it got."""

    def __init__(self, directory: Path) -> None:
        self.answers: list[tuple[int, bytes]] = []
        self.asked: list[tuple[str, str, str, dict[str, Any]]] = []
        files = Authority(directory).issue("api", "127.0.0.1")
        self.authority = files.authority
        self.server = ThreadingHTTPServer(("127.0.0.1", 0), self._handler())
        context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        context.load_cert_chain(files.certificate, files.key)
        self.server.socket = context.wrap_socket(self.server.socket, server_side=True)
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    def _handler(self) -> type[BaseHTTPRequestHandler]:
        api = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                body = self.rfile.read(int(self.headers.get("Content-Length", "0")))
                token = self.headers["Authorization"]
                api.asked.append((self.command, self.path, token, json.loads(body) if body else {}))
                status, answer = api.answers.pop(0)
                self.send_response(status)
                self.send_header("Content-Length", str(len(answer)))
                self.end_headers()
                self.wfile.write(answer)

            do_PUT = do_GET

            def log_message(self, *_: object) -> None:
                pass

        return Handler


@pytest.fixture
def api(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Api]:
    found = Api(tmp_path / "tls")
    account = tmp_path / "account"
    account.mkdir()
    (account / "token").write_text("first\n")
    (account / "namespace").write_text("ml")
    (account / "ca.crt").write_bytes(Path(found.authority).read_bytes())
    monkeypatch.setattr(shell, "SERVICE_ACCOUNT", account)
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "127.0.0.1")
    monkeypatch.setenv("KUBERNETES_SERVICE_PORT", str(found.server.server_address[1]))
    yield found
    found.server.shutdown()
    found.server.server_close()


def test_the_record_is_read_with_the_newest_token(api: Api, tmp_path: Path) -> None:
    api.answers = [
        (200, json.dumps(FOUND).encode()),
        (200, json.dumps({"metadata": {"resourceVersion": "8"}}).encode()),
    ]
    server = LeaseServer("relight", 15)
    assert server.perform(Read(), {}) == (Record("7", "a", 15.0), FOUND)
    (tmp_path / "account" / "token").write_text("second")
    assert server.perform(Read(), {})[0] == Record("8", "", 15.0)  # a Lease that was never held has no fields
    assert [(method, path, token) for method, path, token, _ in api.asked] == [
        ("GET", PATH, "Bearer first"),
        ("GET", PATH, "Bearer second"),
    ]


def test_a_write_names_the_version_that_it_replaces(api: Api) -> None:
    api.answers = [(200, json.dumps({**FOUND, "metadata": {"resourceVersion": "8"}}).encode()), (409, b"{}")]
    server = LeaseServer("ml/relight", 15)
    assert server.perform(Write("7", "b"), FOUND)[0] == "8"
    assert server.perform(Write("7", "a"), FOUND)[0] == ""
    taken, renewed = (body for _, _, _, body in api.asked)
    assert taken["metadata"] == FOUND["metadata"]
    assert taken["spec"]["holderIdentity"] == "b"
    assert taken["spec"]["leaseTransitions"] == 4
    assert taken["spec"]["acquireTime"] == taken["spec"]["renewTime"]
    assert renewed["spec"]["leaseTransitions"] == 3
    assert "acquireTime" not in renewed["spec"]


@pytest.mark.parametrize(
    ("answer", "says", "is_refusal"),
    [
        ((403, b'{"message": "leases is forbidden"}'), "status 403, leases is forbidden", True),
        ((404, b'{"message": "not found"}'), "not found", True),
        ((503, b"{}"), "status 503, no words", False),
        ((200, b"<html>"), "no answer", False),
        ((200, b"[]"), "no words", False),
        ((200, b"{}"), "has no version", False),
    ],
)
def test_an_answer_of_no_use_is_told(api: Api, answer: tuple[int, bytes], says: str, is_refusal: bool) -> None:
    api.answers = [answer]
    with pytest.raises(LeaseError, match=says) as raised:
        LeaseServer("relight", 15).perform(Read(), {})
    assert raised.value.is_refusal is is_refusal


def keeper(said: list[str]) -> LeaseKeeper:
    return LeaseKeeper(LeaseServer("relight", 15), "a", 15, said.append)


def test_a_keeper_holds_the_lease_and_gives_it_up(api: Api) -> None:
    free = {"metadata": {"name": "relight", "resourceVersion": "1"}}
    taken = {"metadata": {"name": "relight", "resourceVersion": "2"}, "spec": {"holderIdentity": "a"}}
    api.answers = [(503, b"{}"), *((200, json.dumps(found).encode()) for found in (free, taken, free))]
    said = list[str]()
    lease = keeper(said)
    assert not lease.may_act()
    assert asyncio.run(lease.acquire())
    assert lease.may_act()
    assert len(said) == 1
    lease.release()
    assert not lease.may_act()
    assert [(method, body.get("spec", {}).get("holderIdentity")) for method, _, _, body in api.asked] == [
        *(("GET", None), ("GET", None), ("PUT", "a"), ("PUT", "")),
    ]


def test_a_refusal_ends_the_first_attempt_and_not_that_of_a_host_that_waits(api: Api) -> None:
    refusal = (403, b'{"message": "leases is forbidden"}')
    api.answers = [refusal]
    with pytest.raises(LeaseError, match="leases is forbidden"):
        asyncio.run(keeper([]).acquire())
    api.answers = [refusal]
    said = list[str]()
    assert not asyncio.run(keeper(said).acquire(lambda: not said, insists=True))


def test_another_authority_is_not_trusted(api: Api, tmp_path: Path) -> None:
    other = Authority(tmp_path / "other").path
    (tmp_path / "account" / "ca.crt").write_bytes(other.read_bytes())
    with pytest.raises(LeaseError, match="CERTIFICATE_VERIFY_FAILED"):
        LeaseServer("relight", 15).perform(Read(), {})
    assert not api.asked


def test_what_cannot_be_a_lease_is_refused(api: Api, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    check_name("relight")
    check_name("ml/relight")
    for name in ("", "My_lease", "a/b/c", "-x"):
        with pytest.raises(UsageError, match="expected NAME or NAMESPACE/NAME"):
            check_name(name)
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST")
    with pytest.raises(UsageError, match="no pod with a service account"):
        check_name("relight")
