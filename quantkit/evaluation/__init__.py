"""The loss by compression: perplexity, KL divergence, tasks, and comparisons of several results."""
