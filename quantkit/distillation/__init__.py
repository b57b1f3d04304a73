"""Training of a compressed student on its teacher's predictions: scales, norms and biases; codes stay.

`student` runs blocks with given floats (scales, norms, biases). `blocks` and `whole` are the two stages of
training. `publish` writes the student's files with the trained floats. `job` calls them in order.
"""
