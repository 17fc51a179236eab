"""TLS of the HTTP server."""

from __future__ import annotations

import ssl

from radixrt.config import FrontendConfig


def tls_context(config: FrontendConfig) -> ssl.SSLContext | None:
    """The context of `ssl_certfile` and `ssl_keyfile`; None without them. Raises ValueError, with a message of one
    line, if they cannot be used."""
    if not config.ssl_certfile:
        if config.ssl_keyfile:
            raise ValueError("--ssl-keyfile needs --ssl-certfile")
        return None
    key = config.ssl_keyfile or config.ssl_certfile
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.set_alpn_protocols(["http/1.1"])
    for name, path in (("certfile", config.ssl_certfile), ("keyfile", key)):
        try:
            open(path, "rb").close()
        except OSError as error:
            raise ValueError(f"--ssl-{name} {path}: {error.strerror}") from None
    try:
        context.load_cert_chain(config.ssl_certfile, key, _no_password)
    except ssl.SSLError as error:
        reason = error.reason or "it is not in PEM format"
        raise ValueError(f"--ssl-certfile {config.ssl_certfile}, --ssl-keyfile {key}: {reason}") from None
    return context


def _no_password() -> str:
    """Called for an encrypted key; OpenSSL would ask on the terminal."""
    raise ValueError("--ssl-keyfile: the key is encrypted; it must not be")
