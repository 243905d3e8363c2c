"""A CUDA graph on the CPU: the operations of a pass, recorded once and replayed.

As in a graph, a replay runs the same operations on the same memory, whatever the host knows by
then. A pass that depends on a number that the host read, on a new tensor, or on the shape of this
batch gives wrong tokens when it is replayed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


@dataclass(slots=True)
class Operation:
    """One call of the host."""

    function: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    out: Any


@dataclass
class Recorder(TorchDispatchMode):
    """Records all operations inside."""

    operations: list[Operation] = field(default_factory=list)

    def __post_init__(self) -> None:
        super().__init__()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        assert "_local_scalar_dense" not in str(func), "a capture must not read a value back"
        self.operations.append(Operation(func, args, kwargs or {}, out))
        return out


@dataclass
class Recordings:
    """A `Capture` that records; keeps what it did."""

    passes: list[list[Operation]] = field(default_factory=list)
    replays: int = 0

    def __call__(self, run: Callable[[], Tensor]) -> Callable[[], Tensor]:
        """Run once and return the replay."""
        with Recorder() as recorder:
            logits = run()
        self.passes.append(recorder.operations)

        def replay() -> Tensor:
            self.replays += 1
            for operation in recorder.operations:
                again = operation.function(*operation.args, **operation.kwargs)
                inputs = {_memory(t) for t in _tensors((operation.args, operation.kwargs))}
                for old, new in zip(_tensors(operation.out), _tensors(again), strict=True):
                    if _memory(new) not in inputs:  # neither a view nor in place
                        old.copy_(new)
            return logits

        return replay


def _tensors(tree: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]


def _memory(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()
