"""Controllers for ordinary programs, by the names of the articles: every call blocks.

    scheduler = LocalScheduler(n_nodes=3)                       or RayScheduler, SlurmScheduler
    rollout = RolloutController(engine=RemoteSGLangEngine(config), scheduler=scheduler)
    actor = TrainController(engine=FSDPPPOActor(config=config), scheduler=scheduler)
    with rollout, actor:
        for _ in range(config.total_train_steps):
            batch = rollout.prepare_batch(problems)
            print(actor.ppo_update(batch))
            rollout.update_weights(actor)

They share an event loop in a separate thread, which the scheduler has. Ctrl-C and SIGTERM raise
`KeyboardInterrupt` in the program; `with` then ends what was started, and summary.json in
`scheduler.folder` says how the program ended.
"""

from __future__ import annotations

import asyncio
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Coroutine, Mapping
from contextlib import AsyncExitStack, ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any, ClassVar, Final, Self, TypeVar

from areal_lab.config.given import Source
from areal_lab.config.load import train_config
from areal_lab.config.problem import ConfigError, refusal
from areal_lab.config.schema import TrainConfig
from areal_lab.config.sections import SchedulerType
from areal_lab.controllers.batch import DistributedBatch
from areal_lab.controllers.host_pool import HostPool, host_pool
from areal_lab.controllers.rollout import AsyncRolloutController
from areal_lab.controllers.train import AsyncTrainController
from areal_lab.data.arrays import Field
from areal_lab.resolve.problems import train_problems
from areal_lab.resolve.resolved import check_given_reward
from areal_lab.rewards.service import RewardFunction
from areal_lab.shell.stop import ended_like_ctrl_c

Result = TypeVar("Result")
_NOT_HERE: Final = (
    "is part of ppo_update here: proximal log-probs and advantages are computed by the trainer's "
    "processes, once for a batch"
)


class Scheduler:
    """Brings up hosts for the controllers that are given to it, and their event loop.

    Args:
        n_nodes: hosts, of which the last ones train.
        say: shows what happens; None prints nothing.
        settings: further ones of `cluster` and `scheduler`, by their names.
    """

    kind: ClassVar[SchedulerType] = "local"

    def __init__(
        self, n_nodes: int = 2, *, say: Callable[[str], None] | None = None, **settings: object
    ) -> None:
        self._settings = {"n_nodes": n_nodes, **settings}
        self._say = say or (lambda _: None)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._stack: AsyncExitStack | None = None
        self._pool: HostPool | None = None
        self._users = 0
        self._signals = ExitStack()
        self._error: BaseException | None = None

    @property
    def folder(self) -> Path:
        """Folder with the logs and the summary of the run.

        Raises:
            RuntimeError: no hosts have joined.
        """
        if self._pool is None:
            raise RuntimeError("no hosts have joined: call initialize() of a controller first")
        return self._pool.folder

    def open(self, config: TrainConfig) -> HostPool:
        """The hosts; they join at the first call. Each call is followed by a `close`.

        Raises:
            ConfigError: a setting is wrong.
            TooFewHosts: hosts did not join in time.
        """
        self._users += 1
        if self._pool is None:
            self._loop = asyncio.new_event_loop()
            self._thread = threading.Thread(
                target=self._loop.run_forever, name="areal_lab controllers", daemon=True
            )
            self._thread.start()
            self._signals.enter_context(ended_like_ctrl_c())
            try:
                self._pool = self.call(self._open(self.settings(config)))
            except BaseException as error:
                self.close(error)
                raise
        return self._pool

    def settings(self, config: TrainConfig) -> TrainConfig:
        """A configuration with those of this scheduler.

        Raises:
            ConfigError: one of them is unknown or wrong.
        """
        fields = type(config.cluster).model_fields
        changes: dict[str, object] = {"scheduler.type": self.kind}
        for name, value in self._settings.items():
            changes[f"{'cluster' if name in fields else 'scheduler'}.{name}"] = value
        return config.with_settings(changes)

    def call(self, work: Coroutine[Any, Any, Result]) -> Result:
        """Run `work` in the event loop, and wait for it; an interrupt cancels it."""
        assert self._loop is not None, "opened before"
        working = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return working.result()
        except BaseException:
            working.cancel()
            raise

    def close(self, error: BaseException | None = None) -> None:
        """Dismiss the hosts once every user has closed.

        Args:
            error: of the program, which ends by it.
        """
        self._users -= 1
        self._error = self._error or error
        if self._users or self._loop is None:
            return
        loop, self._loop = self._loop, None
        error, self._error = self._error, None
        try:
            if self._stack is not None:
                asyncio.run_coroutine_threadsafe(_closed(self._stack, error), loop).result()
        finally:
            self._signals.close()
            self._stack = self._pool = None
            loop.call_soon_threadsafe(loop.stop)
            if self._thread is not None:
                self._thread.join()
            if left := asyncio.all_tasks(loop):  # another Ctrl-C has come meanwhile
                for task in left:
                    task.cancel()
                loop.run_until_complete(asyncio.gather(*left, return_exceptions=True))
            loop.close()

    async def _open(self, config: TrainConfig) -> HostPool:
        self._stack = AsyncExitStack()
        return await self._stack.enter_async_context(
            host_pool(config, say=self._say, waiting=self._say)
        )


