"""Every setting of training on fixed data: `areal-lab sft`, `areal-lab rm`, `areal-lab dpo`.

A setting with the name of one of `areal-lab train` means the same.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Final, Literal, TypeAlias

from annotated_types import Ge, Le
from pydantic import Field

from areal_lab.config.given import Overrides, Sources, source_files
from areal_lab.config.load import load_record
from areal_lab.config.problem import refusal
from areal_lab.config.record import (
    About,
    Count,
    FolderName,
    FolderPath,
    NonNegative,
    Positive,
    Record,
    Whole,
)
from areal_lab.config.schema import Attention, DType, Operation, OptimizerConfig, TrainConfig
from areal_lab.config.sections import SinkName, StatsLoggerConfig
from areal_lab.config.shipped import offline_configs


class OfflineDataConfig(Record):
    """Rows to train on: generated, or read from a file."""

    type: Literal["jsonl", "arithmetic", "reversed_addition", "sorting"] = "jsonl"
    """`jsonl` reads rows from `path`; the other types generate problems with solutions, as in
    `areal-lab train`. The rejected response of a generated pair has one wrong character."""
    path: str = ""
    """File of rows (`type=jsonl`), in the formats of `areal-lab train`."""
    eval_path: str = ""
    """File of held-out rows; empty holds out `eval_size` rows of `path`."""
    eval_size: Whole = 0
    """Number of held-out rows; rows with the same prompt stay together. 0 holds out a fifth (at
    least 32, at most 256 or half of all), or uses all of `eval_path`."""
    prompt_field: str = "prompt"
    """Field with the prompt: text, or a list of messages (`role`, `content`). Dots lead into
    objects. If empty, the response is the whole text."""
    prompt_template: str = "{prompt}"
    """Text around each prompt; `{prompt}` is replaced by the prompt. Ignored for prompts that go
    through a chat template."""
    chat: bool = False
    """Put prompts and responses that are text through the model's chat template, as messages of a
    user and an assistant. Messages always go through it."""
    end_text: str = ""
    """Text after each response, such as the newline that stops generation. A chat template has its
    own."""
    end_token: bool = True
    """Append the model's end token to each response, after `end_text`. Ignored with a chat
    template, which adds its own."""
    max_tokens: Annotated[Whole, About(unit="tokens")] = 0
    """Longest row, prompt and response together; 0 takes the model's context."""
    too_long: Literal["refuse", "drop"] = "refuse"
    """Handling of rows longer than `max_tokens`: raise an error, or drop and count them. Rows are
    never cut off."""
    operations: list[Operation] = Field(default_factory=lambda: list[Operation](["add"]))
    """Operations of the generated problems (`type=arithmetic`)."""
    digits: list[int] = Field(default_factory=lambda: [1, 1])
    """Same as `dataset.digits` of `areal-lab train` (generated problems)."""
    few_shot: Whole = 0
    """Solved examples before each problem (`type=arithmetic`)."""
    batch_size: Count = 32
    """Rows per optimizer step."""


class DemonstrationsConfig(OfflineDataConfig):
    """Rows with one response each: generated, or read from a JSONL file."""

    response_field: str = "response"
    """Field with the response: text, or a list of messages."""
    messages_field: str = "messages"
    """Field with a whole conversation as a list of messages; a row that has it needs no prompt and
    response."""


class PairsConfig(OfflineDataConfig):
    """Rows with a chosen and a rejected response: generated, or read from a JSONL file."""

    chosen_field: str = "chosen"
    """Field with the preferred response: text, or a list of messages. A row without a prompt has
    whole conversations here."""
    rejected_field: str = "rejected"
    """Field with the other response."""


class ScoredPairsConfig(PairsConfig):
    """Rows with a chosen and a rejected response: generated, or read from a JSONL file."""

    margin_field: str = ""
    """Field with the margin by which the chosen response should score higher (Llama 2); empty for
    no margin."""


class OfflineActorConfig(Record):
    """The trained model."""

    path: str = "SmolLM2-135M-Instruct"
    """Hugging Face model folder, or the name of a model, as in `areal-lab train`."""
    optimizer: OptimizerConfig = Field(default_factory=OptimizerConfig)
    max_tokens_per_mb: Annotated[Count, About(unit="tokens")] = 4096
    """Token budget of a micro-batch. It changes memory, not results."""
    dtype: DType = "auto"
    """Compute type; master weights are float32. `auto` is bfloat16 on GPUs, and on a CPU where it
    is faster, else float32."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Device of the processes. `auto` is one GPU per process, or else the CPU."""
    attention: Attention = "auto"
    """Attention kernel. `auto` selects, on a GPU in bfloat16, `varlen` (FlashAttention, one call
    for all rows) if no rows of a micro-batch share a prefix, and `flex` (FlexAttention, compiled;
    needs a C compiler) if they do; otherwise `sdpa`, one call per prefix tree. `varlen` uses `sdpa`
    for shared prefixes. On a CPU only `sdpa` works."""
    processes: Count = 1
    """Processes that share the model and the rows (FSDP2)."""
    shard_ranks: Whole = 0
    """Processes that share one copy of the parameters (HSDP); divides `processes`. 0 is all."""
    collective_timeout_s: Positive = 300.0
    """Timeout for a process that waits for the others; then the run ends with an error."""
    threads: Whole = 0
    """CPU threads of each process; 0 shares the cores."""
    gradient_checkpointing: bool | Literal["selective"] = False
    """Recompute activations in the backward pass: less memory, a third more time. `selective` keeps
    the outputs of attention and of every second matrix product of a layer, and recomputes less."""
    compile: bool = False
    """Compile the norms and the feed-forward part of each decoder layer (`torch.compile`), for
    GPUs; on a CPU it needs a C++ compiler. The first steps take longer."""
    use_lora: bool = False
    """Train low-rank adapters (LoRA) on frozen weights. Checkpoints have merged weights, and also
    the adapter."""
    lora_rank: Count = 32
    """Rank of each adapter."""
    lora_alpha: Count = 16
    """Adapters are scaled by `lora_alpha / lora_rank`."""
    target_modules: list[str] = Field(default_factory=lambda: ["all-linear"])
    """Linear layers with an adapter, by name (`q_proj`); `all-linear` is all but the output."""


