"""The paper's tables and figures beside ours: `python -m reproductions.NAME [--json] [--quick]`.

    table_1 table_7 figure_4 figure_5c figure_6a figure_6b      one published result each
    batched_generation
    speedup lag_by_batch_order where_asynchrony_pays            three results not in the paper
    table_2 figure_5 table_8 corrections                        learning under staleness,
    learning.where_staleness_hurts learning.gradients_by_lag    co-simulated
    bounded_drift
    calibration within_prompt                                   fitted and measured parameters

`--full` simulates all steps of the presets; `--save` writes results/NAME.json, for notebooks.
`python -m reproductions` runs those that simulate, takes the recorded results of those that learn,
and writes `reproductions/README.md`.
"""
