"""The group of trainer and engines: it has no key, so it must not listen where others are."""

from __future__ import annotations

import os

import psutil
import pytest

from areal_lab.engines.weights.group import LOOPBACK, connect, gloo_on_loopback, open_store

INTERFACE = "GLOO_SOCKET_IFNAME"


def test_the_store_listens_on_the_given_address_alone() -> None:
    store = open_store(LOOPBACK, timeout_s=20.0)
    sockets = psutil.Process().net_connections("inet")
    where = {one.laddr.ip for one in sockets if one.laddr.port == store.port and not one.raddr}
    assert where == {LOOPBACK}
    store.set("a", "b")
    assert connect(LOOPBACK, store.port, timeout_s=20.0).get("a") == b"b"


def test_gloo_listens_on_loopback_unless_the_user_says_where(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv(INTERFACE, raising=False)
    with gloo_on_loopback():
        assert os.environ[INTERFACE] == "lo"
    assert INTERFACE not in os.environ
    monkeypatch.setenv(INTERFACE, "eth7")
    with gloo_on_loopback():
        assert os.environ[INTERFACE] == "eth7"
    assert os.environ[INTERFACE] == "eth7"
