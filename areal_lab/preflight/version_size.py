"""How large one version is on its way to the engines."""

from __future__ import annotations

from pathlib import Path

from areal_lab.config.schema import TrainConfig
from areal_lab.engines.errors import EngineError
from areal_lab.engines.weights.records import Transfer
from areal_lab.engines.weights.verify_folder import adapter_parameters
from areal_lab.models.folder import transfer_bytes
from areal_lab.preflight.limits import lora_of


def version_bytes(config: TrainConfig, model_path: Path, parameters: int) -> int:
    """At most; a whole model's where the folder does not tell how large an adapter is.

    Args:
        model_path: the model's folder.
        parameters: of the whole model.
    """
    if config.rollout.transfer == Transfer.ADAPTER:
        try:
            parameters = adapter_parameters(model_path, lora_of(config)) or parameters
        except EngineError:
            pass  # who loads the model says what is wrong with it
    return transfer_bytes(parameters, config.rollout.dtype)
