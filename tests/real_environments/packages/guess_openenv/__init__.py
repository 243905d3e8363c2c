"""An OpenEnv environment: guess the number that a seed hides."""
