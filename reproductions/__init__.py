"""The paper's tables and figures beside ours: `python -m reproductions.NAME [--json] [--quick]`.

    table_1 figure_5c figure_6a figure_6b batched_generation    one published result each
    calibration                                                 what was fitted, and the fit itself

`python -m reproductions` runs all of them and writes `reproductions/README.md`.
"""
