"""The paper's tables and figures beside ours: `python -m reproductions.NAME [--json] [--quick]`.

    table_1 table_7 figure_4 figure_5c figure_6a figure_6b      one published result each
    batched_generation
    lag_by_batch_order where_asynchrony_pays                    two results not in the paper
    calibration within_prompt                                   fitted and measured parameters

`python -m reproductions` runs all of them and writes `reproductions/README.md`.
"""
