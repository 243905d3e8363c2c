"""Host agents brought up by Slurm: as jobs of their own, or as steps of the allocation of a run."""
