"""The cost of running a checkpoint: `quantkit bench`.

settings.py     the flags: batches, prompts, repeats; refused where they make no sense
subjects.py     the checkpoints and their engines, by headers alone, and the reasons why one cannot run
measure.py      rounds A B A B…: every checkpoint in a process of its own, in turn
worker.py       that process: a job on stdin, a line of JSON for each run on stdout
runners/        one file an engine: load, prefill, decode, each timed
memory.py       peaks of the process, or of an accelerator's allocator
machine.py      bandwidth and FLOPS of this machine, measured in the same run
roofline.py     the least time of a step, and the batch at which a step costs twice its floor
record.py       the result as JSON (bench-2.json), with an evaluation's figures; show.py for people
attention/      another mode: time and memory of attention implementations
batching/       another mode: one trace of requests, batched in several ways
"""
