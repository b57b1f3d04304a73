"""`quantkit shrink TEACHER --blocks N`: a smaller student, made and measured."""

import json

import jobs

FEW = ("--samples", "10", "--seqlen", "16", "--steps", "12", "--dtype", "float32", "--threads", "1")


def test_a_smaller_student_is_made_and_measured(tiny_model, tmp_path, make):
    teacher = tiny_model("llama", tokenizer=True)
    planned = make("shrink", teacher, "--blocks", "2", *FEW, "--dry-run")
    assert planned["student"] | {"output": ""} == {
        "output": "", "blocks": 2, "parameters": 2 * (64 * (64 + 32 + 32 + 64 + 3 * 128) + 128)
        + 2 * 512 * 64 + 64,
    }  # fmt: skip
    assert not (tmp_path / "llama-b2").exists()
    done = make(
        "shrink",
        teacher,
        "--blocks",
        "2",
        "--lr",
        "0.002",
        *FEW,
        "-o",
        "small",
        "--calibration",
        jobs.calibration(tmp_path).calibration,
    )
    assert [model["source"] for model in done["held_out"]["models"]] == [
        "llama",
        "small as cut",
        "small trained",
    ]
    assert done["options"]["lr"] == 0.002 and json.loads((tmp_path / "small/config.json").read_text())
    again = make("shrink", teacher, "--blocks", "2", "--lr", "0.002", *FEW, "-o", "small", "--resume")
    assert again == {"schema": "quantkit.distill-smaller/2", "output": "small", "finished": True}


def test_shrink_takes_a_teacher_and_a_number_of_blocks(tiny_model, refuse):
    teacher = tiny_model("llama", tokenizer=True)
    assert refuse(2, "shrink", teacher)[0] == "missing option '--blocks'"
    assert "unexpected extra argument" in refuse(2, "shrink", teacher, teacher, "--blocks", "2")[0]
    assert refuse(2, "shrink", teacher, "--blocks", "0")[0] == "--blocks 0 is invalid"
    assert "--block-epochs" in refuse(2, "shrink", teacher, "--blocks", "2", "--block-epochs", "1")[0]
