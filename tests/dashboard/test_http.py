"""The server as a browser and as a stranger meet it: real sockets, real processes."""

import array
import json
import socket
from pathlib import Path

import pytest

from tests.dashboard.conftest import Serve
from tests.dashboard.made_up import MadeUpJob
from tests.dashboard.served import Served


@pytest.fixture
def run_dir(made: MadeUpJob, tmp_path: Path) -> Path:
    return tmp_path / "run"


@pytest.fixture
def served(run_dir: Path, serve: Serve) -> Served:
    return serve(run_dir)


def test_the_page_needs_nothing_from_elsewhere(served: Served) -> None:
    status, headers, body = served.get("/")
    assert status == 200
    policy = headers["Content-Security-Policy"]
    assert "default-src 'none'" in policy
    assert "unsafe" not in policy
    assert headers["X-Content-Type-Options"] == "nosniff"
    assert b"//" not in body.replace(b"<!doctype html>", b"")  # no address of another site
    for name, kind in (("main.js", "text/javascript"), ("style.css", "text/css"), ("icon.svg", "image/svg+xml")):
        status, headers, text = served.get(f"/{name}")
        assert (status, headers["Content-Type"].split(";")[0]) == (200, kind)
        assert b"innerHTML" not in text


@pytest.mark.parametrize("path", ["/../pyproject.toml", "/main.py", "/api/none", "//etc/passwd", "/%2e%2e/x"])
def test_nothing_else_can_be_asked_for(served: Served, path: str) -> None:
    assert served.get(path)[0] == 404


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "OPTIONS", "HEAD"])
def test_nothing_can_be_changed(served: Served, method: str) -> None:
    assert served.get("/api/events", method=method)[0] == 405


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"Host": "evil.example"}, 403),
        ({"Host": "evil.example:80"}, 403),
        ({"Host": "127.0.0.1.evil.example"}, 403),
        ({"Host": "localhost:9999"}, 200),
        ({"Host": "[::1]:9999"}, 200),
        ({"Origin": "http://evil.example"}, 403),
        ({"Origin": "null"}, 403),
        ({"Sec-Fetch-Site": "cross-site"}, 403),
        ({"Sec-Fetch-Site": "same-origin"}, 200),
    ],
)
def test_a_page_of_another_site_gets_nothing(served: Served, headers: dict[str, str], status: int) -> None:
    assert served.get("/api/log?rank=0", headers)[0] == status
    assert served.get("/", headers)[0] == status


def test_where_others_can_reach_it_a_token_is_needed(run_dir: Path, serve: Serve) -> None:
    served = serve(run_dir, host="0.0.0.0")
    assert len(served.token) >= 32
    assert served.get("/")[0] == 200  # the page itself says nothing of the job
    for path in ("/api/events", "/api/log?rank=0", "/api/tiles?shift=26&tile=0&first=0&rows=4&runs=0"):
        assert served.get(path)[0] == 401
        assert served.get(path, {"Authorization": "Bearer x"})[0] == 401
    assert served.get("/api/log?rank=0", {"Authorization": f"Bearer {served.token}"})[0] == 200
    with served.events(token=served.token) as events:
        assert next(events)[1]["whole"]


def test_events_go_on_where_they_broke_off(run_dir: Path, served: Served, made: MadeUpJob) -> None:
    served.wait_for_version(10)
    with served.events() as events:
        last, event = next(events)
    assert event["whole"]
    assert [line["rank"] for line in event["ranks"]] == [0, 1, 2, 3]
    made.note(12.0, "said without listeners")
    made.steps(1)
    served.wait_for_version(11)
    with served.events(last=last) as events:
        _, event = next(events)
    assert not event["whole"]
    assert [notice["text"] for notice in event["notices"]][-1] == "said without listeners"
    assert [line["version"] for line in event["ranks"]] == [11] * 4
    assert "failures" not in event  # nothing new there


def test_a_new_server_begins_from_the_beginning(run_dir: Path, served: Served, serve: Serve) -> None:
    with served.events() as events:
        last, _ = next(events)
    other = serve(run_dir)
    other.wait_for_version(10)
    with other.events(last=last) as events:
        _, event = next(events)
    assert event["whole"]
    assert len(event["ranks"]) == 4


def test_tiles_are_what_was_asked_for(served: Served) -> None:
    served.wait_for_version(10)
    _, _, cells = served.get("/api/tiles?shift=26&tile=0&first=1&rows=2&runs=0")
    assert len(cells) == 2 * 256
    _, _, runs = served.get("/api/tiles?shift=26&tile=0&first=3&rows=100&runs=1")
    words = array.array("i", runs)
    assert words[0] == len(words) - 1
    assert words[0] % 4 == 0


@pytest.mark.parametrize(
    "change",
    ["shift=99", "shift=-1", "shift=x", "shift=", "tile=1e9", "rows=0", "rows=99999", "runs=2", "tile=" + "9" * 40],
)
def test_a_malformed_question_is_refused(served: Served, change: str) -> None:
    query = dict(part.split("=") for part in "shift=26&tile=0&first=0&rows=4&runs=0".split("&"))
    name, _, value = change.partition("=")
    query[name] = value
    text = "&".join(f"{key}={value}" for key, value in query.items())
    status, _, body = served.get(f"/api/tiles?{text}")
    assert status == 400
    assert b"relight:" in body


@pytest.mark.parametrize(
    ("sent", "status"),
    [
        (b"hello\r\n\r\n", 400),
        (b"GET / HTTP/1.1\r\n\r\n", 400),
        (b"GET / HTTP/1.1\r\nHost: localhost\r\nHost: evil\r\n\r\n", 400),
        (b"GET / HTTP/1.1\r\nHost: localhost\r\nContent-Length: 5\r\n\r\nhello", 400),
        (b"GET / HTTP/1.1\r\nHost: localhost\r\n Folded: x\r\n\r\n", 400),
        (b"GET http://localhost/ HTTP/1.1\r\nHost: localhost\r\n\r\n", 400),
        (b"GET / HTTP/1.1\r\nX: " + b"a" * 40_000 + b"\r\n\r\n", 431),
    ],
)
def test_malformed_http_is_refused(served: Served, sent: bytes, status: int) -> None:
    with socket.create_connection(("127.0.0.1", served.port), timeout=20) as connection:
        connection.sendall(sent)
        assert connection.recv(4096).split()[1] == str(status).encode()
    assert served.get("/")[0] == 200


def test_a_log_is_read_from_its_end_and_then_on(run_dir: Path, served: Served) -> None:
    logs = run_dir / "logs"
    logs.mkdir()
    log = logs / "rank-2.log"
    assert json.loads(served.get("/api/log?rank=2")[2]) == {"begin": 0, "end": 0, "text": ""}
    log.write_bytes(b"x" * 70_000 + b"\n" + b"<b>bold</b> \xff\n")
    found = json.loads(served.get("/api/log?rank=2")[2])
    assert found["text"] == "<b>bold</b> \N{REPLACEMENT CHARACTER}\n"
    with log.open("ab") as file:
        file.write(b"more\n")
    assert json.loads(served.get(f"/api/log?rank=2&since={found['end']}")[2])["text"] == "more\n"


def test_many_connections_are_turned_away_and_harm_nobody(served: Served) -> None:
    held = [socket.create_connection(("127.0.0.1", served.port), timeout=20) for _ in range(80)]
    try:
        answers = []
        for connection in held[64:]:
            connection.sendall(b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n")
            answers.append(connection.recv(4096).split()[1])
        assert b"503" in answers
    finally:
        for connection in held:
            connection.close()
    served.wait_for_version(10)
