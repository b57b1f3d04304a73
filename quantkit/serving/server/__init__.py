"""`quantkit serve`: starts an engine's own server, requests a first answer, and runs it until it ends.

settings.py   the flags
sizing.py     context length, number of sequences and cache size that fit the memory
command.py    each engine's arguments, environment and notes
job.py        chooses the command for a checkpoint; compares the engine with quantkit's decode
process.py    the engine's processes: starts the server and waits for its first answer
"""
