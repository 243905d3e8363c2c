"""Images in prompts: their bytes, their places among the tokens, and the positions that follow.

    "What is <image>?" + PNG --encode_prompt-->  What is <start> [] [] [] [] <end> ?
                                                                 '- rows x columns placeholders

An image is its PNG file and a hash of it. It is stored once: prompts, samples and batches refer to
the same object. Positions are those of M-RoPE (arXiv:2409.12191): three numbers a token.
"""

from __future__ import annotations

import hashlib
import io
import struct
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Protocol

if TYPE_CHECKING:
    from areal_lab.data.tokenize import TextCodec  # needs tokenizers, which others do without

IMAGE_MARK: Final = "<image>"
"""Where an image stands in the text of a prompt."""
_PNG: Final = b"\x89PNG\r\n\x1a\n"
_HEADER: Final = struct.Struct(">8sI4sII")


@dataclass(frozen=True, slots=True)
class EncodedImage:
    """An image as a PNG file; equal if its bytes are."""

    digest: str
    """SHA-256 of the file, in hexadecimal digits."""
    width: int
    """In pixels."""
    height: int
    """In pixels."""
    png: bytes = field(repr=False, compare=False)


@dataclass(frozen=True, slots=True)
class PlacedImage:
    """An image in a prompt: `rows * columns` placeholder tokens from `start` on."""

    image: EncodedImage
    start: int
    rows: int
    columns: int

    @property
    def tokens(self) -> int:
        """Number of its placeholders."""
        return self.rows * self.columns

    @property
    def end(self) -> int:
        """Index of the token after its placeholders."""
        return self.start + self.tokens


class Vision(Protocol):
    """How prompts of a model represent an image (`models.vision.VisionFacts`)."""

    @property
    def image_token(self) -> int:
        """The placeholder."""
        ...

    @property
    def start_token(self) -> int:
        """Before the placeholders of an image."""
        ...

    @property
    def end_token(self) -> int:
        """After them."""
        ...

    def grid(self, width: int, height: int) -> tuple[int, int]:
        """Rows and columns of placeholders for an image of this size, in pixels."""
        ...


class EncodedPrompt(NamedTuple):
    """Tokens of a prompt, placeholders included, and the images that these stand for."""

    tokens: tuple[int, ...]
    images: tuple[PlacedImage, ...] = ()


def image_of_bytes(data: bytes, *, what: str = "an image") -> EncodedImage:
    """An image from the bytes of a file; formats other than PNG are converted to it.

    Args:
        data: of the file.
        what: it is, for errors.

    Raises:
        ValueError: in one line: it is no image, or too large.
    """
    from PIL import Image, ImageOps  # takes 0.1 s, which runs without images can spare

    try:
        with Image.open(io.BytesIO(data)) as opened:
            if opened.format == "PNG":
                opened.verify()
            else:
                written = io.BytesIO()
                ImageOps.exif_transpose(opened).convert("RGB").save(written, "PNG")
                data = written.getvalue()
    except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:
        raise ValueError(f"{what} cannot be read as an image: {error}") from error
    signature, _, _, width, height = _HEADER.unpack_from(data)
    assert signature == _PNG
    return EncodedImage(hashlib.sha256(data).hexdigest(), width, height, data)


def image_of_value(value: object, where: str, folder: Path) -> EncodedImage:
    """The image of a field of a dataset.

    Args:
        value: the path of a file, its bytes, a PIL image, or `{bytes:, path:}` as `datasets` has.
        where: file and line, for errors.
        folder: that paths are relative to.

    Raises:
        ValueError: in one line: it is none of them, or cannot be read.
    """
    if isinstance(value, dict):
        value = value.get("bytes") or value.get("path")
    if isinstance(value, str):
        path = folder / value
        try:
            value = path.read_bytes()
        except OSError as error:
            reason = error.strerror
            raise ValueError(f"{where} has the image {path}, which cannot be read: {reason}") from (
                error
            )
        return image_of_bytes(value, what=f"{path} ({where})")
    if isinstance(value, bytes):
        return image_of_bytes(value, what=f"the image of {where}")
    if hasattr(value, "save"):  # of PIL, which `datasets` decodes to
        return image_of_picture(value)
    raise ValueError(
        f"{where} has {type(value).__name__} as an image, but must have the path of a file or its "
        "bytes"
    )


def image_of_picture(picture: Any) -> EncodedImage:
    """An image from PIL's form of it."""
    written = io.BytesIO()
    picture.convert("RGB").save(written, "PNG")
    return image_of_bytes(written.getvalue())


