"""Quantizing a checkpoint. Begin with `loop.py`. As a function: `quantkit.api.quantize`."""

import sys

from quantkit import Room

sys.modules[__name__].__class__ = Room
