"""Let every write of a job fail in turn, then every read: nothing may be torn, and one line must say why.

    python scripts/faults.py [--methods gptq nf4 ...] [--every 1] [--errors ENOSPC EIO]

A library between the job and the system (faults.c, compiled here: this needs `cc`) fails the n-th call below
the folder that the job writes to, or reads its model from. After each: no traceback, no output or the whole
one, and the same command with --resume ends with the bytes of an undisturbed run. Prints a line of JSON by
method; exit code 1 if anything was wrong.
"""

from __future__ import annotations

import argparse
import ctypes
import errno
import json
import os
import random
import re
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path

import kills
from random_llama import make

SHIM = "QUANTKIT_FAULTS_SHIM"


def child(folder: str, arguments: list[str], where: str, kind: str, number: int, error: int) -> None:
    """A job whose `number`-th call fails; the count of calls goes to `count`."""
    shim = ctypes.CDLL(os.environ[SHIM])
    shim.fault_set.argtypes = [ctypes.c_char_p, ctypes.c_int, ctypes.c_long, ctypes.c_long]
    os.chdir(folder)
    log = os.open("log", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    count = os.open("count", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(log, 1)
    os.dup2(log, 2)
    import torch

    from quantkit import cli

    torch.set_num_threads(1)
    sys.argv = ["quantkit", *arguments]
    shim.fault_set(where.encode(), ord(kind), number, error)
    try:
        cli.main()
    finally:
        os.write(count, str(shim.fault_count()).encode())


def run(folder: Path, arguments: list[str], where: Path, kind: str, number: int, error: int) -> int | None:
    process = kills.SERVER.Process(
        target=child, args=(str(folder), arguments, str(where), kind, number, error), daemon=True
    )
    process.start()
    process.join(120)
    if process.is_alive():
        process.kill()
        process.join()
        return None
    return process.exitcode


def of_method(name: str, model: Path, where: Path, every: int, errors: list[str]) -> dict:
    """All faults of one method."""
    arguments, output = kills.command(name, model)
    again = [*arguments, "--resume"] if name.partition(" ")[0] != "imatrix" else arguments
    reference, calls, codes, wrong = where / "reference", {}, Counter(), []
    for kind, place in (("w", reference), ("r", model)):
        shutil.rmtree(reference, ignore_errors=True)
        reference.mkdir(parents=True)
        code = run(reference, arguments, place, kind, 0, 0)
        assert code == 0, (reference / "log").read_text()
        calls[kind] = int((reference / "count").read_text())
    wanted = kills.contents(reference / output)
    chance = random.Random(name)
    for kind in calls:
        for number in range(1 + chance.randrange(every), calls[kind] + 1, every):
            failing = errors[number // every % len(errors)] if kind == "w" else "EIO"
            folder = where / f"{kind}{number}"
            folder.mkdir()
            what = f"{kind}{number} {failing}"
            code = run(
                folder, arguments, folder if kind == "w" else model, kind, number, getattr(errno, failing)
            )
            log = (folder / "log").read_text(errors="replace")
            codes[str(code)] += 1
            if code is None or code < 0:
                wrong.append(f"{what}: ended by {code}")
            elif "Traceback" in log or (code and len(re.findall("^error: ", log, re.M)) != 1):
                wrong.append(f"{what}: exit code {code}: {log[-400:]}")
            if (folder / output).exists() and kills.contents(folder / output) != wanted:
                wrong.append(f"{what}: exit code {code}, other bytes published")
            elif code == 0 and not (folder / output).exists():
                wrong.append(f"{what}: exit code 0 and no output")
            if code:
                more = again if not (folder / output).exists() else [*again, "--overwrite"]
                after = run(folder, more, folder, "w", 0, 0)
                if after != 0 or kills.contents(folder / output) != wanted:
                    wrong.append(f"{what}: not resumed: {(folder / 'log').read_text()[-300:]}")
            shutil.rmtree(folder)
    return {"method": name, "calls": calls, "codes": dict(codes), "wrong": len(wrong), "first": wrong[:4]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--methods", nargs="+", choices=list(kills.METHODS), default=list(kills.METHODS))
    parser.add_argument("--every", type=int, default=1)
    parser.add_argument("--errors", nargs="+", default=["ENOSPC", "EIO"])
    args = parser.parse_args()
    if SHIM not in os.environ:  # begin again behind the library
        with tempfile.TemporaryDirectory() as place:
            library = f"{place}/faults.so"
            source = Path(__file__).with_name("faults.c")
            subprocess.run(["cc", "-shared", "-fPIC", "-O1", "-o", library, source, "-ldl"], check=True)
            env = os.environ | {SHIM: library, "LD_PRELOAD": library}
            sys.exit(subprocess.run([sys.executable, *sys.argv], env=env).returncode)
    kills.SERVER.set_forkserver_preload(["torch", "transformers", "quantkit.cli", "quantkit.quantize.loop"])
    bad = 0
    with tempfile.TemporaryDirectory() as place:
        model = Path(place) / "model"
        make(model, 64, 128, 4, 4, 256, "bfloat16")
        for name in args.methods:
            where = Path(place) / name.replace(" ", "-")
            found = of_method(name, model, where, args.every, args.errors)
            print(json.dumps(found), flush=True)
            bad += found["wrong"]
    sys.exit(bool(bad))


if __name__ == "__main__":
    main()
