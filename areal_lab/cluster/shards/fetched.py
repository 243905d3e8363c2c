"""A batch whose fields are fetched from their hosts on first access."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor

from areal_lab.cluster.shards.metadata import DistributedBatch
from areal_lab.cluster.shards.protocol import TensorStore
from areal_lab.data.arrays.jagged import Field, concat_rows


class FetchedBatch(Mapping[str, Field]):
    """The rows of a rank's part by field, in the order of its metadata.

    `fetch` gets several fields with one request per shard; access to another field gets that one.
    """

    def __init__(self, batch: DistributedBatch, store: TensorStore, *, at_once: int = 4) -> None:
        """Fetch nothing yet.

        Args:
            batch: the rank's part.
            store: reaches all hosts.
            at_once: shards that are fetched at the same time.
        """
        self.batch = batch
        self._at_once = at_once
        self._store = store
        self._fields: dict[str, Field] = {}

    def fetch(self, names: Collection[str] | None = None) -> None:
        """Fetch fields that are not here yet; all of them if None.

        Raises:
            DataPlaneError: a host cannot be reached, or no longer holds its shard.
            KeyError: the batch has no such field.
        """
        known = self.batch.shards[0].fields
        for name in names or ():
            if name not in known:
                raise KeyError(f"the batch has no field {name!r}; it has {list(known)}")
        missing = [name for name in (known if names is None else names) if name not in self._fields]
        if not missing:
            return
        with ThreadPoolExecutor(min(self._at_once, len(self.batch.shards))) as pool:
            parts = list(pool.map(lambda one: self._store.get(one, missing), self.batch.shards))
        self._fields |= concat_rows(parts)

    def __getitem__(self, name: str) -> Field:
        if name not in self._fields:
            self.fetch([name])
        return self._fields[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.batch.shards[0].fields)

    def __len__(self) -> int:
        return len(self.batch.shards[0].fields)
