"""Run a block on the calibration text and sum the statistics of its sites."""

LOGITS_BYTES, LOGITS_TOKENS = 1 << 26, 1024  # limits of float32 logits per backward pass

ENOUGH = 24  # tokens that the original model sees for each input of the widest linear
HEAD_ENOUGH = 16  # tokens for each input of the head; four times as many: Q4_0 3 % better, Q8_0 the same


def original_every(tokens: int, widest: int) -> int:
    """Return n: the original model runs on every n-th batch, at most on every second. tokens: length of
    the calibration text. widest: number of inputs of the widest linear."""
    return max(2, tokens // (ENOUGH * widest))


def head_every(tokens: int, hidden: int) -> int:
    """Return n: inputs of the head, `hidden` of them, are measured on every n-th batch."""
    return max(1, tokens // (HEAD_ENOUGH * hidden))
