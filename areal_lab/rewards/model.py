"""Rewards by a trained reward model: the score at the end of the response.

    reward:
      fn: areal_lab.rewards.model:RewardModel
      kwargs: {path: runs/rm-.../model}

The folder has the rule by which prompts and responses became tokens in training, so that a response
gets the score that it would have had there. Loads torch when it is made, once per reward process.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from areal_lab.data.tokenize import TextCodec
from areal_lab.data.wrapping import Wrapping
from areal_lab.models.folder import read_model_facts
from areal_lab.models.locate import resolve_model_path


class RewardModel:
    """A reward function: `RewardModel(path)(completion, example)` is a score without bounds.

    Args:
        path: folder that `areal-lab rm` wrote.
        device: `cpu`, or a GPU that neither engines nor the trainer use.
        threads: of the CPU.

    Raises:
        ValueError: the folder has no reward model.
    """

    def __init__(self, path: str, *, device: str = "cpu", threads: int = 1) -> None:
        import torch  # not above: the pipeline, which checks the name, does without
        from transformers import AutoModelForSequenceClassification
        from transformers.utils import logging

        folder = self.check(path)
        logging.disable_progress_bar()
        torch.set_num_threads(threads)
        self._wrapping = Wrapping.read(folder)
        self._codec = TextCodec.load(folder)
        self._context = read_model_facts(folder).context_tokens
        self._device = device
        model: Any = AutoModelForSequenceClassification.from_pretrained(
            folder,
            num_labels=1,
            dtype=torch.float32,
            local_files_only=True,
            trust_remote_code=False,
        )
        self._model = model.eval().to(device)

    @staticmethod
    def check(path: str = "", **_: object) -> Path:
        """The folder, if it has a reward model; preflight calls this.

        Raises:
            ValueError: in one line.
        """
        if not path:
            raise ValueError("path is empty, but must be the folder of a reward model")
        folder = resolve_model_path(path)
        Wrapping.read(folder)
        return folder

    def __call__(self, completion: str, example: Mapping[str, Any]) -> float:
        """The score of a completion of `example["prompt"]`."""
        return self.score(str(example["prompt"]), completion)

    def score(self, prompt: str, response: str) -> float:
        """The score of a response; higher is better, and only differences have a meaning.

        The text that training put around a prompt and after a response is added where it is not
        there yet.

        Raises:
            ValueError: they are longer than the model's context.
        """
        import torch

        tokens = self._wrapping.tokens(self._codec, prompt, response)
        if self._context is not None and len(tokens) > self._context:
            raise ValueError(
                f"prompt and response have {len(tokens)} tokens, but the reward model's context is "
                f"{self._context}; lower gconfig.max_new_tokens"
            )
        with torch.inference_mode():
            # Not its own forward: that looks for padding, which may be the end token.
            body = self._model.get_submodule(self._model.base_model_prefix)
            input_ids = torch.tensor([tokens], device=self._device)
            hidden = body(input_ids=input_ids, use_cache=False).last_hidden_state
            return float(self._model.score(hidden[0, -1]))
