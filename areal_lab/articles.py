"""Names of AReaL, and of articles about it, as thin fronts of what areal_lab calls otherwise.

    load_expr_config, GRPOConfig, PPOConfig     load_config, TrainConfig
    RolloutConfig, DataConfig                   TrainConfig.rollout, TrainConfig.dataset
    PPOTrainer, AReaLTrainer                    train(config, ...)
    SFTTrainer, RWTrainer, DPOTrainer           areal-lab sft, rm, dpo, in this process
    Learner                                     training.step.train_batch, in this process
    AsyncReplayBuffer                           the batch order `bounded_lag` with `on_late=drop`
    AgentTrainer, AgentConfig                   train(config, ...) with the workflow `tool_use`
    VLMActor, VLMConfig                         train(config, ...) with problems that have images
    MultiTurnWorkflow, TIRWorkflow              the workflows `multi_turn`, and `tool_use` in Python
    TrainController, RolloutController          `areal_lab.controllers`, on hosts
    LocalScheduler, RayScheduler,               who brings up these hosts
    SlurmScheduler
    FSDPPPOActor, RemoteSGLangEngine            what the controllers start there
    DistributedBatch                            a batch as metadata (`controllers.batch`)

docs/from_areal.md has the settings. There is no `Actor`: in AReaL it is the policy that is trained,
in articles the process that generates, which is an engine here. A `workflow` is a
setting, `rollout.workflow` (docs/agents.md).
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import math
import shlex
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Generic, TypeAlias, TypeVar

from areal_lab.agents.multi_turn import MultiTurn
from areal_lab.agents.tool_use import DESCRIBED, ToolUse
from areal_lab.agents.tools.catalogue import as_schema
from areal_lab.config.functions import Form, check_call
from areal_lab.config.given import Source, given_number, given_texts
from areal_lab.config.load import load_config, train_config
from areal_lab.config.offline import OfflineConfig
from areal_lab.config.problem import refusal
from areal_lab.config.schema import DatasetConfig, RolloutConfig, TrainConfig
from areal_lab.control.events import Version
from areal_lab.control.order import bounded_lag
from areal_lab.controllers.batch import DistributedBatch
from areal_lab.controllers.fronts import (
    FSDPPPOActor,
    LocalScheduler,
    RayScheduler,
    RemoteSGLangEngine,
    RolloutController,
    SlurmScheduler,
    TrainController,
)
from areal_lab.data.jsonl import split_problems
from areal_lab.data.problems import Problem, ProblemSet
from areal_lab.data.rows import object_rows
from areal_lab.data.sources import given_list
from areal_lab.data.trajectory import Trajectory
from areal_lab.models.locate import resolve_model_path
from areal_lab.offline.console import train_here
from areal_lab.offline.rows import given_rows
from areal_lab.pipeline.train import train
from areal_lab.resolve.problems import renderer, run_problems
from areal_lab.rewards.service import RewardFunction
from areal_lab.shell.step_report import StepReport

if TYPE_CHECKING:
    from areal_lab.functional.losses.policy import HasLoss

__all__ = [
    "AReaLTrainer",
    "AgentConfig",
    "AgentTrainer",
    "AsyncReplayBuffer",
    "DPOTrainer",
    "DataConfig",
    "DistributedBatch",
    "FSDPPPOActor",
    "GRPOConfig",
    "Learner",
    "LocalScheduler",
    "MultiTurnWorkflow",
    "PPOConfig",
    "PPOTrainer",
    "RWTrainer",
    "RayScheduler",
    "RemoteSGLangEngine",
    "RolloutConfig",
    "RolloutController",
    "SFTTrainer",
    "SlurmScheduler",
    "TIRWorkflow",
    "TrainController",
    "VLMActor",
    "VLMConfig",
    "load_expr_config",
    "vlm_math_reward",
]

GRPOConfig = TrainConfig
"""AReaL's config of a GRPO run. The defaults are GRPO's advantages under decoupled PPO."""
PPOConfig = TrainConfig
"""AReaL's config of a PPO run; algorithms differ in settings here, not in classes."""
DataConfig = DatasetConfig

