"""HTTP/1.1, as little of it as a page of one job needs: GET requests without a body. No sockets here but streams."""

import asyncio
from collections.abc import Mapping
from urllib.parse import parse_qsl, urlsplit

import msgspec

from relight.dashboard.web.guard import SECURITY_HEADERS

MAX_HEAD_BYTES = 16 * 1024
_REASONS = {
    200: "OK",
    400: "Bad Request",
    401: "Unauthorized",
    403: "Forbidden",
    404: "Not Found",
    405: "Method Not Allowed",
    431: "Request Header Fields Too Large",
    503: "Service Unavailable",
}


class Request(msgspec.Struct, frozen=True):
    """A request without a body."""

    method: str
    path: str
    query: dict[str, str]
    headers: dict[str, str]  # by name in lower case


class BadRequest(Exception):
    """Answered with `status`; the connection is closed."""

    def __init__(self, status: int, why: str) -> None:
        super().__init__(why)
        self.status = status


async def read_request(reader: asyncio.StreamReader) -> Request | None:
    """The next request; None at the end of the connection. Raises BadRequest. The reader's limit bounds the head."""
    try:
        head = await reader.readuntil(b"\r\n\r\n")
    except asyncio.LimitOverrunError:
        raise BadRequest(431, f"a request's head may have {MAX_HEAD_BYTES} bytes") from None
    except (asyncio.IncompleteReadError, ConnectionError):
        return None
    return parse_request(head)


def parse_request(head: bytes) -> Request:
    """Read a head that ends with an empty line. Raises BadRequest."""
    first, *lines = head[:-4].decode("latin-1").split("\r\n")
    parts = first.split(" ")
    if len(parts) != 3 or not parts[2].startswith("HTTP/1."):
        raise BadRequest(400, "this is no HTTP/1.1 request")
    method, target, _ = parts
    if method != "GET":
        raise BadRequest(405, "nothing can be changed here: GET only")
    headers: dict[str, str] = {}
    for line in lines:
        name, colon, value = line.partition(":")
        if not colon or not name or name != name.strip() or name.lower() in headers:
            raise BadRequest(400, "a header line is malformed, or given twice")
        headers[name.lower()] = value.strip()
    if "transfer-encoding" in headers or headers.get("content-length", "0") != "0":
        raise BadRequest(400, "a request here has no body")
    if not target.startswith("/"):
        raise BadRequest(400, "a request's target is a path")
    try:
        split = urlsplit(target)
        query = dict(parse_qsl(split.query, strict_parsing=bool(split.query), max_num_fields=16))
    except ValueError:
        raise BadRequest(400, "the query is malformed") from None
    return Request(method, split.path, query, headers)


def head(status: int, kind: str, length: int | None, extra: Mapping[str, str] | None = None) -> bytes:
    """The head of an answer. Without a length the body ends with the connection."""
    fields = {
        "Content-Type": kind,
        **({"Connection": "close"} if length is None else {"Content-Length": str(length)}),
        **SECURITY_HEADERS,
        **(extra or {}),
    }
    lines = [f"HTTP/1.1 {status} {_REASONS[status]}", *(f"{name}: {value}" for name, value in fields.items())]
    return "\r\n".join([*lines, "", ""]).encode("latin-1")
