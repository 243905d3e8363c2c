"""Where the trainer computes, in how many processes: decided before any process starts.

    allocation_mode, actor.device, free GPUs --trainer_plan--> TrainerPlan, or a one-line error
    its sizes, model folders --check_division--> problems

t divides heads, key-value heads, the width of the feed-forward network, the vocabulary
c divides heads
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Final, Literal

from areal_lab.config.offline import OfflineActorConfig
from areal_lab.config.problem import Kind, Problem, refusal
from areal_lab.config.schema import ActorConfig, TrainConfig
from areal_lab.host.machine import find_compiler
from areal_lab.models.folder import ModelShape, dtype_name, has_bfloat16, read_model_shape
from areal_lab.models.locate import is_here, resolve_model_path
from areal_lab.resolve.allocation import TORCH_TRAINERS, UNDIVIDED, Part, Sizes
from areal_lab.training.objective.formula_index import find_formula
from areal_lab.training.objective.formulas import Role

_DIVIDED: Final = ("llama", "qwen2", "qwen3")
"""Models whose layers `training.parallel` knows."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerPlan:
    """The processes of a trainer."""

    sizes: Sizes = UNDIVIDED
    """How they divide the model and its work."""
    device: str = "cpu"
    """`cpu` or `cuda`."""
    gpus: tuple[str, ...] = ()
    """GPU of each rank, as `CUDA_VISIBLE_DEVICES` names it."""

    @property
    def ranks(self) -> int:
        """Number of processes."""
        return self.sizes.devices


NO_TRAINER: Final = TrainerPlan()
"""Of what trains nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FreeGpus:
    """The GPUs that a trainer may take."""

    free: tuple[str, ...]
    """Those that no engine of the run uses."""
    visible: int
    torch_has_cuda: bool


def check_trainer(trainer: Part, text: str) -> None:
    """Refuse what the trainer cannot do.

    Args:
        trainer: of an allocation.
        text: the whole `allocation_mode`.

    Raises:
        ConfigError: in one line, with the reason and another allocation.
    """
    sizes, why = trainer.sizes, ""
    fix = Sizes(data=sizes.data * sizes.pipeline, tensor=sizes.tensor, context=sizes.context)
    if trainer.backend not in TORCH_TRAINERS:
        why = (
            f"trains with {trainer.backend}, which is not supported: trainers here are torch's own "
            "(another one would answer the requests of areal_lab/training/protocol.py)"
        )
    elif sizes.pipeline > 1:
        why = (
            f"trains with p{sizes.pipeline}, but trainer processes have no pipeline of stages: "
            "each of them takes part in every layer"
        )
    elif sizes.expert > 1:
        why = f"trains with e{sizes.expert}, but experts are sharded like all other weights"
    elif sizes.tensor > 1 and sizes.context > 1:
        why = f"trains with {sizes}, but t and c divide the same heads, and only one of them can"
    if sizes.tensor > 1 and sizes.context > 1:
        fix = Sizes(data=fix.data * sizes.context, tensor=sizes.tensor)
    if why:
        raise refusal("allocation_mode", f"allocation_mode {text} {why}; write fsdp:{fix}")


def asks_for_values(actor: ActorConfig) -> bool:
    """Whether the advantages need a critic; True of custom functions, which only the trainer
    imports."""
    name = actor.advantage_fn or actor.advantage.get("name", "")
    if not name:
        return False
    found = find_formula(Role.ADVANTAGE, name)
    return found is None or "values" in found.facts


def models_of(config: TrainConfig) -> Iterator[tuple[str, str]]:
    """The settings that name the models of the trainer, and what they say: the policy's first."""
    yield "actor.path", config.actor.path
    if config.actor.kl_loss_coef or config.actor.kl_ctl:
        yield "ref.path", config.ref.path
    if asks_for_values(config.actor) and not config.critic.share_body:
        yield "critic.path", config.critic.path
    yield "teacher.path", config.teacher.path


def trainer_plan(config: TrainConfig, sizes: Sizes, gpus: FreeGpus) -> TrainerPlan:
    """The trainer's processes and their devices.

    Raises:
        ConfigError: in one line, if GPUs were asked for that are not there.
    """
    asked, ranks = config.actor.device, sizes.devices
    _check_ranks(config, sizes)
    enough = gpus.torch_has_cuda and len(gpus.free) >= ranks
    if asked == "cpu" or (asked == "auto" and not enough):
        check_layers(config.actor, "cpu")
        _check_working_copies(config.actor, "cpu")
        return TrainerPlan(sizes=sizes)
    if enough:
        check_layers(config.actor, "cuda")
        _check_working_copies(config.actor, "cuda")
        return TrainerPlan(sizes=sizes, device="cuda", gpus=gpus.free[-ranks:])
    share = ""
    if not gpus.visible:
        why = "no GPU is visible here"
    elif not gpus.torch_has_cuda:
        why = "the installed torch was built without CUDA"
    else:
        why = (
            f"{ranks} trainer process(es) need a GPU each, and of {gpus.visible} visible GPU(s) "
            f"the engines leave {len(gpus.free)}"
        )
        share = ", or rollout.share_gpu=true to share the GPUs of embedded engines"
    raise refusal(
        "actor.device", f"actor.device is cuda, but {why}; write actor.device=cpu, or auto{share}"
    )


