"""A taskset of verifiers that SmolLM2-135M-Instruct learns: products, with one server of a tool."""

from products_v1.taskset import ProductsTaskset

__all__ = ["ProductsTaskset"]
