"""Log-probs of a packed batch: one pass over the trees, with logits only where a token is
predicted."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor, nn
from transformers import PreTrainedModel

from areal_lab.data.batch import PackedBatch
from areal_lab.functional.logprobs.token_logprobs import logprobs_and_entropy
from areal_lab.training.attention import tree_layout


class Predictions(NamedTuple):
    """Log-probs and entropies at the chosen tokens, in the order of the packed rows."""

    logprobs: Float[Tensor, " R"]
    entropy: Float[Tensor, " R"]
    """In nats, of the distribution that the token was sampled from."""


class PackedPolicy(nn.Module):
    """A policy whose forward takes packed batches: body, output layer and chunked log-probs.

    This is the module to shard and to call. The weights of the output layer, which may be those of
    the embedding, are read in its forward, so they are in one piece there and get their gradient.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        temperature: float = 1.0,
        dtype: torch.dtype = torch.float32,
        entropy_gradient: bool = False,
    ) -> None:
        """Wrap a model.

        Args:
            model: from `load_policy`.
            temperature: the sampler's temperature, which divides the logits.
            dtype: type of the matrix products; float32 needs no autocast.
            entropy_gradient: whether the entropy is part of the loss; it is detached otherwise.
        """
        super().__init__()
        self.model = model
        self.temperature = temperature
        self.dtype = dtype
        self.entropy_gradient = entropy_gradient

    def forward(self, packed: PackedBatch) -> Predictions:
        """Compute the model's log-probs of the chosen tokens.

        Args:
            packed: on the model's device.
        """
        body: Any = self.model.get_submodule(self.model.base_model_prefix)
        head: Any = self.model.get_output_embeddings()
        with _autocast(packed.tokens.device, self.dtype):
            hidden = body(
                input_ids=packed.tokens[None],
                position_ids=packed.positions[None],
                use_cache=False,
                tree_layout=tree_layout(packed),
            ).last_hidden_state[0]
        # Autocast does not apply inside the chunked product, so its inputs are cast here.
        scored = logprobs_and_entropy(
            hidden[packed.predict_from].to(self.dtype),
            head.weight.to(self.dtype),
            packed.targets,
            temperature=self.temperature,
        )
        entropy = scored.entropy if self.entropy_gradient else scored.entropy.detach()
        return Predictions(scored.logprobs[packed.prediction], entropy[packed.prediction])


def _autocast(device: torch.device, dtype: torch.dtype) -> AbstractContextManager[Any]:
    if dtype == torch.float32:
        return nullcontext()
    return torch.autocast(device.type, dtype=dtype)
