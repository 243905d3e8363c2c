"""When each setting is read: of `areal-lab train`, `sft`, `rm`, `dpo`, `eval` and `gateway`.

A new setting comes into its table here, or a test fails: as always read, or with its condition. The
settings of `dataset` are also compared with those that the sources of problems really read.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final, get_args

from areal_lab.config.offline import KINDS, OfflineConfig
from areal_lab.config.record import settings, value_of
from areal_lab.config.schema import BenchmarkName, TrainConfig
from areal_lab.config.sections import SinkName
from areal_lab.config.unread import Condition, ReadSettings, is_among
from areal_lab.metrics.alarm import AlarmName
from areal_lab.resolve.allocation import layout_of
from areal_lab.resolve.limits import schedule_of
from areal_lab.resolve.placement import runs_on_hosts
from areal_lab.resolve.trainer import asks_for_values

_FILE: Final = ("path", "eval_path", "prompt_template", "eval_size")
SOURCES: Final[Mapping[str, tuple[str, ...]]] = {
    "arithmetic": ("operations", "digits", "carry", "few_shot", "eval_size"),
    "reversed_addition": ("digits", "eval_size"),
    "sorting": ("digits", "eval_size"),
    "calculator": ("tool_examples", "tool_notation", "eval_size"),
    "chain": ("size", "depth", "few_shot", "eval_size"),
    "numbered": ("size", "prompt_template", "eval_size"),
    "rendered_sums": ("size", "eval_size"),
    "environment": ("eval_size",),
    "reasoning_gym": ("tasks", "size", "prompt_template", "eval_size"),
    "jsonl": (*_FILE, "prompt_field", "answer_field", "image_field", "image_folder"),
    **dict.fromkeys(get_args(BenchmarkName), _FILE),
}
"""Settings of `dataset` that each `dataset.type` reads."""
_NAMES_DATA: Final = (
    *("path", "eval_path", "prompt_field", "answer_field", "image_field", "image_folder"),
    *("prompt_template", "operations", "tasks"),
)
"""Settings of `dataset` that name what is trained on, so that a run without them is another one."""
_LORA: Final = ("actor.lora_rank", "actor.lora_alpha", "actor.target_modules")
_BOUNDS: Final[Mapping[str, str]] = {"stale_weights": "lag"}
"""The setting of an alarm's bound, where it has another name."""


def _of_source(name: str) -> Condition:
    """A setting of `dataset`, by its type."""
    readers = tuple(source for source, read in SOURCES.items() if name in read)

    def why(config: Any) -> str:
        return (
            f"with dataset.type={config.dataset.type}, which does not read it; set dataset.type="
            f"{' or '.join(readers)}, or leave it out"
        )

    return Condition(
        (f"dataset.{name}",),
        lambda config: config.dataset.type in readers,
        why,
        refused=name in _NAMES_DATA,
    )


_OF_SOURCES: Final = tuple(
    map(_of_source, sorted({name for read in SOURCES.values() for name in read}))
)


def _when(read: Callable[[Any], object], why: str, *names: str, refused: bool = False) -> Condition:
    return Condition(names, read, why, refused)


def _needs(name: str, *names: str) -> Condition:
    """Settings without effect where another one has its default: nothing, or off."""
    return Condition(names, lambda config: value_of(config, name), f"without {name}")


def _by_type(kind: str, *names: str) -> Condition:
    """Settings of one scheduler."""
    return Condition(
        names, lambda config: config.scheduler.type == kind, f"without scheduler.type={kind}"
    )


_OF_ENVIRONMENTS: Final = Condition(
    ("environment.",),
    lambda config: config.dataset.type == "environment",
    lambda _: "without dataset.type=environment; set it, or leave it out",
    True,
)


def _of_sink(sink: str) -> Condition:
    return Condition(
        (f"stats_logger.{sink}.",),
        lambda config: sink in config.sinks,
        f"without sinks=[{sink}]",
    )


def _of_alarm(alarm: str) -> Condition:
    return Condition(
        (f"alarms.{_BOUNDS.get(alarm, alarm)}",),
        lambda config: alarm not in config.alarms.off,
        f"with alarms.off=[{alarm}]",
    )


