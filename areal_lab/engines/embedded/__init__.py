"""The embedded engine: a small inference server on torch and transformers.

    server     the process: options, port           app        HTTP in SGLang's words
    wire       JSON <-> records
    scheduler  the one thread that owns the model  activity   what it did when
    batcher    continuous batching                 sampler    draws and log-probs
    cache      keys and values of running rows     attention  packed tokens against them
    loading    model folder -> model

Run it by hand with `python -m areal_lab.engines.embedded.server --model-path FOLDER --port 30000`.
"""
