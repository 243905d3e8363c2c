"""Settings of a simulated number of engines that changes while the run continues.

What is simulated: a cluster, a model, a workload and a schedule; the schema of the YAML files.

    model, workload, cluster, rollout, trainer, weights, schedule, faults --build--> costs, limits
                                                                          --simulate--> results

Every number that is measured rather than chosen can be replaced by your own measurement: the fields
named `*_s` are null by default, which means "by the cost model". A field checks its own value;
`simulator.assembly.check` checks what must fit together.
"""

from __future__ import annotations

from typing import Annotated, Final, Literal, Self

from annotated_types import Ge, Gt, Le, Lt
from pydantic import AllowInfNan, Field, model_validator

from areal_lab.config.record import About, Count, NonNegative, Record, Share, Whole
from areal_lab.config.sections import ReadsDropLate, ScalingConfig
from areal_lab.control.drift import DriftBound
from areal_lab.control.limits import SlotsName
from areal_lab.control.order import OnLateName, OrderName
from areal_lab.control.routing import RoutingName
from areal_lab.control.schedule import MAX_DRIFT, Schedule, ScheduleName, schedule_named


class SimulatedScalingConfig(ScalingConfig):
    """Engines join and leave while the run continues; the first are on `cluster.rollout_gpus`."""

    startup_s: Annotated[float, Ge(0), Le(86_400), About(hint="at most a day")] = 120.0
    """From the decision until a new engine loads its weights; its GPUs are paid for."""


YEAR_S: Final = 365 * 24 * 3600
_ROLLOUT_SHARE: Final = 0.75
"""Of the GPUs, those that generate unless `rollout_gpus` is given: the paper's split."""
_YEAR = About(hint="at most a year")

Seconds = Annotated[float, Ge(0), Le(YEAR_S), _YEAR]
PositiveSeconds = Annotated[float, Gt(0), Le(YEAR_S), _YEAR]
Versions = Annotated[
    float, Ge(0), About(unit="versions", hint="0 is synchronous, inf has no bound")
]
TailName = Literal["", "math", "deepscaler", "reasoning", "service", "conversation"]
EngineName = Literal[
    "default",
    "vllm-0.6",
    "vllm-0.8",
    "vllm-0.14",
    "sglang-0.4",
    "sglang-0.5",
    "areal-0.3",
    "embedded",
]
Placement = Literal["disaggregated", "colocated"]
TrainerKind = Literal["areal", "megatron", "fsdp2", "prime_rl", "torchtitan", "areal_lab"]
Sleep = Literal["to_host", "discard", "none"]
Offload = Literal["all", "optimizer", "none"]
Refit = Literal["packed", "by_tensor"]
ControllerKind = Literal["none", "single", "metadata", "spmd"]


class LengthConfig(Record):
    """Lengths of responses."""

    kind: Literal["lognormal", "trace", "constant", "recorded"] = "lognormal"
    """Distribution: `lognormal` (cut at `max_tokens`), `trace` (a histogram), `constant`, or
    `recorded` (prompt by prompt as in your own run)."""
    mean_tokens: NonNegative = 9277.0
    """Mean length after the cut; 0 keeps the mean of a `trace`. The default is the paper's mean for
    the 1.5B model (Table 1 with Figure 5c)."""
    sigma: Annotated[
        float, Gt(0), Le(10), About(unit="ln(tokens)", hint="for no spread, kind: constant")
    ] = 0.684
    """Standard deviation of ln(length). The default is fitted to math-like reasoning (ServeGen,
    client 66: 41,230 requests)."""
    tail: TailName = ""
    """Takes `sigma` from published lengths: `deepscaler` (0.57, training on mathematics with a cap
    of 8K), `math` (0.68, ServeGen client 66), `reasoning` (0.82, ServeGen client 35), `service`
    (0.97, all clients of DeepSeek-R1), `conversation` (1.36, Mooncake). Empty takes `sigma`."""
    truncated_share: Annotated[float, Gt(0), Lt(1)] | None = None
    """Share of the responses that `max_tokens` cuts off: with the mean it determines `sigma`, for
    `lognormal`. Training logs have both (verl's response_length/mean and /clip_ratio)."""
    max_tokens: Count = 27648
    """Maximum length; longer responses are cut."""
    trace: str = ""
    """For `trace`: name of a shipped histogram, or your own CSV file with lengths and weights. For
    `recorded`: a run folder or its events.jsonl."""
    group_correlation: Share = 0.3
    """Correlation of ln(length) between responses to the same prompt."""
    drift_per_step: Annotated[
        float, Gt(-1), AllowInfNan(False), About(hint="0.001 is 0.1 % a step")
    ] = 0.0
    """Relative growth of the uncut length from one training step to the next."""