def _of_any_training(saves: str, saved: Callable[[Any], object]) -> tuple[Condition, ...]:
    """Conditions that `areal-lab train` and training on fixed data have in common.

    Args:
        saves: why only one checkpoint is written.
        saved: True for a config with several.
    """
    return (
        _when(
            lambda config: config.actor.use_lora,
            "without actor.use_lora=true: the whole model is trained",
            *_LORA,
        ),
        _when(
            lambda config: config.actor.optimizer.lr_scheduler_type != "constant",
            "with actor.optimizer.lr_scheduler_type=constant; set it to linear or cosine",
            "actor.optimizer.min_lr_ratio",
        ),
        *map(_of_sink, get_args(SinkName)),
        _needs("sinks", "stats_logger.close_timeout_s"),
        _when(saved, saves, "checkpoint.keep"),
    )


def _without_loss(config: TrainConfig) -> bool:
    """Return whether the policy loss has a factor of 0."""
    return bool(config.teacher.path) and config.teacher.rl_loss_weight == 0


def _default_loss(config: TrainConfig) -> bool:
    return not (config.actor.loss or config.actor.loss_fn)


def _starts_engines(config: TrainConfig) -> bool:
    return not config.rollout.addresses


def _eta(config: TrainConfig) -> str:
    schedule = schedule_of(config)
    return (
        f"with rollout.schedule={schedule.name}, which is eta={schedule.eta:g}; set "
        "rollout.schedule=asynchronous"
    )