def check_layers(actor: ActorConfig | OfflineActorConfig, device: str) -> None:
    """Refuse kernels and compilation that the device does not have.

    Args:
        actor: the settings of the trained model.
        device: `cpu` or `cuda`.

    Raises:
        ConfigError: in one line.
    """
    language: Literal["c", "c++"] = "c++" if device == "cpu" else "c"
    if actor.compile and find_compiler(language) is None:
        raise refusal(
            "actor.compile",
            f"actor.compile is true, but there is no {language.upper()} compiler here, which torch "
            f"needs for a trainer on {device}; install gcc and g++, or leave it out",
        )
    asked = actor.attention
    if asked in ("varlen", "flex") and device == "cpu":
        raise refusal(
            "actor.attention",
            f"actor.attention is {asked}, but the trainer computes on the CPU, for which it has no "
            "backward pass; write actor.attention=auto, or sdpa",
        )
    if asked == "varlen" and actor.dtype == "float32":
        raise refusal(
            "actor.attention",
            "actor.attention is varlen, which computes in 16 bits only, but actor.dtype is "
            "float32; write actor.dtype=bfloat16, or actor.attention=auto",
        )
    if asked == "flex" and find_compiler("c") is None:
        raise refusal(
            "actor.attention",
            "actor.attention is flex, which is compiled, but there is no C compiler; install gcc, "
            "or write actor.attention=auto, which does without",
        )


def _check_working_copies(actor: ActorConfig, device: str) -> None:
    """Refuse weights of another type than layers compute in, and adapters on them."""
    if actor.param_dtype == "float32":
        return
    dtype = dtype_name(actor.dtype, native=has_bfloat16(device))
    if dtype != actor.param_dtype:
        raise refusal(
            "actor.param_dtype",
            f"actor.param_dtype is {actor.param_dtype}, but the trainer computes in {dtype} "
            f"(actor.dtype {actor.dtype} on {device}); write actor.dtype=bfloat16, or leave it out",
        )
    if actor.use_lora:
        raise refusal(
            "actor.param_dtype",
            f"actor.param_dtype is {actor.param_dtype}, but adapters (actor.use_lora) are merged "
            "into weights in float32, as in what engines get; leave one of them out",
        )


def _check_ranks(config: TrainConfig, sizes: Sizes) -> None:
    """Refuse more processes than there is work for, and shards that do not divide them."""
    batch, parts = config.dataset.batch_size, config.actor.ppo_n_minibatches
    if sizes.data > 1 and sizes.data > batch // parts:
        fewer = replace(sizes, data=max(1, batch // parts))
        raise refusal(
            "allocation_mode",
            f"allocation_mode {config.allocation_mode} trains in {sizes.data} data ranks, but a "
            f"minibatch has {batch // parts} group(s) (dataset.batch_size {batch} / "
            f"actor.ppo_n_minibatches {parts}), and a group is not divided; write "
            f"fsdp:{fewer}",
        )
    undivided = f"fsdp:d{min(sizes.devices, max(1, batch // parts))}"
    if config.actor.use_lora and sizes.tensor > 1:
        raise refusal(
            "allocation_mode",
            f"allocation_mode {config.allocation_mode} divides layers among {sizes.tensor} "
            f"processes, but adapters (actor.use_lora) are not divided; write {undivided}",
        )
    if config.actor.compile and sizes.tensor > 1:
        raise refusal(
            "actor.compile",
            "actor.compile is true, but torch cannot compile the layers that allocation_mode "
            f"{config.allocation_mode} divides; leave it out, or write {undivided}",
        )
    shards, ranks = config.actor.shard_ranks, sizes.data * sizes.context
    if shards and ranks % shards:
        raise refusal(
            "actor.shard_ranks",
            f"actor.shard_ranks is {shards}, but must divide the {ranks} trainer process(es) of "
            "allocation_mode (d x c); 0 shards over all of them",
        )


def check_division(config: TrainConfig, sizes: Sizes) -> Iterator[Problem]:
    """Check that the trainer's processes can divide the models that are here; broken ones are
    reported elsewhere."""
    if sizes.tensor == sizes.context == 1:
        return
    for setting, path in models_of(config):
        try:
            if not path or not is_here(path):
                continue
            shape = read_model_shape(resolve_model_path(path))
        except ValueError:
            continue
        if why := _undivided(shape, sizes):
            message = (
                f"allocation_mode {config.allocation_mode} trains with {sizes}, but {why} "
                f"({setting} {path}); write fsdp:d{sizes.devices}"
            )
            yield Problem(Kind.DIVISIBILITY, "allocation_mode", message)


def _undivided(shape: ModelShape | None, sizes: Sizes) -> str:
    """What does not divide; nothing if all does."""
    if shape is None:
        return "the model's config.json does not tell its heads"
    if sizes.tensor > 1 and (shape.kind not in _DIVIDED or not shape.dense):
        return f"layers of {shape.kind} are not divided, only those of {', '.join(_DIVIDED)}"
    divided = {
        "heads": (shape.heads, sizes.tensor * sizes.context),
        "key-value heads": (shape.kv_heads, sizes.tensor),
        "numbers in its feed-forward network": (shape.intermediate, sizes.tensor),
        "tokens in its vocabulary": (shape.vocab, sizes.tensor),
    }
    for what, (number, degree) in divided.items():
        if number % degree:
            return f"{degree} does not divide the {number} {what}"
    return ""
