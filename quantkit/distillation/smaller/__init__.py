"""A smaller student: blocks chosen by measurement, then trained on the teacher's predictions.

`shape` checks the student's configuration, `blocks` chooses blocks to leave out, `cut` writes the student,
`learner` trains on the teacher's predictions (`targets`); `job` calls them in order.
"""