_OBJECTIVE: Final = ("actor.loss", "actor.loss_fn", "actor.advantage", "actor.advantage_fn")
TRAIN: Final = ReadSettings(
    TrainConfig,
    always=(
        *("experiment_name", "total_train_steps", "seed", "run_dir", "allocation_mode"),
        *("save_every_steps", "eval_every_steps", "token_fields", "plots", "sinks"),
        *("dataset.type", "dataset.batch_size", "gconfig."),
        *("rollout.backend", "rollout.schedule", "rollout.max_concurrent_rollouts"),
        *("rollout.batch_order", "rollout.workflow", "rollout.pause_mode", "rollout.transfer"),
        "rollout.slots",
        *("rollout.dtype", "rollout.max_running_requests", "rollout.addresses"),
        "rollout.share_gpu",
        *("rollout.ready_timeout_s", "rollout.health_interval_s", "rollout.health_timeout_s"),
        *("rollout.stall_timeout_s", "rollout.max_engine_restarts", "rollout.stream_interval"),
        *("rollout.request_timeout_s", "rollout.dynamic_sampling.enabled"),
        "rollout.scaling.max_engines",
        *("actor.path", "actor.overlong_share", "actor.mask_truncated", "actor.entropy_coeff"),
        *("actor.kl_loss_coef", "actor.kl_ctl", "actor.ppo_n_minibatches"),
        *("actor.age_half_life", "actor.lr_ess_share", "actor.max_gradient_cosine"),
        *("actor.max_tokens_per_mb", "actor.dtype", "actor.param_dtype", "actor.device"),
        *("actor.attention", "actor.shard_ranks", "actor.offload", "actor.threads"),
        *("actor.gradient_checkpointing", "actor.compile", "actor.profile_steps"),
        *("actor.use_lora", "actor.optimizer.", "reward."),
        *("teacher.path", "evaluation.max_problems"),
        *("scheduler.type", "cluster.n_nodes", "checkpoint.resumable"),
        *("alarms.off", "alarms.steps", "alarms.solved"),
    ),
    conditions=(
        *_OF_SOURCES,
        _OF_ENVIRONMENTS,
        *_of_any_training(
            "without save_every_steps: only the last step is saved",
            lambda config: config.save_every_steps,
        ),
        _when(
            lambda config: not _without_loss(config),
            "with teacher.rl_loss_weight=0, which learns from the teacher alone; raise it, or "
            "leave it out",
            *_OBJECTIVE,
            refused=True,
        ),
        _when(
            lambda config: not _without_loss(config),
            "with teacher.rl_loss_weight=0, which learns from the teacher alone",
            *("actor.eps_clip", "actor.use_decoupled_loss", "actor.behav_imp_weight_cap"),
            *("actor.adv_norm_std", "actor.overlong_penalty_factor"),
        ),
        _when(
            lambda config: not config.actor.loss_fn,
            "with actor.loss_fn",
            *("actor.eps_clip", "actor.use_decoupled_loss", "actor.behav_imp_weight_cap"),
        ),
        _when(
            _default_loss,
            "with actor.loss, which has keywords of its own (clip_epsilon, correct)",
            *("actor.eps_clip", "actor.behav_imp_weight_cap"),
        ),
        _needs("actor.use_decoupled_loss", "actor.behav_imp_weight_cap"),
        _when(
            lambda config: not (config.actor.advantage or config.actor.advantage_fn),
            "with actor.advantage or actor.advantage_fn",
            "actor.adv_norm_std",
        ),
        _needs("actor.overlong_share", "actor.overlong_penalty_factor"),
        _needs("actor.kl_loss_coef", "actor.kl_estimator"),
        Condition(
            ("actor.aligned_gradients",),
            lambda config: config.actor.max_gradient_cosine < 1,
            lambda _: "without actor.max_gradient_cosine below 1; set it, or leave it out",
        ),
        _needs(
            "actor.kl_ctl", "actor.kl_ctl_estimator", "actor.kl_ctl_target", "actor.kl_ctl_horizon"
        ),
        _needs("actor.kl_ctl_target", "actor.kl_ctl_horizon"),
        _when(
            lambda config: config.actor.kl_loss_coef or config.actor.kl_ctl,
            "without actor.kl_loss_coef or actor.kl_ctl; set one of them, or leave it out",
            "ref.path",
            refused=True,
        ),
        _when(
            lambda config: asks_for_values(config.actor),
            "without advantages that are made from values; set actor.advantage=gae, or leave it "
            "out",
            "critic.path",
            refused=True,
        ),
        _when(
            lambda config: asks_for_values(config.actor),
            "without advantages that are made from values: actor.advantage=gae",
            *("critic.share_body", "critic.eps_clip", "critic.bootstrap_truncated"),
            *("critic.loss_coef", "critic.optimizer."),
        ),
        _needs("critic.share_body", "critic.loss_coef"),
        _when(
            lambda config: not config.critic.share_body,
            "with critic.share_body: actor.optimizer is for both",
            *("critic.optimizer.beta1", "critic.optimizer.beta2", "critic.optimizer.eps"),
            *("critic.optimizer.weight_decay", "critic.optimizer.gradient_clipping"),
            *("critic.optimizer.warmup_steps", "critic.optimizer.lr_scheduler_type"),
            "critic.optimizer.min_lr_ratio",
        ),
        _when(
            lambda config: config.critic.optimizer.lr_scheduler_type != "constant",
            "with critic.optimizer.lr_scheduler_type=constant; set it to linear or cosine",
            "critic.optimizer.min_lr_ratio",
        ),
        _needs("teacher.path", "teacher.distill_loss_weight", "teacher.rl_loss_weight"),
        Condition(
            ("rollout.max_head_offpolicyness",),
            lambda config: schedule_of(config).largest_eta == config.rollout.max_head_offpolicyness,
            _eta,
        ),
        _when(
            lambda config: config.rollout.schedule in ("asynchronous", "bounded_drift"),
            "without rollout.schedule=asynchronous or bounded_drift",
            "rollout.interruptible",
        ),
        _when(
            lambda config: config.rollout.schedule == "bounded_drift",
            "without rollout.schedule=bounded_drift",
            *("rollout.bounded_drift.max_drift", "rollout.bounded_drift.min_eta"),
            "rollout.bounded_drift.max_weight_deviation",
            "rollout.bounded_drift.min_effective_share",
        ),
        _when(
            lambda config: config.rollout.batch_order == "bounded_lag",
            "without rollout.batch_order=bounded_lag",
            *("rollout.max_lag", "rollout.on_late"),
        ),
        _when(
            lambda config: config.rollout.dynamic_sampling.enabled,
            "without rollout.dynamic_sampling.enabled=true",
            *("rollout.dynamic_sampling.tolerance", "rollout.dynamic_sampling.max_batches"),
            "rollout.dynamic_sampling.on_exhausted",
        ),
        _needs(
            "rollout.scaling.max_engines",
            *("rollout.scaling.min_engines", "rollout.scaling.window_steps"),
            *("rollout.scaling.cooldown_steps", "rollout.scaling.tolerance"),
        ),
        _when(
            lambda config: config.rollout.routing != "sticky" or config.rollout.workflow,
            "without rollout.workflow: sticky acts as least_loaded",
            "rollout.routing",
        ),
        _when(
            lambda config: config.rollout.transfer in ("http_tensor", "distributed", "cuda_ipc"),
            "without rollout.transfer=http_tensor, distributed or cuda_ipc",
            "rollout.transfer_timeout_s",
        ),
        _when(
            _starts_engines,
            "with rollout.addresses, whose servers run already",
            *("rollout.engines", "rollout.threads", "rollout.device", "rollout.port"),
            *("rollout.engine_args", "rollout.cache_gib"),
        ),
        _when(
            lambda config: layout_of(config).engines.backend == "embedded",
            "without rollout.backend=embedded: other engines compute where their build does",
            "rollout.device",
        ),
        _when(
            lambda config: layout_of(config).engines.backend == "embedded",
            "without rollout.backend=embedded: other engines size their caches themselves",
            "rollout.cache_gib",
        ),
        _when(
            lambda config: layout_of(config).trainer.devices > 1,
            "with one trainer process; more are allocation_mode=embedded:d1+fsdp:d2",
            "actor.collective_timeout_s",
        ),
        _needs(
            "evaluation.max_problems",
            *("evaluation.samples_per_problem", "evaluation.temperature", "evaluation.pass_at"),
            *("evaluation.engine_share", "evaluation.remeasure"),
        ),
        _needs("eval_every_steps", "evaluation.engine_share", "evaluation.remeasure"),
        _when(
            lambda config: config.save_every_steps,
            "without save_every_steps: only the last step is saved",
            "checkpoint.asynchronous",
        ),
        _when(
            lambda config: config.checkpoint.resumable,
            "with checkpoint.resumable=false",
            "checkpoint.open_groups",
        ),
        _by_type("manual", "scheduler.this_host"),
        _by_type("ray", "scheduler.ray_address", "scheduler.ray_resources"),
        _by_type("slurm", "scheduler.slurm_args", "scheduler.slurm_jobs"),
        _when(
            runs_on_hosts,
            "on this machine alone; set cluster.n_nodes or scheduler.type",
            *("scheduler.start_timeout_s", "cluster.n_gpus_per_node", "cluster.trainer_nodes"),
            *("cluster.spare_nodes", "cluster.address", "cluster.port", "cluster.heartbeat_s"),
            *("cluster.lost_after", "cluster.lease_s", "cluster.shared_files"),
        ),
        *map(_of_alarm, get_args(AlarmName)),
    ),
)
"""Settings of `areal-lab train`."""

