"""A model folder of a stranger: whatever it holds, nothing of it is run."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from areal_lab.agents.template import load_template
from areal_lab.engines.embedded.loading import load_model
from areal_lab.training.model import load_policy, load_value_model
from benchmarks.tiny_model import write_tiny_model

CODE = """
from pathlib import Path
Path({marker!r}).touch()
from transformers import LlamaConfig as Config, LlamaForCausalLM as Model
from transformers import PreTrainedTokenizerFast as Tokenizer
"""
LOADERS: list[Callable[[Path], Any]] = [
    load_policy,
    load_value_model,
    lambda folder: load_model(folder, torch.float32),
]


class Bomb:
    """Makes a file when it is unpickled."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.marker,)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_tiny_model(tmp_path / "model")
    return tmp_path / "model"


def change(file: Path, **values: Any) -> None:
    file.write_text(json.dumps({**json.loads(file.read_text()), **values}))


@pytest.mark.parametrize("known", [True, False])
@pytest.mark.parametrize("load", LOADERS)
def test_code_in_a_model_folder_is_not_run(
    folder: Path, load: Callable[[Path], Any], known: bool
) -> None:
    """If transformers knows the architecture, its own class is used instead."""
    marker = folder / "ran"
    (folder / "code.py").write_text(CODE.format(marker=str(marker)))
    names = {
        "AutoConfig": "code.Config",
        "AutoModelForCausalLM": "code.Model",
        "AutoModelForSequenceClassification": "code.Model",
    }
    kind = {} if known else {"model_type": "unheard-of", "architectures": ["Model"]}
    change(folder / "config.json", auto_map=names, **kind)
    tokenizer = {} if known else {"tokenizer_class": "Tokenizer"}
    change(
        folder / "tokenizer_config.json",
        auto_map={"AutoTokenizer": [None, "code.Tokenizer"]},
        **tokenizer,
    )
    if known:
        load(folder)
    else:
        with pytest.raises(ValueError, match="contains custom code which must be executed"):
            load(folder)
    assert not marker.exists()


@pytest.mark.parametrize("load", LOADERS[:2])
def test_pickled_weights_are_read_as_tensors_only(
    folder: Path, load: Callable[[Path], Any]
) -> None:
    """The embedded engine reads safetensors alone."""
    marker = folder / "ran"
    (folder / "model.safetensors").unlink()
    torch.save({"model.norm.weight": Bomb(marker)}, folder / "pytorch_model.bin")
    with pytest.raises(Exception, match="Weights only load failed"):
        load(folder)
    assert not marker.exists()


def test_a_chat_template_reaches_neither_files_nor_types(folder: Path) -> None:
    for source in (
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ messages.__class__.__init__.__globals__ }}",
        "{% include 'config.json' %}",
        "{{ messages.append(1) }}",
    ):
        (folder / "chat_template.jinja").write_text(source)
        template = load_template(folder)
        with pytest.raises(ValueError, match="the chat template refuses the conversation"):
            template.data([])
