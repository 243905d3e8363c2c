"""Tasksets of verifiers 0.4. Run by `loop.py`, in the environment's own Python."""

import importlib.metadata
import importlib.util
import os
import sys
from pathlib import Path
from typing import Any

_NO_KEY = "AREAL_LAB_NO_KEY"
"""A variable that is not set: the key is part of the URL."""

_CHAT = "areal_lab_chat"
"""Name of our harness among those of verifiers: that of its module."""


class Standard:
    """One taskset; `args` are its settings (`--env.taskset.*` of verifiers)."""

    def __init__(self, name: str, args: dict[str, Any]) -> None:
        try:
            self.version = importlib.metadata.version("verifiers")
        except importlib.metadata.PackageNotFoundError:
            raise ValueError(
                "this Python has no verifiers; install verifiers>=0.4,<0.5 into it"
            ) from None
        if not self.version.startswith("0.4."):
            raise ValueError(
                f"verifiers {self.version} is of another generation; install verifiers>=0.4,<0.5"
            )
        from verifiers.v1.configs.agent import agent_config_fields
        from verifiers.v1.runtimes import SubprocessConfig
        from verifiers.v1.utils import loaders

        _import_chat()
        harness = loaders.default_harness_id(name)
        bundled = harness == name and not loaders.harness_class(name).EXECUTES_CODE
        config_type = loaders.env_config_type(name)
        seats = agent_config_fields(config_type(taskset={"id": name, **args}))
        if list(seats) != ["agent"]:
            raise ValueError(
                f"{name} has the seats {', '.join(seats)}, but only environments of one agent are "
                "served: others would be trained on its tokens"
            )
        config = config_type(
            taskset={"id": name, **args},
            agent={
                "harness": {"id": name if bundled else _CHAT},
                "runtime": SubprocessConfig().model_dump(),
            },
        )
        self._env = loaders.load_environment(config)
        boxed = f"{name} needs a container for each sample, which is not served"
        if type(self._env.taskset).task_type().NEEDS_CONTAINER:
            raise ValueError(boxed)
        if not self._env.taskset.bounded:
            raise ValueError(f"{name} has tasks without end; bound it by its settings")
        self._tasks = {str(task.key): task for task in self._env.taskset}
        if any(task.data.image for task in self._tasks.values()):  # verifiers ignores it here
            raise ValueError(boxed)
        self._serving = self._env.serving()

    async def start(self) -> None:
        """Start what the samples share."""
        from verifiers.v1.errors import ToolsetError

        os.environ.pop(_NO_KEY, None)
        try:
            await self._serving.__aenter__()
        except ToolsetError as error:  # after three minutes: verifiers does not see that it ended
            raise ValueError(_line(str(error))) from None

    async def close(self) -> None:
        """Stop it."""
        await self._serving.__aexit__(None, None, None)

    def tasks(self) -> list[dict[str, Any]]:
        """All tasks; a key is a hash of a task's content."""
        return [{"id": key, "prompt": task.data.prompt_text} for key, task in self._tasks.items()]

    async def run(self, request: dict[str, Any]) -> dict[str, Any]:
        """One episode."""
        from verifiers.v1.clients import EvalClientConfig, ModelContext
        from verifiers.v1.types import SamplingConfig

        client = EvalClientConfig(base_url=request["base_url"], api_key_var=_NO_KEY)
        context = ModelContext(model=request["model"], client=client, sampling=SamplingConfig())
        if request["max_turns"]:
            self._env.config.agent.max_turns = request["max_turns"]
        task = self._tasks.get(request["task"])
        if task is None:
            raise ValueError(f"there is no task {request['task']!r}")
        try:
            episode = await self._env.run_episode(task, context)
        finally:
            await self._forget(request["base_url"])
        errors = [*episode.errors, *(error for trace in episode.traces for error in trace.errors)]
        rewards: dict[str, float] = {}
        metrics: dict[str, float] = {}
        total = 0.0
        for trace in episode.traces:
            total += trace.reward
            rewards |= {name: one.value for name, one in trace.rewards.items() if one is not None}
            metrics |= {name: one for name, one in trace.metrics.items() if one is not None}
            if errors:
                continue
            if None in trace.rewards.values():
                return {"ok": False, "error": "a reward was not computed"}
            if not trace.rewards:
                return {"ok": False, "error": "the task has no reward"}
        return {
            "ok": episode.ok,
            "reward": total,
            "rewards": rewards,
            "metrics": metrics,
            "truncated": any(trace.is_truncated for trace in episode.traces),
            "stop": episode.traces[-1].stop_condition if episode.traces else None,
            "error": _line(f"{errors[-1].type}: {errors[-1].message}") if errors else "",
        }

    async def _forget(self, base_url: str) -> None:
        """Close the HTTP client of a sample: verifiers keeps one for each configuration."""
        pool = self._env._interception
        for server in [pool, *getattr(pool, "servers", [])]:
            clients = getattr(server, "clients", {})
            for key in [key for key, one in clients.items() if one.base_url == base_url]:
                await clients.pop(key).close()


def _line(message: str) -> str:
    """The first line of a message and, if it continues with the end of a log, the last one."""
    first, *rest = filter(None, map(str.strip, message.splitlines())) or ["no reason was given"]
    return f"{first} ... {rest[-1]}" if rest else first


def _import_chat() -> None:
    """Import our harness under the name by which verifiers finds it."""
    file = Path(__file__).with_name("verifiers_chat.py")
    spec = importlib.util.spec_from_file_location(_CHAT, file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    sys.modules[_CHAT] = module
