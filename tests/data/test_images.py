"""Images in prompts: their placeholders and positions are those of transformers' processor."""

from __future__ import annotations

import io
import json
import os
import random
import struct
import zlib
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image
from tokenizers import AddedToken, Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import smart_resize
from transformers.models.qwen2_vl.modeling_qwen2_vl import Qwen2VLModel

from areal_lab.config.schema import DatasetConfig
from areal_lab.data.images import (
    EncodedPrompt,
    PlacedImage,
    encode_prompt,
    image_of_bytes,
    image_of_value,
    one_placeholder_each,
    place_images,
    rope_positions,
)
from areal_lab.data.jsonl import file_problems
from areal_lab.data.problems import Problem, ProblemSet
from areal_lab.data.small_tasks import HEIGHT, WIDTH, rendered_sums
from areal_lab.data.sources import load_problems
from areal_lab.data.tokenize import TextCodec
from areal_lab.models.vision import VisionFacts, read_vision_facts
from tests.fuzz import damaged_bytes, mutations, refused
from tests.vision_folder import FACTS, IMAGE, START, STOP, picture, write_vision_model

SIDES = st.integers(1, 400)


@given(SIDES, SIDES, st.integers(784, 20_000), st.integers(20_000, 200_000))
def test_an_image_gets_the_size_that_transformers_gives_it(
    width: int, height: int, fewest: int, most: int
) -> None:
    facts = VisionFacts(**{**vars_of(FACTS), "min_pixels": fewest, "max_pixels": most})
    if max(width, height) > 200 * min(width, height):
        with pytest.raises(ValueError, match="factor of 200"):
            facts.grid(width, height)
        return
    expected = smart_resize(height, width, 28, min_pixels=fewest, max_pixels=most)
    assert tuple(28 * side for side in facts.grid(width, height)) == expected


def vars_of(facts: VisionFacts) -> dict[str, int]:
    return {name: getattr(facts, name) for name in VisionFacts.__dataclass_fields__}


@st.composite
def prompts(draw: st.DrawFn) -> tuple[list[int], list[tuple[int, int]]]:
    """Tokens with one placeholder for each image, and the sizes of the images."""
    pieces = draw(st.lists(st.lists(st.integers(6, 30), max_size=4), min_size=1, max_size=4))
    tokens = list(pieces[0])
    sizes = []
    for piece in pieces[1:]:
        tokens += [START, IMAGE, STOP, *piece]
        sizes.append((draw(st.sampled_from([28, 56, 84])), draw(st.sampled_from([28, 56]))))
    return tokens or [6], sizes


@given(prompts())
def test_positions_are_those_of_transformers(
    given_: tuple[list[int], list[tuple[int, int]]],
) -> None:
    tokens, sizes = given_
    images = [picture(number, *size) for number, size in enumerate(sizes)]
    prompt = place_images(tokens, images, FACTS)
    assert one_placeholder_each(prompt.tokens, prompt.images) == tuple(tokens)
    assert [one.image for one in prompt.images] == images
    for placed in prompt.images:
        assert set(prompt.tokens[placed.start : placed.end]) == {IMAGE}
    config = SimpleNamespace(vision_config=SimpleNamespace(spatial_merge_size=2))
    ids = torch.tensor([(*prompt.tokens, 9, 9)])
    model = SimpleNamespace(config=config, get_vision_position_ids=None)
    model.get_vision_position_ids = Qwen2VLModel.get_vision_position_ids.__get__(model)
    expected, _ = Qwen2VLModel.get_rope_index(
        model,
        ids,
        (ids == IMAGE).int(),
        torch.tensor([[1, 2 * i.rows, 2 * i.columns] for i in prompt.images]).reshape(-1, 3),
    )
    assert expected[:, 0].tolist() == list(rope_positions(ids.shape[1], prompt.images))


def test_placeholders_have_to_match_the_images() -> None:
    with pytest.raises(ValueError, match=r"2 placeholder token\(s\) for 1 image\(s\)"):
        place_images([IMAGE, 7, IMAGE], [picture(1)], FACTS)


@pytest.fixture
def codec() -> TextCodec:
    names = {0: "<unk>", IMAGE: "<|image_pad|>", START: "<|vision_start|>", STOP: "<|vision_end|>"}
    names |= {6: "What", 7: "is", 8: "?", 9: "<", 10: "image", 11: ">"}
    tokenizer = Tokenizer(WordLevel({name: token for token, name in names.items()}, "<unk>"))
    tokenizer.pre_tokenizer = Whitespace()
    tokenizer.add_special_tokens(
        [AddedToken(names[token], special=True) for token in (IMAGE, START, STOP)]
    )
    return TextCodec(tokenizer)


