"""`quantkit serve`: starts an engine's own server, requests a first answer, and runs it until it ends.

settings.py   the flags
sizing.py     context length, number of sequences and cache size that fit the memory
command.py    each engine's arguments, environment and notes
process.py    the engine's processes
job.py        chooses the command for a checkpoint; starts the server and waits for its first answer
show.py       the printed output
"""
