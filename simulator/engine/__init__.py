"""One inference server in simulated time; imports neither config nor coordinator."""
