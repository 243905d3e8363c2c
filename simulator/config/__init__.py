"""Settings of a simulation: schema, presets and loading.

May import `areal_lab.config` and the names in `areal_lab.control`; imported by every room but
`engine`, `run` and `stats`.
"""
