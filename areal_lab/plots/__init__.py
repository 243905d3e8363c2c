"""Pictures of a run, real or simulated, from its event log; each file is one picture."""