Rows: TypeAlias = object
"""Problems, or rows with the fields that `dataset.prompt_field` and `answer_field` name: a list, an
iterable, a frame, a table, a data set of `datasets`, or the path of a file."""
_Sample = TypeVar("_Sample")
_Config = TypeVar("_Config", "AgentConfig", "VLMConfig")


def load_expr_config(
    argv: Sequence[str] | str, config_class: type[TrainConfig] = TrainConfig
) -> tuple[TrainConfig, str]:
    """AReaL's way to read a command line: `--config FILE a.b=c ...`.

    Args:
        argv: the arguments without the program's name.
        config_class: as in AReaL's scripts; `GRPOConfig` and `PPOConfig` are the same here.

    Returns:
        The config and the file.

    Raises:
        ConfigError: no file is named, or a setting is wrong.
        TypeError: `config_class` is none of these.
    """
    if config_class is not TrainConfig:
        raise TypeError(f"config_class is {config_class.__name__}, but must be GRPOConfig")
    rest = shlex.split(argv) if isinstance(argv, str) else given_texts(argv, "argv")
    if "--config" not in rest[:-1]:
        raise refusal(
            "--config", f"the arguments are {' '.join(rest)!r}, but must have --config FILE"
        )
    at = rest.index("--config")
    file = rest[at + 1]
    return load_config(file, rest[:at] + rest[at + 2 :]), file


class PPOTrainer:
    """AReaL's trainer: `with PPOTrainer(config, rows) as trainer: trainer.train(reward_fn)`.

    A run starts in `train` and has ended, with all of its processes, when that returns or raises.
    The algorithm is what `config.actor` says: a critic comes with `actor.advantage=gae`.

    Args:
        config: from `load_expr_config` or `load_config`.
        train_dataset: rows to train on; None reads `config.dataset`.
        valid_dataset: held-out rows; None holds out those of `config.dataset`, which then has to be
            the source of both.

    Raises:
        ValueError: a row lacks a field, or only one of the datasets is given.
    """

    def __init__(
        self,
        config: TrainConfig | Source,
        train_dataset: Rows | None = None,
        valid_dataset: Rows | None = None,
    ) -> None:
        self.config = train_config(config)
        self.problems = _problems(self.config, train_dataset, valid_dataset)

    def train(
        self,
        reward_fn: RewardFunction | None = None,
        *,
        loss: Callable[..., HasLoss] | None = None,
        on_step: Callable[[StepReport], object] = lambda _: None,
    ) -> dict[str, Any]:
        """Run to the end; returns the content of `summary.json`.

        Args:
            reward_fn: `(completion, example) -> float | dict`; None takes `config.reward.fn`.
            loss: see `areal_lab.train`.
            on_step: called after each step.

        Raises:
            ConfigError: one line per problem, before any process starts.
            Exception: whatever ended the run early.
        """
        _check_callback(on_step, _ON_STEP)
        run = train(self.config, problems=self.problems, reward_fn=reward_fn, loss=loss)
        for report in run:
            on_step(report)
        return run.summary

    def __enter__(self) -> PPOTrainer:
        """Itself."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Nothing is left to close."""


AReaLTrainer = PPOTrainer


