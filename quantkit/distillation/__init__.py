"""A student taught by its teacher: a compressed checkpoint's scales and norms, or a smaller model."""
