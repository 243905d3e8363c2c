"""A taskset of verifiers, as its users write one: products, with a tool."""

from sums_v1.taskset import SumsTaskset

__all__ = ["SumsTaskset"]
