"""A compressed student: codes stay, what goes with them and norms and biases are trained.

`student` runs blocks on floats that are given to them, `blocks` and `whole` are the two stages of training,
`publish` writes the student's files with other floats in them; `job` is the way through.
"""
