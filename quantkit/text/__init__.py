"""Calibration text: reads, renders and tokenizes it, and records its origin."""
