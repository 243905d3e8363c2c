"""Ledger of a run: what became of the generated tokens, and what the lag of samples is made of.

    first token          enters the queue          trained on
         |---- before the queue ----|---- in the queue ----|        versions of the trainer

    generated --> waiting --Train--> trained               BatchReturned undoes it
                     |----Drop, GroupFiltered--> dropped, by reason
                     '----starts over----------> generated twice
    The tokens of a recycled group (`rollout.on_late`) are dropped, by the reason `RECYCLED`.

A group enters the queue with `GroupFinished`, when all of its samples ended and were scored. The
shell passes on every event and action in order, and reports the tokens of a group before the event
of its end: what a running group has generated so far counts once it is reported. Then

    generated = trained + waiting + dropped (by reason) + generated twice

is exact after each event, and so is lag = lag before the queue + lag in the queue of each sample.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from areal_lab.control import events as ev


class LagParts(NamedTuple):
    """Lag of a trained sample in two parts, in versions."""

    before_queue: int
    """Versions that passed while its group was generated and scored."""
    in_queue: int
    """Versions that passed while its finished group waited for training."""

    @property
    def lag(self) -> int:
        """Lag of the first token: the sum."""
        return self.before_queue + self.in_queue


def lag_parts(first: ev.Version, entered: ev.Version, trained: ev.Version) -> LagParts:
    """Split the lag of a sample at the moment when its group entered the queue.

    Args:
        first: version of the engines that generated its first token.
        entered: version of the trainer when all samples of its group had ended and were scored.
        trained: version of the trainer before the step that trains on it (`Train.version`).

    Source: definition. Both parts count versions of the trainer, so that weights on their way to
    the engines belong to the part before the queue.

    Raises:
        ValueError: the versions decrease.
    """
    if not first <= entered <= trained:
        raise ValueError(
            f"the first token has version {first}, the group entered the queue at {entered} and "
            f"was trained on at {trained}, but versions must not decrease"
        )
    return LagParts(entered - first, trained - entered)


@dataclass(slots=True)
class LagCounts:
    """Samples by each part of their lag in versions."""

    offered: Counter[int] = field(default_factory=Counter)
    """By the lag before the queue: all samples that entered the queue, trained on or not."""
    before_queue: Counter[int] = field(default_factory=Counter)
    """Trained samples, by the lag before the queue."""
    in_queue: Counter[int] = field(default_factory=Counter)
    """Trained samples, by the lag in the queue."""

    def add(self, more: LagCounts) -> None:
        """Add the counts of other samples."""
        _add(self.offered, more.offered)
        _add(self.before_queue, more.before_queue)
        _add(self.in_queue, more.in_queue)

    @property
    def means(self) -> dict[str, float]:
        """Mean of each part over its samples, in versions; 0 without samples."""
        return {
            "before_queue": mean_lag(self.before_queue),
            "in_queue": mean_lag(self.in_queue),
            "offered": mean_lag(self.offered),
        }

    @property
    def largest(self) -> dict[str, int]:
        """Largest value of each part, in versions; 0 without samples."""
        return {
            "before_queue": max(self.before_queue, default=0),
            "in_queue": max(self.in_queue, default=0),
            "offered": max(self.offered, default=0),
        }


def _add(into: Counter[int], more: Mapping[int, int]) -> None:
    # `Counter.update` takes several times as long for the few lags of a step.
    for lag, samples in more.items():
        into[lag] = into.get(lag, 0) + samples


def mean_lag(lags: Mapping[int, int]) -> float:
    """Mean of a histogram of lags; 0 if it is empty."""
    count = sum(lags.values())
    return sum(lag * times for lag, times in lags.items()) / count if count else 0.0


def lag_percentile(lags: Mapping[int, int], share: float = 0.95) -> int:
    """The smallest lag of a histogram that at least `share` of it does not exceed; 0 if empty."""
    wanted, count = share * sum(lags.values()), 0
    for lag, times in sorted(lags.items()):
        count += times
        if times and count >= wanted:
            return lag
    return 0


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenCounts:
    """What became of the generated tokens of a run, at one moment."""

    generated: int = 0
    """All tokens that engines sampled and the shell reported, in groups or as lost."""
    trained: int = 0
    """Tokens of groups that were given to the trainer, the running step included."""
    waiting: int = 0
    """Tokens of groups that may still be trained on."""
    dropped: Mapping[str, int] = field(default_factory=dict)
    """Tokens of groups that were dropped or filtered, by reason."""
    generated_twice: int = 0
    """Tokens in place of which others were generated: those of groups that started over, of samples
    whose weights are unknown, and of a workflow that raised or requested others after a checkpoint.
    Tokens that were kept and only computed again (`recomputed_tokens`) are not among them."""

    @property
    def dropped_tokens(self) -> int:
        """Tokens dropped for any reason."""
        return sum(self.dropped.values())

    @property
    def thrown_away(self) -> float:
        """Share that was dropped or generated twice, of these tokens and the trained ones.

        What the end of the run cuts off is in neither; 0 without tokens.
        """
        lost = self.dropped_tokens - self.dropped.get(ev.RUN_ENDED, 0) + self.generated_twice
        return lost / max(1, self.trained + lost)

    @property
    def unexplained(self) -> int:
        """Generated tokens that are in none of the other counts: 0."""
        known = self.trained + self.waiting + self.dropped_tokens + self.generated_twice
        return self.generated - known


_NOT_ENTERED: Final[ev.Version] = -1


class _Group:
    """Reported responses of a group."""

    __slots__ = ("entered", "heads", "queued", "tokens")

    def __init__(
        self, heads: Mapping[ev.Version, int], tokens: int, entered: ev.Version = _NOT_ENTERED
    ) -> None:
        self.heads = heads  # samples by the version of their first token
        self.tokens = tokens
        self.entered = entered  # version of the trainer at its first GroupFinished
        self.queued = entered != _NOT_ENTERED  # GroupFinished came, and no recovery since


class _Batch(NamedTuple):
    """Groups given to the trainer, whose weights no engine has loaded yet."""

    version: ev.Version
    groups: dict[ev.GroupId, _Group]


class Ledger:
    """Owner of the counts of one run; O(1) per event, O(groups) per training step."""

    def __init__(self) -> None:
        self.version: ev.Version = 0
        """Version of the trainer."""
        self.step = LagCounts()
        """Samples of the newest batch, and those that entered the queue since the batch before."""
        self._total = LagCounts()
        # Samples that entered the queue since the newest batch. By versions rather than by lags
        # and with plain numbers: there are many more groups than pairs of versions.
        self._offered: dict[tuple[ev.Version, ev.Version], int] = {}
        self._open: dict[ev.GroupId, _Group] = {}
        self._gone: dict[ev.GroupId, str] = {}  # dropped before a report or an end of theirs
        self._batches: list[_Batch] = []
        self._training = False
        self._rest = 0  # groups of the newest batch that are still to come
        self._generated = self._trained = self._waiting = self._twice = 0
        self._dropped: dict[str, int] = {}

    @property
    def total(self) -> LagCounts:
        """All samples so far."""
        total = LagCounts()
        total.add(self._total)
        _add(total.offered, _before_queue(self._offered))
        return total

    def tokens(self) -> TokenCounts:
        """Return what became of the tokens so far."""
        return TokenCounts(
            generated=self._generated,
            trained=self._trained,
            waiting=self._waiting,
            dropped=dict(self._dropped),
            generated_twice=self._twice,
        )

    # --- reports of the shell --------------------------------------------------------------------

    def report(self, group: ev.GroupId, heads: Mapping[ev.Version, int], tokens: int) -> None:
        """Count the responses of a group, before the event of its end.

        A group that was reported before starts over: the earlier tokens were generated twice.

        Args:
            group: a group that was started; if it was dropped, its tokens are dropped, too.
            heads: number of samples by the version of their first token.
            tokens: generated tokens of all its samples.
        """
        if tokens < 0:
            raise ValueError(f"group {group} has {tokens} tokens, but their number must be >= 0")
        self._generated += tokens
        if self._gone and (reason := self._gone.get(group)) is not None:
            self._dropped[reason] = self._dropped.get(reason, 0) + tokens
            return
        if group in self._open:
            self._start_over(group)
        self._waiting += tokens
        self._open[group] = _Group(heads, tokens)

    def report_twice(self, tokens: int) -> None:
        """Count tokens in place of which others are generated, since they were lost."""
        if tokens < 0:
            raise ValueError(f"{tokens} tokens were lost, but their number must be >= 0")
        self._generated += tokens
        self._twice += tokens

    # --- events and actions ----------------------------------------------------------------------

    def event(self, event: ev.Event) -> None:
        """Follow an event, before the coordinator handles it."""
        if type(event) is ev.GroupFinished:  # most of them: without another call
            group = event.group
            one = self._open.get(group)
            if one is None:
                if self._gone.pop(group, None) is not None:
                    return
                # Without a report: one sample, with the oldest version of the group.
                one = self._open[group] = _Group({event.head_version: 1}, 0)
            one.queued = True
            if one.entered == _NOT_ENTERED:  # else it was in the queue before a recovery
                entered = one.entered = self.version
                offered = self._offered
                for first, samples in one.heads.items():
                    offered[first, entered] = offered.get((first, entered), 0) + samples
            return
        match event:
            case ev.GroupFiltered(group, reason):
                if self._gone.pop(group, None) is None:
                    self._drop(self._open.pop(group, None), reason)
            case ev.TrainStepDone(version):
                self.version, self._training = version, False
            case ev.WeightsPushed(version):
                self._batches = [one for one in self._batches if one.version >= version]
            case ev.BatchReturned():
                self._returned(event)
            case ev.RunStarted():
                self._run_started(event)
            case _:
                pass

    def finished(
        self,
        groups: Sequence[ev.GroupId],
        heads: Sequence[Mapping[ev.Version, int]],
        tokens: Sequence[int],
    ) -> None:
        """Follow ends of running groups that nothing interrupted: `report` and `GroupFinished`."""
        opened, offered, entered = self._open, self._offered, self.version
        for group, by_version, count in zip(groups, heads, tokens, strict=True):
            opened[group] = _Group(by_version, count, entered)
        shared = {id(one): one for one in heads}  # many groups have the same
        for name, times in Counter(map(id, heads)).items():
            for first, samples in shared[name].items():
                offered[first, entered] = offered.get((first, entered), 0) + samples * times
        self._generated += sum(tokens)
        self._waiting += sum(tokens)

    def action(self, action: ev.Action) -> None:
        """Follow an action of the coordinator."""
        if type(action) is ev.Train:
            self._train(action)
        elif type(action) is ev.StartGroup:
            if self._gone:  # a recycled group, whose next report is of other tokens
                self._gone.pop(action.group, None)
        elif type(action) is ev.Drop:
            one = self._open.pop(action.group, None)
            if one is None or not one.queued:
                # It is running: a report of its tokens, or its end, may be on the way.
                self._gone[action.group] = action.reason
            self._drop(one, action.reason)

    def _train(self, train: ev.Train) -> None:
        part = LagCounts()
        if not self._rest:  # the first or only part of a batch
            self.step = LagCounts(offered=_before_queue(self._offered))
            _add(self._total.offered, self.step.offered)
            self._offered = {}
            self._batches.append(_Batch(train.version, {}))
        self._rest, self._training = train.rest, True
        taken: dict[ev.GroupId, _Group] = {}
        tokens = 0
        for group in train.groups:
            one = self._open.pop(group, None)
            if one is None:
                continue  # a log of which a part is missing, as in the next line
            one.entered = train.version if one.entered == _NOT_ENTERED else one.entered
            taken[group] = one
            tokens += one.tokens
        self._batches[-1].groups.update(taken)
        self._trained += tokens
        self._waiting -= tokens
        _count(part, taken.values(), train.version)
        self.step.add(part)
        self._total.add(part)

    def _returned(self, event: ev.BatchReturned) -> None:
        """Undo a batch: its groups wait again, or start over."""
        batch = self._undo(event.groups)
        if batch is None:
            raise ValueError(f"{event}: these groups are no batch that the trainer has")
        for group in event.lost:
            self._start_over(group)

    def _undo(self, groups: Collection[ev.GroupId]) -> _Batch | None:
        found = [one for one in self._batches if one.groups.keys() == set(groups)]
        if not found:
            return None
        (batch,) = found
        if self._training and batch is self._batches[-1]:
            self._training = False
        else:
            self.version -= 1
        self._batches.remove(batch)
        undone = LagCounts()
        _count(undone, batch.groups.values(), batch.version)
        for group, one in batch.groups.items():
            self._trained -= one.tokens
            self._waiting += one.tokens
            self._open[group] = one
        self._total.before_queue -= undone.before_queue
        self._total.in_queue -= undone.in_queue
        self._clamp()
        return batch

    def _clamp(self) -> None:
        """Let no group have entered the queue at a version that was taken back."""
        for one in self._open.values():
            one.entered = min(one.entered, self.version)

    def _run_started(self, event: ev.RunStarted) -> None:
        """Start, or continue with the groups that a recovery kept: others are generated again."""
        if self._training:
            self._undo(self._batches[-1].groups)
        opened = zip(event.open_groups, event.open_versions, strict=True)
        kept = {group for group, version in opened if version != ev.STARTS_OVER}
        for group in [group for group in self._open if group not in kept]:
            self._start_over(group)
        self._batches.clear()
        self._gone.clear()
        self.version, self._rest = event.version, 0
        for one in self._open.values():
            one.queued = False
        self._clamp()

    def _start_over(self, group: ev.GroupId) -> None:
        one = self._open.pop(group, None)
        if one is not None:
            self._waiting -= one.tokens
            self._twice += one.tokens

    def _drop(self, group: _Group | None, reason: str) -> None:
        tokens = 0 if group is None else group.tokens
        self._waiting -= tokens
        self._dropped[reason] = self._dropped.get(reason, 0) + tokens


def _count(counts: LagCounts, groups: Iterable[_Group], version: ev.Version) -> None:
    """Count the samples of groups that are trained on at `version`."""
    samples_of: dict[tuple[ev.Version, ev.Version], int] = {}
    for group in groups:
        entered = group.entered
        for first, samples in group.heads.items():
            samples_of[first, entered] = samples_of.get((first, entered), 0) + samples
    for (first, entered), samples in samples_of.items():
        before, waited = lag_parts(first, entered, version)
        counts.before_queue[before] += samples
        counts.in_queue[waited] += samples


def _before_queue(samples_of: Mapping[tuple[ev.Version, ev.Version], int]) -> Counter[int]:
    """Samples by their lag before the queue, of samples by first token and entrance."""
    lags: Counter[int] = Counter()
    for (first, entered), samples in samples_of.items():
        lags[lag_parts(first, entered, entered).before_queue] += samples
    return lags