class DriftConfig(Record):
    """Drift of the policy while responses wait, for `schedule.name=bounded_drift`."""

    learning_rate: Annotated[float, Gt(0), Le(1)] = 1e-4
    """Learning rate of the run; drift grows with its power 0.92."""
    drift_at_one: Annotated[float, Gt(0), AllowInfNan(False), About(unit="nats")] = 0.0078
    """Drift of tokens that are one version old, at a learning rate of 1e-4 with one minibatch. The
    default is of models of 102 thousand weights: set it so that the drift of your own run at its
    lag follows."""
    age_exponent: Annotated[float, Gt(0), Le(4)] = 0.64
    """Power of the age in versions with which drift grows; fitted up to a lag of 8."""


class LatencyConfig(Record):
    """Time spent outside the GPUs."""

    kind: Literal["constant", "exponential", "lognormal"] = "constant"
    """Distribution."""
    mean_s: Seconds = 0.0
    """Mean."""
    sigma: Annotated[float, Ge(0), Le(10), About(unit="ln(seconds)")] = 1.0
    """Standard deviation of ln(time), for `lognormal`."""


class WorkloadConfig(Record):
    """Work of one training step."""

    prompts_per_batch: Count = 512
    """Prompts per training step."""
    samples_per_prompt: Count = 16
    """Responses per prompt."""
    prompt_tokens: Whole = 256
    """Length of a prompt, shared by its responses. The paper caps prompts at 1,024."""
    answers: LengthConfig = Field(default_factory=LengthConfig)
    drift: DriftConfig = Field(default_factory=DriftConfig)
    """Drift of trained tokens by their lag."""
    minibatches: Count = 4
    """Optimizer steps per training step."""
    steps: Count = 40
    """Training steps to simulate."""
    warmup_steps: Whole = 8
    """First steps left out of averages while the pipeline fills."""
    whole_run: bool = False
    """The run ends after `steps`, and no prompt is started that they do not need. False simulates
    the beginning of a longer run."""
    reward: LatencyConfig = Field(default_factory=LatencyConfig)
    """Time to score one completion."""
    reward_workers: Whole = 0
    """Completions scored at the same time; 0 has no limit."""
    equal_rewards_share: Annotated[float, Ge(0), Le(0.99)] = 0.0
    """Share of prompts whose responses all get the same reward, and which dynamic sampling (DAPO)
    therefore replaces by others before training: one by one, once all of their responses are
    scored, so that their generation is paid for. 0 trains on every prompt."""
    turns: Count = 1
    """Model calls per response, with a tool call between two of them."""
    turns_most: Whole = 0
    """Largest number of model calls. With it, responses differ: a geometric distribution that is
    cut here and has the mean `turns`. 0 gives every response `turns`."""
    tool: LatencyConfig = Field(default_factory=LatencyConfig)
    """Time of one tool call, during which the response holds no slot of the engine."""
    tool_tokens: Whole = 0
    """Tokens that one tool call adds to the context. They are read, and trained over, but not
    generated, and throughput does not count them."""

    @property
    def most_turns(self) -> int:
        """Largest number of model calls per response."""
        return self.turns_most or self.turns


