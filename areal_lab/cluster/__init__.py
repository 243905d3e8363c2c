"""Several machines: host agents, schedulers, and tensors that go from host to host."""
