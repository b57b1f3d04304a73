"""Memory and time that a model needs, computed before anything is loaded; `quantkit plan` prints them.

Everything but the time of a job follows from config.json and the headers of the weight files, in less than a
second and without torch. transformers fills in missing values; importing transformers takes a few seconds.

    source.py        the input: a folder, a hub id, a config.json, or a number of parameters;
                     quantized.py: original shapes of codes and scales
    settings.py      checked values of config.json, under every family's names
    parameters.py    the tensors of a model
    kv_cache.py      values that each layer keeps per token, and their bytes
    meta.py          the same three, by transformers; the only module here that imports transformers
    formats.py       bytes of the weights in each format, llama.cpp's file types included;
                     gguf_tensors.py: names and shapes in a GGUF file
    question.py      the command's flags
    devices.py       memory, bandwidth and FLOPS of known devices; the roofline
    speed.py         a benchmark of this machine
    duration.py      amounts of work of a job, and its time on this machine
    job.py           peak memory, disk and time of a quantization job
    forecast.py      the complete JSON record; show.py prints it

The dry run of a job (`quantkit gptq MODEL --dry-run`, quantkit/quantize/prepare/plan.py) builds the
model's modules and knows more; both use the same memory formula.
"""


class Unsupported(Exception):
    """Raised with the reason if a property of a model is unknown, or if a format cannot store the model."""
