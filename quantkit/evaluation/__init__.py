"""What compression cost: perplexity, KL divergence, tasks, and comparisons of several results."""
