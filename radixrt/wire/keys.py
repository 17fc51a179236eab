"""CURVE keys: the secret one in a file, the public ones behind addresses. `radixrt keygen` makes the file. Nobody who
does not know the public key of a socket can connect to it, and one secret gives the clients' and the workers' socket
different keys."""

from __future__ import annotations

import hashlib
import secrets
from pathlib import Path

import zmq
from zmq.utils import z85


def make_secret_key(path: str) -> None:
    """Write a new CURVE secret key, 64 hex digits, readable by its owner only. FileExistsError if there is one."""
    file = Path(path)
    file.touch(mode=0o600, exist_ok=False)
    file.write_text(secrets.token_hex(32) + "\n")


def load_secret_key(path: str, role: str) -> tuple[bytes, bytes]:
    """(secret, public), z85, of `role` ("clients" or "workers"), derived so that a client's key opens no worker socket.

    ValueError if the file is not 64 hex digits; OSError if it cannot be read."""
    try:
        root = bytes.fromhex(Path(path).read_text().strip())
    except ValueError:
        root = b""
    if len(root) != 32:
        raise ValueError(f"curve_secret_key: {path} is not a key file made by `radixrt keygen`")
    secret = z85.encode(hashlib.blake2b(root, digest_size=32, person=role.encode()).digest())
    return secret, zmq.curve_public(secret)


def is_private(path: str) -> bool:
    """Whether nobody but its owner can read a file."""
    return not Path(path).stat().st_mode & 0o077


def public_suffix(path: str, role: str) -> str:
    """What to append to the address of the socket of `role` to connect to it: `#` and 64 hex digits."""
    return "#" + z85.decode(load_secret_key(path, role)[1]).hex()
