"""A model folder that is broken or incomplete is refused in one line, before anything starts."""

from __future__ import annotations

import json
import os
import random
import resource
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText
from typer.testing import CliRunner

from areal_lab.cli.app import app
from areal_lab.config.load import load_config
from areal_lab.config.problem import ConfigError
from areal_lab.data.wrapping import Wrapping
from areal_lab.engines.embedded import server
from areal_lab.engines.embedded.loading import load_model
from areal_lab.models.complete import check_folder, expected_tensors, quantization, read_sizes
from areal_lab.models.folder import end_token_ids, read_model_facts
from areal_lab.models.load import load_pretrained
from areal_lab.models.locate import INCLUDED_MODELS, ModelNotFound, resolve_model_path
from areal_lab.models.vision import read_placeholder_tokens, read_vision_facts
from areal_lab.resolve.check import check_model, check_other_models, check_tokens
from areal_lab.resolve.memory import estimate
from areal_lab.resolve.placement import place_run
from areal_lab.resolve.vision import check_vision_model
from areal_lab.rewards.model import RewardModel
from areal_lab.training.model import load_policy, load_value_model
from benchmarks.tiny_model import write_tiny_model
from tests.fuzz import damaged_bytes, damaged_json, mutations, one_line

KINDS = ("llama", "mistral", "qwen2", "qwen3", "qwen2_vl", "qwen2_5_vl", "qwen3_vl")


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tiny")
    write_tiny_model(folder)
    return folder


@pytest.fixture
def folder(tiny: Path, tmp_path: Path) -> Path:
    """A complete Llama of two layers, to be damaged."""
    copy = tmp_path / "model"
    copy.mkdir()
    for file in tiny.iterdir():
        (copy / file.name).write_bytes(file.read_bytes())
    return copy


def change_tensors(folder: Path, change: Callable[[dict[str, torch.Tensor]], Any]) -> None:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    (folder / "model.safetensors").unlink()
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})


def change_config(folder: Path, **values: Any) -> None:
    file = folder / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **values}))


def without(*parts: str) -> Callable[[dict[str, torch.Tensor]], None]:
    def change(tensors: dict[str, torch.Tensor]) -> None:
        for name in [name for name in tensors if any(part in name for part in parts)]:
            del tensors[name]

    return change


def refusal(folder: Path) -> str:
    """The message of the refusal, which is the same in every command."""
    with pytest.raises(ModelNotFound) as caught:
        resolve_model_path(folder)
    assert one_line(caught.value)
    return str(caught.value)


def shard(folder: Path) -> dict[str, str]:
    """Split the weights into two files with an index; returns its map."""
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    names = sorted(tensors)
    parts = {"a.safetensors": names[::2], "b.safetensors": names[1::2]}
    for file, of_file in parts.items():
        save_file({name: tensors[name] for name in of_file}, folder / file, {"format": "pt"})
    where = {name: file for file, of_file in parts.items() for name in of_file}
    (folder / "model.safetensors.index.json").write_text(
        json.dumps({"metadata": {}, "weight_map": where})
    )
    return where


def test_complete_folders_pass(folder: Path, tmp_path: Path) -> None:
    assert resolve_model_path(folder) == folder
    # What may be absent, or beside the model's tensors.
    extra = {"score.weight": torch.zeros(1, 64), "mtp.layers.0.x.weight": torch.zeros(2)}
    change_tensors(folder, lambda tensors: tensors.update(extra))
    inverse = {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.zeros(8)}
    change_tensors(folder, lambda tensors: tensors.update(inverse))
    resolve_model_path(folder)
    load_pretrained(folder, dtype=torch.float32, attention="sdpa")
    shard(folder)
    resolve_model_path(folder)
    load_pretrained(folder, dtype=torch.float32, attention="sdpa")
    for one in INCLUDED_MODELS.values():
        check_folder(one)
    load_value_model(folder)
    body = AutoModelForCausalLM.from_pretrained(folder).model
    body.save_pretrained(tmp_path / "body")  # named without `model.`, as embedding models are
    check_folder(tmp_path / "body")


