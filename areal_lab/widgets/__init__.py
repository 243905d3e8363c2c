"""Interactive pictures for notebooks: widgets, and figures that follow the page's theme.

May import plots and the rooms below it; imported by `pipeline`, `cli` and notebooks. No torch, no
marimo, no simulator. `pip install 'areal_lab[notebooks]'` brings anywidget and pandas.
"""