_FROM_FILE: Final = "with a dataset.type that is generated; set dataset.type=jsonl, or leave it out"
_OFFLINE: Final = (
    _when(
        lambda config: config.rows.type == "jsonl",
        _FROM_FILE,
        *("dataset.path", "dataset.eval_path", "dataset.prompt_field", "dataset.response_field"),
        *("dataset.messages_field", "dataset.chosen_field", "dataset.rejected_field"),
        "dataset.margin_field",
        refused=True,
    ),
    _when(
        lambda config: config.rows.type == "arithmetic",
        "without dataset.type=arithmetic; set it, or leave it out",
        "dataset.operations",
        refused=True,
    ),
    _when(
        lambda config: config.rows.type == "arithmetic",
        "without dataset.type=arithmetic",
        "dataset.few_shot",
    ),
    _when(
        lambda config: config.rows.type != "jsonl",
        "with dataset.type=jsonl",
        "dataset.digits",
    ),
    _when(
        lambda config: not config.rows.chat,
        "with dataset.chat=true: the chat template has its own",
        "dataset.end_token",
    ),
    *_of_any_training(
        "without save_every_steps or eval_every_steps: only the last step is saved",
        lambda config: config.save_every_steps or config.eval_every_steps,
    ),
    _when(
        lambda config: not config.total_train_steps,
        "with total_train_steps",
        "total_train_epochs",
    ),
    _when(
        lambda config: config.actor.processes > 1,
        "without actor.processes above 1",
        "actor.collective_timeout_s",
    ),
)
OFFLINE: Final[Mapping[type[OfflineConfig], ReadSettings]] = {
    kind: ReadSettings(
        kind,
        always=(
            *("experiment_name", "total_train_steps", "seed", "eval_every_steps"),
            *("save_every_steps", "run_dir", "plots", "sinks", "checkpoint.resumable"),
            *("dataset.type", "dataset.eval_size", "dataset.prompt_template", "dataset.chat"),
            *("dataset.end_text", "dataset.max_tokens", "dataset.too_long", "dataset.batch_size"),
            *("actor.path", "actor.max_tokens_per_mb", "actor.dtype", "actor.device"),
            *("actor.attention", "actor.processes", "actor.shard_ranks", "actor.threads"),
            *("actor.gradient_checkpointing", "actor.compile", "actor.use_lora"),
            *("actor.optimizer.", "train_on", "center_rewards_coefficient", "ref.path", "loss"),
            *("beta", "label_smoothing", "length_normalized"),
        ),
        conditions=_OFFLINE,
    )
    for kind in KINDS.values()
}
"""Settings of `areal-lab sft`, `rm` and `dpo`."""


