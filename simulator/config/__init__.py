"""Settings of a simulation: schema, presets and loading; knows nothing that simulates."""
