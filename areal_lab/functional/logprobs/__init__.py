"""Log-probs and entropy of tokens from logits or hidden states.

May import `functional.checks`; imported by users and `training`.
"""
