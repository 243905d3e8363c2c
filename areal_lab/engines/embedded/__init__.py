"""The embedded engine: a small inference server on torch and transformers.

    server     the process: options, port           app        SGLang's HTTP protocol
    wire       JSON <-> records                    streaming  replies in pieces
    scheduler  the one thread that owns the model  activity   spans of its activity
    batcher    continuous batching                 sampler    token sampling, log-probs
    cache      keys and values of running rows     attention  packed tokens against the cache
    loading    model folder -> model               received   weights over HTTP or by broadcast

May import `engines.protocol`, `engines.weights`, `engines.launch.backends`, data, models and host;
nothing imports it: it runs as a separate process.

To run it manually: `python -m areal_lab.engines.embedded.server --model-path FOLDER --port 30000`.
"""
