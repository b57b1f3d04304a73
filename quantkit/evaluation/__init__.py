"""The loss of a compression: perplexity, KL divergence, tasks, and comparisons of several results."""