class SFTTrainer:
    """AReaL's trainers on fixed data: `with SFTTrainer(config) as trainer: trainer.train()`.

    One class for three names: what is trained is what the config is made for.

    Args:
        config: from `areal_lab.config.offline.load_offline("sft", FILE)`; "rm" and "dpo" likewise.
        train_dataset: rows to train on, with the fields that `config.dataset` names; None reads
            `config.dataset`.
        valid_dataset: held-out rows; given with `train_dataset`, or not at all.

    Raises:
        ValueError: a row lacks a field, or only one of the datasets is given.
    """

    def __init__(
        self,
        config: OfflineConfig,
        train_dataset: Rows | None = None,
        valid_dataset: Rows | None = None,
    ) -> None:
        if not isinstance(config, OfflineConfig):
            raise refusal(
                "config",
                f"config is {type(config).__name__}, but must say what is trained: "
                'load_offline("sft", FILE), "rm" or "dpo"',
            )
        self.config = config
        if (train_dataset is None) != (valid_dataset is None):
            raise ValueError(
                "train_dataset and valid_dataset belong together: give both, or neither, which "
                "reads config.dataset"
            )
        self.rows = None
        if train_dataset is not None and valid_dataset is not None:
            self.rows = given_rows(config.rows, train_dataset, valid_dataset)

    def train(
        self, on_step: Callable[[int, Mapping[str, float]], object] = lambda *_: None
    ) -> dict[str, Any]:
        """Run to the end in this process; returns the content of `summary.json`.

        Args:
            on_step: called with the number and the metrics of each step.

        Raises:
            ConfigError: one line per problem, before anything is loaded.
            NonFiniteStep: the loss or gradient of a step is not finite.
        """
        _check_callback(on_step, _ON_OFFLINE_STEP)
        return train_here(self.config, self.rows, on_step=on_step)

    def __enter__(self) -> SFTTrainer:
        """Itself."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Nothing is left to close."""


RWTrainer = SFTTrainer
DPOTrainer = SFTTrainer


def _given_as(kind: type[_Config], value: object, name: str) -> _Config:
    """A record of this module, or its fields by name; None is the defaults."""
    fields = {} if value is None else value
    if isinstance(fields, kind):
        return fields
    known = [one.name for one in dataclasses.fields(kind)]
    if not isinstance(fields, Mapping) or not set(fields) <= set(known):
        raise ValueError(
            f"{name} is {value!r:.60}, but must be {kind.__name__}(...), or have its fields by "
            f"name: {', '.join(known)}"
        )
    return kind(**fields)


def _problems(config: TrainConfig, train: object, held_out: object) -> ProblemSet:
    if (train is None) != (held_out is None):
        raise ValueError(
            "train_dataset and valid_dataset belong together: give both, or neither, which reads "
            "config.dataset"
        )
    if train is None:
        return run_problems(config)
    render = renderer(config.actor.path)
    kept = given_list(held_out, "valid_dataset", config.dataset, render)
    keys = {problem.key for problem in kept}
    found = given_list(train, "train_dataset", config.dataset, render)
    return ProblemSet(
        train=tuple(one for one in found if one.key not in keys), held_out=tuple(kept)
    )


