"""What makes a block's bytes its own: digests of paths, checksums bound to them, and encryption.

A path's digest covers the fingerprint, the namespace and all its ids, as blake2b of its parent's digest and its own ids
(keyed, if there is a key). A part's seal covers its bytes, its path's digest, its number and its rank: XXH3, 128 bits,
which costs less than reading memory; with a key the tag of AES-GCM instead. Bytes that are torn, of another block, of
another model, or of a file that was swapped do not verify.
"""

from __future__ import annotations

import hmac
import os
import struct
from hashlib import blake2b
from typing import Any

import xxhash

SEAL_BYTES = 16
FORMAT = 1
"""Of segments and digests; another one is another fingerprint."""
_KINDS = {"kv": b"k", "state": b"s"}


class BadSeal(Exception):
    """Bytes are not what was written under this key."""


class Seals:
    """Of one fingerprint, `ranks` and key."""

    def __init__(self, fingerprint: str, rank: int, ranks: int, key: bytes | None) -> None:
        self._rank = rank
        self._secret = b"" if key is None else _derived(key, b"radixrt digests")
        self._index: Any = None
        self._master = b""
        if key is not None:
            self._master = _derived(key, b"radixrt segments")
            self._index = _aes(_derived(key, b"radixrt index"))
        self.fingerprint = self._digest(f"{FORMAT} {ranks} {fingerprint}".encode())
        """The name that a fingerprint has in the folder, 16 bytes. Under another key it has another."""
        self.key_name = self._digest(b"key") if key is not None else b""
        """Tells keys apart."""

    @property
    def overhead(self) -> int:
        """Bytes that a part takes beside its rows."""
        return 0 if self._index is None else SEAL_BYTES

    def root(self, namespace: str) -> bytes:
        """Digest of the empty path of a namespace."""
        return self._digest(self.fingerprint + namespace.encode())

    def path(self, parent: bytes, kind: str, start: int, ids: bytes) -> bytes:
        """Digest of a block's path, from its parent's or the root."""
        return self._digest(parent + _KINDS[kind] + start.to_bytes(8, "little") + ids)

    def seal(self, number: int, path: bytes, data: memoryview) -> bytes:
        """Of a part's bytes, without a key."""
        digest = xxhash.xxh3_128(data)
        digest.update(self._bound(number, path, len(data)))
        return digest.digest()

    def verify(self, number: int, path: bytes, data: memoryview, seal: bytes) -> None:
        """Raises BadSeal."""
        if self.seal(number, path, data) != seal:
            raise BadSeal

    @property
    def encrypted(self) -> bool:
        return self._index is not None

    def encrypt(self, number: int, path: bytes, file: bytes, offset: int, data: memoryview, out: memoryview) -> bytes:
        """`data` into `out`, which has room for `SEAL_BYTES` more. Returns the seal. `file`: what the key of its
        segment is derived from. Offsets of a segment are used once, so no nonce is used twice."""
        size = len(data)
        bound = self._bound(number, path, size)
        _aes(_derived(self._master, file)).encrypt_into(_nonce(offset), data, bound, out[: size + SEAL_BYTES])
        return bytes(out[size : size + SEAL_BYTES])

    def decrypt(
        self, number: int, path: bytes, file: bytes, offset: int, data: memoryview, seal: bytes, out: memoryview
    ) -> None:
        """`data`, with its seal at the end, into `out`. Raises BadSeal."""
        bound = self._bound(number, path, len(out))
        if data[len(out) :] != seal:
            raise BadSeal
        try:
            _aes(_derived(self._master, file)).decrypt_into(_nonce(offset), data, bound, out)
        except Exception as e:  # InvalidTag, of a module that is not always there
            raise BadSeal from e

    def hide(self, text: bytes, bound: bytes) -> bytes:
        """`text` for the index: as it is without a key."""
        if self._index is None:
            return text
        nonce = os.urandom(12)
        return nonce + self._index.encrypt(nonce, text, bound)

    def show(self, hidden: bytes, bound: bytes) -> bytes:
        """The inverse. Raises BadSeal."""
        if self._index is None:
            return hidden
        try:
            return self._index.decrypt(hidden[:12], hidden[12:], bound)
        except Exception as e:
            raise BadSeal from e

    def _digest(self, data: bytes) -> bytes:
        return blake2b(data, digest_size=16, key=self._secret).digest()

    def _bound(self, number: int, path: bytes, nbytes: int) -> bytes:
        return self.fingerprint + path + struct.pack("<QIQ", number, self._rank, nbytes)


def check_key(key: bytes) -> None:
    """Raises ValueError if encryption cannot work."""
    if len(key) < 16:
        raise ValueError("kv_disk_key_file: fewer than 16 bytes")
    try:
        from cryptography.hazmat.primitives.ciphers.aead import AESGCM
    except ImportError as e:
        raise ValueError(f"kv_disk_key_file: pip install 'radixrt[encryption]' ({e})") from e
    if not hasattr(AESGCM, "decrypt_into"):
        raise ValueError("kv_disk_key_file: pip install 'radixrt[encryption]' (this `cryptography` is too old)")


def _aes(key: bytes) -> Any:
    from cryptography.hazmat.primitives.ciphers.aead import AESGCM

    return AESGCM(key)


def _derived(key: bytes, purpose: bytes) -> bytes:
    """32 bytes: HMAC-SHA-256, a pseudorandom function of the key."""
    return hmac.digest(key, purpose, "sha256")


def _nonce(offset: int) -> bytes:
    return offset.to_bytes(12, "little")
