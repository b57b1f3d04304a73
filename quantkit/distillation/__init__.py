"""A student trained on its teacher's predictions: scales and norms of a compressed checkpoint, or a smaller
model."""
