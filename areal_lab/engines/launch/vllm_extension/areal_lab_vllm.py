"""In vLLM's workers on a CPU: an output layer that is the embeddings gets new weights, too.

There vLLM 0.32.0 multiplies by a copy of a layer's weights that is packed for the CPU. When weights
are reloaded, every layer that finds its name among them packs them anew. The output layer of a
model with tied embeddings (`tie_word_embeddings`) has no name of its own, and so keeps the copy of
the first weights: every log-prob is then wrong, by up to 0.43 nat in a small random model.

Started with `--worker-extension-cls areal_lab_vllm.ReloadAll`, this folder in PYTHONPATH. vLLM
makes the class a base of its worker; its methods are called by name through `/collective_rpc`.
"""

from __future__ import annotations

from typing import Any


class ReloadAll:
    """Methods of a worker beside vLLM's own; their names must not be among those."""

    def reload_all_weights(self: Any, weights_path: str) -> None:
        """Load the weights in a folder into every layer."""
        from vllm.config import set_current_vllm_config
        from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead

        self.reload_weights(weights_path=weights_path)
        with set_current_vllm_config(self.vllm_config):
            for layer in self.get_model().modules():
                if isinstance(layer, ParallelLMHead):
                    # Packing again what the reload has packed does no harm.
                    layer.quant_method.process_weights_after_loading(layer)

    def can_reload_all_weights(self) -> bool:
        """Whether this class is there: asked of servers that somebody else has started."""
        return True
