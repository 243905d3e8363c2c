"""What is simulated: a cluster, a model, a workload and a schedule; the schema of the YAML files.

    model, workload, cluster, rollout, trainer, weights, schedule, faults --build--> costs, limits
                                                                          --simulate--> results

Every number that is measured rather than chosen can be replaced by a measurement of one's own: the
fields named `*_s` are None by default, which means "by the cost model". Plain mutable records: they
are filled from YAML and `a.b=c` overrides, then checked as a whole (`simulator.assembly.check`).
"""

from __future__ import annotations

from dataclasses import dataclass, field

from areal_lab.control.schedule import schedule_named


@dataclass(kw_only=True)
class LengthConfig:
    """How many tokens an answer has."""

    kind: str = "lognormal"
    """`lognormal` (truncated at `max_tokens`, the tail in a spike there), `trace`, `constant`, or
    `recorded` (prompt by prompt as in a run of one's own)."""
    mean_tokens: float = 9277.0
    """Mean after the cap; for `trace`, 0 keeps the trace's own mean. The default is the paper's
    mean of the 1.5B model (Table 1 with Figure 5c)."""
    sigma: float = 0.684
    """Spread of ln(tokens). The default was fitted to math-like reasoning answers (ServeGen, client
    66: 41,230 requests)."""
    max_tokens: int = 27648
    """Longest answer; generation is cut there."""
    trace: str = ""
    """Name of a shipped histogram, or a CSV file of one's own with lengths and weights; for
    `recorded` the run's folder or its events.jsonl."""
    group_correlation: float = 0.3
    """Correlation of ln(tokens) between two answers to one prompt, 0 to 1."""
    drift_per_step: float = 0.0
    """Relative growth, from one training step to the next, of what the model would write without
    the cap (answers grow in training)."""


@dataclass(kw_only=True)
class LatencyConfig:
    """How long something outside the GPUs takes."""

    kind: str = "constant"
    """`constant`, `exponential` or `lognormal`."""
    mean_s: float = 0.0
    """Mean seconds; 0 takes no time."""
    sigma: float = 1.0
    """Spread of ln(seconds), for `lognormal`."""


@dataclass(kw_only=True)
class WorkloadConfig:
    """What one training step consumes."""

    prompts_per_batch: int = 512
    """Prompts that one training step consumes."""
    samples_per_prompt: int = 16
    """Answers to each prompt."""
    prompt_tokens: int = 256
    """Tokens of a prompt; shared by its samples. The paper caps prompts at 1,024."""
    answers: LengthConfig = field(default_factory=LengthConfig)
    minibatches: int = 4
    """Optimizer steps per batch."""
    steps: int = 40
    """Training steps to simulate."""
    warmup_steps: int = 8
    """Steps at the beginning that the averages leave out: the pipeline is still filling."""
    whole_run: bool = False
    """`steps` are the whole run: no prompt is started that they do not need. False simulates the
    beginning of a longer run."""
    reward: LatencyConfig = field(default_factory=LatencyConfig)
    """Time to judge one sample."""
    reward_workers: int = 0
    """Samples judged at a time; 0 has no limit."""
    turns: int = 1
    """Calls of the model per sample; between them a tool answers."""
    tool: LatencyConfig = field(default_factory=LatencyConfig)
    """Time of one tool call, during which the sample holds no slot of the engine."""


@dataclass(kw_only=True)
class ClusterConfig:
    """The GPUs, and how they are shared out."""

    gpu: str = "H800"
    """A name of the catalogue, a YAML file with the numbers of one's own GPU, or `CPU core`: a
    process of a run with the embedded engine, whose times are measured."""
    gpus: int = 128
    """All of them."""
    placement: str = "disaggregated"
    """`disaggregated` (generation and training have GPUs of their own) or `colocated` (all GPUs do
    one, then the other)."""
    rollout_gpus: int = 96
    """GPUs that generate; the others train. Not looked at when colocated."""
    rollout_gpu: str = ""
    """Another type of GPU for generation; empty is `gpu`."""
    price_per_gpu_h: float | None = None
    """Replaces the catalogue's typical price, in dollars."""
    overhead: float = 0.0
    """Share added to the price for storage, network and operation; 0.3 to 0.5 is usual."""


@dataclass(kw_only=True)
class RolloutConfig:
    """The generation engines."""

    tensor_parallel: int = 1
    """GPUs per engine."""
    max_running: int = 0
    """Sequences one engine decodes at a time; 0 is what its KV cache holds, at most 256."""
    memory_utilization: float = 0.85
    """Share of the GPU's memory for weights and KV cache (`mem_fraction_static` of SGLang)."""
    routing: str = "least_loaded"
    """Which engine takes a prompt: the `least_loaded`, or each in turn (`round_robin`). `sticky`
    acts as `least_loaded`, since all turns of a prompt stay on one engine."""
    prefix_sharing: bool = True
    """The samples of a prompt share its prefill and its cache."""
    engine_overhead_s: float | None = None
    """CPU time of the engine per decode step (scheduling, sampling, detokenizing); None takes the
    default."""
    engine_overlap: bool = True
    """The engine's CPU prepares the next step while the GPU computes (SGLang's overlap schedule): a
    step takes the longer of the two. False adds them."""
    decode_step_s: float | None = None
    """A measured decode step, whatever the batch; replaces the cost model, engine CPU included."""
    decode_sequence_s: float = 0.0
    """With `decode_step_s`: measured seconds that each sequence of a step takes."""
    decode_context_token_s: float = 0.0
    """With `decode_step_s`: measured seconds that each token of context of a step takes."""
    decode_knee: float = 1.0
    """With `decode_step_s`: 1 adds the sequences' seconds to the step's, infinity takes the larger
    of both (reading weights, or computing), what is between them is a smooth knee."""
    prefill_pass_s: float | None = None
    """Measured seconds of a prefill, whatever it reads; replaces the cost model."""
    prefill_token_s: float = 0.0
    """With `prefill_pass_s`: measured seconds for each token that is read."""
    prefill_pair_s: float = 0.0
    """With `prefill_pass_s`: measured seconds for each (query, key) pair of attention."""


