"""Store the same integers in another layout, without any change of a weight.

Examples:
  quantkit convert ./model-gptq-w4g32 --to awq                 # writes ./model-gptq-w4g32-awq
  quantkit convert ./model-gptq-w4g32 --to mlx -o ./model-mlx
  quantkit convert ./model-gptq-w4g32 --to q4_0                # writes ./model-gptq-w4g32-Q4_0.gguf
"""

from typing import Any

from quantkit.cli import flags, streams
from quantkit.errors import count
from quantkit.tables import make_console, megabytes, print_facts


@flags.command(
    shared=("output", "overwrite", "as_json", "quiet"),
    helps={"output": "Folder or GGUF file. (default: MODEL-LAYOUT in the current folder)"},
)
def command(
    model: flags.argument("Checkpoint folder of 2 to 8 bit integers."),
    to: flags.flag(
        "Layout to write: gptq, awq, compressed-tensors or mlx; q4_0 or q8_0: a GGUF file.",
        str,
        metavar="LAYOUT",
    ),
    **values: Any,
) -> None:
    with streams.listener(values["quiet"]) as progress:
        from quantkit.quantize import convert

        record = convert.convert(model, to, values["output"], values["overwrite"], progress)
    streams.present(record, values["as_json"], lambda: _show(record))


def _show(record: dict[str, Any]) -> None:
    facts = {"written": record["output"], "layout": f"{record['from']} → {record['to']}"}
    facts["size"] = f"{megabytes(record['source_bytes'])} → {megabytes(record['output_bytes'])}"
    facts["exact"] = f"read back: {count(record['linears'], 'linear')} with the same codes and scales"
    print_facts(make_console(), facts)
