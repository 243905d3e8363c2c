"""Extension of vLLM's CPU workers: reload the weights of tied output layers, too.

On a CPU, vLLM 0.32.0 multiplies by a packed copy of each layer's weights. When weights are
reloaded, every layer whose name is among them repacks its copy. The output layer of a model with
tied embeddings (`tie_word_embeddings`) has no separate name and keeps the copy of the first
weights: every log-prob is then wrong, by up to 0.43 nat in a small random model.

Enable it with `--worker-extension-cls areal_lab_vllm.ReloadAll` and this folder in PYTHONPATH. vLLM
makes the class a base of its worker; its methods are called by name through `/collective_rpc`.
"""

from __future__ import annotations

from typing import Any


class ReloadAll:
    """Methods added to a vLLM worker; their names must not clash with its own."""

    def reload_all_weights(self: Any, weights_path: str) -> None:
        """Load the weights in a folder into every layer."""
        from vllm.config import set_current_vllm_config
        from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead

        self.reload_weights(weights_path=weights_path)
        with set_current_vllm_config(self.vllm_config):
            for layer in self.get_model().modules():
                if isinstance(layer, ParallelLMHead):
                    # Repacking is harmless if the reload has already packed it.
                    layer.quant_method.process_weights_after_loading(layer)

    def can_reload_all_weights(self) -> bool:
        """Return whether this class is loaded; checks servers that we did not start."""
        return True
