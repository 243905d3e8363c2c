"""The run's inference servers: started or attached, watched, restarted, given new weights.

May import engines, training.process, preflight, runlog and the rooms below; imported by
`areal_lab.pipeline`.
"""
