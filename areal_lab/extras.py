"""What `pip install 'areal_lab[train]'` adds, and one clear error where it is missing.

The base install simulates, plans, calibrates and reads runs. Standard library only.
"""

from __future__ import annotations

from importlib.util import find_spec
from typing import Final, Literal

Extra = Literal["train", "notebooks"]

PACKAGES: Final[dict[Extra, tuple[str, ...]]] = {
    "train": (
        *("torch", "transformers", "tokenizers", "safetensors", "accelerate", "peft", "gguf"),
        *("datasets", "jaxtyping", "fastapi", "uvicorn", "httpx", "cloudpickle", "xxhash"),
    ),
    "notebooks": ("marimo", "pandas"),
}
"""The packages of each extra, as they are imported; pyproject.toml has their versions."""
_MOST_NAMED: Final = 3


class MissingExtra(ModuleNotFoundError):
    """Something needs packages that are not installed; the message has the command."""


def require(what: str, extra: Extra, *packages: str) -> None:
    """Refuse to continue without packages of an extra; imports none of them.

    Args:
        what: what needs them, at the beginning of the message.
        packages: those that are needed; all of the extra if none is given.

    Raises:
        MissingExtra: in one line, with the command that installs them.
    """
    missing = [one for one in packages or PACKAGES[extra] if find_spec(one) is None]
    if missing:
        more = f" and {len(missing) - _MOST_NAMED} more" if len(missing) > _MOST_NAMED else ""
        raise MissingExtra(
            f"{what} needs packages that are not installed ({', '.join(missing[:_MOST_NAMED])}"
            f"{more}); run: pip install 'areal_lab[{extra}]'",
            name=missing[0],
        )
