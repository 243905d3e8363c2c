"""The `distributed` transfer: a process group of trainer and engines, kept between versions.

    same engines as before, and all still hold the version sent last   the group is reused
    other engines, or one that was restarted                           a new group
    the broadcast fails                                                the trainer leaves the group,
        so the engines in it reply at once; those form a new group for one more attempt, and
        engines that do not reply are dropped

Every wait is bounded: `timeout_s` in the group, and a little more for the reply to its request, so
that an engine that only waits for other members does not count as dead.
"""

from __future__ import annotations

import secrets
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import torch.distributed as dist
from torch._C._distributed_c10d import TCPStore

from areal_lab.control.events import Version
from areal_lab.engines.weights import group as process_group
from areal_lab.engines.weights.link import EngineLink
from areal_lab.engines.weights.push import ActivePush
from areal_lab.engines.weights.records import Phase, TransferFailed

ATTEMPTS = 2


@dataclass(slots=True)
class _Group:
    """The current group; engines in the order of their ranks."""

    name: str
    engines: tuple[tuple[str, int], ...]
    members: dist.ProcessGroup
    store: TCPStore
    version: Version | None = None
    """The version that was broadcast last."""


class BroadcastSender:
    """Send a version by one broadcast per tensor."""

    def __init__(self, *, timeout_s: float, backend: str = "gloo") -> None:
        """Create a sender without a group yet."""
        self._timeout_s = timeout_s
        self._backend = backend
        self._group: _Group | None = None
        self._left: dict[str, set[str]] = {}
        """Groups that the trainer left, with the engines that may still be in them."""
        self.groups_made = 0
        """Groups formed since the start."""

    def send(self, active: ActivePush) -> None:
        """Send all tensors to all engines; drop those that fail."""
        for attempt in range(ATTEMPTS):
            if not active.links:
                return
            failed = self._join(active)
            if not failed and self._group is not None:
                failed = self._broadcast(active)
            if not failed:
                return
            self.close()
            self._left = {name: engines for name, engines in self._left.items() if engines}
            for link, error in failed.items():
                # An engine that replies lost only the other members; drop it after the last try.
                if error.failure.problem != "refused" or attempt + 1 == ATTEMPTS:
                    active.drop(link, error)

    def close(self) -> None:
        """Leave the group; engines that wait in it then fail."""
        if self._group is not None:
            process_group.leave(self._group.members)
            self._left[self._group.name] = {url for url, _ in self._group.engines}
            self._group = None

    # --- internal ---

    def _join(self, active: ActivePush) -> dict[EngineLink, TransferFailed]:
        """Make or reuse a group of exactly these engines; returns the failures."""
        engines = tuple((link.base_url, link.ranks) for link in active.links)
        group = self._group
        if group is not None:
            known = {str(group.version)}
            if group.engines == engines and {link.version_before for link in active.links} == known:
                return {}
            del group
            self.close()
        active.for_each(self._destroy_left_groups)
        if not active.links:
            return {}
        engines = tuple((link.base_url, link.ranks) for link in active.links)
        address = process_group.own_address(url for url, _ in engines)
        store = process_group.open_store(address, timeout_s=self._timeout_s)
        name, size = f"areal-lab-{secrets.token_hex(6)}", 1 + sum(ranks for _, ranks in engines)
        ask = {
            "master_address": address,
            "master_port": store.port,
            "world_size": size,
            "group_name": name,
            "backend": self._backend,
        }
        with ThreadPoolExecutor(max_workers=len(engines)) as pool:
            replies: dict[EngineLink, Future[object]] = {}
            rank = 1
            for link in active.links:
                body = {**ask, "rank_offset": rank}
                replies[link] = pool.submit(
                    link.post, Phase.JOIN, "/init_weights_update_group", body
                )
                rank += link.ranks
            reason = None
            try:
                members = process_group.join(
                    store,
                    name=name,
                    rank=0,
                    size=size,
                    backend=self._backend,
                    timeout_s=self._timeout_s,
                )
            except RuntimeError as error:
                reason = _first_line(error)
                # Engines that wait in the store for other members then fail at once.
                del store
            else:
                self._group = _Group(name, engines, members, store)
                self.groups_made += 1
        return _failures(replies, Phase.JOIN, reason)

    def _broadcast(self, active: ActivePush) -> dict[EngineLink, TransferFailed]:
        """Send the tensors through the group; returns the failures."""
        group = self._group
        assert group is not None
        body = {
            "names": list(active.tensors),
            "dtypes": [str(t.dtype).removeprefix("torch.") for t in active.tensors.values()],
            "shapes": [list(tensor.shape) for tensor in active.tensors.values()],
            "group_name": group.name,
            "flush_cache": active.flush_cache,
            "weight_version": str(active.version),
        }
        with ThreadPoolExecutor(max_workers=len(active.links)) as pool:
            replies: dict[EngineLink, Future[object]] = {
                link: pool.submit(
                    link.post, Phase.BROADCAST, "/update_weights_from_distributed", body
                )
                for link in active.links
            }
            reason = None
            try:
                process_group.broadcast(active.tensors.values(), group.members)
            except RuntimeError as error:
                reason = _first_line(error)
                del group
                self.close()
            else:
                group.version = active.version
        return _failures(replies, Phase.BROADCAST, reason)

    def _destroy_left_groups(self, link: EngineLink) -> None:
        """Make an engine close the groups that this process has left."""
        for name, engines in self._left.items():
            if link.base_url not in engines:
                continue
            try:
                link.post(Phase.JOIN, "/destroy_weights_update_group", {"group_name": name})
            except TransferFailed as error:
                if error.failure.problem != "refused":  # a restarted engine does not know it
                    raise
            engines.discard(link.base_url)


def _failures(
    replies: dict[EngineLink, Future[object]], phase: Phase, reason: str | None
) -> dict[EngineLink, TransferFailed]:
    """The failed engines; all of them if only the trainer's side failed."""
    failed = {}
    for link, reply in replies.items():
        error = reply.exception()
        if isinstance(error, TransferFailed):
            failed[link] = error
        elif error is not None:
            raise error
    if reason is not None and not failed:
        failed = {link: link.failure(phase, "refused", reason) for link in replies}
    return failed


def _first_line(error: BaseException) -> str:
    return str(error).splitlines()[0] if str(error) else type(error).__name__
