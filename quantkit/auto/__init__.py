"""Bits for each linear within a budget, with the least loss of the model (`quantkit auto`).

options.py      the command's flags
engines.py      what each engine loads: folders of integers; gguf.py: any of ggml's types
units.py        unit, candidate, choice, preset
unit_divergence.py <- what one unit changes in the divergence at the output, one block in memory at a time
solving.py      a unit's candidates as the job's solver makes them; scaling.py behind the job's transform
curve.py        <- from the measured candidates of a unit to all of them
allocation.py   <- the integer program
sensitivities.py  the table of all that, measured and saved
job.py          from options to a prepared search, its recipes and needs; run.py: search, make, measure, keep
                the better; show.py: what people read
"""
