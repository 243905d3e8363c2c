"""The hosts of a training run, and the processes that it starts on them.

    opened(settings) --hosts join--> placement --> start_trainer(settings), launch_engine(...)

Remote processes look like local ones: an `EngineProcess`, a `TrainerProcess`. A lost host takes its
processes with it; an engine then starts on the host that replaces it.
"""

from __future__ import annotations

import asyncio
import os
from collections import Counter
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Final

from areal_lab.cluster.files import RunFiles
from areal_lab.cluster.host import Host, HostLost, HostRefused
from areal_lab.cluster.hosts import Hosts, new_token
from areal_lab.cluster.ranks import HostedTrainer, RanksOnHosts
from areal_lab.cluster.ray.scheduler import RayScheduler
from areal_lab.cluster.records import TOKEN_VARIABLE, StartEngine
from areal_lab.cluster.scheduler import LocalScheduler, ManualScheduler, Scheduler
from areal_lab.cluster.slurm.scheduler import SlurmScheduler
from areal_lab.config.sections import ClusterConfig, SchedulerConfig
from areal_lab.control.placement import Demand, HostSlots, Placement, place, seat_of_another
from areal_lab.engines.client.engine_client import EngineClient
from areal_lab.engines.launch.backends import BACKENDS, ServerOptions
from areal_lab.engines.launch.detect import dialect_of
from areal_lab.engines.launch.start import EngineProcess
from areal_lab.engines.protocol import WeightsFolder
from areal_lab.host.durable import replace_text
from areal_lab.host.pipes import PipeListener
from areal_lab.host.ports import address_towards
from areal_lab.training.process.client import TrainerProcess
from areal_lab.training.settings import TrainerSettings

_ANYWHERE: Final = "192.0.2.1"
"""Address for documentation (RFC 5737): nothing is sent there, but the route to it is that to
other networks."""
_LOG_LINES: Final = 100_000
_LOG_S: Final = 10.0
_MOST_LINES: Final = 8


def make_scheduler(
    scheduler: SchedulerConfig,
    cluster: ClusterConfig,
    log_folder: Path,
    say: Callable[[str], None],
) -> Scheduler:
    """Create the scheduler of this type."""
    match scheduler.type:
        case "local":
            return LocalScheduler(log_folder)
        case "manual":
            return ManualScheduler(log_folder, this_host=scheduler.this_host)
        case "ray":
            return RayScheduler(scheduler, cluster, log_folder)
        case "slurm":
            return SlurmScheduler(scheduler, cluster, log_folder, say=say)


def own_address(scheduler: SchedulerConfig, cluster: ClusterConfig) -> str:
    """Address of this machine for hosts."""
    if cluster.address:
        return cluster.address
    if scheduler.type == "local":
        return "127.0.0.1"
    try:
        return address_towards(_ANYWHERE)
    except ValueError as error:
        raise ValueError(
            "cluster.address is empty, and this machine has no route to other networks; set it to "
            "the address of this machine that the hosts reach"
        ) from error


@dataclass(frozen=True, slots=True, kw_only=True)
class HostThreads:
    """CPU threads of each process."""

    engine: int
    trainer: int


