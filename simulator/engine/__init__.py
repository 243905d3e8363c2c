"""One inference server in simulated time; knows no configuration and no coordinator."""
