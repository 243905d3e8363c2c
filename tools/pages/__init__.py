"""Generate the reference pages of `docs/`: `python -m tools.pages`.

Tests compare the pages with what is committed.
"""
