"""Text to calibrate on, as batches of tokens whose origin is recorded."""
