"""Requests to an OpenAI endpoint of any server: one (client.py), or many at once, timed.

client.py   requests and streams, by the standard library
dialect.py  the API, model and fields that a server takes; seeded prompts of words
load.py     users in a closed loop: `measure`
figures.py  statistics of the times of requests
show.py     the result for people
"""
