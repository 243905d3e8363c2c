"""Which tests share a worker in `make test-cluster` (`--dist loadgroup`)."""

from __future__ import annotations

import pytest


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Lost hosts first, each test on its own: they take minutes. A file of others shares a worker,
    for its clusters."""
    items.sort(key=lambda item: item.path.name != "test_host_faults.py")
    for item in items:
        if item.path.name != "test_host_faults.py":
            item.add_marker(pytest.mark.xdist_group(str(item.path)))
