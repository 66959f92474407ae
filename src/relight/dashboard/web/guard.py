"""Admission of a request, decided from its headers alone. Pure.

A page in the same browser must not read this one through a name that it points at us (DNS rebinding), and no host on
the network may read it without the token. The page itself, which says nothing about the job, needs none.
"""

import hmac
import ipaddress
from collections.abc import Mapping

_HERE = frozenset({"localhost", "127.0.0.1", "::1"})

SECURITY_HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "img-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-store",
}


def is_loopback(host: str) -> bool:
    """Return whether only this machine can reach an address."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def refusal(headers: Mapping[str, str], token: str, *, is_private: bool) -> tuple[int, str] | None:
    """Return the status and the sentence with which a request is refused; None if it is not.

    Args:
        headers: by name in lower case.
        token: that private requests must carry; empty: this listens on loopback, and needs none.
        is_private: whether the answer says anything about the job.
    """
    host = _name(headers.get("host", ""))
    if not host:
        return 400, "a request needs a Host header"
    if not token and host not in _HERE and not is_loopback(host):
        return 403, f"this answers to localhost, not to {host[:100]}; open it by its address"
    origin = headers.get("origin", "")
    if origin and origin.partition("://")[2].lower() != headers["host"].lower():
        return 403, "a page of another origin may not read this one"
    if headers.get("sec-fetch-site", "none") not in ("none", "same-origin"):
        return 403, "a page of another site may not read this one"
    if is_private and token:
        given = headers.get("authorization", "").removeprefix("Bearer ")
        if not hmac.compare_digest(given.encode(), token.encode()):
            return 401, "the token is missing or wrong: open the whole address that relight printed"
    return None


def _name(host: str) -> str:
    """The name in a Host header, without the port."""
    if host.startswith("["):
        return host[1:].partition("]")[0].lower()
    return host.partition(":")[0].lower()