class ClusterConfig(Record):
    """GPUs and how they are split."""

    gpu: str = "H800"
    """GPU type: a name of the catalogue, a YAML file of your own GPU, or `CPU core` (a process of a
    run with the embedded engine, whose times are measured)."""
    gpus: Annotated[int, Ge(1), Le(200_000), About(hint="each of their engines is simulated")] = 128
    """Number of GPUs."""
    placement: Placement = "disaggregated"
    """`disaggregated`: separate GPUs generate and train. `colocated`: all GPUs alternate."""
    rollout_gpus: int = 96
    """GPUs used for generation; the rest train. By default three quarters of `gpus`. Ignored when
    colocated."""
    hybrid_gpus: Whole = 0
    """Of the GPUs that generate, those that join the training of each step: their engines pause,
    with their responses, from the batch until the new weights are loaded (`colocation`). With
    `rollout_gpus` equal to `gpus` no others train: trainers that generate while they wait."""
    rollout_gpu: str = ""
    """GPU type for generation if it differs; empty takes `gpu`."""
    price_per_gpu_h: Annotated[NonNegative, About(unit="dollars")] | None = None
    """Price per GPU-hour; null takes the catalogue's."""
    overhead: NonNegative = 0.0
    """Share added to the price for storage, network and operation; 0.3 to 0.5 is usual."""

    @model_validator(mode="after")
    def _follow_gpus(self) -> Self:
        if "rollout_gpus" not in self.model_fields_set:
            # Not by assignment, which would validate again and count as given.
            self.__dict__["rollout_gpus"] = max(1, round(_ROLLOUT_SHARE * self.gpus))
        return self

    @property
    def colocated(self) -> bool:
        """True if the same GPUs generate and train."""
        return self.placement == "colocated"

    @property
    def generating_gpus(self) -> int:
        """GPUs that generate; all of them when colocated."""
        return self.gpus if self.colocated else self.rollout_gpus

    @property
    def training_gpus(self) -> int:
        """GPUs that train; all of them when colocated."""
        return self.gpus if self.colocated else self.only_training_gpus + self.hybrid_gpus

    @property
    def only_training_gpus(self) -> int:
        """GPUs that train and do not generate."""
        return 0 if self.colocated else self.gpus - self.rollout_gpus

    @property
    def switches(self) -> bool:
        """True if some GPUs alternate between generation and training."""
        return self.colocated or self.hybrid_gpus > 0

    @property
    def sends_weights(self) -> bool:
        """True if engines get weights from other GPUs; false if all that generate also train."""
        return not self.colocated and self.rollout_gpus > self.hybrid_gpus

    @property
    def generating_gpu(self) -> str:
        """Type of the GPUs that generate."""
        return self.rollout_gpu or self.gpu


