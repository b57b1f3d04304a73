"""What a checkpoint costs to run: `quantkit bench`.

settings.py     what is asked: batches, prompts, repeats; refused where it makes no sense
subjects.py     the checkpoints and their engines, by headers alone; what cannot run, and why
measure.py      rounds A B A B…: every checkpoint in a process of its own, in turn
worker.py       that process: a job on stdin, a line of JSON for each run on stdout
runners/        one file an engine: load, prefill, decode, each timed
memory.py       peaks of the process, or of an accelerator's allocator
machine.py      bandwidth and FLOPS of this machine, measured in the same run
roofline.py     what these allow, and the batch at which a step costs twice its floor
record.py       all of it as JSON (bench-1.json), with an evaluation's figures; show.py for people
attention/      another question: time and memory of attention implementations
batching/       and another: one trace of requests, batched in several ways
"""
