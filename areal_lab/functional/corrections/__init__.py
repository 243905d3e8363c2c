"""Weights and masks for data from another policy: pi_prox / pi_behav, rejection."""
