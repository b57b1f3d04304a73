"""quantkit's own side of a comparison, by the same rules: `python run_quantkit.py JOB.json` (see job.py).

`quantize` ends where the last block is solved and staged; `save` is writing and verification.
"""

import os
from contextlib import ExitStack
from pathlib import Path

import job as jobs

job = jobs.start()
os.environ |= {"OMP_WAIT_POLICY": "passive", "THP_MEM_ALLOC_ENABLE": "1"}  # as the command line does

from quantkit import __version__  # noqa: E402
from quantkit.models.files.open import open_checkpoint  # noqa: E402
from quantkit.options import CalibrationOptions, RunOptions  # noqa: E402
from quantkit.quantize import job as requests  # noqa: E402
from quantkit.quantize import loop, methods  # noqa: E402
from quantkit.quantize.progress import Progress  # noqa: E402
from quantkit.text import calibration  # noqa: E402


def options():
    """The method's defaults, apart from what the job says; `options` has the last word."""
    chosen = {"bits": job.bits, "group_size": job.group_size, "sym": job.sym, "zero_point": not job.sym}
    fields = methods.load(job.method).Options.__dataclass_fields__
    chosen = {key: chosen[key] for key in chosen if key in fields} | job.options
    if "type" in chosen:  # as a JSON file has it
        chosen["type"] = tuple(chosen["type"])
    return methods.load(job.method).Options(**chosen)


def main() -> None:
    rows = job.rows()
    text = CalibrationOptions(job.calibration, samples=len(rows), seqlen=len(rows[0]))
    tokens = calibration.load(open_checkpoint(job.model), text)
    assert tokens.tokens.tolist() == rows, "other calibration tokens than the peers'"
    calibration.load = lambda *arguments: tokens  # cut already, as the peers are given theirs
    request = requests.Request(
        job.model, job.method, options(), text, RunOptions(threads=job.threads), output=Path(job.out)
    )
    clock = jobs.Clock()
    with clock("load"):
        prepared = requests.prepare(request, Progress())
    finish = loop.finish.finish
    with ExitStack() as solving:
        solving.enter_context(clock("quantize"))

        def timed_finish(*arguments):
            solving.close()
            with clock("save"):
                return finish(*arguments)

        loop.finish.finish = timed_finish
        loop.run(prepared, Progress())
    version = f"{__version__} computing in {prepared.plan.execution.dtype}"
    clock.finish("torch", "transformers", quantkit=version)


if __name__ == "__main__":
    main()