def _only(read: tuple[str, ...], why: str) -> Condition:
    """All settings of a training run but these."""
    names = (one.name for one in settings(TrainConfig) if not is_among(one.name, read))
    return _when(lambda _: False, why, *names)


def _never(why: str, *names: str) -> Condition:
    return _when(lambda _: False, why, *names, refused=True)


_ENGINES: Final = (
    *("allocation_mode", "actor.path", "rollout.backend", "rollout.engine_args"),
    *("rollout.routing", "rollout.workflow", "rollout.pause_mode", "rollout.engines"),
    *("rollout.threads", "rollout.dtype", "rollout.device", "rollout.max_running_requests"),
    *("rollout.cache_gib", "rollout.port", "rollout.addresses", "rollout.ready_timeout_s"),
    *("rollout.health_interval_s", "rollout.health_timeout_s", "rollout.stall_timeout_s"),
    *("rollout.stream_interval", "rollout.request_timeout_s", "scheduler.", "cluster."),
    *("gconfig.max_new_tokens", "gconfig.max_tokens", "gconfig.temperature", "gconfig.top_p"),
    *("gconfig.top_k", "gconfig.stop"),
)
"""Settings of commands that generate and train nothing."""
_MODEL: Final = _never("beside MODEL, which names the model; leave it out", "actor.path")
EVAL: Final = ReadSettings(
    TrainConfig,
    always=(*_ENGINES, "seed", "dataset.type", "reward."),
    conditions=(
        _MODEL,
        _never(
            "on areal-lab eval; use --samples",
            "gconfig.n_samples",
            "evaluation.samples_per_problem",
        ),
        _never("on areal-lab eval; use --temperature", "evaluation.temperature"),
        _never("on areal-lab eval; use --limit", "evaluation.max_problems"),
        _never("on areal-lab eval; use --k", "evaluation.pass_at"),
        *_OF_SOURCES,
        _OF_ENVIRONMENTS,
        _only(
            (
                *(*_ENGINES, "seed", "dataset.", "gconfig.n_samples", "evaluation.", "reward.fn"),
                "environment.",
                *("reward.kwargs", "reward.weights", "reward.sandbox", "reward.timeout_s"),
                "reward.workers",
            ),
            "on areal-lab eval, which trains nothing",
        ),
        _when(
            lambda _: False,
            "on areal-lab eval, which trains nothing",
            *("dataset.batch_size", "evaluation.engine_share", "evaluation.remeasure"),
        ),
    ),
)
"""Settings that are given to `areal-lab eval` beside its data set."""
_OF_ONE_EPISODE: Final = (*_ENGINES, "seed", "dataset.type", "environment.")
ENVIRONMENT: Final = ReadSettings(
    TrainConfig,
    always=_OF_ONE_EPISODE[:-1],
    conditions=(
        _never("on areal-lab environment; use --model", "actor.path"),
        _OF_ENVIRONMENTS,
        _only(_OF_ONE_EPISODE, "on areal-lab environment, which plays single episodes"),
    ),
)
"""Settings that are given to `areal-lab environment`."""
GATEWAY: Final = ReadSettings(
    TrainConfig,
    always=(*_ENGINES, "rollout.max_engine_restarts"),
    conditions=(
        _MODEL,
        _never("on areal-lab gateway; use --seed", "seed"),
        _only(
            (*_ENGINES, "rollout.max_engine_restarts", "seed"),
            "on areal-lab gateway, which serves one model and trains nothing",
        ),
    ),
)
"""Settings that are given to `areal-lab gateway`."""
