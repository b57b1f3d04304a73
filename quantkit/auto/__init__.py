"""Chooses bits for each linear such that the model loses least within a budget (`quantkit auto`).

A unit is one or several linears that an engine stores in the same way; a candidate is one format for a unit.
Begin with `run.py`: `sensitivities` measures units, `allocation` chooses candidates, `results` makes outputs.
"""

import sys

from quantkit import Room

sys.modules[__name__].__class__ = Room
