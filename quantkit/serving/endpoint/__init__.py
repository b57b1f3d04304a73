"""What an OpenAI endpoint does, whoever runs it: one request (client.py), or many at once, timed.

client.py   requests and streams, by the standard library
prompts.py  seeded prompts of a length, in the server's own tokens
load.py     users in a closed loop, or a given rate of arrivals: `measure`
figures.py  what the times of requests say
show.py     the result for people
"""
