"""Tasks of inspect-ai 0.3.28x. Run by `loop.py`, in the environment's own Python.

The library allows one evaluation in a process. It is started with the first sample and takes those
that follow while it runs; each sample is an epoch of its own:

    run -> enqueue_sample(epoch=number) -> solver -> _Policy, URL of this epoch -> sample_complete
"""

import asyncio
import contextvars
import functools
import hashlib
import importlib.metadata
import os
import re
import tempfile
from typing import Any

_WANTED = "inspect-ai>=0.3.280,<0.3.290 and openai"
_ANY = 2**20
"""Concurrent samples, and calls of the model: areal_lab has bounds of its own."""
_LONG_S = 86_400.0
_ZERO = ("i", "n", "no", "false")
"""Scores that inspect-ai counts as 0. It counts a text without a meaning as 0, too."""
_SCORING = contextvars.ContextVar("scoring", default=False)


class Standard:
    """One task, `FILE.py@NAME` or `PACKAGE/NAME`; `args` are its arguments (`-T` of inspect)."""

    def __init__(self, name: str, args: dict[str, Any]) -> None:
        try:
            self.version = importlib.metadata.version("inspect-ai")
            if not re.match(r"0\.3\.28\d", self.version):
                raise ValueError(
                    f"inspect-ai {self.version} is of another generation; install {_WANTED}"
                )
            importlib.metadata.version("openai")
        except importlib.metadata.PackageNotFoundError as error:
            raise ValueError(f"this Python has no {error.name}; install {_WANTED}") from None
        from inspect_ai import SampleSource, task_with
        from inspect_ai._eval.loader import load_tasks
        from inspect_ai._eval.task.constants import TASK_ALL_PARAMS_ATTR
        from inspect_ai.scorer import value_to_float

        found = load_tasks([name], args)
        if len(found) != 1:
            names = ", ".join(one.name for one in found) or "none"
            raise ValueError(f"{name} must be one task, such as FILE.py@NAME, but has {names}")
        (task,) = found
        taken = getattr(task, TASK_ALL_PARAMS_ATTR)
        if unknown := args.keys() - taken.keys():  # of which the library only warns
            raise ValueError(
                f"{name} has no argument {', '.join(sorted(unknown))}, only {', '.join(taken)}"
            )
        if task.model is not None or not task.scorer or task.sample_source is not None:
            raise ValueError(f"{name} must have a scorer and a dataset, and no model of its own")
        if task.sandbox or any(sample.sandbox for sample in task.dataset):
            raise ValueError(f"{name} runs code in a sandbox, which is not served")
        self._samples: dict[str, Any] = {}
        counts: dict[str, int] = {}
        for sample in task.dataset:
            if sample.id is None:  # its position may change
                content = hashlib.sha256(sample.model_dump_json().encode()).hexdigest()[:16]
                equal = counts[content] = counts.get(content, -1) + 1
                sample.id = f"{content}-{equal}" if equal else content
            if str(sample.id) in self._samples:
                raise ValueError(f"{name} has two samples with the id {sample.id!r}")
            self._samples[str(sample.id)] = sample
        source = SampleSource.from_samples(
            [], next_samples=self._wait, sample_complete=self._complete
        )
        scorers = [_marked(scorer) for scorer in task.scorer]
        self._task = task_with(
            task, dataset=source, scorer=scorers, epochs=1, early_stopping=None, checkpoint=False
        )
        self._to_float = value_to_float()
        self._number = 0
        self._running: dict[int, _Sample] = {}
        self._eval: asyncio.Task[Any] | None = None

    def tasks(self) -> list[dict[str, Any]]:
        """All samples of the dataset, in the order of their ids: a task may shuffle them."""
        return [
            {"id": key, "prompt": one.input if isinstance(one.input, str) else one.input[-1].text}
            for key, one in sorted(self._samples.items())
        ]

    async def run(self, request: dict[str, Any]) -> dict[str, Any]:
        """One sample."""
        from inspect_ai import enqueue_sample
        from inspect_ai.log._samples import active_samples

        if request["task"] not in self._samples:
            raise ValueError(f"there is no task {request['task']!r}")
        if self._eval is None:
            self._context = asyncio.get_running_loop().create_future()
            self._more = asyncio.Event()
            self._eval = asyncio.create_task(self._evaluate(request["model"]))
        self._number += 1
        number, running = self._number, _Sample(request["base_url"], request["max_turns"])
        self._running[number] = running
        try:
            context = await asyncio.shield(self._context)
            sample = self._samples[request["task"]].model_copy(deep=True)
            context.run(enqueue_sample, sample, epoch=number)
            self._more.set()
            return self._result(await running.ended)
        except asyncio.CancelledError:
            for active in active_samples():
                if active.epoch == number:
                    active.interrupt("cancel")
            raise
        finally:
            del self._running[number]

    async def close(self) -> None:
        """End the evaluation."""
        if self._eval is not None:
            self._eval.cancel()
            await asyncio.gather(self._eval, return_exceptions=True)

    async def _evaluate(self, model: str) -> None:
        """One evaluation of all samples, which ends only with an error."""
        from inspect_ai import eval_async

        reason = "the evaluation of inspect-ai has ended"
        try:
            with tempfile.TemporaryDirectory(prefix="areal-inspect-") as folder:
                os.environ["INSPECT_CACHE_DIR"] = folder
                os.environ["INSPECT_TRACE_FILE"] = f"{folder}/trace.log"
                logs = await eval_async(
                    self._task, model=_policy(model, self._running),
                    log_dir=folder, log_samples=False, log_realtime=False, score_display=False,
                    ctl_server=False, max_samples=_ANY, max_connections=_ANY, max_retries=0,
                    fail_on_error=False, retry_on_error=0, score_on_error=False,
                )  # fmt: skip
            reason = next((str(log.error.message) for log in logs if log.error), reason)
        except Exception as error:
            reason = f"{type(error).__name__}: {error}"
        finally:
            self._eval = None
            for future in [self._context, *(one.ended for one in self._running.values())]:
                if not future.done():
                    future.set_exception(ValueError(reason))

    async def _wait(self) -> list[Any]:
        """Called when no sample runs, in the context in which samples can be added."""
        if not self._context.done():
            self._context.set_result(contextvars.copy_context())
        await self._more.wait()
        self._more.clear()
        return []

    async def _complete(self, sample: Any) -> None:
        running = self._running.get(sample.epoch)
        if running is not None and not running.ended.done():
            running.ended.set_result(sample)

    def _result(self, sample: Any) -> dict[str, Any]:
        if sample.error:
            return {"ok": False, "error": " ".join(sample.error.message.split())}
        rewards: dict[str, float] = {}
        for scorer, score in (sample.scores or {}).items():
            if score.reason in ("grader_failed", "scoring_failed"):
                return {"ok": False, "error": f"{scorer}: {score.reason}: {score.explanation}"}
            value = score.value
            parts = enumerate(value) if isinstance(value, list) else [("", value)]
            for part, one in value.items() if isinstance(value, dict) else parts:
                number = self._to_float(one)
                known = not isinstance(one, str) or one.lower() in _ZERO or one.strip("+-0.") == ""
                if one is None or (number == 0 and not known):
                    return {"ok": False, "error": f"{scorer} gave {one!r:.60}, which is no number"}
                rewards[scorer if part == "" else f"{scorer}.{part}"] = number
        if not rewards:
            return {"ok": False, "error": "the sample has no score"}
        return {
            "ok": True,
            "reward": sum(rewards.values()),
            "rewards": rewards,
            "truncated": sample.limit is not None,
            "stop": sample.limit.type if sample.limit else "",
        }