@dataclass(slots=True, kw_only=True)
class RunHosts:
    """The hosts of one run, with their processes."""

    hosts: Hosts
    placement: Placement
    demand: Demand
    listener: PipeListener
    files: RunFiles
    log_folder: Path
    weights_bytes: int
    """Size of one version of the weights."""
    trainer_host: Host | None = None
    """Host of exported weights, once the trainer has started."""
    _exports: Path = Path()
    """Folder of these weights."""
    _engine_numbers: dict[str, list[int]] = field(default_factory=dict)
    """Engines of each seat."""

    def __post_init__(self) -> None:
        for number, seat in enumerate(self.placement.engines):
            self._engine_numbers.setdefault(seat, []).append(number)

    def seat_of(self, number: int) -> str:
        """Seat of an engine. A new engine gets the seat of a spare host, or a seat with room,
        and keeps it.
        """
        for seat, numbers in self._engine_numbers.items():
            if number in numbers:
                return seat
        spare = self.hosts.seat_spare()
        if spare is None:
            spare = seat_of_another(
                self.placement,
                {seat: len(numbers) for seat, numbers in self._engine_numbers.items()},
                {seat: len(host.facts.gpus) for seat, host in self.hosts.seats.items() if host},
                self.demand,
            )
        self._engine_numbers.setdefault(spare, []).append(number)
        return spare

    def threads(self) -> HostThreads | None:
        """Threads that leave no core of any host idle or shared; None if hosts are processes of
        one machine.
        """
        if isinstance(self.hosts.scheduler, LocalScheduler):
            return None
        work = Counter([*self.placement.engines, *self.placement.trainer])
        cores = {seat: host.facts.cores for seat, host in self.hosts.seats.items() if host}
        each = {seat: max(1, cores[seat] // count) for seat, count in work.items() if seat in cores}

        def fewest(seats: Sequence[str]) -> int:
            return min((each[seat] for seat in seats if seat in each), default=1)

        return HostThreads(
            engine=fewest(self.placement.engines), trainer=fewest(self.placement.trainer)
        )

    async def start_trainer(self, settings: TrainerSettings, *, run_folder: Path) -> TrainerProcess:
        """Start the trainer's processes on their hosts; raises as `TrainerProcess.start`."""
        hosts = [await self.hosts.host_in(seat) for seat in self.placement.trainer]
        settings = replace(settings, gpus=",".join(_gpus(hosts) if settings.gpus else ()))
        if settings.sharded:
            meet = f"tcp://{hosts[0].facts.address}:{await hosts[0].free_port()}"
            settings = replace(settings, rendezvous=meet)
        trainer = await HostedTrainer.start(
            settings,
            log_path=Path(f"trainer.log on host {hosts[0].name}"),
            start_rank=RanksOnHosts(
                hosts=tuple(hosts),
                listener=self.listener,
                files=self.files,
                weights_bytes=self.weights_bytes,
            ),
        )
        trainer.host, trainer.files, trainer.run_folder = hosts[0], self.files, run_folder
        try:
            await trainer.check_shared()
        except BaseException:
            await trainer.stop()
            raise
        self.trainer_host, self._exports = hosts[0], trainer.ready.weights.path.parent
        return trainer

    async def launch_engine(
        self,
        backend: str,
        options: ServerOptions,
        *,
        index: int,
        log_path: Path,
        ready_timeout_s: float,
        request_timeout_s: float | None,
    ) -> EngineProcess:
        """Start an engine on the host in its seat; waits for another host if that one is lost."""
        del log_path  # on the host
        seat = self.seat_of(index)
        while True:
            host = await self.hosts.host_in(seat)
            request = StartEngine(
                backend=backend,
                options=replace(options, host=host.facts.address, port=0),
                index=index,
                place=self._engine_numbers[seat].index(index),
                ready_timeout_s=ready_timeout_s,
                request_timeout_s=request_timeout_s,
            )
            try:
                return await self._launch_on(host, request)
            except (HostLost, HostRefused):
                # A host with broken connections may have died a moment ago. Otherwise it refuses,
                # or the host that has the weights is lost.
                if await host.is_there():
                    raise

    async def _launch_on(self, host: Host, request: StartEngine) -> EngineProcess:
        """Start an engine on a host, after copying the model there."""
        options, backend = request.options, request.backend
        model, tokenizer = options.model, options.tokenizer
        there = replace(
            options,
            model=await self.files.on(host, model, self._owner(model)),
            tokenizer=None if tokenizer is None else await self.files.on(host, tokenizer),
        )
        process, started = await host.start_engine(replace(request, options=there))
        client = EngineClient(
            started.base_url,
            api=dialect_of(BACKENDS[backend], started.build),
            request_timeout_s=request.request_timeout_s,
            key=started.key,
            read_folder=partial(self._read_weights, host),
        )
        if self._owner(model) is None:
            client.note_model(model)
        if tokenizer is not None:
            client.note_tokenizer(tokenizer)
        if options.lora is not None:
            client.use_adapters(int(options.version))
        return EngineProcess(
            child=process,
            client=client,
            base_url=started.base_url,
            backend=backend,
            version=started.version,
            build=started.build,
        )

    def _owner(self, path: Path) -> Host | None:
        """Host whose trainer wrote a folder; None for this machine."""
        host = self.trainer_host
        return host if host is not None and path.is_relative_to(self._exports) else None

    async def _read_weights(
        self, host: Host, weights: WeightsFolder
    ) -> tuple[WeightsFolder, Mapping[str, Sequence[int]]]:
        return await self.files.read_weights(host, weights, self._owner(weights.path))

    async def collect_logs(self) -> None:
        """Copy the logs of the remaining hosts into the run folder."""
        await asyncio.gather(*(self._collect(host) for host in self.hosts.working))

    async def _collect(self, host: Host) -> None:
        try:
            async with asyncio.timeout(_LOG_S):
                for name in await host.logs():
                    text = await host.last_lines(name, _LOG_LINES)
                    replace_text(self.log_folder / f"{host.name}-{Path(name).name}", text)
        except (HostLost, HostRefused, TimeoutError):
            pass  # the run has ended; the host drops them


@asynccontextmanager
async def opened(
    scheduler: SchedulerConfig,
    cluster: ClusterConfig,
    demand: Demand,
    *,
    weights_bytes: int,
    log_folder: Path,
    say: Callable[[str], None],
    waiting: Callable[[str], None],
) -> AsyncIterator[RunHosts]:
    """Wait for hosts to join, place the work on them, and dismiss them at the end.

    `demand` is the work to place, `weights_bytes` the size of one version of the weights, and
    `log_folder` gets the logs of hosts. `say` prints events, `waiting` the reason for waiting.
    """
    address = own_address(scheduler, cluster)
    token = os.environ.get(TOKEN_VARIABLE, "")
    if scheduler.type == "manual" and not token:
        raise ValueError(
            f"scheduler.type is manual, but {TOKEN_VARIABLE} is not set; set it to a secret of "
            "your own, here and for the agents of the hosts"
        )
    log_folder.mkdir(parents=True, exist_ok=True)
    hosts = Hosts(
        config=cluster,
        scheduler=make_scheduler(scheduler, cluster, log_folder, say),
        address=address,
        start_timeout_s=scheduler.start_timeout_s,
        say=say,
        waiting=waiting,
        token=token or new_token(),
    )
    async with AsyncExitStack() as stack:
        stack.push_async_callback(hosts.close)
        joined = await hosts.start()
        listener = PipeListener(address)
        stack.push_async_callback(listener.close)
        files = RunFiles(
            address=f"{address}:{hosts.port}",
            token=hosts.token,
            shared=cluster.shared_files == "auto",
        )
        stack.callback(files.close)
        hosts.data_plane = files.app
        placement = place([_slots(host, cluster) for host in joined], demand)
        for line in _what_is_where(joined, placement):
            say(line)
        hosts.leave_vacant(placement.spares)
        run_hosts = RunHosts(
            hosts=hosts,
            placement=placement,
            demand=demand,
            listener=listener,
            files=files,
            log_folder=log_folder,
            weights_bytes=weights_bytes,
        )
        stack.push_async_callback(run_hosts.collect_logs)
        yield run_hosts


def _slots(host: Host, cluster: ClusterConfig) -> HostSlots:
    return HostSlots(name=host.name, gpus=min(len(host.facts.gpus), cluster.n_gpus_per_node))


def _gpus(hosts: list[Host]) -> list[str]:
    """GPU of each rank: those of its host from the last one backwards, after its engines."""
    chosen: list[str] = []
    for rank, host in enumerate(hosts):
        ranks = [other for other, one in enumerate(hosts) if one is host]
        chosen.append(host.facts.gpus[len(host.facts.gpus) - len(ranks) + ranks.index(rank)])
    return chosen


def _what_is_where(hosts: Sequence[Host], placement: Placement) -> list[str]:
    """One line for each host; of many, the first and the last ones."""
    lines = []
    for host in hosts:
        engines = [str(n) for n, seat in enumerate(placement.engines) if seat == host.name]
        ranks = placement.trainer.count(host.name)
        work = [f"engine {', '.join(engines)}"] * bool(engines)
        work += ["the trainer" if ranks == 1 else f"{ranks} trainer processes"] * bool(ranks)
        where = f"host {host.name} ({host.facts.address})"
        lines.append(f"{where}: {' and '.join(work) or 'a spare'}")
    if len(lines) > _MOST_LINES:
        kept = _MOST_LINES // 2
        return [*lines[:kept], f"... {len(lines) - 2 * kept} more hosts ...", *lines[-kept:]]
    return lines
