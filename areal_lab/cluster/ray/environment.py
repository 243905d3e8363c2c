"""Variables that Ray reads in the driver."""

from __future__ import annotations

import os
import secrets
from typing import Final

TOKEN: Final = "RAY_AUTH_TOKEN"
"""It lets its holder run anything in the cluster: the driver gets it, other children do not."""
_DEFAULTS: Final = {
    "RAY_USAGE_STATS_ENABLED": "0",
    # Ray and Python compare to the patch level; what passes between them here does not need that.
    "RAY_DEFAULT_PYTHON_VERSION_MATCH_LEVEL": "minor",
}


def driver_environment(address: str) -> dict[str, str]:
    """Variables to add for the driver. A variable that the user has set is kept.

    A private cluster (`local`) gets a token of its own. For any other, the user's token and mode
    are passed on; without a mode, Ray takes a token if it finds one (`~/.ray/auth_token`).
    """
    added = {name: value for name, value in _DEFAULTS.items() if name not in os.environ}
    if address == "local":
        added |= {"RAY_AUTH_MODE": "token", TOKEN: secrets.token_hex(32)}
    elif TOKEN in os.environ:
        added[TOKEN] = os.environ[TOKEN]
    return added