class _Sample:
    """A sample that runs."""

    def __init__(self, url: str, max_turns: int) -> None:
        self.url, self.max_turns, self.turns = url, max_turns, 0
        self.ended: asyncio.Future[Any] = asyncio.get_running_loop().create_future()


def _marked(scorer: Any) -> Any:
    """A scorer, during which calls of the trained model are refused."""

    @functools.wraps(scorer)
    async def scored(state: Any, target: Any) -> Any:
        token = _SCORING.set(True)
        try:
            return await scorer(state, target)
        finally:
            _SCORING.reset(token)

    return scored


def _policy(name: str, running: dict[int, _Sample]) -> Any:
    """The model, whose URL is that of the sample that calls it."""
    from inspect_ai.log._samples import sample_active
    from inspect_ai.model import get_model, modelapi
    from inspect_ai.model._providers.openai_compatible import OpenAICompatibleAPI
    from inspect_ai.util import LimitExceededError

    def current() -> _Sample | None:
        active = sample_active()
        return running.get(active.epoch) if active else None

    # Here the library is not installed, so its class has no type. Arguments that are not used are
    # part of the signatures of its methods.
    class Policy(OpenAICompatibleAPI):  # type: ignore[misc]
        # Also part of the keys of cached replies: no reply is one of another sample.
        @property
        def base_url(self) -> str:
            sample = current()
            return sample.url if sample else "http://none.invalid"

        @base_url.setter
        def base_url(self, value: str | None) -> None:
            pass

        async def _generate_completion(self, request: Any, config: Any) -> Any:  # noqa: ARG002
            if _SCORING.get():
                raise ValueError("a scorer calls the model that is trained; name another for it")
            sample = current()
            if sample is None:
                raise ValueError("the sample has ended")
            if sample.turns == sample.max_turns > 0:
                # The limit of the library ends a sample with the reply after the last one.
                raise LimitExceededError("turn", value=sample.turns + 1, limit=sample.max_turns)
            sample.turns += 1
            client = self.client.with_options(base_url=sample.url)
            return await client.chat.completions.create(**request)

        def should_retry(self, ex: BaseException) -> bool:  # noqa: ARG002
            return False

    modelapi("areal-lab")(Policy)
    return get_model(
        f"areal-lab/policy/{name}", api_key="none", memoize=False, max_retries=0,
        client_timeout=_LONG_S,
    )  # fmt: skip