def encode_prompt(
    codec: TextCodec, vision: Vision | None, text: str, images: Sequence[EncodedImage] = ()
) -> EncodedPrompt:
    """Tokens of a prompt with its images.

    Args:
        codec: the model's tokenizer.
        vision: of the model; None if it has no images.
        text: with an `IMAGE_MARK` for each image, or without any: the images then come first.
        images: in the order of their marks.

    Raises:
        ValueError: in one line: the model has no images, or marks and images do not match.
    """
    if vision is None:
        if images:
            raise ValueError(
                f"a prompt has {len(images)} image(s), but the model has none; choose a Qwen2-VL, "
                "Qwen2.5-VL or Qwen3-VL for actor.path"
            )
        return EncodedPrompt(codec.encode(text))
    if images:
        marks = text.count(IMAGE_MARK)
        if marks not in (0, len(images)):
            raise ValueError(
                f"a prompt has {len(images)} image(s), but {marks} times {IMAGE_MARK} in its text "
                f"({text[:40]!r}); write it once for each image, or not at all"
            )
        special = codec.added_tokens
        names = (vision.start_token, vision.image_token, vision.end_token)
        stand_in = "".join(special.get(token, "") for token in names)
        text = text.replace(IMAGE_MARK, stand_in) if marks else len(images) * stand_in + text
    return place_images(codec.encode(text), images, vision)


def place_images(
    tokens: Sequence[int], images: Sequence[EncodedImage], vision: Vision
) -> EncodedPrompt:
    """Put as many placeholders into a prompt as each image needs.

    Args:
        tokens: with one placeholder for each image.
        images: in their order.
        vision: of the model.

    Raises:
        ValueError: in one line: their numbers differ.
    """
    found = sum(token == vision.image_token for token in tokens)
    if found != len(images):
        raise ValueError(
            f"a prompt has {found} placeholder token(s) for {len(images)} image(s); each image has "
            f"exactly one, token {vision.image_token}"
        )
    if not images:
        return EncodedPrompt(tuple(tokens))
    expanded: list[int] = []
    placed: list[PlacedImage] = []
    for token in tokens:
        if token == vision.image_token:
            image = images[len(placed)]
            placed.append(
                PlacedImage(image, len(expanded), *vision.grid(image.width, image.height))
            )
            expanded.extend([token] * placed[-1].tokens)
        else:
            expanded.append(token)
    return EncodedPrompt(tuple(expanded), tuple(placed))


def one_placeholder_each(tokens: tuple[int, ...], images: Sequence[PlacedImage]) -> tuple[int, ...]:
    """Inverse of `place_images`: the tokens with one placeholder for each image."""
    kept: tuple[int, ...] = ()
    begin = 0
    for placed in images:
        kept += tokens[begin : placed.start + 1]
        begin = placed.end
    return kept + tokens[begin:]


def check_places(tokens: int, images: Sequence[PlacedImage], what: str) -> None:
    """Check that images are inside of a prompt of `tokens` tokens, one after the other.

    Args:
        tokens: of the prompt.
        images: placed in it.
        what: has them, for errors.

    Raises:
        ValueError: in one line.
    """
    end = 0
    for placed in images:
        if placed.start < end or placed.end > tokens or placed.tokens < 1:
            raise ValueError(
                f"{what} has an image at tokens {placed.start} to {placed.end - 1}, but it must be "
                f"behind token {end - 1} and inside of a prompt of {tokens}"
            )
        end = placed.end


def rope_positions(
    length: int, images: Sequence[PlacedImage]
) -> tuple[list[int], list[int], list[int]]:
    """Positions of the tokens of a sequence: temporal, height, width.

    Text has the same number three times. An image has one temporal position, and its placeholders
    those of their row and column; the text behind it continues after the largest one.

    Args:
        length: tokens of the sequence.
        images: in it.
    """
    temporal: list[int] = []
    height: list[int] = []
    width: list[int] = []
    following, begin = 0, 0
    for placed in images:
        text = range(following, following + placed.start - begin)
        following += len(text)
        temporal += [*text, *(following for _ in range(placed.tokens))]
        height += [
            *text,
            *(following + row for row in range(placed.rows) for _ in range(placed.columns)),
        ]
        width += [
            *text,
            *(following + column for _ in range(placed.rows) for column in range(placed.columns)),
        ]
        following += max(placed.rows, placed.columns)
        begin = placed.end
    text = range(following, following + length - begin)
    return [*temporal, *text], [*height, *text], [*width, *text]