MultiTurnWorkflow = MultiTurn
"""AReaL's workflow: answer again after feedback. A setting is
`rollout.workflow={name: multi_turn}`."""
TIRWorkflow = functools.partial(ToolUse, notation="python")
"""AReaL's tool-integrated reasoning: Python fences that are run. A setting is
`rollout.workflow={name: tool_use, notation: python}`."""
_TOOLS = {"calculator": "calculator", "code_execute": "python", "web_search": "search"}
_RENAMED = "areal_lab.agents.tools.catalogue:Renamed"


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentConfig:
    """Tools and turns of the agents in articles.

    Raises:
        ValueError: in one line: a tool has no name, or is none that there is.
    """

    tools: Sequence[Mapping[str, Any] | str] = ("calculator",)
    """Each with `name`, perhaps `description` and `parameters` (a JSON schema, or only its
    properties). `calculator`, `code_execute` (Python in the sandbox) and `web_search` (the local
    `corpus`, never the network) are there; any other has a `function`, as `module:name`, whose own
    name, docstring and types are taken for what is not given."""
    max_turns: int = 20
    """Of the model, its answer included."""
    reward_shaping: str = "trajectory"
    """`trajectory`: one reward for the whole sample; there is no other."""
    corpus: str = ""
    """JSONL file that `web_search` searches."""

    def __post_init__(self) -> None:
        if self.reward_shaping != "trajectory":
            raise ValueError(
                f"reward_shaping is {self.reward_shaping!r}, but must be trajectory; a reward of "
                "single turns is what a workflow of your own returns (docs/agents.md)"
            )
        object.__setattr__(self, "tools", tuple(self._all_tools()))  # an iterator is read once
        self.workflow()

    def workflow(self) -> dict[str, Any]:
        """The value of `rollout.workflow`."""
        return {
            "name": "tool_use",
            "notation": "json",
            "max_turns": self.max_turns,
            "tools": [self._tool(one) for one in self.tools],
        }

    def _all_tools(self) -> list[Any]:
        given: Any = self.tools
        one = isinstance(given, str | Mapping) or callable(given)
        if not one and not isinstance(given, Iterable):
            raise ValueError(f"tools is {given!r:.60}, but must be a list, such as ['calculator']")
        return [given] if one else list(given)

    def _tool(self, given: object) -> dict[str, Any]:
        if callable(given):
            given = {"name": getattr(given, "__name__", ""), "function": given}
        if not isinstance(given, str | Mapping):
            raise ValueError(
                f"a tool is {given!r:.60}, but must be a name ({', '.join(_TOOLS)}), a function, "
                'or fields: {"name": "weather", "function": "module:weather"}'
            )
        tool: dict[str, Any] = {"name": given} if isinstance(given, str) else dict(given)
        name, function = str(tool.get("name", "")), tool.get("function")
        if function is not None:
            if callable(function):
                function = f"{function.__module__}:{function.__qualname__}"
            said = {"called": name, "description": str(tool.get("description", ""))}
            schema = tool.get("parameters")
            parameters = {"parameters": as_schema(schema)} if schema else {}
            return {"name": function, **{k: one for k, one in said.items() if one}, **parameters}
        if name not in _TOOLS:
            raise ValueError(
                f"the tool is {name!r}, but must be one of {', '.join(_TOOLS)}, or have a "
                "function, as module:name"
            )
        if name == "web_search" and not self.corpus:
            raise ValueError(
                "web_search searches a local corpus and never the network, but corpus is empty; "
                "set AgentConfig(corpus=...) to a JSONL file of texts"
            )
        made: dict[str, Any] = {"name": _TOOLS[name]}
        if name == "web_search":
            made["corpus"] = self.corpus
        return {
            "name": _RENAMED,
            "tool": made,
            "called": name,
            "description": str(tool.get("description", "")),
            "parameters": dict(tool.get("parameters") or {}),
        }


