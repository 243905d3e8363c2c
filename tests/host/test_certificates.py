"""Clients check who replies at an https address, and read no certificates for an http one."""

from __future__ import annotations

import ssl

import pytest

from areal_lab.host.certificates import certificates_for


@pytest.mark.parametrize("url", ["https://engine:30000", "HTTPS://engine"])
def test_an_https_address_is_checked_with_certificates_that_are_read_once(url: str) -> None:
    context = certificates_for(url)
    assert isinstance(context, ssl.SSLContext)
    assert (context.verify_mode, context.check_hostname) == (ssl.CERT_REQUIRED, True)
    assert certificates_for(url) is context


def test_an_http_address_needs_none() -> None:
    assert certificates_for("http://127.0.0.1:30000") is False
