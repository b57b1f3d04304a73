"""quantkit: compress causal language models and show honestly what it cost."""

__version__ = "0.2.0"
