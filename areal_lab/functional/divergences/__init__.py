"""KL, other divergences and entropy, sampled or over the whole vocabulary.

May import the files below the rooms (aggregate, segments, masked, checks); imported by `losses`,
`advantages` and `staleness`.
"""
