"""Check an environment of another library: one episode of a fixed response, one of a model.

    a fixed response ----> workflow of a run --> Episode --episode_report--> numbers of the check
    engines of a model -->  gateway, runner

Both take the way of a sample in a run: its gateway, its conversation in tokens, its runner. Without
a model, tokens are the bytes of the text, in the format of ChatML.
"""

from __future__ import annotations

import tempfile
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from areal_lab.agents.chat_format import ChatFormat
from areal_lab.agents.control_text import control_text
from areal_lab.agents.template import TEMPLATE_FILE, load_template
from areal_lab.agents.workflow import Episode, opened
from areal_lab.config.problem import refusal
from areal_lab.config.schema import TrainConfig
from areal_lab.data.problems import Problem
from areal_lab.data.tokenize import TOKENIZER_FILE, TextCodec
from areal_lab.data.trajectory import FinishReason, Segment
from areal_lab.engines.protocol import CannotScore, Generated, SamplingParams, ScoredTokens
from areal_lab.pipeline.fleet import Fleet, first_error
from areal_lab.pipeline.model_evaluation import Evaluation, start_evaluation
from areal_lab.resolve.functions import workflow_of
from areal_lab.rewards.service import RewardOutcome
from areal_lab.runlog.folder import RunFolder
from areal_lab.shell.display import Display