def test_a_mark_is_replaced_by_an_image(codec: TextCodec) -> None:
    shown = picture(1)
    prompt = encode_prompt(codec, FACTS, "What is <image> ?", [shown])
    assert prompt.tokens == (6, 7, START, IMAGE, IMAGE, STOP, 8)
    assert prompt.images == (PlacedImage(shown, 3, 1, 2),)
    assert encode_prompt(codec, FACTS, "What is ?", [shown]).tokens[:2] == (START, IMAGE)
    assert encode_prompt(codec, FACTS, "What is ?") == EncodedPrompt((6, 7, 8))
    # Without images a mark is text, as it was before.
    assert encode_prompt(codec, None, "is <image> ?").tokens == codec.encode("is <image> ?")


def test_marks_and_models_that_do_not_fit_are_refused(codec: TextCodec) -> None:
    with pytest.raises(ValueError, match=r"2 image\(s\), but 1 times <image>"):
        encode_prompt(codec, FACTS, "What is <image> ?", [picture(1), picture(2)])
    with pytest.raises(ValueError, match="but the model has none; choose a Qwen2-VL"):
        encode_prompt(codec, None, "What is <image> ?", [picture(1)])
    with pytest.raises(ValueError, match=r"1 placeholder token\(s\) for 0 image"):
        encode_prompt(codec, FACTS, "What is <|image_pad|> ?")


def test_an_image_is_its_file() -> None:
    shown = picture(1)
    assert (shown.width, shown.height) == (56, 28)
    assert image_of_bytes(shown.png) == shown
    assert picture(2) != shown
    # Other formats are converted, without loss where they have none.
    pixels = np.asarray(Image.open(io.BytesIO(shown.png)))
    written = io.BytesIO()
    Image.fromarray(pixels).save(written, "BMP")
    converted = image_of_bytes(written.getvalue())
    assert (np.asarray(Image.open(io.BytesIO(converted.png))) == pixels).all()
    for wrong in (b"", b"GIF89a", shown.png[:100]):
        with pytest.raises(ValueError, match="a picture cannot be read as an image") as raised:
            image_of_bytes(wrong, what="a picture")
        assert "\n" not in str(raised.value)


def test_a_field_of_a_dataset_may_be_a_path_bytes_or_a_picture(tmp_path: Path) -> None:
    shown = picture(1)
    (tmp_path / "one.png").write_bytes(shown.png)
    decoded = Image.open(io.BytesIO(shown.png))
    for value in ("one.png", shown.png, {"bytes": shown.png, "path": None}, {"path": "one.png"}):
        assert image_of_value(value, "line 1", tmp_path) == shown
    assert image_of_value(decoded, "line 1", tmp_path).width == shown.width
    with pytest.raises(ValueError, match=r"line 1 has the image .*two.png, which cannot be read"):
        image_of_value("two.png", "line 1", tmp_path)
    with pytest.raises(ValueError, match="line 1 has int as an image"):
        image_of_value(3, "line 1", tmp_path)


def test_files_outside_of_the_folder_of_a_dataset_are_refused_unless_a_setting_names_theirs(
    tmp_path: Path,
) -> None:
    shown, folder, other = picture(1), tmp_path / "data", tmp_path / "other"
    for one in (folder, other):
        one.mkdir()
        (one / "one.png").write_bytes(shown.png)
    (folder / "link.png").symlink_to(other / "one.png")
    (folder / "beside").symlink_to(other)
    (tmp_path / "data-2").mkdir()
    (tmp_path / "data-2" / "one.png").write_bytes(shown.png)
    outside = ("../other/one.png", str(other / "one.png"), "link.png", "beside/one.png")
    for value in (*outside, {"path": "../other/one.png"}, "../data-2/one.png"):
        with pytest.raises(ValueError, match=r"line 1 has the image .*outside of .*image_folder="):
            image_of_value(value, "line 1", folder)
    for value in (*outside, "one.png", "../data/one.png", str(folder / "one.png")):
        assert image_of_value(value, "line 1", folder, str(other)) == shown
    file = folder / "rows.jsonl"
    row = {"question": "What?", "answer": "1", "picture": "../other/one.png"}
    file.write_text("".join(json.dumps({**row, "question": str(n)}) + "\n" for n in range(3)))
    settings = DatasetConfig(type="jsonl", path=str(file), image_field="picture", eval_size=1)
    with pytest.raises(ValueError, match="outside of"):
        load_problems(settings, seed=1)
    named = load_problems(settings.with_settings({"image_folder": str(other)}), seed=1)
    assert named.train[0].images == (shown,)


