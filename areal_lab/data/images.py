"""Images in prompts: their bytes, their places among the tokens, and the resulting positions.

    "What is <image>?" + PNG --encode_prompt-->  What is <start> [] [] [] [] <end> ?
                                                                 '- rows x columns placeholders

An image is its PNG file and a hash of it. It is stored once: prompts, samples and batches refer to
the same object. Positions are those of M-RoPE (arXiv:2409.12191): three numbers a token.
"""

from __future__ import annotations

import hashlib
import io
import re
import struct
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Protocol

from areal_lab.host.foreign import UNPACKED_BYTES, read_bytes

if TYPE_CHECKING:
    from areal_lab.data.tokenize import TextCodec  # needs tokenizers, which others do without

IMAGE_MARK: Final = "<image>"
"""Place of an image in the text of a prompt."""
MOST_PIXELS: Final = 2**26
"""Maximum pixels of an image: a small file may declare a billion, which take gigabytes."""
_FORMATS: Final = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF", "PPM")
"""Accepted formats; others of Pillow start programs, such as Ghostscript."""
_URL: Final = re.compile(r"(?i)[a-z][a-z0-9+.-]*://|(?:data|file):")
_MOST_LETTERS: Final = 4096
"""Maximum characters of a path, which is also the system's limit."""
_PNG: Final = b"\x89PNG\r\n\x1a\n"
_HEADER: Final = struct.Struct(">8sI4sII")


@dataclass(frozen=True, slots=True)
class EncodedImage:
    """An image as a PNG file; equal if its bytes are."""

    digest: str
    """SHA-256 of the file, in hexadecimal digits."""
    width: int
    """Width in pixels."""
    height: int
    """Height in pixels."""
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
    """Representation of an image in prompts of a model (`models.vision.VisionFacts`)."""

    @property
    def image_token(self) -> int:
        """Placeholder token."""
        ...

    @property
    def start_token(self) -> int:
        """Token before the placeholders of an image."""
        ...

    @property
    def end_token(self) -> int:
        """Token after them."""
        ...

    def grid(self, width: int, height: int) -> tuple[int, int]:
        """Rows and columns of placeholders for an image of this size, in pixels."""
        ...


class EncodedPrompt(NamedTuple):
    """Tokens of a prompt, placeholders included, and its images."""

    tokens: tuple[int, ...]
    images: tuple[PlacedImage, ...] = ()


def image_of_bytes(data: bytes, *, what: str = "an image") -> EncodedImage:
    """Image from the bytes of a file; formats other than PNG are converted to it."""
    from PIL import (
        Image,
        ImageOps,
        UnidentifiedImageError,
    )  # the import takes 0.1 s, wasted in runs without images

    try:
        with Image.open(io.BytesIO(data), formats=_FORMATS) as opened:
            if opened.width * opened.height > MOST_PIXELS:
                raise ValueError(
                    f"it has {opened.width} x {opened.height} pixels, but at most {MOST_PIXELS:,} "
                    "are read"
                )
            if opened.format == "PNG":
                opened.verify()
            else:
                written = io.BytesIO()
                ImageOps.exif_transpose(opened).convert("RGB").save(written, "PNG")
                data = written.getvalue()
    except Exception as error:  # Pillow raises many types for damaged files
        reason = str(error).split("\n", 1)[0]
        if isinstance(error, UnidentifiedImageError):  # names an object of ours
            reason = f"it is none of {', '.join(_FORMATS)}"
        raise ValueError(f"{what} cannot be read as an image: {reason}") from error
    signature, _, _, width, height = _HEADER.unpack_from(data)
    assert signature == _PNG
    return EncodedImage(hashlib.sha256(data).hexdigest(), width, height, data)


def image_of_value(value: object, where: str, folder: Path, image_folder: str = "") -> EncodedImage:
    """Image of a field of a dataset.

    `value` is the path of a file, its bytes, a PIL image, or `{bytes:, path:}` as in `datasets`.
    Files may be in `folder` or, unless it is empty, in `image_folder`.
    """
    if isinstance(value, dict):
        value = value.get("bytes") or value.get("path")
    if isinstance(value, str) and _URL.match(value):
        raise ValueError(
            f"{where} has the image {value[:60]!r}, which cannot be read: it is a URL, but must be "
            "the path of a file, or its bytes"
        )
    if isinstance(value, str):
        path = folder / value[:_MOST_LETTERS]
        try:
            found = path.resolve(strict=True)  # after resolving links
            if not any(found.is_relative_to(one) for one in _allowed(folder, image_folder)):
                raise ValueError(
                    f"it is outside of {folder.resolve()}; if you trust the data set, set "
                    f"dataset.image_folder={found.parent}"
                )
            value = read_bytes(found, limit_bytes=UNPACKED_BYTES)
        except (OSError, ValueError, RuntimeError) as error:
            reason = error.strerror if isinstance(error, OSError) else error
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


def _allowed(folder: Path, image_folder: str) -> list[Path]:
    folders = [folder, Path(image_folder).expanduser()] if image_folder else [folder]
    return [one.resolve() for one in folders]


def image_of_picture(picture: Any) -> EncodedImage:
    """Image from PIL's form."""
    written = io.BytesIO()
    picture.convert("RGB").save(written, "PNG")
    return image_of_bytes(written.getvalue())


def encode_prompt(
    codec: TextCodec,
    vision: Vision | None,
    text: str,
    images: Sequence[EncodedImage] = (),
    *,
    begins: bool = True,
) -> EncodedPrompt:
    """Encode a prompt with its images.

    `vision` is None if the model has no images. The text has an `IMAGE_MARK` for each image, or
    none: then the images come first. With `begins` False, the text has its begin-of-text token from
    a chat template.
    """
    if vision is None:
        if images:
            raise ValueError(
                f"a prompt has {len(images)} image(s), but the model has none; choose a Qwen2-VL, "
                "Qwen2.5-VL or Qwen3-VL for actor.path"
            )
        return EncodedPrompt(codec.encode_all([text], begins=begins)[0])
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
    return place_images(codec.encode_all([text], begins=begins)[0], images, vision)


def place_images(
    tokens: Sequence[int], images: Sequence[EncodedImage], vision: Vision
) -> EncodedPrompt:
    """Insert as many placeholders into a prompt as each image needs."""
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
    """Check that images are inside of a prompt of `tokens` tokens, in order."""
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
