"""How old and how far off the data is: lags, effective sample size, gradient spread.

May import every room of functional but `losses`; imported by users and `training`.
"""
