"""CURVE keys: the secret key is in a file, made by `radixrt keygen`; public keys are appended to addresses. Only a peer
that knows a socket's public key can connect to it. The keys of the client and the worker socket are both derived from
the secret key, and differ."""

from __future__ import annotations

import hashlib
import secrets
from pathlib import Path

import zmq
from zmq.utils import z85

from radixrt.wire.sockets import Key


def make_secret_key(path: str) -> None:
    """Write a new CURVE secret key, 64 hex digits, readable by its owner only. Raises FileExistsError if the file
    exists."""
    file = Path(path)
    file.touch(mode=0o600, exist_ok=False)
    file.write_text(secrets.token_hex(32) + "\n")


def load_secret_key(path: str, role: str) -> Key:
    """Derive the key pair of the socket for `role` ("clients" or "workers"). Roles have different keys, so that a
    client's does not give access to the worker socket. Returns (secret, public), in Z85.

    Raises ValueError if the file is not 64 hex digits, OSError if it cannot be read."""
    try:
        root = bytes.fromhex(Path(path).read_text().strip())
    except ValueError:
        root = b""
    if len(root) != 32:
        raise ValueError(f"curve_secret_key: {path} is not a key file made by `radixrt keygen`")
    secret = z85.encode(hashlib.blake2b(root, digest_size=32, person=role.encode()).digest())
    return secret, zmq.curve_public(secret)


def is_private(path: str) -> bool:
    """Whether only its owner can access a file."""
    return not Path(path).stat().st_mode & 0o077


def public_suffix(path: str, role: str) -> str:
    """The suffix with which to connect to the socket for `role`: `#` and its public key in 64 hex digits."""
    return "#" + z85.decode(load_secret_key(path, role)[1]).hex()
