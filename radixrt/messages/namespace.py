"""Who may share cached text and KV: requests of one namespace, and no others."""

from __future__ import annotations

from hashlib import blake2b

import msgspec


class Namespace(msgspec.Struct, frozen=True, gc=False):
    """The server derives it from the API key, so that nothing that a caller sends can name another tenant's; a salt
    narrows it further. A LoRA adapter counts as a model of its own, and so does each `version` of it. Text has the
    `model` "": its tokens depend on none.

    key    its name in trees and messages, which no other namespace has: four lines, in which the line breaks of a
           tenant and a model are escaped. The salt is the last one, and may have more. Not to be given.
    """

    tenant: str = ""
    model: str = ""
    version: int = 0
    salt: str = ""
    key: str = ""

    def __post_init__(self) -> None:
        key = f"{_escaped(self.tenant)}\n{_escaped(self.model)}\n{self.version or ''}\n{self.salt}"
        msgspec.structs.force_setattr(self, "key", key)

    @classmethod
    def of(cls, key: str) -> Namespace:
        """The inverse of `key`. Missing lines are empty."""
        tenant, model, version, salt = (*key.split("\n", 3), "", "", "")[:4]
        return cls(_plain(tenant), _plain(model), int(version or 0), salt)


def tenant_digest(tenant: str) -> bytes:
    """16 bytes that stand for a tenant's name, which they do not tell."""
    return blake2b(tenant.encode("utf-8", "surrogatepass"), digest_size=16, person=b"radixrt tenant").digest()


def tenant_of(key: str) -> str:
    """The tenant of a namespace, from its key."""
    return _plain(key.partition("\n")[0])


def namespaces_of(tenant: str) -> str:
    """The beginning of the keys of all namespaces of a tenant, and of no others."""
    return f"{_escaped(tenant)}\n"


def _escaped(text: str) -> str:
    return text.replace("\\", "\\\\").replace("\n", "\\n") if "\\" in text or "\n" in text else text


def _plain(line: str) -> str:
    if "\\" not in line:
        return line
    return "\\".join(part.replace("\\n", "\n") for part in line.split("\\\\"))


NO_TENANT = Namespace()
"""Of text that is nobody's."""
