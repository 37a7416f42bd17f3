"""Causal language models, and token log-probs from them."""
