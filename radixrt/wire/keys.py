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


def key_pair(root: str, role: str) -> Key:
    """The key pair of the socket for `role` ("clients" or "workers"), derived from a secret of 64 hex digits. Roles have
    different keys, so that a client's does not give access to the worker socket. Raises ValueError for other text."""
    try:
        secret = bytes.fromhex(root)
    except ValueError:
        secret = b""
    if len(secret) != 32:
        raise ValueError("a secret key is 64 hex digits")
    secret = z85.encode(hashlib.blake2b(secret, digest_size=32, person=role.encode()).digest())
    return secret, zmq.curve_public(secret)


def load_secret_key(path: str, role: str) -> Key:
    """`key_pair` of the secret in a file. Raises ValueError if the file has none, OSError if it cannot be read."""
    try:
        return key_pair(Path(path).read_text().strip(), role)
    except ValueError:
        raise ValueError(f"curve_secret_key: {path} is not a key file made by `radixrt keygen`") from None


def is_private(path: str) -> bool:
    """Whether only its owner can access a file."""
    return not Path(path).stat().st_mode & 0o077


def suffix(key: Key) -> str:
    """The suffix with which to connect to a socket: `#` and its public key in 64 hex digits."""
    return "#" + z85.decode(key[1]).hex()


def public_suffix(path: str, role: str) -> str:
    """`suffix` of the socket for `role`, whose secret is in a file."""
    return suffix(load_secret_key(path, role))
