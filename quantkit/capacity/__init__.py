"""Capacity: what a model takes, in memory and in time, before anything is loaded; `quantkit plan` prints it.

Everything follows from config.json and the headers of the weight files, in less than a second and without
torch; what they leave open is asked of transformers, which takes a few seconds.

    source.py        what there is to read: a folder, a hub id, a config.json, or a number of parameters;
                     quantized.py what codes and scales were
    settings.py      values of config.json, checked, under whichever name a family has for them
    parameters.py    the tensors of a model
    kv_cache.py      what each layer keeps of a token, and the bytes of that
    meta.py          all three as transformers has them: it alone imports it
    formats.py       bytes of the weights in each format; gguf.py those of llama.cpp's file types
    question.py      what is asked: the command's flags
    devices.py       memory, bandwidth and FLOPS of known devices, and what they allow: the roofline
    job.py           peak memory, disk and time of a quantization job
    forecast.py      all of it as one record; show.py for people

The dry run of a job (`quantkit gptq MODEL --dry-run`, quantkit/quantize/prepare/plan.py) builds the
model's modules and so knows more; its memory comes from the same formula.
"""


class Unsupported(Exception):
    """Why something of a model cannot be known, or a format cannot hold it."""
