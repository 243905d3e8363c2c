"""Packages of `pip install 'areal_lab[train]'` and other extras, and one error if they are missing.

The base installation can simulate, plan, calibrate and read runs. Standard library only.
"""

from __future__ import annotations

from importlib.util import find_spec
from typing import Final, Literal

Extra = Literal[
    "train",
    "math",
    "json",
    "search",
    "mcp",
    "openenv",
    "reasoning-gym",
    "textarena",
    "openai",
    "notebooks",
    "tensorboard",
    "wandb",
    "swanlab",
    "trackio",
    "ray",
]

PACKAGES: Final[dict[Extra, tuple[str, ...]]] = {
    "train": (
        *("torch", "transformers", "tokenizers", "safetensors", "accelerate", "peft", "gguf"),
        *("datasets", "jaxtyping", "jinja2", "fastapi", "starlette", "uvicorn", "httptools"),
        *("httpx2", "cloudpickle", "pyarrow", "xxhash"),
    ),
    "math": ("math_verify", "sympy"),
    "json": ("jsonschema", "referencing", "llguidance"),
    "search": ("bm25s",),
    "mcp": ("mcp", "anyio"),
    "openenv": ("websockets",),
    "reasoning-gym": ("reasoning_gym",),
    "textarena": ("textarena",),
    "openai": ("openai",),
    "notebooks": ("marimo", "altair", "anywidget", "traitlets", "pandas"),
    "tensorboard": ("tensorboard",),
    "wandb": ("wandb",),
    "swanlab": ("swanlab",),
    "trackio": ("trackio",),
    "ray": ("ray",),
}
"""Import names of each extra's packages; pyproject.toml has their versions."""
_MOST_NAMED: Final = 3


class MissingExtra(ModuleNotFoundError):
    """Packages are not installed; the message has the command that installs them."""


def require(what: str, extra: Extra, *packages: str) -> None:
    """Check that packages of an extra are installed, without importing them.

    Args:
        what: what needs them, for the message.
        extra: the extra to install.
        packages: the packages needed; all of the extra if none is given.

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
