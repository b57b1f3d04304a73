"""Chooses bits for each linear such that the model loses least within a budget (`quantkit auto`).

A unit is one or several linears that an engine stores in the same way; a candidate is one format for a unit.

options.py      the command's flags
engines.py      units and candidates of each engine: folders of integers, GGUF files of ggml's types
units.py        units and candidates; divergences of all candidates from the measured one
unit_divergence.py  measures how each unit changes the KL divergence at the model's output
solving.py      quantizes a unit with the job's solver; scaling.py applies the job's transform before
allocation.py   the integer program that chooses a candidate for each unit
sensitivities.py  the table of all measurements, saved for later searches
results.py      makes outputs and measures them on held-out text
job.py          prepares a search; run.py: searches, keeps the better result; show.py: prints it
"""

import sys

from quantkit import Room

sys.modules[__name__].__class__ = Room
