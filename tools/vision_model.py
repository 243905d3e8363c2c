"""Train the packaged vision-language model: `python -m tools.vision_model FOLDER`.

    [ picture of "7 5" ]=  ->  12<end>

A Qwen2-VL of 574,000 parameters: a vision tower and a language model of two layers each, one token
per character. It is trained from random weights on pictures of `data.rendered` with their sums, and
stops at a measured accuracy of sampled responses, in the middle of learning. Reading the digits
alone is learned in 100 steps and leaves nothing to learn; their sum does.

It takes half a minute on one core; the same torch on the same kind of processor, with the same
Pillow, gives the same bytes. Nothing is downloaded.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from pathlib import Path
from typing import Any, Final, NamedTuple

import PIL
import torch
from jaxtyping import Float, Int
from tokenizers import AddedToken, Regex, Tokenizer
from tokenizers.decoders import Fuse
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Split
from torch import Tensor
from transformers import (
    PreTrainedTokenizerFast,
    Qwen2VLConfig,
    Qwen2VLForConditionalGeneration,
)

from areal_lab.data.images import EncodedPrompt, encode_prompt
from areal_lab.data.problems import Problem
from areal_lab.data.small_tasks import HEIGHT, WIDTH, rendered_sums
from areal_lab.data.tokenize import TextCodec
from areal_lab.models.image_features import ImagePixels
from areal_lab.models.vision import placeholder_tokens, read_vision_facts
from tools.tiny_model import write_source

BATCH: Final = 32
LEARNING_RATE: Final = 2e-3
WARMUP_STEPS: Final = 100
"""Without them, or with weights near 0, nothing is learned."""
INITIALIZER_RANGE: Final = 0.08
PICTURES: Final = 4000
TESTED: Final = 512
"""Other pictures, on which the accuracy is measured."""
ACCURACY: Final = 0.42
"""Of sampled responses, from which the training stops."""
MEASURE_EVERY: Final = 10
MOST_STEPS: Final = 4000
SEED: Final = 1
END: Final = "<end>"
SPECIAL: Final = (
    *("<unk>", END),
    *("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>"),
)
"""The names of the last four are those of Qwen2-VL: SGLang looks for them in a prompt's text."""
CHARACTERS: Final = "0123456789+-*= \n.,?!abcxyz"


class Pictures(NamedTuple):
    """Problems as the model takes them, with their gold answers."""

    tokens: Int[Tensor, "N T"]
    pixels: Float[Tensor, "N patches numbers"]
    prompt_tokens: int


def write_tokenizer(folder: Path) -> dict[str, int]:
    """Write a tokenizer of one token per character; returns its vocabulary."""
    vocabulary = {token: index for index, token in enumerate((*SPECIAL, *CHARACTERS))}
    tokenizer = Tokenizer(WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = Split(Regex(r"[\s\S]"), "isolated")
    # SGLang turns a prompt with images into text and back, so this has to be the identity.
    tokenizer.decoder = Fuse()
    tokenizer.add_special_tokens([AddedToken(name, special=True) for name in SPECIAL])
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, unk_token="<unk>", eos_token=END, pad_token=END
    ).save_pretrained(folder)
    return vocabulary


def write_untrained(folder: Path, *, seed: int = SEED) -> None:
    """Write the model with random weights, its tokenizer and its image processor's settings."""
    vocabulary = write_tokenizer(folder)
    end = vocabulary[END]
    text = {
        "vocab_size": len(vocabulary),
        "hidden_size": 128,
        "intermediate_size": 256,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 256,
        "rope_parameters": {
            "rope_type": "default",
            "mrope_section": [4, 6, 6],
            "rope_theta": 10_000.0,
        },
        "bos_token_id": end,
        "eos_token_id": end,
        "pad_token_id": end,
        "initializer_range": INITIALIZER_RANGE,
    }
    vision = {
        "depth": 2,
        "embed_dim": 64,
        "hidden_size": 128,
        "num_heads": 4,
        "patch_size": 14,
        "spatial_merge_size": 2,
        "initializer_range": INITIALIZER_RANGE,
        "in_chans": 3,  # SGLang's name of `in_channels`
    }
    config = Qwen2VLConfig(
        text_config=text,
        vision_config=vision,
        tie_word_embeddings=True,
        image_token_id=vocabulary["<|image_pad|>"],
        video_token_id=vocabulary["<|video_pad|>"],
        vision_start_token_id=vocabulary["<|vision_start|>"],
        vision_end_token_id=vocabulary["<|vision_end|>"],
    )
    torch.manual_seed(seed)
    Qwen2VLForConditionalGeneration(config).save_pretrained(folder)
    settings = {
        "image_processor_type": "Qwen2VLImageProcessor",
        "patch_size": 14,
        "temporal_patch_size": 2,
        "merge_size": 2,
        # The smallest picture that is not enlarged: those of `data.rendered` keep their size.
        "min_pixels": WIDTH * HEIGHT // 2,
        "max_pixels": 28 * 28 * 64,
    }
    (folder / "preprocessor_config.json").write_text(json.dumps(settings, indent=1) + "\n")


