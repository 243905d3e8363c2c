"""Certificate authorities that HTTP clients trust, read only for addresses that need them."""

from __future__ import annotations

import ssl
from functools import cache

import httpx2


def certificates_for(url: str) -> ssl.SSLContext | bool:
    """Argument `verify` of a client of `httpx2` for this address.

    By default a client reads all certificates, 0.7 MiB, which takes longer than a request. An
    `http` address needs none.
    """
    return _certificates() if url.lower().startswith("https:") else False


@cache
def _certificates() -> ssl.SSLContext:
    return httpx2.create_ssl_context(trust_env=False)
