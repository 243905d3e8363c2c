"""What each host of a run asks of a scheduler, and what its nodes have, in words."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

_NODES_SHOWN: Final = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeResources:
    """A node, and how much of each resource it has, used or not."""

    name: str
    resources: Mapping[str, float]

    def holds(self, bundle: Mapping[str, float]) -> bool:
        """Whether the node has all of this."""
        return all(self.resources.get(name, 0) >= amount for name, amount in bundle.items())


def gpus_of_each(nodes: Iterable[NodeResources], count: int) -> int:
    """The largest number of GPUs that `count` of the nodes each have; 0 for fewer nodes."""
    most = sorted((int(node.resources.get("GPU", 0)) for node in nodes), reverse=True)
    return most[count - 1] if len(most) >= count else 0


def lacking(bundle: Mapping[str, float], count: int, nodes: Sequence[NodeResources]) -> str:
    """Why `count` nodes cannot each give a bundle: what is asked for and what there is.

    Where enough nodes have it, something else uses it.
    """
    asked = f"asked for {count} x ({_amounts(bundle, bundle)}), each on a node of its own"
    fit = sum(node.holds(bundle) for node in nodes)
    # A node that runs nothing, such as the head of many clusters, is not worth a mention.
    offering = [node for node in nodes if any(node.resources.get(name, 0) for name in bundle)]
    if not offering:
        return f"{asked}; no node has any of that"
    shown = ", ".join(
        f"{node.name} ({_amounts(node.resources, bundle)})" for node in offering[:_NODES_SHOWN]
    )
    more = f" and {len(offering) - _NODES_SHOWN} more" if len(offering) > _NODES_SHOWN else ""
    used = ", but something else uses part of that" if fit >= count else ""
    return f"{asked}; there are {shown}{more}{used}"


def _amounts(resources: Mapping[str, float], names: Iterable[str]) -> str:
    """`1 CPU, 4 GPU`."""
    return ", ".join(f"{resources.get(name, 0):g} {name}" for name in names)
