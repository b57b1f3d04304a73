"""Generate calibration text with the model itself; no dataset is needed.

Examples:
  quantkit sample ./model                                   # writes model-own.jsonl
  quantkit gptq ./model --calibration model-own.jsonl --seqlen 512
  quantkit sample org/model --samples 512 --seqlen 1024 --device cuda -o own.jsonl
"""

from functools import partial
from pathlib import Path
from shlex import join
from typing import Any

from quantkit.cli import flags, streams
from quantkit.evaluation.settings import SampleSettings
from quantkit.tables import print_written


@flags.command(
    *flags.of("options", SampleSettings),
    shared=("output", "dtype", "overwrite", "device", "threads", *flags.OPENING),
    helps={
        "output": "JSON lines file to write. (default: NAME-own.jsonl)",
        "dtype": "Precision. auto: the model's own if the hardware supports it.",
        "overwrite": "Replace an existing file.",
    },
)
def command(model: flags.MODEL, **values: Any) -> None:
    settings, as_json = flags.options(SampleSettings, values), values["as_json"]
    with streams.listener(values["quiet"]) as progress:
        from quantkit.evaluation import generate, self_text
        from quantkit.models.files.gguf_shards import base_name
        from quantkit.models.files.open import open_checkpoint
        from quantkit.models.machine.device import choose_device

        output = values["output"] or Path(f"{base_name(model)}-own.jsonl")
        self_text.check_output(output, values["overwrite"])
        opened = values["revision"], values["offline"], values["trust_remote_code"]
        checkpoint = open_checkpoint(model, *opened)
        device = choose_device(values["device"])
        precision = generate.shared_dtype(values["dtype"], checkpoint, device)
        progress.phase(f"loading {checkpoint.source}")
        listen = partial(progress.counting, "writing text")
        record = self_text.write(checkpoint, settings, output, precision, device, listen)
    spare = f"{settings.samples:,} to calibrate on, {record['texts'] - settings.samples:,} spare"
    text = f"text         {record['texts']:,} sequences, {record['tokens']:,} tokens ({spare})"
    streams.present(record, as_json, lambda: print(text))
    print_written([output], as_json, as_json and values["quiet"])
    if not as_json:
        original = "MODEL" if checkpoint.quantized else model  # gptq takes the original
        shape = "--samples", str(settings.samples), "--seqlen", str(settings.seqlen)
        job = original, "--calibration", record["output"], *shape, "-o", f"{base_name(model)}-gptq-own"
        print(f"\nnext: quantkit gptq {join(job)}")
