"""Time and bytes at the program that steers a run, by what passes through it.

    single     replies --> controller (reads, keeps) --> ranks of the trainer
    metadata   replies --> agents (read, pack) ==================> ranks of the trainer
                              \\-- lengths, places --> controller --> which of them to fetch
    spmd       replies --> the rank's own program, which trains on them; no controller

`measured` has the inputs, `terms` one function per cost, `ways` puts them together, `own_batches`
is the training step of ranks that keep their batches. May import the configuration, the layout of
GPUs (`layers.groups`) and `training_timing`.
"""
