"""Published step times of other systems: fit two numbers on a synchronous row, predict the rest."""
