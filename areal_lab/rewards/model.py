"""Rewards by a trained reward model: the score at the end of the response.

    reward:
      fn: areal_lab.rewards.model:RewardModel
      kwargs: {path: runs/rm-.../model}

The folder has the rule by which prompts and responses became tokens in training, so a response gets
the same score as there. Loads torch when it is created, once per reward process.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from areal_lab.data.tokenize import TextCodec
from areal_lab.data.wrapping import Wrapping
from areal_lab.models.folder import read_model_facts
from areal_lab.models.locate import sound_model_path


class RewardModel:
    """A reward function: `RewardModel(path)(completion, example)` is an unbounded score.

    Args:
        path: folder that `areal-lab rm` wrote.
        device: `cpu`, or a GPU that neither engines nor the trainer use.
        threads: CPU threads.

    Raises:
        ValueError: the folder has no reward model.
    """

    def __init__(self, path: str, *, device: str = "cpu", threads: int = 1) -> None:
        import torch  # a late import: the pipeline, which checks the name, has no torch
        from transformers import AutoModelForSequenceClassification

        from areal_lab.models.load import load_complete

        folder = self.check(path)
        torch.set_num_threads(threads)
        self._wrapping = Wrapping.read(folder)
        self._codec = TextCodec.load(folder)
        self._context = read_model_facts(folder).context_tokens
        self._device = device
        model: Any = load_complete(
            AutoModelForSequenceClassification, folder, num_labels=1, dtype=torch.float32
        ).model
        self._model = model.eval().to(device)

    @staticmethod
    def check(path: str = "", **_: object) -> Path:
        """Return the folder if it has a reward model; `areal_lab.resolve` calls this."""
        if not path:
            raise ValueError("path is empty, but must be the folder of a reward model")
        folder = sound_model_path(path)
        Wrapping.read(folder)
        return folder

    def __call__(self, completion: str, example: Mapping[str, Any]) -> float:
        """Score of a completion of `example["prompt"]`."""
        return self.score(str(example["prompt"]), completion)

    def score(self, prompt: str, response: str) -> float:
        """Score of a response; higher is better, and only differences are meaningful.

        The text that training put around a prompt and after a response is added if missing.
        """
        import torch

        tokens = self._wrapping.tokens(self._codec, prompt, response)
        if self._context is not None and len(tokens) > self._context:
            raise ValueError(
                f"prompt and response have {len(tokens)} tokens, but the reward model's context is "
                f"{self._context}; lower gconfig.max_new_tokens"
            )
        with torch.inference_mode():
            # Not the model's forward, which looks for padding, which may be the end token.
            body = self._model.get_submodule(self._model.base_model_prefix)
            input_ids = torch.tensor([tokens], device=self._device)
            hidden = body(input_ids=input_ids, use_cache=False).last_hidden_state
            return float(self._model.score(hidden[0, -1]))