_CONTEXT_TOKENS: Final = 2**20
"""Context of a fixed response: an environment's own limits end its episode."""
_BEGIN, _END = "<|im_start|>", "<|im_end|>"
_CHATML: Final = (
    "{% for one in messages %}<|im_start|>{{ one.role }}\n{{ one.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckedEpisode:
    """An episode, and its times in seconds."""

    episode: Episode
    start_s: float
    """Until the gateway, the runner and the engines had started."""
    episode_s: float
    model_s: float
    """Part of `episode_s` in which the model generated; turns at the same time count each."""


class FixedResponse:
    """Engine of one sample, whose turns are all the same text (`WorkflowEngine`).

    Raises:
        ConfigError: the tokenizer cannot write the response.
    """

    stream = "held-out"
    group = 0
    context_tokens = _CONTEXT_TOKENS

    def __init__(self, response: str, form: ChatFormat, codec: TextCodec) -> None:
        self._codec = codec
        text = control_text(codec)
        tokens = text.encode(str(text.plain(response)))
        if (written := codec.decode(tokens)).strip() != response.strip():
            detail = f"{response[:40]!r}, but the model's tokens write {written[:40]!r}"
            raise refusal("response", f"the response is {detail}; give another one, or no model")
        self._response = (*tokens, *form.end_tokens[:1])
        self.sampling = SamplingParams(max_new_tokens=len(self._response))
        self._turns = 0
        self._over = False

    async def turn(
        self,
        prompt_tokens: Sequence[int],
        sampling: SamplingParams | None = None,
        *,
        seed: int | None = None,
    ) -> Generated:
        """See `TurnSampler.turn`; the response has the probability 1."""
        del seed
        self._turns += 1
        most = min((sampling or self.sampling).max_new_tokens, _CONTEXT_TOKENS - len(prompt_tokens))
        tokens = () if self._over else self._response[:most]
        reason: FinishReason = "stop" if len(tokens) == len(self._response) else "length"
        return Generated(
            request_id=f"turn-{self._turns}",
            segments=(Segment(tokens, (0.0,) * len(tokens), 0),) if tokens else (),
            finish_reason="abort" if self._over else reason,
            retractions=0,
            cached_tokens=0,
        )

    async def token_logprobs(
        self, tokens: Sequence[int], *, start: int = 0, top: int = 0
    ) -> ScoredTokens:
        """See `TurnSampler.token_logprobs`."""
        del tokens, start, top
        raise CannotScore("a fixed response has no scores of other tokens")

    def encode(self, text: str, *, begins: bool = False) -> tuple[int, ...]:
        """See `WorkflowEngine.encode`."""
        return control_text(self._codec).encode(text, begins=begins)

    def plain(self, text: str, *, within: str = "") -> str:
        """See `WorkflowEngine.plain`."""
        return str(control_text(self._codec, within).plain(text))

    def decode(self, tokens: Sequence[int]) -> str:
        """See `WorkflowEngine.decode`."""
        return self._codec.decode(tokens)

    def give_up(self) -> None:
        """See `WorkflowEngine.give_up`."""
        self._over = True

    async def score(self, completion: str, data: Mapping[str, Any]) -> RewardOutcome:
        """See `WorkflowEngine.score`; rewards are the environment's."""
        del completion, data
        raise AssertionError("an environment scores its samples itself")


async def play_response(
    config: TrainConfig, task: Problem, response: str, model: Path | None
) -> CheckedEpisode:
    """Play one episode in which the model always responds the same.

    Args:
        config: settings with an environment.
        task: task of the environment.
        response: text of each turn.
        model: folder with a tokenizer and a chat template; None takes bytes.

    Raises:
        ConfigError: the settings cannot be used.
        RewardError: the runner could not start.
    """
    with tempfile.TemporaryDirectory(prefix="areal-check-") as folder:
        model = model or byte_model(Path(folder))
        workflow = workflow_of(config)
        assert workflow is not None, "environments are played by one"
        codec = TextCodec.load(model)
        template = load_template(model, config.rollout.workflow.get("template") or None)
        form = ChatFormat(template, codec)
        began_s = time.monotonic()
        async with opened(workflow, model):
            started_s = time.monotonic()
            episode = await workflow.run(FixedResponse(response, form, codec), task.as_example())
            ended_s = time.monotonic()
    return CheckedEpisode(
        episode=episode, start_s=started_s - began_s, episode_s=ended_s - started_s, model_s=0.0
    )


async def play_model(evaluation: Evaluation, display: Display) -> CheckedEpisode:
    """Play one episode of the only problem of an evaluation.

    Raises:
        Exception: the first error of any part.
    """
    with tempfile.TemporaryDirectory(prefix="areal-check-") as path:
        folder = RunFolder(Path(path))
        (folder.path / "logs").mkdir()
        began_s = time.monotonic()
        async with Fleet() as fleet:
            try:
                rollout, _ = await start_evaluation(evaluation, folder, fleet, display)
                started_s = time.monotonic()
                display.phase("playing an episode of the model")
                (group,) = await rollout.held_out(evaluation.problems, samples=1)
                ended_s = time.monotonic()
            except BaseExceptionGroup as errors:
                raise first_error(errors) from errors
    return CheckedEpisode(
        episode=group.samples[0],
        start_s=started_s - began_s,
        episode_s=ended_s - started_s,
        model_s=sum(turn.end_s - turn.start_s for turn in group.turns),
    )


def episode_report(checked: CheckedEpisode) -> dict[str, Any]:
    """Describe an episode: its reward, and the tokens that a run would train on.

    `trained_share` is the share of the tokens of all rows that have a loss (the mean of the loss
    mask); None without rows. A sample without a reward trains nothing.
    """
    episode = checked.episode
    outcome, rows = episode.outcome, episode.rows
    ok = outcome.status == "ok"
    trained = episode.tokens if ok else 0
    total = sum(len(row.prompt_tokens) + sum(len(p.tokens) for p in row.parts) for row in rows)
    named = dict(outcome.rewards)
    return {
        "status": outcome.status,
        "detail": outcome.detail,
        "reward": outcome.reward if ok else None,
        "rewards": named,
        "metrics": {name: one for name, one in episode.metrics.items() if name not in named},
        "end": episode.end,
        "truncated": episode.truncated,
        "turns": len(episode.turns),
        "tools": list(episode.tools),
        "tool_calls": dict(Counter(name for turn in episode.turns for name, _ in turn.calls)),
        "forks": dict(Counter(turn.fork for turn in episode.turns if turn.fork)),
        "rows": len(rows),
        "tokens": total,
        "trained_tokens": trained,
        "trained_share": trained / total if total else None,
        "start_s": checked.start_s,
        "episode_s": checked.episode_s,
        "model_s": checked.model_s,
    }


def byte_model(folder: Path) -> Path:
    """Write a tokenizer of bytes and the template of ChatML into a folder; returns it."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([_BEGIN, _END])
    tokenizer.save(str(folder / TOKENIZER_FILE))
    (folder / TEMPLATE_FILE).write_text(_CHATML)
    return folder
