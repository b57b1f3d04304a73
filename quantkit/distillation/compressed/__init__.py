"""A compressed student: scales, norms and biases are trained, codes stay.

`student` runs blocks with given floats (scales, norms, biases). `blocks` and `whole` are the two stages of
training. `publish` writes the student's files with the trained floats. `job` calls them in order.
"""
