"""Reports of simulation results: JSON, tables, notes and pictures."""