class OfflineCheckpointConfig(Record):
    """Checkpoints. `--resume` continues from them."""

    resumable: bool = True
    """Also save the state for `--resume`, in the newest two checkpoints. It takes three times the
    model's float32 size."""
    keep: Whole = 2
    """Number of newest checkpoints to keep, in addition to the one with the lowest held-out loss; 0
    keeps all."""


class OfflineConfig(Record):
    """Settings that the offline commands share."""

    experiment_name: FolderName = "offline"
    """First part of the run folder's name."""
    total_train_epochs: Positive = 1.0
    """Number of times that each row is trained on."""
    total_train_steps: Whole = 0
    """Optimizer steps; 0 takes `total_train_epochs`."""
    seed: int = 1
    """Seed of the data split and order, and of adapters."""
    actor: OfflineActorConfig = Field(default_factory=OfflineActorConfig)
    eval_every_steps: Whole = 0
    """Steps between evaluations on held-out rows; the best one is saved. 0 evaluates before the
    first and after the last step."""
    save_every_steps: Whole = 0
    """Steps between checkpoints; 0 saves the best (`eval_every_steps`) and the last one."""
    checkpoint: OfflineCheckpointConfig = Field(default_factory=OfflineCheckpointConfig)
    run_dir: FolderPath = "runs"
    """Parent folder of run folders, which are named by experiment and start time."""
    plots: bool = True
    """Draw loss.png at the end."""
    sinks: list[SinkName] = Field(default_factory=list[SinkName])
    """Tools that also get settings, metrics and pictures, as in `areal-lab train`."""
    stats_logger: StatsLoggerConfig = Field(default_factory=StatsLoggerConfig)

    @property
    def rows(self) -> OfflineDataConfig:
        """Settings of the data set, of any kind."""
        dataset = getattr(self, "dataset", None)
        if not isinstance(dataset, OfflineDataConfig):
            raise TypeError(f"{type(self).__name__} is no config of sft, rm or dpo")
        return dataset


class SFTConfig(OfflineConfig):
    """Supervised fine-tuning."""

    experiment_name: FolderName = "sft"
    """First part of the run folder's name."""
    dataset: DemonstrationsConfig = Field(default_factory=DemonstrationsConfig)
    train_on: Literal["responses", "everything"] = "responses"
    """Tokens with a loss: the responses (all messages of the assistant), or prompts, too."""


class RewardModelConfig(OfflineConfig):
    """Training of a reward model."""

    experiment_name: FolderName = "rm"
    """First part of the run folder's name."""
    dataset: ScoredPairsConfig = Field(default_factory=ScoredPairsConfig)
    center_rewards_coefficient: Annotated[NonNegative, About(hint="0 disables it")] = 0.0
    """Penalty on the squared sum of the two scores of a pair, which keeps their mean near 0
    (arXiv:2312.09244). 0 disables it."""


class ReferencePolicyConfig(Record):
    """Frozen reference model, whose log-probs the loss compares with the policy's."""

    path: str = ""
    """Folder or name of the model; empty takes the weights of `actor.path`."""


class DPOConfig(OfflineConfig):
    """Direct preference optimization."""

    experiment_name: FolderName = "dpo"
    """First part of the run folder's name."""
    dataset: PairsConfig = Field(default_factory=PairsConfig)
    ref: ReferencePolicyConfig = Field(default_factory=ReferencePolicyConfig)
    loss: Literal["dpo", "ipo"] = "dpo"
    """Loss of a pair: logistic (DPO), or the squared distance from 1 / (2 beta) (IPO)."""
    beta: Positive = 0.1
    """Strength of the pull to the reference; larger values keep the policy closer."""
    label_smoothing: Annotated[float, Ge(0), Le(0.5)] = 0.0
    """Assumed share of pairs with the wrong preference (`loss=dpo`)."""
    length_normalized: bool = False
    """Divide the log-prob of a response by its number of tokens."""


RunConfig: TypeAlias = TrainConfig | OfflineConfig
"""The settings of a run folder."""

KINDS: Final[Mapping[str, type[OfflineConfig]]] = {
    "sft": SFTConfig,
    "rm": RewardModelConfig,
    "dpo": DPOConfig,
}
"""Settings of each command."""
ALIASES: Final[Mapping[str, str]] = {
    "train_dataset.path": "dataset.path",
    "train_dataset.batch_size": "dataset.batch_size",
    "valid_dataset.path": "dataset.eval_path",
}
"""Names of settings in AReaL."""


def load_offline(
    kind: str,
    files: Sources = (),
    overrides: Overrides | None = (),
    *,
    files_are_given: bool = True,
) -> OfflineConfig:
    """Load the settings of a command from defaults, files (or names of shipped ones) and
    overrides.
    """
    if kind not in KINDS:
        raise refusal("kind", f"kind is {kind!r}, but must be one of {', '.join(KINDS)}")
    known = offline_configs(kind)
    paths = source_files(files, known, f"config of areal-lab {kind}")
    return load_record(
        KINDS[kind](),
        paths,
        overrides,
        ALIASES,
        bases=offline_configs(),
        files_are_given=files_are_given,
    )
