"""Fit kernel coefficients to measured tables: `python -m tools.kernels`."""
