"""Check the rewards of other people's environments: `python -m tools.environments`.

May import the product; `tools.pages.environments` renders what it writes.
"""
