"""Imported by name in every run; what it offers is missing as in the package itself."""

from . import __getattr__  # noqa: F401 - a module's own `__getattr__`