def test_an_image_is_a_file_of_bounded_size(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "folder").mkdir()
    for name in ("pipe", "folder", "a\0b", "x" * 300, "file:///etc/passwd"):
        with pytest.raises(ValueError, match="which cannot be read"):
            image_of_value(name, "line 1", tmp_path)
    for url in ("data:image/png;base64," + "iVBOR" * 10**5, "https://x/y.png"):
        with pytest.raises(ValueError, match="cannot be read: it is a URL, but must be") as raised:
            image_of_value(url, "line 1", tmp_path)
        assert len(str(raised.value)) < 300
    claims = bytearray(picture(1).png)
    claims[16:24] = struct.pack(">II", 50_000, 50_000)  # as many pixels as fill 7 GB
    claims[29:33] = struct.pack(">I", zlib.crc32(claims[12:29]))
    with pytest.raises(ValueError, match=r"50000 x 50000 pixels, but at most|decompression bomb"):
        image_of_bytes(bytes(claims))
    with pytest.raises(ValueError, match="cannot be read as an image: it is none of PNG, JPEG"):
        image_of_bytes(b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 1 1\n%%EndComments\n")


@mutations
def test_a_damaged_image_is_read_or_refused_in_one_line(count: int) -> None:
    rng, kinds = random.Random(count), []
    for kind in ("PNG", "JPEG", "GIF", "BMP", "TIFF", "WEBP"):
        written = io.BytesIO()
        Image.open(io.BytesIO(picture(1).png)).convert("RGB").save(written, kind)
        kinds.append(written.getvalue())
    for _ in range(count):
        content = damaged_bytes(rng, rng.choice(kinds))
        refused(lambda content=content: image_of_bytes(content))


def test_lines_of_a_file_have_their_images(tmp_path: Path) -> None:
    rows = []
    for number in range(3):
        (tmp_path / f"{number}.png").write_bytes(picture(number).png)
        row = {"question": "What?", "answer": "1", "picture": f"{number}.png", "level": number}
        rows.append({**row, "picture": [row["picture"], "0.png"]} if number == 2 else row)
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    # The questions are equal: problems differ by their images.
    problems = file_problems(DatasetConfig(path=str(file), image_field="picture", eval_size=1))
    found = sorted((*problems.train, *problems.held_out), key=lambda one: one.metadata["level"])
    assert [one.images for one in found[:2]] == [(picture(0),), (picture(1),)]
    assert found[2].images == (picture(2), picture(0))
    assert "picture" not in found[0].as_example()
    with pytest.raises(ValueError, match="has no field 'image'"):
        file_problems(DatasetConfig(path=str(file), image_field="image"))


def test_the_digest_of_problems_covers_their_images() -> None:
    def digest(*shown: int) -> str:
        images = tuple(map(picture, shown))
        asked = Problem(prompt="a", answer="b", key="c", images=images)
        other = Problem(prompt="d", answer="b", key="e")
        return ProblemSet(train=(asked,), held_out=(other,)).digest()

    assert digest(1) == digest(1)
    assert len({digest(), digest(1), digest(2), digest(1, 2)}) == 4


def test_a_folder_tells_how_its_model_sees(tmp_path: Path) -> None:
    folder = write_vision_model(tmp_path / "model")
    assert read_vision_facts(folder) == FACTS
    settings = folder / "preprocessor_config.json"
    # What Qwen3-VL has, and what transformers 5 writes.
    size = {"size": {"shortest_edge": 784, "longest_edge": 784 * 16}}
    settings.unlink()
    (folder / "processor_config.json").write_text(json.dumps({"image_processor": size}))
    assert read_vision_facts(folder) == FACTS
    settings.write_text(json.dumps({**size, "patch_size": 16}))
    with pytest.raises(ValueError, match=r"patch_size 16 and .* the model has 14"):
        read_vision_facts(folder)
    settings.unlink()
    (folder / "processor_config.json").unlink()
    with pytest.raises(ValueError, match=r"without preprocessor_config\.json"):
        read_vision_facts(folder)


def test_pictures_show_what_is_asked() -> None:
    problems = rendered_sums(size=60, eval_size=20, seed=3)
    everything = (*problems.train, *problems.held_out)
    assert (len(problems.train), len(problems.held_out)) == (40, 20)
    assert len({one.images[0].digest for one in everything}) == 60
    for one in everything:
        assert one.answer == f"{one.metadata['left'] + one.metadata['right']:02d}"
        (image,) = one.images
        assert (image.width, image.height) == (WIDTH, HEIGHT)
        darkest, lightest = Image.open(io.BytesIO(image.png)).convert("L").getextrema()
        assert darkest < 90
        assert lightest > 165


def test_a_seed_gives_the_same_pictures() -> None:
    assert rendered_sums(size=10, seed=3).digest() == rendered_sums(size=10, seed=3).digest()
    assert rendered_sums(size=10, seed=3).digest() != rendered_sums(size=10, seed=4).digest()
    with pytest.raises(ValueError, match="size is 1, but must be from 2"):
        rendered_sums(size=1)
