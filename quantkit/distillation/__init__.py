"""Training of a student on its teacher's predictions: the scales and norms of a compressed checkpoint, or a
model with fewer blocks."""