async def _closed(stack: AsyncExitStack, error: BaseException | None) -> None:
    if isinstance(error, KeyboardInterrupt):  # which would end the event loop
        error = asyncio.CancelledError(*error.args)
    await stack.__aexit__(None if error is None else type(error), error, None)


class LocalScheduler(Scheduler):
    """Hosts are processes of this machine."""


class RayScheduler(Scheduler):
    """Hosts are nodes of a Ray cluster (`scheduler.type=ray`)."""

    kind = "ray"


class SlurmScheduler(Scheduler):
    """Hosts are nodes of a Slurm cluster (`scheduler.type=slurm`)."""

    kind = "slurm"


class RemoteSGLangEngine:
    """SGLang servers, as `RolloutController` starts them on hosts."""

    backend: ClassVar[str] = "sglang"

    def __init__(self, config: TrainConfig | Source) -> None:
        self.config = train_config(config).with_settings({"rollout.backend": self.backend})


class EmbeddedEngine(RemoteSGLangEngine):
    """Servers of this package, which need no installation."""

    backend = "embedded"


class RemotevLLMEngine(RemoteSGLangEngine):
    """vLLM servers."""

    backend = "vllm"


class FSDPPPOActor:
    """A policy trained by FSDP2, as `TrainController` starts its processes on hosts."""

    def __init__(self, config: TrainConfig | Source) -> None:
        self.config = train_config(config)


class _Controller(ABC):
    """What both controllers do the same way."""

    def __init__(self, engine: Any, scheduler: Scheduler) -> None:
        if not isinstance(getattr(engine, "config", None), TrainConfig):
            raise refusal(
                "engine",
                f"engine is {engine!r:.60}, but must be made of a config: FSDPPPOActor(config), or "
                "RemoteSGLangEngine(config)",
            )
        if not isinstance(scheduler, Scheduler):
            raise refusal(
                "scheduler", f"scheduler is {scheduler!r:.60}, but must be one, as LocalScheduler()"
            )
        self.config: TrainConfig = scheduler.settings(engine.config)
        self._scheduler = scheduler

    def __enter__(self) -> Self:
        """Start."""
        self.initialize()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """End."""
        self._destroy(error)

    def destroy(self) -> None:
        """End what was started, and dismiss the hosts if nothing else uses them. Idempotent."""
        self._destroy(None)

    @abstractmethod
    def initialize(self) -> None:
        """Start on hosts, and return when it is ready."""

    @abstractmethod
    def _destroy(self, error: BaseException | None) -> None:
        """See `destroy`; `error` ends the program."""


