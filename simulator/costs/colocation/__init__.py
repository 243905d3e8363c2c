"""What colocated GPUs do between generation and training, one function per term.

    to training      engine sleeps        weights copied to the host, or discarded    engine_sleep
                     trainer's state      copied back from the host                   trainer_state
    to generation    trainer's state      copied to the host                          trainer_state
                     engine wakes         memory mapped again, weights copied back    engine_sleep
                     refit                new weights into the engine's layout        refit
                     CUDA graphs          kept, or captured again

Terms are fitted to the published seconds of `data/colocation.csv`; `switch` adds them up.
"""