class RolloutConfig(Record):
    """Inference engines."""

    tensor_parallel: Count = 1
    """GPUs per engine; an engine that is larger than a node takes whole nodes."""
    max_running: Whole = 0
    """Maximum sequences that one engine decodes at once; 0 takes what its KV cache holds, at most
    256."""
    weight_precision: Literal["auto", "bf16", "fp8"] = "auto"
    """Weights of the engines: `auto` is bf16, except for experts that the model's checkpoint holds
    in MXFP4 (gpt-oss), which also travel in MXFP4. `bf16` holds everything in bf16. `fp8` holds the
    layers, and computes their products, in fp8 (`quantization: fp8` in vLLM and SGLang), with the
    embedding and the head in bf16; it needs GPUs with fp8 units."""
    kv_cache_precision: Literal["bf16", "fp8"] = "bf16"
    """Numbers of the KV cache (`kv_cache_dtype` in vLLM and SGLang): one of `fp8` has half of the
    bytes."""
    memory_utilization: Annotated[float, Gt(0), Le(1)] = 0.85
    """Share of GPU memory for weights and KV cache (`mem_fraction_static` in SGLang)."""
    routing: RoutingName = "least_loaded"
    """Which engine takes a prompt: the `least_loaded`, or each in turn (`round_robin`). `sticky`
    acts as `least_loaded`, since all turns of a prompt stay on one engine."""
    max_samples: Whole = 0
    """Responses of several turns in progress at one engine, those at their tools included; 0 has no
    limit. `max_running` counts only those that the engine works on."""
    prefix_sharing: bool = True
    """Responses to the same prompt share its prefill and KV cache."""
    turn_prefix_cache: bool = False
    """A turn finds the context of the turns before in the KV cache, unless others needed the room
    or the weights have changed since (automatic prefix caching of vLLM and SGLang). False reads
    the whole context again in every turn."""
    speculative_tokens: Whole = 0
    """Tokens that a step drafts for each sequence and verifies beside the next one
    (`num_speculative_tokens` in vLLM; `speculative_num_draft_tokens` in SGLang, less one); 0 does
    not speculate."""
    acceptance_length: Annotated[float, Ge(1), Le(100), About(unit="tokens")] | None = None
    """Mean tokens that a step adds to a sequence, the next one included; engines log it. Needs
    `speculative_tokens`."""
    draft_layers: Count = 1
    """Layers of the draft, each like one of the model: 1 for EAGLE and for a module that predicts
    several tokens (MTP)."""
    draft_passes: Count | None = None
    """Passes of the draft per step (`speculative_num_steps` in SGLang); null takes one per drafted
    token, a chain. Fewer draft a tree."""
    draft_pass_s: Seconds | None = None
    """Measured time of one pass of the draft; null takes the cost model."""
    engine: EngineName = "default"
    """Engine and first version with these numbers: CPU time per decode step, how it grows with the
    running sequences, whether it overlaps with the GPU. `vllm-0.6` is V0, `vllm-0.8` V1,
    `vllm-0.14` V1 with asynchronous scheduling, `areal-0.3` SGLang 0.4.6 on the hosts of AReaL's
    paper, `embedded` this library's own, which launches each kernel of a layer (reckoned, not
    measured); `default` is 1.5 ms, overlapped."""
    engine_overhead_s: Seconds | None = None
    """Measured CPU time per decode step (scheduling, sampling, detokenizing); null takes the
    engine's."""
    engine_sequence_s: Seconds | None = None
    """The same per running sequence, added; null takes the engine's, or 0 with a measured
    `engine_overhead_s`."""
    engine_overlap: bool | None = None
    """Overlap CPU and GPU, as SGLang does: a step takes the longer of the two. False adds them;
    null takes the engine's way."""
    cuda_graphs: bool = True
    """Decode with CUDA graphs. False launches each kernel, 0.43 ms of CPU per layer of the model
    (within a factor of two)."""
    time_factor: Annotated[float, Gt(0), Le(100), About(hint="1.2 takes a fifth longer")] = 1.0
    """Measured factor on all times of the engines, which `areal-lab import --advise` fits to the
    generation of a logged run."""
    decode_step_s: PositiveSeconds | None = None
    """Measured decode step, CPU time included, whatever the batch; null takes the cost model."""
    decode_sequence_s: Seconds = 0.0
    """Measured time per sequence of a decode step. Needs `decode_step_s`."""
    decode_context_token_s: Seconds = 0.0
    """Measured time per token of context of a decode step. Needs `decode_step_s`."""
    decode_knee: Annotated[float, Ge(1), About(hint="1 adds, inf takes the larger")] = 1.0
    """How `decode_step_s` and the time of the sequences combine: 1 adds them, inf takes the larger
    one, values between are a smooth knee."""
    prefill_pass_s: Seconds | None = None
    """Measured prefill, whatever it reads; null takes the cost model."""
    prefill_token_s: Seconds = 0.0
    """Measured time per token of a prefill. Needs `prefill_pass_s`."""
    prefill_pair_s: Seconds = 0.0
    """Measured time per (query, key) pair of a prefill. Needs `prefill_pass_s`."""


