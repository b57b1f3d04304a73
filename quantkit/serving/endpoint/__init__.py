"""What an OpenAI endpoint does, whoever runs it: one request (client.py), or many at once, timed.

client.py   requests and streams, by the standard library
dialect.py  how a server wants to be asked; seeded prompts of words
load.py     users in a closed loop: `measure`
figures.py  what the times of requests say
show.py     the result for people
"""
