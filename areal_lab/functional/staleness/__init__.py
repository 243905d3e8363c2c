"""Age of the data and its distance from the policy: lags, effective sample size, gradient
spread.

May import every room of functional but `losses`; imported by users and `training`.
"""