def read_pictures(folder: Path, problems: tuple[Problem, ...]) -> Pictures:
    """The problems with their gold answers, each with an end token."""
    codec, vision, pixels = TextCodec.load(folder), read_vision_facts(folder), ImagePixels(folder)
    prompts = [encode_prompt(codec, vision, one.prompt, one.images) for one in problems]
    answers = codec.encode_all([f"{one.answer}{END}" for one in problems])
    lines = [prompt.tokens + answer for prompt, answer in zip(prompts, answers, strict=True)]
    return Pictures(
        torch.tensor(lines),
        torch.stack([_pixels(pixels, prompt) for prompt in prompts]),
        len(prompts[0].tokens),
    )


def _pixels(pixels: ImagePixels, prompt: EncodedPrompt) -> Tensor:
    (placed,) = prompt.images
    return pixels.of(placed.image, placed.rows, placed.columns)


def answer_logits(
    model: Qwen2VLForConditionalGeneration, pictures: Pictures, rows: Int[Tensor, " n"]
) -> Float[Tensor, "n T V"]:
    """Logits of the tokens of the answers, without those of placeholders."""
    tokens, pixels = pictures.tokens[rows, :-1], pictures.pixels[rows]
    grid = torch.tensor([1, HEIGHT // 14, WIDTH // 14]).expand(len(rows), 3)
    logits: Tensor = model(
        input_ids=tokens,
        pixel_values=pixels.flatten(0, 1),
        image_grid_thw=grid,
        mm_token_type_ids=(tokens == model.config.image_token_id).int(),
    ).logits[:, pictures.prompt_tokens - 1 :]
    never = torch.zeros(logits.shape[-1])
    never[list(placeholder_tokens(model.config))] = -torch.inf
    return logits + never


@torch.no_grad()
def accuracy(model: Qwen2VLForConditionalGeneration, tested: Pictures, *, greedy: bool) -> float:
    """Share of correct answers: greedy ones, or the probability that a sampled one is correct."""
    logits = answer_logits(model, tested, torch.arange(len(tested.tokens)))
    targets = tested.tokens[:, tested.prompt_tokens :]
    if greedy:
        return float((logits.argmax(-1) == targets).all(1).float().mean())
    chosen = logits.log_softmax(-1).gather(-1, targets[..., None])[..., 0]
    return float(chosen.sum(1).exp().mean())


def train(
    model: Qwen2VLForConditionalGeneration, folder: Path, *, most_steps: int = MOST_STEPS
) -> int:
    """Train with AdamW until the accuracy is reached; returns the number of steps."""
    pictures, tested = pictures_of(folder)
    optimizer = torch.optim.AdamW(model.parameters(), LEARNING_RATE, (0.9, 0.95), weight_decay=0.0)
    chosen = torch.Generator().manual_seed(SEED)
    for step in range(1, most_steps + 1):
        for group in optimizer.param_groups:
            group["lr"] = LEARNING_RATE * min(1.0, step / WARMUP_STEPS)
        rows = torch.randint(0, len(pictures.tokens), (BATCH,), generator=chosen)
        logits = answer_logits(model, pictures, rows)
        targets = pictures.tokens[rows, pictures.prompt_tokens :]
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if step % MEASURE_EVERY == 0 and accuracy(model, tested, greedy=False) >= ACCURACY:
            return step
    return most_steps


def pictures_of(folder: Path) -> tuple[Pictures, Pictures]:
    """Pictures to train on, and others to test with."""
    problems = rendered_sums(size=PICTURES + TESTED, eval_size=TESTED, seed=SEED)
    return read_pictures(folder, problems.train), read_pictures(folder, problems.held_out)


def make(folder: Path, *, most_steps: int = MOST_STEPS) -> dict[str, Any]:
    """Write the trained model as a Hugging Face folder; returns what `source.json` says."""
    began_s = time.process_time()
    torch.set_num_threads(1)
    kind = Qwen2VLForConditionalGeneration
    with tempfile.TemporaryDirectory() as place:
        untrained = Path(place)
        write_untrained(untrained)
        model = kind.from_pretrained(untrained, dtype=torch.float32)
        steps = train(model, untrained, most_steps=most_steps)
        model.bfloat16().save_pretrained(folder)
        for file in ("tokenizer.json", "tokenizer_config.json", "preprocessor_config.json"):
            (folder / file).write_bytes((untrained / file).read_bytes())
    stored = kind.from_pretrained(folder, dtype=torch.float32)
    _, tested = pictures_of(folder)
    return write_source(
        folder,
        stored,
        began_s=began_s,
        made_by="python -m tools.vision_model, from random weights and drawn pictures",
        steps=steps,
        batch=BATCH,
        seed=SEED,
        accuracy_sampled=accuracy(stored, tested, greedy=False),
        accuracy_greedy=accuracy(stored, tested, greedy=True),
        pillow=PIL.__version__,
    )


def main() -> None:
    """Parse the command line, train, and say how well the model does."""
    parser = argparse.ArgumentParser(description="train the packaged vision-language model")
    parser.add_argument("folder", type=Path)
    print(json.dumps(make(parser.parse_args().folder), indent=1))


if __name__ == "__main__":
    main()
