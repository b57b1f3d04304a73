"""A smaller student: blocks chosen by measurement, then trained on the teacher's predictions.

`shape` checks the student's configuration, `blocks` chooses what is left out, `cut` writes the student,
`learner` learns what the teacher predicts (`targets`); `job` is the way through.
"""
