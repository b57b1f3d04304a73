"""Run a block on the calibration text and sum the statistics of its sites."""

LOGITS_BYTES, LOGITS_TOKENS = 1 << 26, 1024  # float32 logits that gradients are made of at a time
