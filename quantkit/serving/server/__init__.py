"""Handing a checkpoint over to an engine's own server, and staying with it until it ends.

settings.py   what a user may ask for: the flags
sizing.py     context, sequences at once and memory for their cache, so that it fits: from the plan
command.py    what is started: each engine's arguments, environment, and what to say about them
process.py    the engine's processes: started, listened to, ended with all their children
job.py        from a checkpoint to a command, and from a command to a server that has answered
show.py       what is said of it
"""
