"""A smaller student: blocks and MLP channels chosen by measurement, then trained on the teacher's
predictions.

`shape` says what the student is, `blocks` and `channels` what is left out, `cut` writes it, `learner` learns
what the teacher predicts (`targets`); `job` is the way through.
"""
