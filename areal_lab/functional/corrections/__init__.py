"""Weights and masks for data from another policy: pi_prox / pi_behav, rejection.

May import the files below the rooms (segments, masked, checks); imported by `losses` and
`staleness`.
"""