class AgentTrainer:
    """Articles' trainer of agents: `AgentTrainer(model, config).train(tasks="tasks.json")`.

    Args:
        model_name: folder or name of the model.
        agent_config: tools and turns.
        async_config: the other settings: a config, settings by name (`{"eta": 4}`), or None.

    Raises:
        ConfigError: one line per setting that is wrong.
    """

    def __init__(
        self,
        model_name: str,
        agent_config: AgentConfig | Mapping[str, Any] | None = None,
        async_config: TrainConfig | Source | None = None,
    ) -> None:
        config = train_config({} if async_config is None else async_config)
        template = config.dataset.prompt_template
        self.config = config.with_settings(
            {
                "actor.path": model_name,
                "rollout.workflow": _given_as(AgentConfig, agent_config, "agent_config").workflow(),
                "dataset.prompt_template": (
                    template if DESCRIBED in template else f"{DESCRIBED}\n\n{template}\n"
                ),
            }
        )
        self._rewards: dict[str, Callable[..., Any]] = {}

    def register_reward_fn(self, name: str, fn: Callable[..., Any]) -> None:
        """Score with `fn(response, ground_truth)`, or `fn(trajectory, task, answer)`.

        Args:
            name: the task's field `reward_fn` chooses among several by it.
            fn: returns a number, named numbers, or None for no reward. Parameters with a default
                keep it.

        Raises:
            ValueError: in one line: it takes neither two nor three arguments.
        """
        if not callable(fn):
            raise ValueError(
                f"the reward function {name!r} is {fn!r:.60}, but must be a function, such as "
                "lambda response, ground_truth: float(response == ground_truth)"
            )
        if (count := _arguments(fn)) not in (_PAIR, _TRIPLE):
            raise ValueError(
                f"the reward function {name!r} has {count} positional parameters without a "
                "default, but must have 2 (response, ground_truth) or 3 (trajectory, task, answer)"
            )
        _check_pair_or_triple(name, fn, count)
        self._rewards[name] = fn

    def train(
        self,
        tasks: Rows,
        num_epochs: float = 1,
        *,
        on_step: Callable[[StepReport], object] = lambda _: None,
    ) -> dict[str, Any]:
        """Run to the end; returns the content of `summary.json`.

        Args:
            tasks: a file, JSON lines or one list, or rows; the text is in `dataset.prompt_field`,
                or in `task`. A part of them is held out (`dataset.eval_size`).
            num_epochs: how often each task is trained on; sets `total_train_steps`.
            on_step: called after each step.

        Raises:
            ConfigError: one line per problem, before any process starts.
            ValueError: in one line: the tasks cannot be read, or one does not say which of the
                reward functions it is for.
        """
        rows = [row for _, row in object_rows(tasks, "tasks", kept=Problem)]
        self._check_rewards(rows)
        dataset = self.config.dataset
        name = dataset.prompt_field
        if rows and isinstance(rows[0], Mapping) and name not in rows[0] and "task" in rows[0]:
            dataset = dataset.model_copy(update={"prompt_field": "task"})
        problems = given_list(rows, "tasks", dataset, renderer(self.config.actor.path))
        return _trained(self.config, problems, num_epochs, self._rewards, on_step)

    def _check_rewards(self, rows: Sequence[Mapping[str, Any] | Problem]) -> None:
        if not self._rewards:
            return
        for number, row in enumerate(rows, start=1):
            name = (row.metadata if isinstance(row, Problem) else row).get("reward_fn")
            if not name and len(self._rewards) == 1:
                continue
            if name not in self._rewards:
                given = f"reward_fn {name!r}" if name else "no reward_fn"
                raise ValueError(
                    f"tasks, row {number} has {given}, but must name one of "
                    f"{', '.join(self._rewards)}"
                )


def _trained(
    config: TrainConfig,
    problems: list[Problem],
    num_epochs: float,
    rewards: Mapping[str, Callable[..., Any]],
    on_step: Callable[[StepReport], object],
) -> dict[str, Any]:
    """Run over the problems, of which a part is held out; returns the content of `summary.json`."""
    if not given_number(num_epochs, "num_epochs") > 0:
        raise ValueError(f"num_epochs is {num_epochs}, but must be > 0")
    dataset = config.dataset
    split = split_problems(
        problems,
        [],
        names=("tasks", "tasks"),
        eval_size=dataset.eval_size,
        seed=config.seed,
    )
    steps = max(1, math.ceil(num_epochs * len(split.train) / dataset.batch_size))
    config = config.with_settings({"total_train_steps": steps})
    _check_callback(on_step, _ON_STEP)
    run = train(config, problems=split, reward_fn=_ByName(dict(rewards)) if rewards else None)
    for report in run:
        on_step(report)
    return run.summary


_ON_STEP = Form("on_step(report)", may_wait=False)
_ON_OFFLINE_STEP = Form("on_step(number, metrics)", may_wait=False)


def _check_pair_or_triple(name: str, function: Callable[..., Any], count: int) -> None:
    """Refuse what cannot be called as the reward functions of articles are.

    Raises:
        ValueError: in one line.
    """
    pair, triple = "score(response, ground_truth)", "score(trajectory, task, answer)"
    form = Form(triple if count == _TRIPLE else pair, may_wait=False)
    try:
        check_call(function, form)
    except ValueError as error:
        raise ValueError(f"the reward function {name!r} {error}") from error


