"""quantkit: compress causal language models and show honestly what it cost."""

__version__ = "0.1.0"
