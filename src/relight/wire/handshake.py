"""The proof that a TCP peer belongs to the job: it knows the token, and never sends it. Both sides give it."""

import hashlib
import hmac
import re
from pathlib import Path

NAME = re.compile(r"[a-z0-9-]{1,64}")
ROLES = ("agent", "observer")


def hello_mac(token: bytes, nonce: bytes, role: str, name: str) -> bytes:
    """HMAC-SHA256 over nonce, role and name: worth nothing on another connection, or under another name."""
    return hmac.new(token, nonce + role.encode() + name.encode(), hashlib.sha256).digest()


def check_mac(token: bytes, nonce: bytes, role: str, name: str, mac: bytes) -> bool:
    """Whether `mac` is the one of `hello_mac`, compared in constant time."""
    return hmac.compare_digest(hello_mac(token, nonce, role, name), mac)


def transfer_mac(token: bytes, role: str, nonce: bytes, peer_nonce: bytes) -> bytes:
    """The proof between two workers, each of which proves itself: HMAC-SHA256 over role and both nonces.

    `nonce` is the source's, `peer_nonce` the target's, so a proof is worth nothing on another connection; with the role
    in front, one side's proof is not the other's, and neither is a `hello_mac`.
    """
    return hmac.new(token, b"relight transfer " + role.encode() + nonce + peer_nonce, hashlib.sha256).digest()


def welcome_mac(token: bytes, nonce: bytes, job: str) -> bytes:
    """The controller's own proof, over the nonce of the peer's Hello. "controller" is no role that a peer can have."""
    return hello_mac(token, nonce, "controller", job)


def read_token(private_dir: str | Path) -> bytes:
    """The job's token, from the private directory that only its owner can read."""
    return (Path(private_dir) / "token").read_bytes()
