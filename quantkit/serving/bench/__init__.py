"""The cost of running a checkpoint: `quantkit bench`.

settings.py     the flags (batches, prompts, repeats) and their checks
measure.py      the checkpoints, and rounds A B A B…: checkpoints take turns, each in a separate process
worker.py       that process: reads a job from stdin and writes a line of JSON for each run to stdout
prompts.py      random prompts
attempts.py     alternatives; a failed alternative is reported and not tried again
runners.py      one class per engine: loads a model and times its prefill and decode
memory.py       peak memory of the process, or of an accelerator's allocator
record.py       the result as JSON (bench-3.json), optionally with figures of `quantkit eval`
show.py         the printed tables and the plots
attention/      `bench attention`: time and memory of attention implementations
batching/       `bench batching`: one trace of requests, batched in several ways
"""
