"""`quantkit serve`: an engine's own server is started for a checkpoint, proven, and watched until it ends.

settings.py   the flags
sizing.py     context, sequences at once and memory for their cache, from the plan
command.py    each engine's arguments, environment and notes
process.py    the engine's processes: started, read, and ended with their children
job.py        from a checkpoint to a command, and from a command to a server that has answered
show.py       the output for people
"""
