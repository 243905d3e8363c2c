"""Experiment trackers that follow a run: TensorBoard, Weights & Biases, SwanLab, Trackio.

Each reads the run folder in a separate process. May import config, metrics, runlog and host;
imported by `resolve`, `pipeline`, `cli` and `cosim`. A tracker's package is imported only in its
own process.
"""