@pytest.mark.parametrize("kind", KINDS)
def test_the_tensors_of_known_architectures_are_those_of_transformers(
    kind: str, tmp_path: Path
) -> None:
    for biased in (False, True):
        sizes = {
            **{"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2},
            **{"num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 40},
        }
        if kind in ("llama", "qwen3", "qwen3_vl"):
            sizes["attention_bias"] = biased
        if kind == "llama":
            sizes["mlp_bias"] = biased
        given = {"text_config": sizes} if kind.endswith("vl") else sizes
        config = AutoConfig.for_model(kind, **given)
        vision = kind.endswith("vl")
        made: Any = AutoModelForImageTextToText if vision else AutoModelForCausalLM
        with torch.device("meta"):
            model = made.from_config(config)
        config.save_pretrained(tmp_path)
        prefix = "model.language_model." if vision else "model."
        expected = dict(expected_tensors(read_sizes(tmp_path / "config.json"), prefix))
        assert expected == {
            name: list(tensor.shape)
            for name, tensor in model.state_dict().items()
            if "visual" not in name and name != "lm_head.weight"
        }


def test_a_known_decoder_is_found_beside_other_parts(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    for prefix in ("model.text_model.", "language_model.model.", "new.name."):
        tensors = load_file(INCLUDED_MODELS["Adder-75K"] / "model.safetensors")
        text = json.loads((INCLUDED_MODELS["Adder-75K"] / "config.json").read_text())
        named = {f"{prefix}{name.removeprefix('model.')}": one for name, one in tensors.items()}
        nested = {"model_type": "idefics3", "text_config": text, "tie_word_embeddings": True}
        (folder / "config.json").write_text(json.dumps(nested))
        (folder / "model.safetensors").unlink()
        save_file(named, folder / "model.safetensors")
        check_folder(folder)
        change_tensors(folder, without("layers.1."))
        if prefix == "new.name.":
            check_folder(folder)
        else:
            assert "lacks 9 tensors of the 20" in refusal(folder)
    (folder / "config.json").write_text(json.dumps(config))
    assert "lacks 20 tensors" in refusal(folder)


def test_half_of_the_layers_is_refused_for_every_model_of_a_run(
    folder: Path,
) -> None:
    """Engines and transformers fill what is missing with random numbers."""
    change_tensors(folder, without(".layers.1."))
    said = refusal(folder)
    assert "lacks 9 tensors of the 20 that config.json asks for (llama, 2 layers)" in said
    assert "model.layers.1.self_attn.q_proj.weight" in said
    assert said.endswith(
        "and 4 more; download or copy the folder again, or correct its config.json"
    )
    others = [f"{one}.path={folder}" for one in ("ref", "teacher", "critic")]
    config = load_config(None, [*others, "actor.kl_loss_coef=0.1", "actor.advantage=gae"])
    found = list(check_other_models(config))
    assert {one.setting for one in found} == {"ref.path", "teacher.path", "critic.path"}
    assert all("lacks 9 tensors" in one.message for one in found)
    for load in (load_policy, load_value_model, lambda one: load_model(one, torch.float32)):
        with pytest.raises(ValueError, match="lacks 9 tensors") as caught:
            load(folder)
        assert one_line(caught.value)


def test_commands_and_engines_name_what_a_folder_lacks(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    change_tensors(folder, without(".layers.1."))
    monkeypatch.chdir(tmp_path)
    rows, model = tmp_path / "rows.jsonl", str(folder)
    rows.write_text('{"prompt": "1+1=", "answer": "2", "response": "2"}\n')
    for command in (
        ["engine", "serve", "embedded", "--model-path", model],
        ["eval", model, "tiny"],
        ["gateway", model],
        ["train", "tiny", f"actor.path={model}"],
        ["cosim", "tiny", f"actor.path={model}"],
        ["sft", f"actor.path={model}", f"dataset.path={rows}"],
    ):
        result = CliRunner().invoke(app, command)
        assert result.exit_code == 2, command
        assert "lacks 9 tensors of the 20 that config.json asks for" in result.output
        assert "Traceback" not in result.output
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model", "rows.jsonl"]
    with pytest.raises(SystemExit, match="lacks 9 tensors"):
        server.main(["--model-path", model])
    Wrapping().write(folder)
    with pytest.raises(ModelNotFound, match="lacks 9 tensors"):
        RewardModel(model)


@pytest.mark.parametrize(
    ("change", "config", "said"),
    [
        (without("model.norm"), {}, "lacks 1 tensors of the 20 .*: model.norm.weight; "),
        (without("embed_tokens"), {}, "lacks 1 tensors .*: model.embed_tokens.weight; "),
        (without(""), {}, "lacks 20 tensors"),
        (None, {"num_hidden_layers": 4}, "lacks 18 tensors of the 38"),
        (None, {"num_hidden_layers": 1}, "has 9 tensors in its layers that .* has no place for"),
        (None, {"model_type": "qwen3"}, r"lacks 4 tensors .*self_attn\.q_norm"),
        (None, {"model_type": "qwen2"}, r"lacks 6 tensors .*self_attn\.q_proj\.bias"),
        (
            lambda tensors: tensors.update(
                {
                    name: tensor.to(torch.float8_e4m3fn)
                    for name, tensor in tensors.items()
                    if name.endswith("_proj.weight")
                }
            ),
            {},
            r"has 14 weights that are quantized \(.* is F8_E4M3, .*\), but neither its config.json",
        ),
        (None, {"tie_word_embeddings": False}, "lacks lm_head.weight, its output layer"),
        (None, {"hidden_size": 128}, "has 20 tensors of another size .* is .* and must be"),
        (None, {"vocab_size": 77}, r"embed_tokens.weight is \[18, 64\] and must be \[77, 64\]"),
        (None, {"num_key_value_heads": 4}, r"4 tensors .*k_proj.weight is \[32, 64\] and must be"),
        (None, {"intermediate_size": 8}, "6 tensors of another size"),
        (None, {"num_hidden_layers": 10**12}, "num_hidden_layers is 1000000000000: .*10000"),
        (None, {"hidden_size": "64"}, "hidden_size is '64': input should be a valid integer"),
        (None, {"hidden_size": -1}, "hidden_size is -1: input should be greater than or equal"),
        (None, {"hidden_size": None}, "must be whole numbers in a llama model"),
        (None, {"num_attention_heads": [4]}, "must be whole numbers in a llama model"),
        (None, {"text_config": []}, "text_config is a list, but must be an object"),
        (
            lambda tensors: tensors.update({"model.layers.0.q_norm.weight": torch.zeros(4)}),
            {},
            "has 1 tensors in its layers .*: model.layers.0.q_norm.weight",
        ),
        (
            lambda tensors: [
                tensors.update({f"transformer.h.{name}": tensors.pop(name)})
                for name in list(tensors)
            ],
            {},
            "lacks 20 tensors",
        ),
        # Another architecture: every layer and every expert must be there.
        (
            without(".layers.1."),
            {"model_type": "olmo2"},
            r"lacks 1 of the 2 layers .*layers\.1\.\*",
        ),
        (
            lambda tensors: tensors.update({"model.layers.0.mlp.experts.1.x": torch.zeros(4)}),
            {"model_type": "mixtral", "num_local_experts": 3},
            r"lacks 2 of 3 experts a layer .*experts\.0\.\*, model\.layers\.0\.mlp\.experts\.2",
        ),
    ],
)
def test_tensors_that_do_not_fit_the_configuration_are_named(
    folder: Path, change: Any, config: dict[str, Any], said: str
) -> None:
    if change is not None:
        change_tensors(folder, change)
    change_config(folder, **config)
    assert refusal(folder)
    with pytest.raises(ModelNotFound, match=said):
        resolve_model_path(folder)


def test_what_only_transformers_knows_is_compared_when_it_is_loaded(tmp_path: Path) -> None:
    config = AutoConfig.for_model(
        "olmo2", hidden_size=32, intermediate_size=48, num_hidden_layers=2, vocab_size=40,
        num_attention_heads=4, num_key_value_heads=4, pad_token_id=1,
    )  # fmt: skip
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    load_policy(tmp_path)
    change_tensors(tmp_path, without("layers.1.self_attn.q_norm", "model.norm"))
    check_folder(tmp_path)
    with pytest.raises(ModelNotFound, match=r"lacks 2 tensors .* \(Olmo2ForCausalLM\): .*norm"):
        load_policy(tmp_path)
    change_config(tmp_path, intermediate_size=64)
    change_tensors(
        tmp_path, lambda t: t.update(AutoModelForCausalLM.from_config(config).state_dict())
    )
    with pytest.raises(ModelNotFound, match=r"6 tensors of another size .*\[48, 32\] and must be"):
        load_policy(tmp_path)
    with pytest.raises(ValueError, match="6 tensors of another size"):
        load_model(tmp_path, torch.float32)


def test_an_engine_that_cannot_load_its_folder_ends_with_one_line(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """In the scheduler's thread, whose errors in a step end the process with a traceback."""
    change_config(folder, rope_parameters={"rope_type": "unheard-of"})
    ended: list[int] = []
    monkeypatch.setattr(os, "_exit", ended.append)
    options = server._parser().parse_args(["--model-path", str(folder)])
    server._loaded(options)
    assert ended == [1]
    said = capfd.readouterr().err.splitlines()[-1]
    assert said.startswith("error: ")
    assert "unheard-of" in said


def test_a_value_output_of_another_size_is_refused(folder: Path) -> None:
    change_tensors(folder, lambda tensors: tensors.update({"score.weight": torch.zeros(2, 64)}))
    with pytest.raises(ModelNotFound, match=r"score.weight is \[2, 64\] and must be \[1, 64\]"):
        load_value_model(folder)


def test_shards_must_be_there_and_be_unambiguous(folder: Path) -> None:
    index = folder / "model.safetensors.index.json"
    where = shard(folder)
    (folder / "b.safetensors").rename(folder / "c.safetensors")
    assert "names 2 files, of which 1 are missing: b.safetensors; download" in refusal(folder)
    (folder / "c.safetensors").rename(folder / "b.safetensors")
    index.write_text(json.dumps({"metadata": {}, "weight_map": {**where, "more": "a.safetensors"}}))
    assert "names 1 tensors that its files lack: more" in refusal(folder)
    for wrong in ("../a.safetensors", "/etc/passwd", "", 3, None, ["a"], "..", "\0", "é" * 200):
        index.write_text(json.dumps({"metadata": {}, "weight_map": {**where, "more": wrong}}))
        assert "but must name a file of its folder" in refusal(folder)
    empty: list[dict[str, Any]] = [{}, {"weight_map": []}, {"weight_map": {}}]
    for broken in empty:
        index.write_text(json.dumps(broken))
        assert "has no weight_map" in refusal(folder)
    index.write_text(json.dumps({"weight_map": where}))
    assert "has no metadata, which transformers reads" in refusal(folder)
    index.write_text(json.dumps({"metadata": {}, "weight_map": where}))
    both = load_file(folder / "a.safetensors") | load_file(folder / "b.safetensors")
    (folder / "b.safetensors").unlink()
    save_file(both, folder / "b.safetensors")
    assert "has 10 tensors in more than one file" in refusal(folder)


def test_a_link_that_leads_nowhere_is_named(folder: Path, tmp_path: Path) -> None:
    """As in a cache whose blobs were removed, and in a run whose checkpoints were."""
    for name in ("model.safetensors", "config.json"):
        (folder / name).rename(tmp_path / name)
        (folder / name).symlink_to("../gone")
        assert f"{folder / name} is a link to ../gone, which does not exist" in refusal(folder)
        (folder / name).unlink()
        (folder / name).symlink_to(f"../{name}")
        resolve_model_path(folder)
    (tmp_path / "link").symlink_to(tmp_path / "gone")
    assert f"link is a link to {tmp_path / 'gone'}, which does not exist" in refusal(
        tmp_path / "link"
    )


def test_what_is_no_model_folder_is_named_with_the_model_in_it(tmp_path: Path) -> None:
    snapshot = tmp_path / "models--a--b/snapshots/0f"
    step = tmp_path / "run/checkpoints/step-00003"
    for one in (snapshot, step):
        shutil.copytree(INCLUDED_MODELS["Adder-75K"], one)
    (tmp_path / "run/model").symlink_to("checkpoints/step-00003")
    (tmp_path / "nothing").mkdir()
    for given, meant in (
        (tmp_path / "models--a--b", snapshot),
        (snapshot.parent, snapshot),
        (step.parent, step),
        (tmp_path / "run", tmp_path / "run/model"),
    ):
        assert f"{given} has no config.json" in refusal(given)
        assert refusal(given).endswith(f"; did you mean {meant}?")
    assert refusal(tmp_path / "nothing").endswith("is not a Hugging Face model")
    weights = step / "model.safetensors"
    assert refusal(weights) == f"{weights} is a file; name its folder, {step}"


def test_weights_in_another_format_beside_those_that_are_loaded_do_not_count(folder: Path) -> None:
    """Mistral's releases have `consolidated.safetensors`, others both formats of Hugging Face."""
    parameters = read_model_facts(folder).parameters
    for name in ("consolidated.safetensors", "pytorch_model.bin"):
        shutil.copy(folder / "model.safetensors", folder / name)
        assert read_model_facts(folder).parameters == parameters


def header(value: Any, data: bytes = b"") -> bytes:
    text = value if isinstance(value, bytes) else json.dumps(value).encode()
    return struct.pack("<Q", len(text)) + text + data


ONE = {"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}
BROKEN: list[tuple[bytes, str]] = [
    (b"", "it is empty"),
    (b"  \n", "it has only spaces"),
    (b"\x01\x02", "it has 2 bytes, but its first 8 say"),
    (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n", "run git lfs pull"),
    (b"<!DOCTYPE html><html></html>", "is an HTML or XML page"),
    (struct.pack("<Q", 1 << 40) + b"{}", "a header of 1,099,511,627,776 bytes follows"),
    (struct.pack("<Q", 2**64 - 1) + b"{}", "a header of 18,446,744,073,709,551,615 bytes"),
    (header(b"{nonsense"), "its header is not JSON"),
    (header(b"\xff\xfe{}"), "its header is not"),
    (header(b"[" * 200_000), "its header is nested too deeply"),
    (header([]), "its header is a list, but must be an object"),
    (header({"a": 1}), "in its header a is 1"),
    (header({"a": {"dtype": "F32", "data_offsets": [0, 8]}}, b"8" * 8), r"a\.shape is .*required"),
    (header({"a": {"shape": [2], "data_offsets": [0, 8]}}, b"8" * 8), r"a\.dtype is .*required"),
    (header({"a": {**ONE["a"], "shape": [-2]}}, b"8" * 8), r"shape\.0 is -2"),
    (header({"a": {**ONE["a"], "shape": [True]}}, b"8" * 8), r"shape\.0 is True"),
    (header({"a": {**ONE["a"], "shape": [3]}}, b"8" * 8), "takes 12 bytes, but has those from 0"),
    (header({"a": {**ONE["a"], "data_offsets": [0]}}, b"8" * 8), "data_offsets is"),
    (header({"a": {**ONE["a"], "data_offsets": [8, 0]}}, b"8" * 8), "takes 8 bytes, but has those"),
    (header(ONE, b"8" * 7), "take 8 bytes, but 7 bytes follow the header: it is cut off"),
    (header(ONE, b"8" * 9), "take 8 bytes, but 9 bytes follow the header"),
    (header(ONE | {"b": {**ONE["a"], "data_offsets": [4, 12]}}, b"8" * 12), "overlap, or leave"),
    (header(ONE | {"b": {**ONE["a"], "data_offsets": [9, 17]}}, b"8" * 17), "overlap, or leave"),
    (header(b'{"a": {}, "a": {}}'), "its header has 'a' twice"),
]


def test_weights_that_are_no_complete_safetensors_file_are_refused(folder: Path) -> None:
    file = folder / "model.safetensors"
    whole = file.read_bytes()
    for content, said in BROKEN:
        file.write_bytes(content)
        assert f"{file} is not a safetensors file: " in refusal(folder)
        with pytest.raises(ModelNotFound, match=said):
            resolve_model_path(folder)
    file.write_bytes(whole[:-100])
    data = len(whole) - 8 - int.from_bytes(whole[:8], "little")
    assert f"take {data:,} bytes, but {data - 100:,} bytes follow the header" in refusal(folder)


@pytest.mark.parametrize(
    "name",
    [
        *("config.json", "generation_config.json", "tokenizer_config.json", "tokenizer.json"),
        *("special_tokens_map.json", "hf_quant_config.json", "preprocessor_config.json"),
        *("model.safetensors.index.json", "adapter_config.json"),
    ],
)
def test_json_files_that_are_cut_off_or_other_are_refused(folder: Path, name: str) -> None:
    if name.endswith("index.json"):
        shard(folder)
    file = folder / name
    whole = file.read_bytes() if file.exists() else b'{"a": {"b": 1}, "c": [1, 2]}'
    for content, said in (
        (whole[: len(whole) // 2], "and does not end with }|are not JSON"),
        (b"", "it is empty"),
        (b"version https://git-lfs.github.com/spec/v1\n", "run git lfs pull"),
        (b"<html>", "is an HTML or XML page"),
        (b"[1]", "holds a list, but must hold an object|does not end with }"),
    ):
        file.write_bytes(content)
        assert str(file) in refusal(folder)
        with pytest.raises(ModelNotFound, match=said):
            resolve_model_path(folder)
    if name != "tokenizer.json":  # which the tokenizer library reads
        file.write_bytes(b'{"a": ' * 100_000)
        assert "nested too deeply" in refusal(folder)
    file.unlink()
    file.mkdir()
    if name == "config.json":
        assert "has no config.json" in refusal(folder)


def test_pickled_weights_must_be_complete(folder: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    file = folder / "pytorch_model.bin"
    torch.save(tensors, file)
    resolve_model_path(folder)
    content = file.read_bytes()
    file.write_bytes(content[:-100])
    assert f"its {len(content) - 100:,} bytes are not an archive of torch" in refusal(folder)
    file.write_bytes(b"version https://git-lfs.github.com/spec/v1\n")
    assert "run git lfs pull" in refusal(folder)
    file.rename(folder / "part-1.bin")
    index = {"metadata": {}, "weight_map": {"a": "part-1.bin", "b": "part-2.bin"}}
    (folder / "pytorch_model.bin.index.json").write_text(json.dumps(index))
    assert "of which 1 are missing: part-2.bin" in refusal(folder)


def test_an_adapter_is_no_model(folder: Path) -> None:
    adapter = {"base_model_name_or_path": "org/base", "peft_type": "LORA"}
    (folder / "adapter_config.json").write_text(json.dumps(adapter))
    assert "is a LoRA adapter of org/base, not a model; merge it" in refusal(folder)
    (folder / "config.json").unlink()
    (folder / "model.safetensors").rename(folder / "adapter_model.safetensors")
    assert "is a LoRA adapter of org/base, not a model; merge it" in refusal(folder)


@pytest.mark.parametrize(
    ("config", "beside", "method"),
    [
        ({}, None, ""),
        ({}, {"quantization": {"quant_algo": "NVFP4", "group_size": 16}}, "NVFP4"),
        ({}, {"producer": {"name": "modelopt"}, "quantization": {"quant_algo": "FP8"}}, "FP8"),
        ({}, {"quantization": {"quant_algo": None, "kv_cache_quant_algo": "FP8"}}, ""),
        ({"quantization_config": {"quant_method": "fp8"}}, None, "fp8"),
        ({"quantization_config": {"quant_method": "gptq", "bits": 4}}, None, "gptq"),
        ({"quantization_config": {"quant_method": "modelopt", "quant_algo": "FP8"}}, None, "FP8"),
        ({"quantization_config": {"config_groups": {}}}, None, "unnamed"),
        ({"quantization_config": "awq"}, None, "awq"),
        ({"text_config": {"quantization_config": {"quant_method": "mxfp4"}}}, None, "mxfp4"),
    ],
)
def test_how_weights_are_quantized_is_read_from_either_file(
    tmp_path: Path, config: dict[str, Any], beside: Any, method: str
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    if beside is not None:
        (tmp_path / "hf_quant_config.json").write_text(json.dumps(beside))
    found = quantization(tmp_path)
    assert ("" if found is None else found.method) == method


def test_scales_that_transformers_does_not_read_are_refused(folder: Path) -> None:
    named = {"quantization": {"quant_algo": "FP8"}}
    (folder / "hf_quant_config.json").write_text(json.dumps(named))
    scales = {f"{name}_scale": torch.ones(1) for name in load_file(folder / "model.safetensors")}
    change_tensors(folder, lambda tensors: tensors.update(scales))
    resolve_model_path(folder)  # SGLang and vLLM read it
    with pytest.raises(ModelNotFound, match=r"is quantized \(FP8 in hf_quant_config.json\)"):
        load_policy(folder)


def _damaged(rng: random.Random, file: Path, content: bytes) -> bytes:
    """A changed file; of JSON and of headers half of the changes are to their values."""
    if rng.random() < 0.4:
        return damaged_bytes(rng, content)
    if file.suffix == ".safetensors":
        length = int.from_bytes(content[:8], "little")
        value = damaged_json(rng, json.loads(content[8 : 8 + length]))
        return header(value, content[8 + length :])
    return json.dumps(damaged_json(rng, json.loads(content))).encode()


@mutations
def test_damaged_model_folders_are_refused_in_one_line_or_pass(
    folder: Path, tmp_path: Path, count: int
) -> None:
    """By what train, eval and others check of a model: no other error, and little memory."""
    rng = random.Random(9)
    shard(folder)
    pictures = tmp_path / "pictures"
    pictures.mkdir()
    for file in INCLUDED_MODELS["Reader-574K"].iterdir():
        (pictures / file.name).write_bytes(file.read_bytes())
    for one in (folder, pictures):
        named = {"quantization": {"quant_algo": None, "exclude_modules": ["lm_head"]}}
        (one / "hf_quant_config.json").write_text(json.dumps(named))
    configs = {
        one: load_config(None, [f"actor.path={one}", f"run_dir={tmp_path / 'runs'}"])
        for one in (folder, pictures)
    }
    files = sorted(file for one in (folder, pictures) for file in one.iterdir())
    whole = {file: file.read_bytes() for file in files}
    most, refused = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, 0
    for _ in range(count):
        file = rng.choice(files)
        changed = _damaged(rng, file, whole[file])
        file.write_bytes(changed)
        said: list[Any] = []
        try:
            model = check_model(config := configs[file.parent])
            facts = read_model_facts(model)
            placed = place_run(config)
            said += check_vision_model(placed, model)
            check_tokens(config, placed.engines, ["1+1="], model, facts)
            end_token_ids(model)
            read_placeholder_tokens(model)
            if (vision := read_vision_facts(model)) is not None:
                vision.grid(100, 60)
            estimate(config, model)
        except ConfigError as error:
            said += error.problems
        except ValueError as error:
            said.append(error)
        assert all(map(one_line, said)), said
        refused += bool(said)
        assert file.read_bytes() == changed
        file.write_bytes(whole[file])
    assert count / 4 < refused < count
    grown_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - most
    assert grown_kib < 512 << 10


@pytest.mark.parametrize(
    ("file", "change", "said"),
    [
        ("config.json", {"image_token_id": "4"}, "image_token_id is '4', but must be a token id"),
        ("config.json", {"vision_start_token_id": None}, "vision_start_token_id is None"),
        ("config.json", {"vision_config": {"patch_size": 16}}, "but the model has 16 and 2"),
        ("preprocessor_config.json", {"patch_size": 0}, "patch_size of its image processor is 0"),
        ("preprocessor_config.json", {"max_pixels": 1e9}, "max_pixels .* is 1000000000.0, but"),
        ("preprocessor_config.json", {"image_processor": 3}, "image_processor must be an object"),
    ],
)
def test_image_settings_of_another_kind_are_named(
    tmp_path: Path, file: str, change: dict[str, Any], said: str
) -> None:
    for one in INCLUDED_MODELS["Reader-574K"].iterdir():
        (tmp_path / one.name).write_bytes(one.read_bytes())
    content = json.loads((tmp_path / file).read_text())
    (tmp_path / file).write_text(json.dumps({**content, **change}))
    with pytest.raises(ValueError, match=said) as caught:
        read_vision_facts(tmp_path)
    assert one_line(caught.value)


def test_a_reward_rule_of_another_kind_is_named(tmp_path: Path) -> None:
    for content, said in (
        ('{"prefix": 1}', "prefix is 1: input should be a valid string"),
        ('{"more": 1}', "more is 1: unexpected keyword argument"),
        ("[]", "holds a list, but must hold an object"),
        ('{"prefix": ' * 100_000, "nested too deeply"),
    ):
        (tmp_path / "reward_model.json").write_text(content)
        with pytest.raises(ValueError, match=said) as caught:
            Wrapping.read(tmp_path)
        assert one_line(caught.value)
