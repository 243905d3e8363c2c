"""Addresses from which other machines are reached, and ports on which nothing listens."""

from __future__ import annotations

import socket

import pytest

from areal_lab.host.ports import address_towards, free_port


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost"])
def test_this_machine_reaches_itself_from_its_loopback_address(host: str) -> None:
    assert address_towards(host) == "127.0.0.1"


@pytest.mark.parametrize("host", ["::1", "[::1]", "2001:db8::7"])
def test_a_machine_that_is_named_by_an_ipv6_address_is_refused_in_one_sentence(host: str) -> None:
    with pytest.raises(ValueError, match=r"has an IPv6 address only, .*; use an IPv4") as told:
        address_towards(host)
    assert str(told.value).startswith(host)
    assert "\n" not in str(told.value)


def test_a_machine_that_is_not_reached_is_told_by_its_name() -> None:
    with pytest.raises(ValueError, match=r"this machine does not reach no-such-host\.invalid"):
        address_towards("no-such-host.invalid")


def test_a_free_port_can_be_listened_on() -> None:
    with socket.create_server(("127.0.0.1", free_port("127.0.0.1"))):
        pass