def _check_callback(on_step: Callable[..., object], form: Form) -> None:
    """Refuse what cannot be called after a step, before the first one.

    Raises:
        ValueError: in one line.
    """
    try:
        check_call(on_step, form)
    except ValueError as error:
        raise ValueError(f"on_step {error}") from error


_PAIR, _TRIPLE = len(("response", "ground_truth")), len(("trajectory", "task", "answer"))


def _arguments(function: Callable[..., Any]) -> int:
    """How many arguments a function has to be given by position.

    Raises:
        ValueError: in one line: it has no signature, as some builtins.
    """
    return sum(
        one.default is one.empty and one.kind in (one.POSITIONAL_ONLY, one.POSITIONAL_OR_KEYWORD)
        for one in inspect.signature(function).parameters.values()
    )


@dataclass(frozen=True, slots=True)
class _ByName:
    """Reward functions of articles as one of ours."""

    functions: Mapping[str, Callable[..., Any]]

    def __call__(self, completion: str, example: Mapping[str, Any]) -> Any:
        function = self.functions[example.get("reward_fn") or next(iter(self.functions))]
        task = example.get("question", example.get("task", example["prompt"]))
        if _arguments(function) == _TRIPLE:
            said = [
                {**one, "tool_call": one["tool_calls"][0]} if "tool_calls" in one else one
                for one in example["trajectory"]
            ]
            return function(said, task, example["answer"])
        return function(completion, example["answer"])


@dataclass(frozen=True, slots=True, kw_only=True)
class VLMConfig:
    """Rows and responses of the vision-language actors in articles."""

    image_field: str = "image"
    """Field of a row with its image, or a list of them (`dataset.image_field`)."""
    n_samples: int = 8
    """Responses per problem."""
    max_new_tokens: int = 512
    """Of a response."""


class VLMActor:
    """Articles' vision-language actor: `VLMActor(model, backend="sglang").train(rows)`.

    Args:
        model_name: folder or name of a Qwen2-VL, Qwen2.5-VL or Qwen3-VL.
        vision_encoder: in articles the name of another model; these models have their own, which
            is trained with them.
        backend: the inference engine, `rollout.backend`.
        config: rows and responses.
        async_config: the other settings: a config, settings by name (`{"eta": 4}`), or None.

    Raises:
        ConfigError: one line per setting that is wrong.
        ValueError: in one line: a vision encoder is named.
    """

    def __init__(
        self,
        model_name: str,
        vision_encoder: str | None = None,
        backend: str = "embedded",
        config: VLMConfig | Mapping[str, Any] | None = None,
        async_config: TrainConfig | Source | None = None,
    ) -> None:
        if vision_encoder:
            raise ValueError(
                f"vision_encoder is {vision_encoder!r}, but the model has its own, which features "
                "of another would not fit; leave it out"
            )
        asked = _given_as(VLMConfig, config, "config")
        base = train_config({} if async_config is None else async_config)
        self.config = base.with_settings(
            {
                "actor.path": model_name,
                "rollout.backend": backend,
                "dataset.image_field": asked.image_field,
                "gconfig.n_samples": asked.n_samples,
                "gconfig.max_new_tokens": asked.max_new_tokens,
            }
        )

    def train(
        self,
        tasks: Rows,
        reward_fn: Callable[..., Any] | None = None,
        num_epochs: float = 1,
        *,
        on_step: Callable[[StepReport], object] = lambda _: None,
    ) -> dict[str, Any]:
        """Run to the end; returns the content of `summary.json`.

        Args:
            tasks: a file, JSON lines or one list, or rows, with images by path or bytes. A part of
                them is held out (`dataset.eval_size`).
            reward_fn: of `(response, ground_truth)`, further parameters having defaults; None is
                `vlm_math_reward`.
            num_epochs: how often each row is trained on; sets `total_train_steps`.
            on_step: called after each step.

        Raises:
            ConfigError: one line per problem, before any process starts.
            ValueError: in one line: the rows cannot be read.
        """
        render = renderer(self.config.actor.path)
        problems = given_list(tasks, "tasks", self.config.dataset, render)
        rewards = {"reward": reward_fn or vlm_math_reward}
        if reward_fn is not None:
            _check_pair_or_triple("reward_fn", reward_fn, _PAIR)
        return _trained(self.config, problems, num_epochs, rewards, on_step)


