"""Run by a python with mlx: writes what `mx.quantize` and `mx.dequantize` make of random weights.

usage: mlx_tensors.py FILE. Names are MODE.BITS.GROUP.TYPE.PART with the parts weight, scales, biases and
values. `tests/data/mlx.safetensors` is such a file.
"""

import sys

import mlx.core as mx

BITS, GROUPS, ROWS, COLUMNS = (2, 3, 4, 5, 6, 8), (32, 64, 128), 2, 128
FLOATS = (("mxfp4", 4, 32), ("nvfp4", 4, 16), ("mxfp8", 8, 32))


def main(path: str) -> None:
    mx.set_default_device(mx.cpu)
    mx.random.seed(0)
    affine = [("affine", bits, group) for bits in BITS for group in GROUPS]
    found = {}
    for number, (mode, bits, group) in enumerate([*affine, *FLOATS]):
        dtype = (mx.bfloat16, mx.float16)[number % 2]
        weight = mx.random.normal((ROWS, COLUMNS)).astype(dtype)
        how = {"group_size": group, "bits": bits, "mode": mode}
        parts = mx.quantize(weight, **how)
        values = (
            mx.dequantize(*parts, **how) if mode == "affine" else mx.dequantize(*parts, dtype=dtype, **how)
        )
        name = f"{mode}.{bits}.{group}.{str(dtype).rpartition('.')[2]}"
        parts = dict(zip(("weight", "scales", "biases"), parts, strict=False)) | {"values": values}
        found |= {f"{name}.{part}": tensor for part, tensor in parts.items()}
    mx.save_safetensors(path, found)


if __name__ == "__main__":
    main(sys.argv[1])
