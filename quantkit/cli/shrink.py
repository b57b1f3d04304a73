"""`quantkit shrink`: cut blocks out of a model and train the rest on its predictions."""

from __future__ import annotations

from quantkit.cli import distill, flags
from quantkit.distillation.options import SmallerOptions

EPILOG = """Examples:
  quantkit shrink ./model --blocks 24                        (writes ./model-b24)
  quantkit shrink ./model --blocks 24 --dry-run
  quantkit shrink ./model --blocks 24 --calibration mine.txt --samples 4096

Never worse: a training that does not lower the divergence from the teacher on held-out text is not kept, and
the student is published as it was cut; the exit code is 0 nevertheless."""
command = distill.training(
    SmallerOptions,
    [flags.parameter("teacher", distill.TEACHER)],
    "Output folder. (default: TEACHER-bBLOCKS in the current folder)",
    "2,048",
)
