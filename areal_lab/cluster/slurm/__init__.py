"""Host agents started by Slurm: as separate jobs, or as steps of the allocation of a run."""
