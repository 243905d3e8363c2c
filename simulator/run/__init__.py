"""One simulated run: performs the coordinator's actions in simulated seconds."""