class TrainerConfig(Record):
    """The trainer."""

    kind: TrainerKind = "areal"
    """Whose speed and structure: `areal` (Megatron-Core 0.11 in AReaL, 2025-05), `megatron`
    (Megatron-Core as NeMo-RL runs it), `fsdp2` (PyTorch's FSDP without compilation, as in verl),
    `prime_rl` or `torchtitan` (FSDP2, compiled), `areal_lab` (this library's own, reckoned from
    operation counts, not measured)."""
    tensor_parallel: Count = 1
    """GPUs that share each matrix product."""
    pipeline_parallel: Count = 1
    """Pipeline stages. The remaining factor of the GPUs is data parallel."""
    pipeline_chunks: Count = 1
    """Parts of the model per pipeline stage, which interleaved schedules alternate (virtual
    pipeline): the bubble is that much shorter."""
    context_parallel: Count = 1
    """GPUs that share the tokens of a micro-batch and pass keys and values around a ring."""
    sequence_parallel: Count = 1
    """The same, but GPUs exchange tokens for heads before and after attention (Ulysses)."""
    expert_parallel: Count = 1
    """GPUs that share the experts of a layer, and exchange tokens for them. Each of them also
    trains on tokens of its own. 1 gives every rank all experts, cut by tensor parallelism."""
    expert_imbalance: Annotated[float, Ge(1), Le(100), About(hint="1 is balanced")] | None = None
    """Tokens that the busiest of these GPUs computes for its experts, relative to the mean; null
    takes 1.5. Balancing in pre-training brings it near 1."""
    shard_group: Whole = 0
    """GPUs that shard one copy of the parameters (FSDP's `fsdp_size`); further groups hold copies.
    0 shards over all. Only for `fsdp2`, `prime_rl`, `torchtitan` and `areal_lab`."""
    precision: Literal["bf16", "fp8"] = "bf16"
    """Matrix products of the layers in `bf16` or `fp8`; attention and the head stay in bf16."""
    lora_rank: Whole = 0
    """Rank of low-rank adapters on every matrix of the layers, experts included; the weights are
    frozen, and a reference model is the one without adapters. 0 trains all weights."""
    gradient_precision: Literal["usual", "fp32", "bf16"] = "usual"
    """Numbers that gradients are accumulated in; `usual` takes those of the kind: bf16 for
    `megatron`, else fp32."""
    optimizer_offload: bool = False
    """Keep the optimizer state in the host's memory, and copy it through the GPU for every
    optimizer step."""
    micro_batch_tokens: Count = 32768
    """Token budget of a micro-batch, with dynamic batching. GPUs that share its tokens
    (`context_parallel`, `sequence_parallel`) share the budget too."""
    dynamic_batching: bool = True
    """Fill micro-batches up to a token budget. False cuts the batch into `micro_batches` of equal
    numbers of sequences, packed."""
    micro_batches: Count = 32
    """Micro-batches per minibatch and data-parallel rank, without dynamic batching."""
    balance: Literal["minibatch", "batch"] = "minibatch"
    """What data-parallel ranks get nearly equal numbers of tokens of: each `minibatch`, or the
    whole `batch`, of which each rank then cuts its own part into minibatches (`balance_batch` of
    verl). With long tails, ranks then wait for each other in every minibatch."""
    activation_recompute: bool = True
    """Recompute activations in the backward pass: more work, much less memory."""
    proximal_logprobs: bool = True
    """Extra forward pass for the decoupled objective."""
    reference_logprobs: bool = False
    """Extra forward pass of a reference model."""
    critic: bool = False
    """Train a critic of the policy's size as well."""
    mfu: Annotated[float, Gt(0), Le(1), About(hint="a share, as 0.3")] | None = None
    """Model FLOPs utilization; null takes the fitted curve over micro-batch and model size."""
    time_factor: Annotated[float, Gt(0), Le(100), About(hint="1.2 takes a fifth longer")] = 1.0
    """Measured factor on all passes of the cost model, which `areal-lab calibrate --step-table`
    fits."""
    fixed_s: Seconds = 0.0
    """Measured time per training step for any number of tokens, added to the cost model: loading,
    logging."""
    step_s: PositiveSeconds | None = None
    """Measured training step; null takes the cost model."""
    token_s: Seconds = 0.0
    """Measured time per token (prompt and response) of the batch, added to `step_s`. Needs
    `step_s`."""


class WeightsConfig(Record):
    """Weight updates of the engines."""

    backend: Literal["disk", "nccl", "delta"] = "disk"
    """How weights travel: `disk` (shared storage and polling, as in the paper), `nccl` or
    `delta`."""
    merge_adapters: bool = False
    """With `trainer.lora_rank`: merge adapters into the weights and send all of them. False sends
    the adapters, which the engines merge."""
    quantize_before_sending: bool = False
    """The trainer quantizes weights before it sends them to engines in fp8, which halves the bytes.
    False sends bf16, and the engines quantize while they load."""
    update_s: Seconds | None = None
    """Measured time from the end of a training step until every engine has the weights; null takes
    the cost model."""
    export_s: Seconds | None = None
    """Measured time the trainer needs to write or gather the weights; null takes the cost model."""
    load_s: Seconds | None = None
    """Measured time engines pause to load weights; null takes the cost model."""
    poll_s: Seconds = 5.0
    """Interval at which engines look for new weights on disk; adds half of it on average."""
    switch_s: Seconds | None = None
    """Measured time to switch between generation and training and back, for colocated and hybrid
    GPUs: the sum of all terms of `colocation`; null takes the cost model."""


