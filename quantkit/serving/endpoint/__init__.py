"""Requests to an OpenAI endpoint of any server: single ones, or many at once to measure speed under load.

client.py   requests and streamed answers, with the standard library
dialect.py  the API, model name and fields that a server accepts; random prompts
load.py     `measure`: simulated users, each of whom sends the next request after an answer
figures.py  statistics of request times
show.py     the printed table
"""
