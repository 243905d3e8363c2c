"""How old and how far off the data is: lags, effective sample size, gradient spread."""
