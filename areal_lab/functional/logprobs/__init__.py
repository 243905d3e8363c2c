"""Log-probs and entropy of tokens from logits or hidden states."""
