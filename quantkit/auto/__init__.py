"""Bits for each linear within a budget, with the least loss of the model (`quantkit auto`).

options.py      the command's flags
engines.py      units and candidates of each engine: folders of integers, GGUF files of ggml's types
units.py        unit, candidate, choice, preset
unit_divergence.py <- change of the output's divergence by one unit, one block in memory at a time
solving.py      candidates by the job's solver; scaling.py: after the job's transform
curve.py        <- from the measured candidates of a unit to all of them
allocation.py   <- the integer program
sensitivities.py  the table of all that, measured and saved
job.py          from options to a prepared search, its recipes and needs; run.py: search, make, measure, keep
                the better; show.py: what people read
"""
