"""Log-probs of a packed batch: one pass over the trees, with logits only where a token is
predicted."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor
from transformers import PreTrainedModel

from areal_lab.data.batch import PackedBatch
from areal_lab.functional.logprobs.token_logprobs import logprobs_and_entropy
from areal_lab.training.attention import tree_layout


class Predictions(NamedTuple):
    """Log-probs and entropies at the chosen tokens, in the order of the packed rows."""

    logprobs: Float[Tensor, " R"]
    entropy: Float[Tensor, " R"]
    """In nats, of the distribution that the token was sampled from."""


def predict(
    model: PreTrainedModel,
    packed: PackedBatch,
    *,
    temperature: float,
    dtype: torch.dtype,
    entropy_gradient: bool = False,
) -> Predictions:
    """Compute the model's log-probs of the chosen tokens.

    Args:
        model: from `load_policy`.
        packed: on the model's device.
        temperature: the sampler's temperature, which divides the logits.
        dtype: type of the matrix products; float32 needs no autocast.
        entropy_gradient: whether the entropy is part of the loss; it is detached otherwise.
    """
    body: Any = model.get_submodule(model.base_model_prefix)
    head: Any = model.get_output_embeddings()
    with _autocast(packed.tokens.device, dtype):
        hidden = body(
            input_ids=packed.tokens[None],
            position_ids=packed.positions[None],
            use_cache=False,
            tree_layout=tree_layout(packed),
        ).last_hidden_state[0]
    # Autocast does not apply inside the chunked product, so its inputs are cast here.
    scored = logprobs_and_entropy(
        hidden[packed.predict_from].to(dtype),
        head.weight.to(dtype),
        packed.targets,
        temperature=temperature,
    )
    entropy = scored.entropy if entropy_gradient else scored.entropy.detach()
    return Predictions(scored.logprobs[packed.prediction], entropy[packed.prediction])


def on_device(packed: PackedBatch, device: torch.device) -> PackedBatch:
    """The batch with its tensors on `device`."""
    moved: dict[str, Any] = {
        name: value.to(device)
        for name, value in packed._asdict().items()
        if isinstance(value, Tensor)
    }
    return packed._replace(**moved)


def _autocast(device: torch.device, dtype: torch.dtype) -> AbstractContextManager[Any]:
    if dtype == torch.float32:
        return nullcontext()
    return torch.autocast(device.type, dtype=dtype)
