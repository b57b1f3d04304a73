"""llama-quantize with an importance matrix: `python run_llamacpp.py JOB.json` (see job.py).

In quantkit's environment. method: a type, such as Q4_K_M; libraries: as `gguf_mixtures.py` takes them.
What llama-quantize reads is quantkit's: a 32-bit GGUF file, and an importance matrix of the job's tokens.
"""

import subprocess
import sys
from pathlib import Path

import job as jobs

job = jobs.start()
sys.path.insert(0, str(Path(__file__).parents[1]))

import llamacpp_library  # noqa: E402

from quantkit.models.gguf import file_types, imatrix  # noqa: E402


def quantkit(*arguments: object) -> None:
    """Run a command."""
    command = [sys.executable, "-m", "quantkit", *map(str, arguments), "--quiet"]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)


def main() -> None:
    library = llamacpp_library.Library(Path(job.libraries))
    source, measured = Path(f"{job.out}.f32.gguf"), Path(f"{job.out}.imatrix.gguf")
    rows = job.rows()
    text = ["--calibration", job.calibration] if job.calibration else []
    text += ["--samples", len(rows), "--seqlen", len(rows[0])]
    clock = jobs.Clock()
    with clock("load"):
        quantkit("gguf", job.model, "-t", "F32", "-o", source)
    with clock("quantize"):  # an importance matrix is part of it, as a Hessian is
        quantkit("imatrix", job.model, *text, "-o", measured)
        kept = {name: values.numpy() for name, values in imatrix.read(measured).values().items()}
        if not library.quantize(source, Path(job.out), file_types.number(job.method), kept):
            raise SystemExit(f"llama.cpp does not quantize: {''.join(library.log[-3:])}")
    source.unlink()
    measured.unlink()
    clock.finish(llamacpp=llamacpp_library.VERSION)


if __name__ == "__main__":
    main()
