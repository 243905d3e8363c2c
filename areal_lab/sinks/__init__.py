"""Tools that follow a run beside it: TensorBoard, Weights & Biases, SwanLab, Trackio.

Each reads the run folder in a process of its own. May import config, metrics, runlog and host;
imported by `preflight`, `pipeline`, `cli` and `cosim`. A tool's package is imported in its own
process only.
"""
