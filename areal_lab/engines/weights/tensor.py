"""The `http_tensor` transfer: the tensors inside the requests, the same bytes to every engine."""

from __future__ import annotations

from areal_lab.engines.weights.link import EngineLink
from areal_lab.engines.weights.push import ActivePush
from areal_lab.engines.weights.records import Phase
from areal_lab.engines.weights.serialize import CHUNK_BYTES, chunks, encode, update_body


class TensorSender:
    """Sends a version in requests of bounded size; the last one names the version."""

    def __init__(self, *, chunk_bytes: int = CHUNK_BYTES) -> None:
        self._chunk_bytes = chunk_bytes

    def send(self, active: ActivePush) -> None:
        """Send all tensors to all engines; drop those that fail."""
        pieces = list(chunks(active.tensors, self._chunk_bytes))
        for number, piece in enumerate(pieces, start=1):
            payload = encode(piece)
            last = number == len(pieces)

            # Built once for all engines: a body is a third larger than its tensors.
            bodies = {
                ranks: b"".join(
                    update_body(
                        payload,
                        ranks=ranks,
                        version=str(active.version) if last else None,
                        flush_cache=active.flush_cache and last,
                    )
                )
                for ranks in {link.ranks for link in active.links}
            }

            def post(link: EngineLink, bodies: dict[int, bytes] = bodies) -> None:
                link.post(Phase.SEND, "/update_weights_from_tensor", bodies[link.ranks])

            active.for_each(post)

    def close(self) -> None:
        """Do nothing: there is no state between versions."""
