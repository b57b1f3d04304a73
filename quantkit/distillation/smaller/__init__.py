"""A smaller student: the teacher without its least important blocks, trained on the teacher's predictions.

`blocks` chooses blocks to leave out, `cut` checks the student's configuration and writes the student,
`learner` trains on the teacher's predictions; `job` calls them in order.
"""
