"""Statistics, fitting and number formatting; knows nothing of clusters."""
