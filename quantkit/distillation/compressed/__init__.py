"""A compressed student: scales, norms and biases are trained, codes stay.

`student` runs blocks on floats that are given to them, `blocks` and `whole` are the two stages of training,
`publish` writes the student's files with other floats in them; `job` is the way through.
"""
