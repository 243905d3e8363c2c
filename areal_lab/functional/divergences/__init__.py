"""KL, other divergences and entropy, sampled or over the whole vocabulary."""
