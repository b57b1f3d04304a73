"""Run a block on the calibration text and sum the statistics of its sites."""
