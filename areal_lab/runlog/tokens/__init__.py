"""The tokens that a run was trained on: their files, columns and training fields.

May import control and `runlog.appended`; imported by `runlog`, `training` (which writes fields),
`widgets` and notebooks. Loads numpy.
"""
