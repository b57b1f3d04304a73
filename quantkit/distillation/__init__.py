"""Training of a compressed student on its teacher's predictions: scales, norms and biases; codes stay."""