class ColocationConfig(Record):
    """What colocated and hybrid GPUs do between generation and training."""

    sleep: Sleep = "to_host"
    """What a sleeping engine does with its weights: copy them to main memory and back (`to_host`,
    vLLM's sleep level 1), `discard` them (level 2, SGLang's release_memory_occupation), or keep
    everything on the GPU (`none`), because training fits beside it."""
    sleep_s: Seconds | None = None
    """Measured time until all engines sleep; null takes the cost model."""
    wake_s: Seconds | None = None
    """Measured time until all are awake, without new weights; null takes the cost model."""
    offload: Offload = "all"
    """What of the trainer main memory holds during generation: `all` (optimizer state and
    parameters), only the `optimizer` state, or `none`."""
    pinned: bool = False
    """Main memory for it is pinned, which is several times as fast; most trainers take pageable
    memory (2026)."""
    offload_s: Seconds | None = None
    """Measured time to move the trainer's state to main memory; null takes the cost model."""
    reload_s: Seconds | None = None
    """Measured time to move it back; null takes the cost model."""
    refit: Refit = "packed"
    """How new weights reach the engine: many tensors `packed` into one buffer, or one after another
    (`by_tensor`), which takes 2.5 ms for each matrix of an expert."""
    refit_s: Seconds | None = None
    """Measured time of new weights from the trainer's layout to the engine's; null takes the cost
    model."""
    other_s: Seconds = 0.0
    """Time per step of what no other setting names: hand-over of data between processes, barriers,
    checks. What a measured synchronous step takes beyond a simulated one
    (`reproductions.measured_runs`: 1 to 22 % of the step)."""
    graphs_s: Seconds = 0.0
    """Time to capture CUDA graphs again at each wake-up. Sleeping engines of vLLM and SGLang keep
    them; engines that are restarted take 14 s (1B, vLLM 0.6) to 20 s (Llama 4, SGLang)."""


class OutsideConfig(Record):
    """What a training step does besides generation, training and weights."""

    batch_s: Seconds | None = None
    """Time per step for data, advantages and logs, in which the trainer waits; null takes 0, and
    for colocated GPUs 6 ms plus 0.46 ms per response (vime, 2026-09)."""
    validation_s: Seconds = 0.0
    """Time of one validation, during which nothing is trained. Needs `validation_steps`."""
    validation_steps: Whole = 0
    """Training steps from one validation to the next; 0 never validates."""
    checkpoint_s: Seconds = 0.0
    """Time for which one checkpoint holds the trainer. Needs `checkpoint_steps`."""
    checkpoint_steps: Whole = 0
    """Training steps from one checkpoint to the next; 0 writes none."""


class ControllerConfig(Record):
    """How responses get from the engines to the trainer."""

    kind: ControllerKind = "none"
    """`single`: one process reads every reply and sends the batch to the trainer. `metadata`:
    agents on the hosts read and pack replies, the process handles only lengths and places, and the
    trainer fetches from the hosts. `spmd`: no such process; every rank of the trainer has its own
    engines and its own part of each batch, and a step waits for the slowest. `none` takes no
    time."""
    inputs: str = ""
    """JSON file with your own measured inputs (`controller_inputs`); empty takes the packaged
    ones."""
    network_bytes_per_s: Annotated[
        float, Ge(1e6), Le(1e13), About(unit="bytes/s", hint="12.5e9 is 100 Gb/s")
    ] = 12.5e9
    """Network of each host for responses, in one direction."""
    ranks: Whole = 0
    """Programs of `spmd`; 0 takes the data-parallel ranks of the trainer."""