class RolloutController(_Controller):
    """Rollout workers on hosts: see `AsyncRolloutController`.

    Args:
        engine: which engines, with the configuration of sampling and rewards.
        scheduler: brings up the hosts; the same one as the `TrainController`'s.
        reward_fn: instead of `config.reward.fn`.

    Raises:
        ConfigError: `reward_fn` cannot be called as a reward function.
    """

    def __init__(
        self,
        engine: RemoteSGLangEngine,
        scheduler: Scheduler,
        *,
        reward_fn: RewardFunction | None = None,
    ) -> None:
        super().__init__(engine, scheduler)
        if reward_fn is not None:
            check_given_reward(self.config, reward_fn)
        self._reward_fn = reward_fn
        self._core: AsyncRolloutController | None = None
        self._given: object = None
        self._last: DistributedBatch | None = None
        self._pool: HostPool | None = None

    def initialize(self) -> None:
        """Have the hosts join; engines start with the first batch, whose problems they need."""
        self._joined()

    def _joined(self) -> HostPool:
        if self._pool is None:
            self._pool = self._scheduler.open(self.config)
        return self._pool

    def prepare_batch(self, problems: object = None) -> DistributedBatch:
        """The next batch, as metadata; see `AsyncRolloutController.prepare_batch`.

        Args:
            problems: to draw from, the same in every call: problems or rows, as `train` takes
                them; None takes `config.dataset`.

        Raises:
            ValueError: they are others than in the first call.
            Exception: what the rollout workers failed with.
        """
        pool = self._joined()
        if self._core is None:
            self._given = problems
            train = train_problems(self.config, problems)
            self._core = self._scheduler.call(
                AsyncRolloutController.start(pool, self.config, train, reward_fn=self._reward_fn)
            )
        elif problems is not self._given:
            raise ValueError(
                "prepare_batch got other problems than in its first call; make another "
                "RolloutController for these"
            )
        if self._last is not None:
            self.free(self._last)
        self._last = self._scheduler.call(self._core.prepare_batch())
        return self._last

    def fields(self, batch: DistributedBatch) -> dict[str, Field]:
        """The arrays of a batch, or of a part of one (`data.arrays.pack_samples`).

        Raises:
            BatchMissing: some of it was freed.
        """
        return self._joined().shards.get(batch.shards)

    def update_weights(self, actor: TrainController) -> None:
        """Bring the weights of a trainer into all engines, which continue with them."""
        core = self._started()
        self._scheduler.call(core.update_weights(self._scheduler.call(actor.core.export())))

    def free(self, batch: DistributedBatch) -> None:
        """Free the tensors of a batch before the next one is prepared, which frees them, too."""
        self._scheduler.call(self._started().free(batch))
        if batch is self._last:
            self._last = None

    def take_back(self, batch: DistributedBatch) -> None:
        """Take a batch back that was not trained on; see `AsyncRolloutController.take_back`."""

        async def take_back() -> None:
            self._started().take_back(batch)

        self._scheduler.call(take_back())
        if batch is self._last:
            self._last = None

    def pause(self) -> None:
        """Stop decoding on all hosts, until `resume`."""
        self._scheduler.call(self._started().pause())

    def resume(self) -> None:
        """Decode again."""
        self._scheduler.call(self._started().resume())

    @property
    def counts(self) -> Mapping[str, int]:
        """What was generated, filtered and lost so far."""
        return dict(self._started().counts)

    def _destroy(self, error: BaseException | None) -> None:
        core, self._core = self._core, None
        try:
            if core is not None:
                self._scheduler.call(core.close())
        finally:
            if self._pool is not None:
                self._pool = None
                self._scheduler.close(error)

    def _started(self) -> AsyncRolloutController:
        if self._core is None:
            raise RuntimeError("no batch was prepared: call prepare_batch() first")
        return self._core


class TrainController(_Controller):
    """A trainer on hosts: see `AsyncTrainController`.

    Args:
        engine: what is trained, with its configuration.
        scheduler: brings up the hosts; the same one as the `RolloutController`'s.
    """

    def __init__(self, engine: FSDPPPOActor, scheduler: Scheduler) -> None:
        super().__init__(engine, scheduler)
        self._core: AsyncTrainController | None = None

    def initialize(self) -> None:
        """Start the trainer's processes; returns when the model is loaded."""
        if self._core is None:
            pool = self._scheduler.open(self.config)
            try:
                self._core = self._scheduler.call(AsyncTrainController.start(pool, self.config))
            except BaseException:
                self._scheduler.close()
                raise

    @property
    def core(self) -> AsyncTrainController:
        """The controller, for calls in the scheduler's event loop.

        Raises:
            RuntimeError: it has not started.
        """
        if self._core is None:
            raise RuntimeError("the trainer has not started: call initialize() first")
        return self._core

    def ppo_update(self, batch: DistributedBatch) -> dict[str, float]:
        """Train on one batch; returns its metrics.

        Raises:
            BatchMissing: some of it was freed; nothing was trained.
            Exception: what the trainer failed with.
        """
        return self._scheduler.call(self.core.train(batch))

    train_batch = ppo_update

    def compute_logp(self, batch: DistributedBatch) -> DistributedBatch:
        """Not a call of its own.

        Raises:
            ConfigError: always, with where it happens.
        """
        raise _part_of_update("compute_logp", batch)

    def compute_advantages(self, batch: DistributedBatch) -> DistributedBatch:
        """Not a call of its own.

        Raises:
            ConfigError: always, with where it happens.
        """
        raise _part_of_update("compute_advantages", batch)

    def save(self, path: str | Path) -> Path:
        """Write an ordinary Hugging Face folder on this machine."""
        return self._scheduler.call(self.core.save(Path(path)))

    def _destroy(self, error: BaseException | None) -> None:
        if self._core is not None:
            core, self._core = self._core, None
            try:
                self._scheduler.call(core.close())
            finally:
                self._scheduler.close(error)


def _part_of_update(name: str, batch: DistributedBatch) -> ConfigError:
    del batch
    return refusal(name, f"{name} {_NOT_HERE}; leave the call out")
