"""Inference servers of a run: start or attach, watch, restart, and push weights.

May import engines, training.process, resolve, runlog and the rooms below; imported by
`areal_lab.pipeline`.
"""
