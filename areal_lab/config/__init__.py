"""Settings of a run: schema, loading, reference; imports no room of `areal_lab`."""