@dataclass(kw_only=True)
class TrainerConfig:
    """The training side."""

    tensor_parallel: int = 1
    """GPUs that share each matrix product."""
    pipeline_parallel: int = 1
    """Stages that the layers are spread over. What is left of the GPUs is data parallel."""
    micro_batch_tokens: int = 32768
    """Token budget of a micro-batch, for dynamic micro-batching."""
    dynamic_batching: bool = True
    """False cuts the batch into `micro_batches` of equal numbers of sequences, packed."""
    micro_batches: int = 32
    """Micro-batches per minibatch and data-parallel rank, without dynamic batching."""
    activation_recompute: bool = True
    """Activations are computed again in the backward pass: more work, much less memory."""
    proximal_logprobs: bool = True
    """One more forward pass over the batch, for the decoupled objective."""
    reference_logprobs: bool = False
    """One more forward pass by a reference model."""
    critic: bool = False
    """A critic of the policy's size is trained as well."""
    mfu: float | None = None
    """Model FLOP/s utilization; None takes the curve by tokens per micro-batch and model size."""
    step_s: float | None = None
    """A measured training step; replaces the cost model."""
    token_s: float = 0.0
    """With `step_s`: measured seconds for each token (prompt and answer) of the batch, which
    `step_s` then is without."""


@dataclass(kw_only=True)
class WeightsConfig:
    """How new weights reach the engines."""

    backend: str = "disk"
    """`disk` (shared storage and polling, the paper's), `nccl` or `delta`."""
    update_s: float | None = None
    """Measured seconds from the end of a training step until every engine has the weights."""
    export_s: float | None = None
    """Measured seconds in which the trainer writes or gathers the weights."""
    load_s: float | None = None
    """Measured seconds in which engines are paused and take the weights."""
    poll_s: float = 5.0
    """How often engines look for new weights on disk; the mean delay is half of it."""
    switch_s: float | None = None
    """Colocated: seconds to reshard and offload between generation and training, and back."""


@dataclass(kw_only=True)
class ScheduleConfig:
    """How generation and training interleave; see `areal_lab.control.schedule`."""

    name: str = "asynchronous"
    """`synchronous`, `one_step_overlap`, `asynchronous` or `partial_rollout`."""
    eta: float = 4.0
    """Largest number of versions that generation may run ahead; infinity has no bound."""
    interruptible: bool = True
    """New weights interrupt running answers; false lets them end first (`asynchronous`)."""
    batch_order: str = "oldest_finished_first"
    """Also `strict_start_order` and `bounded_lag`."""
    max_lag: float = 0.0
    """Bound of `bounded_lag`; 0 is eta."""
    drop_late: bool = False
    """With `bounded_lag`, give up what would be too old instead of waiting for it in time."""
    max_concurrent_prompts: int = 0
    """Prompts that may be generated at once; 0 is what the engines can run, at least a batch."""

    @property
    def versions_ahead(self) -> float:
        """How many versions this schedule lets generation run ahead; not all of them read eta."""
        return schedule_named(self.name, eta=self.eta).eta


@dataclass(kw_only=True)
class FaultsConfig:
    """Failures and stragglers."""

    node_mtbf_h: float = 0.0
    """Mean time between failures of one node in hours; 0 never fails."""
    detection_s: float = 30.0
    """From a failure until the run knows."""
    restart_s: float = 300.0
    """From detection until an engine accepts work again, or training goes on from its
    checkpoint."""
    straggler_share: float = 0.0
    """Share of engines that are slower."""
    straggler_slowdown: float = 1.5
    """How many times slower they are."""


@dataclass(kw_only=True)
class CalibrationConfig:
    """Where measured numbers come from, for reports; `areal-lab calibrate` writes it."""

    source: str = ""
    """What they were fitted to, in words."""
    decode_error: float = 0.0
    """Mean absolute relative error of decode steps that the fit has not seen; 0 is not known."""
    prefill_error: float = 0.0
    """The same of prefills."""
    training_error: float = 0.0
    """The same of training steps."""


@dataclass(kw_only=True)
class SimulationConfig:
    """One simulation."""

    name: str = "simulation"
    """Title of results and pictures."""
    model: str = "R1-Distill-Qwen-1.5B"
    """A name of the catalogue, or a Hugging Face folder or `config.json`."""
    workload: WorkloadConfig = field(default_factory=WorkloadConfig)
    cluster: ClusterConfig = field(default_factory=ClusterConfig)
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    trainer: TrainerConfig = field(default_factory=TrainerConfig)
    weights: WeightsConfig = field(default_factory=WeightsConfig)
    schedule: ScheduleConfig = field(default_factory=ScheduleConfig)
    faults: FaultsConfig = field(default_factory=FaultsConfig)
    calibration: CalibrationConfig = field(default_factory=CalibrationConfig)
    seeds: int = 5
    """Independent repetitions that the intervals are over."""
    seed: int = 1
    """First of the seeds; the same seeds give the same draws to every configuration."""
