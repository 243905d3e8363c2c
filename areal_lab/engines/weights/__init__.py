"""Transfer of weights from the trainer into engines: folders, pushes, checksums.

May import `engines.protocol`, `engines.errors`, host and control; imported by `engines`,
`training`, `preflight` and `pipeline`.
"""
