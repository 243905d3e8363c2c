"""Pure decisions, standard library only: time and chance are arguments."""
