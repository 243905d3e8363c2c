"""Training on one batch: loss, forward pass, optimizer step, metrics.

May import functional, data, models, config, host, control, `engines.protocol` and
`engines.weights`; imported by `pipeline`, which talks to it through `training.process`.
"""