class ScheduleConfig(ReadsDropLate):
    """How generation and training interleave (`areal_lab.control.schedule`)."""

    name: ScheduleName = "asynchronous"
    """Schedule."""
    eta: Versions = 4.0
    """Staleness bound: versions that generation may run ahead. Some schedules fix it:
    `synchronous` at 0, `one_step_overlap` at 1. For `bounded_drift` it is the largest one."""
    max_drift: Annotated[float, Gt(0), About(unit="nats")] = MAX_DRIFT
    """Bound on drift (`workload.drift`) by which `bounded_drift` sets eta."""
    min_eta: Annotated[NonNegative, About(unit="versions")] = 0.0
    """Smallest eta of `bounded_drift`, with which a run starts."""
    interruptible: bool = True
    """Interrupt running responses for new weights; false waits until they end (`asynchronous` and
    `bounded_drift` only)."""
    batch_order: OrderName = "oldest_finished_first"
    """Which finished prompts make up the next batch."""
    max_lag: Annotated[NonNegative, About(unit="versions")] = 0.0
    """Hard bound on the age of trained prompts, for `bounded_lag`; 0 takes eta."""
    on_late: OnLateName = "wait"
    """With `bounded_lag`, what happens to prompts that would exceed the bound: training waits for
    them before that (`wait`), or drops them and generates others (`drop`), or the same ones again
    with the current weights (`recycle`), whose responses then have the same lengths."""
    max_concurrent_prompts: Whole = 0
    """Maximum prompts in flight; 0 takes what the engines can run, at least a batch."""
    slots: SlotsName = "groups"
    """What frees the place of a response: the end of all responses to its prompt (`groups`), or its
    own end (`samples`), after which the next prompt starts while the longest responses run."""
    require_batches: Whole = 0
    """Minibatches that the trainer takes at once, as soon as their prompts have finished, while the
    others of the batch are generated (verl's fully asynchronous recipe). Its
    `trigger_parameter_sync_step` is `workload.minibatches` divided by this: new weights follow the
    last minibatch. Each time log-probs are scored, and a reference model in main memory
    (`trainer.kind=megatron`) is swapped in and out. 0 waits for the whole batch."""

    @model_validator(mode="after")
    def _check_least(self) -> Self:
        if self.name == "bounded_drift" and self.min_eta > self.eta:
            raise ValueError(
                f"schedule.min_eta is {self.min_eta:g}, but must be at most eta ({self.eta:g}), "
                "the largest one"
            )
        return self

    @property
    def policy(self) -> Schedule:
        """The schedule that these settings name."""
        bound = DriftBound(max_drift=self.max_drift, min_eta=self.min_eta)
        return schedule_named(
            self.name, eta=self.eta, interruptible=self.interruptible, bound=bound
        )

    @property
    def versions_ahead(self) -> float:
        """How many versions this schedule lets generation run ahead; not all of them read eta."""
        return self.policy.largest_eta


class FaultsConfig(Record):
    """Failures and stragglers."""

    node_mtbf_h: NonNegative = 0.0
    """Mean time between failures of one node; 0 never fails."""
    detection_s: Seconds = 30.0
    """Time until the run notices a failure."""
    restart_s: Seconds = 300.0
    """Time from detection until an engine accepts requests again, or training continues from its
    checkpoint."""
    straggler_share: Share = 0.0
    """Share of engines that are slower."""
    straggler_slowdown: Annotated[
        float, Ge(1), Le(1000), About(hint="1.5 takes half as long again")
    ] = 1.5
    """Slowdown factor of these engines."""


class CalibrationConfig(Record):
    """Source and error of measured times, for reports; `areal-lab calibrate` writes it."""

    source: str = ""
    """What they were fitted to."""
    decode_error: NonNegative = 0.0
    """Mean absolute relative error on held-out decode steps; 0 is unknown."""
    prefill_error: NonNegative = 0.0
    """The same for prefills."""
    training_error: NonNegative = 0.0
    """The same for training steps."""


class SimulationConfig(Record):
    """A simulation."""

    name: str = "simulation"
    """Title of results and pictures."""
    model: str = "R1-Distill-Qwen-1.5B"
    """A name of the catalogue, or a Hugging Face folder or `config.json`."""
    workload: WorkloadConfig = Field(default_factory=WorkloadConfig)
    cluster: ClusterConfig = Field(default_factory=ClusterConfig)
    rollout: RolloutConfig = Field(default_factory=RolloutConfig)
    trainer: TrainerConfig = Field(default_factory=TrainerConfig)
    weights: WeightsConfig = Field(default_factory=WeightsConfig)
    colocation: ColocationConfig = Field(default_factory=ColocationConfig)
    outside: OutsideConfig = Field(default_factory=OutsideConfig)
    controller: ControllerConfig = Field(default_factory=ControllerConfig)
    schedule: ScheduleConfig = Field(default_factory=ScheduleConfig)
    faults: FaultsConfig = Field(default_factory=FaultsConfig)
    scaling: SimulatedScalingConfig = Field(default_factory=SimulatedScalingConfig)
    calibration: CalibrationConfig = Field(default_factory=CalibrationConfig)
    seeds: Annotated[int, Ge(1), Le(10_000), About(hint="3 to 10 give intervals")] = 5
    """Repetitions with different seeds, for confidence intervals."""
    seed: Whole = 1
    """First seed. Two configurations with the same seeds get the same random numbers."""

    @property
    def batch_parts(self) -> int:
        """Parts of a batch, each trained on as soon as enough prompts finished; 1 is all of it."""
        taken = self.schedule.require_batches
        return max(1, self.workload.minibatches // taken) if taken else 1
