"""Log-probs, or values, of a packed batch: one pass over the trees, with outputs only for
predictions.

These modules are sharded and called: they read the weights of their output layer, which
may be those of the embedding, in their forward, where a sharded model has them in one piece.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from areal_lab.data.batch import WHOLE, PackedBatch, SequencePart
from areal_lab.functional.logprobs.tiles import VocabularyPart
from areal_lab.functional.logprobs.token_logprobs import logprobs_and_entropy
from areal_lab.models.image_features import ImageInputs, ImagePixels, sees, with_features
from areal_lab.models.vision import placeholder_tokens
from areal_lab.training.attention import tree_layout
from areal_lab.training.model import VALUE_HEAD
from areal_lab.training.throughput import model_flops


class Predictions(NamedTuple):
    """Log-probs and entropies at the chosen tokens, in the order of the packed rows."""

    logprobs: Float[Tensor, " R"]
    entropy: Float[Tensor, " R"]
    """Entropy in nats of the distribution that the token was sampled from."""
    values: Float[Tensor, " R"] | None = None
    """Before each token; None of a policy without an output for them."""


class PackedPolicy(nn.Module):
    """A policy whose forward takes packed batches: body, output layer and chunked log-probs."""

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        temperature: float = 1.0,
        dtype: torch.dtype = torch.float32,
        param_dtype: torch.dtype = torch.float32,
        entropy_gradient: bool = False,
        attention: str = "auto",
        pixels: ImagePixels | None = None,
    ) -> None:
        super().__init__()
        self.model = model
        self.flops = model_flops(model)
        self.param_dtype = param_dtype
        """Type of the gathered weights, with which layers compute; see `_autocast`."""
        self.pixels = pixels
        self.never_sampled = placeholder_tokens(model.config)
        """Tokens that engines do not sample; log-probs are over the others."""
        self.temperature = temperature
        self.dtype = dtype
        self.entropy_gradient = entropy_gradient
        self.attention = attention
        self.vocabulary: VocabularyPart | None = None
        """Local rows of the output layer, if ranks divide them."""
        self.sequence = WHOLE
        """Local tokens, if ranks divide them."""
        self.always_sees = False
        """True if the vision tower computes in passes without images, too."""

    def forward(self, packed: PackedBatch) -> Predictions:
        """Compute the model's log-probs of the chosen tokens."""
        head: Any = self.model.get_output_embeddings()
        hidden = _hidden_states(self, packed)
        values = None
        if hasattr(self.model, VALUE_HEAD):
            values = _values(self.model, hidden, packed, self.sequence)
        # Autocast does not apply inside the chunked product, so its inputs are cast here.
        hidden = hidden.to(self.dtype)
        weight = _rows_here(head.weight)
        scored = logprobs_and_entropy(
            hidden,
            weight.to(self.dtype),
            self.sequence.own(packed.targets),
            temperature=self.temperature,
            keep=self._sampled(len(hidden), weight),
            part=self.vocabulary,
        )
        logprobs, entropy = (self.sequence.gather(one)[packed.prediction] for one in scored)
        return Predictions(logprobs, entropy if self.entropy_gradient else entropy.detach(), values)

    def _sampled(self, tokens: int, weight: Tensor) -> Bool[Tensor, "T V"] | None:
        """Mask of the tokens that engines sample, for each prediction; None: all of them."""
        if not self.never_sampled:
            return None
        sampled = torch.ones(weight.shape[0], dtype=torch.bool)
        sampled[list(self.never_sampled)] = False
        return sampled.to(weight.device).expand(tokens, -1)


class PackedValues(nn.Module):
    """A model with one output per token whose forward takes packed batches.

    The value of a token is read where the token is predicted: before it is known.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        dtype: torch.dtype = torch.float32,
        param_dtype: torch.dtype = torch.float32,
        attention: str = "auto",
    ) -> None:
        super().__init__()
        self.model = model
        self.flops = model_flops(model)
        self.param_dtype = param_dtype
        self.dtype = dtype
        self.attention = attention
        self.sequence = WHOLE
        self.pixels: ImagePixels | None = None
        """transformers has no value models with images."""
        self.always_sees = False

    def forward(self, packed: PackedBatch) -> Float[Tensor, " R"]:
        """Compute the value before each chosen token."""
        hidden = _hidden_states(self, packed)
        return _values(self.model, hidden, packed, self.sequence)


def _values(
    model: PreTrainedModel,
    hidden: Float[Tensor, "u hidden"],
    packed: PackedBatch,
    part: SequencePart,
) -> Float[Tensor, " R"]:
    head: Any = model.get_submodule(VALUE_HEAD)
    # Values in bfloat16 would have three digits.
    values = part.gather(head(hidden.to(head.weight.dtype))[:, 0])
    return values[packed.prediction]


def _hidden_states(
    of: PackedPolicy | PackedValues, packed: PackedBatch
) -> Float[Tensor, "u hidden"]:
    """Outputs of the model's body at the predictions of this rank.

    Parts of the predictions are equal, and not those of the tokens: prompts predict nothing.
    """
    model, part = of.model, of.sequence
    body: Any = model.get_submodule(model.base_model_prefix)
    with _autocast(packed.tokens.device, of):
        hidden = body(
            input_ids=part.own(packed.tokens)[None],
            position_ids=_positions(packed, part, rope=sees(model)),
            use_cache=False,
            tree_layout=tree_layout(packed, asked=of.attention, dtype=of.dtype, part=part),
            **with_features(model, _image_inputs(of, packed)),
        ).last_hidden_state[0]
    predicting: Tensor = part.gather(hidden)[part.own(packed.predict_from)]
    return predicting


def _positions(packed: PackedBatch, part: SequencePart, *, rope: bool) -> Tensor:
    """Positions in the form of the body: [1, p], or [3, 1, p] of a model with M-RoPE."""
    if packed.images is not None:
        return packed.images.positions[:, None]
    positions = part.own(packed.positions)[None]
    return positions.expand(3, 1, -1) if rope else positions


def _image_inputs(of: PackedPolicy | PackedValues, packed: PackedBatch) -> ImageInputs | None:
    pixels, device = of.pixels, packed.tokens.device
    if packed.images is None:
        if pixels is None:
            return None
        placeholders = torch.tensor(placeholder_tokens(of.model.config), device=device)
        if torch.isin(packed.tokens, placeholders).any():
            raise ValueError("a batch has placeholders, but no images: they were lost on the way")
        return pixels.none(device) if of.always_sees else None
    if pixels is None:
        raise ValueError(
            f"a batch has {len(packed.images.images)} image(s), but the model cannot have any"
        )
    return pixels.inputs(
        [(one.image, one.rows, one.columns) for one in packed.images.images],
        packed.images.features,
        device,
    )


def _rows_here(weight: Tensor) -> Tensor:
    """Local rows of a divided output layer."""
    return weight.to_local() if isinstance(weight, DTensor) else weight


def _autocast(device: torch.device, of: PackedPolicy | PackedValues) -> AbstractContextManager[Any]:
    """Cast the inputs of products, unless weights and hidden states have their type anyway."""
    if of.dtype == of.param_dtype:
        return nullcontext()
    return torch.autocast(device.type, dtype=of.dtype)
