"""Imported by SGLang in every run; all its names are missing kernels, as in the package."""

from . import __getattr__  # noqa: F401 - a module's own `__getattr__`
