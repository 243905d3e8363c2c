"""Transfer of weights from the trainer into engines: folders, pushes, checksums.

May import `engines.protocol`, host and control; imported by `engines`,
`training`, `resolve` and `pipeline`.
"""
