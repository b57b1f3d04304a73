"""The cost of running a checkpoint: `quantkit bench`.

settings.py     the flags (batches, prompts, repeats) and their checks
subjects.py     the checkpoints, read from their headers, and the reasons why a point cannot run
measure.py      rounds A B A B…: the checkpoints take turns, each in a process of its own
worker.py       that process: reads a job from stdin and writes a line of JSON for each run to stdout
runners.py      one class per engine: loads a model and times its prefill and decode
memory.py       peak memory of the process, or of an accelerator's allocator
record.py       the result as JSON (bench-3.json), optionally with figures of `quantkit eval`
show.py         the printed tables and the plots
attention/      `bench attention`: time and memory of attention implementations
batching/       `bench batching`: one trace of requests, batched in several ways
"""