def vlm_math_reward(response: str, ground_truth: str, image_features: object = None) -> float:
    """1 if the answer of the response equals the gold answer, as mathematics; else 0.

    Args:
        response: of the model, whose answer is in `\\boxed{}`, or its last expression.
        ground_truth: the gold answer.
        image_features: as articles give them; ignored: what a model has seen shows in its answer.
            A response earns nothing by writing `<image>`.

    Raises:
        MissingExtra: math-verify is not installed.
        ValueError: the gold answer cannot be read.
    """
    del image_features
    from areal_lab.rewards.math_answer import math_answer  # of an extra

    return math_answer(response, {"answer": ground_truth})


class Learner:
    """The learner of actor-learner articles: the trainer of a run, in this process.

    Args:
        config: of which `actor` and `gconfig` count.
    """

    def __init__(self, config: TrainConfig | Source) -> None:
        config = train_config(config)
        # They load torch, which the other names do without.
        from areal_lab.training.learner import make_learner
        from areal_lab.training.model import load_policy
        from areal_lab.training.settings import TrainerSettings

        folder: Path = resolve_model_path(config.actor.path)
        model = load_policy(folder, gradient_checkpointing=config.actor.gradient_checkpointing)
        settings = TrainerSettings(config=config, model_path=str(folder), weights_root="")
        self._learner = make_learner(model, settings)
        self.version: Version = 0
        """Updates so far."""

    @property
    def model(self) -> Any:
        """The policy, a transformers model."""
        return self._learner.model

    def update(self, trajectories: Sequence[Trajectory]) -> dict[str, float]:
        """One training step on whole groups; returns its metrics (docs/metrics.md).

        Raises:
            NonFiniteStep: the loss or gradient is not finite.
        """
        from areal_lab.training.protocol import TrainBatchRequest
        from areal_lab.training.step import train_batch

        outcome = train_batch(self._learner, TrainBatchRequest(self.version, tuple(trajectories)))
        self.version += 1
        return outcome.metrics | outcome.measured


class AsyncReplayBuffer(Generic[_Sample]):
    """Samples on their way to the learner: each is used once, the oldest first, none too old.

    Articles show a replay buffer that draws old samples again and again by a priority. AReaL has
    none: a sample leaves when it is trained on (docs/retellings.md).

    Args:
        batch_size: samples of a batch; in a run a sample is a group.
        max_staleness: versions between the start of a sample and the learner; what is older is
            dropped and counted. Infinity keeps everything.
    """

    def __init__(self, batch_size: int, max_staleness: float = math.inf) -> None:
        if not given_number(batch_size, "batch_size").is_integer() or batch_size < 1:
            raise ValueError(f"batch_size is {batch_size}, but must be >= 1 and whole")
        self._batch_size = int(batch_size)
        most = given_number(max_staleness, "max_staleness")
        self._backlog = bounded_lag(most, "drop").make_backlog(batch_size)
        self._samples: dict[int, _Sample] = {}
        self._next = 0
        self.dropped = 0
        """Samples that became too old."""

    def put(self, sample: _Sample, version: Version) -> None:
        """Add a sample whose generation started under `version`."""
        self._backlog.started(self._next, version)
        self._backlog.finished(self._next, version)
        self._samples[self._next] = sample
        self._next += 1

    def get_batch(self, version: Version) -> list[_Sample] | None:
        """The oldest samples, for a learner that has `version`; None while there are too few."""
        for late in self._backlog.late(version):
            del self._samples[late]
            self.dropped += 1
        if not self._backlog.ready(version, self._batch_size):
            return None
        return [self._samples.pop(number) for number in self._backlog.take(self._batch_size)]

    def __len__(self) -> int:
        """Samples that wait."""
        return len(self._samples)
