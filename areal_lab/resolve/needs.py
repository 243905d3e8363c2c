"""What a config asks of the machines that it will run on, without looking at this one.

TrainConfig --needs_of--> cluster.deploy.shape.Needs: servers, trainer processes, memory of each
"""

from __future__ import annotations

from typing import Final

from areal_lab.cluster.deploy.shape import GIB, Needs
from areal_lab.config.schema import TrainConfig
from areal_lab.engines.launch.backends import BACKENDS
from areal_lab.models.folder import read_model_facts, transfer_bytes
from areal_lab.models.locate import is_here, resolve_model_path
from areal_lab.resolve.allocation import layout_of
from areal_lab.resolve.limits import version_bytes
from areal_lab.resolve.memory import estimate
from areal_lab.resolve.trainer import check_trainer

_SERVER_BYTES: Final = {"embedded": GIB}
_OTHER_SERVER_BYTES: Final = 4 * GIB
"""Resident memory of SGLang or vLLM beside weights: 2.7 GB on a CPU, with a margin."""
_SETS: Final = 3
"""Weights that a server holds at most while it loads a version: old, new, and a copy to convert."""
_RANK_BYTES: Final = 4 * GIB
"""Main memory of a trainer process whose model is on a GPU."""
_GUESS: Final = {True: 32 * GIB, False: 4 * GIB}
"""Main memory for each GPU, or for each process on a CPU, of a model that is not here."""


def asks_for_gpus(config: TrainConfig) -> bool:
    """Whether a run is meant for GPUs: SGLang, vLLM, or a device that says so."""
    if "cuda" in (config.rollout.device, config.actor.device):
        return True
    backend = BACKENDS[layout_of(config).engines.backend]
    return not config.rollout.addresses and backend.own_environment


def needs_of(config: TrainConfig, *, gpu: bool) -> Needs:
    """Processes and memory of a run.

    Args:
        gpu: whether engines and trainer compute on GPUs.

    Raises:
        ValueError: in one line, if the allocation contradicts itself or is not supported.
    """
    layout = layout_of(config)
    if layout.allocation is not None and layout.allocation.trainer is not None:
        check_trainer(layout.allocation.trainer, config.allocation_mode)
    plan, ranks = layout.engines, layout.trainer.devices
    each = _GUESS[gpu]
    server, trainer, version = each * (plan.tensor_parallel if gpu else 1), each * ranks, each // 4
    guess = f"{config.actor.path} is not here"
    if is_here(config.actor.path):
        folder = resolve_model_path(config.actor.path)
        parameters = read_model_facts(folder).parameters
        weights = transfer_bytes(parameters, config.rollout.dtype)
        version = version_bytes(config, folder, parameters)
        server = _SERVER_BYTES.get(plan.backend, _OTHER_SERVER_BYTES) + _SETS * weights
        estimated = estimate(config, folder, layout.trainer, device="cuda" if gpu else "cpu")
        guess = ""
        if gpu:
            trainer = ranks * _RANK_BYTES + 4 * parameters  # float32, gathered to be saved
        elif estimated is not None:
            trainer = estimated.resident[1]
        else:
            guess = f"the layers of {config.actor.path} are neither Llama's nor Qwen's"
    return Needs(
        backend=plan.backend,
        servers=0 if config.rollout.addresses else plan.servers,
        tensor_parallel=plan.tensor_parallel,
        trainer_ranks=ranks,
        trainer_nodes=config.cluster.trainer_nodes,
        spare_nodes=config.cluster.spare_nodes,
        shared=plan.shared and not config.rollout.addresses,
        gpu=gpu,
        server_bytes=server,
        trainer_bytes=trainer,
        version_bytes=version,
        guess=guess,
    )
