"""`quantkit gptq org/name` against a stand-in for the hub: what is fetched, how, and offline nothing."""

import io
import json

import pyarrow
import pytest
from families import save_model, save_tokenizer, sentences
from pyarrow import parquet
from stand_in_hub import SHA, TOKEN, Elsewhere, Repo

OLDER = "f" * 40
TEMPLATE = "additional_chat_templates/tool_use.jinja"
OPTIONS = (
    "--samples 4 --seqlen 32 --batch-size 2 --threads 1 --group-size 32 --calibration org/data:train:text"
    " --transform none --refine 0"
)


@pytest.fixture
def hub(hub_server, tmp_path):
    buffer = io.BytesIO()
    parquet.write_table(pyarrow.table({"text": sentences(200, seed=8)}), buffer)
    hub_server.add("datasets/org/data", {"train.parquet": buffer.getvalue()})
    revisions = {}
    for commit, blocks in ((SHA, 2), (OLDER, 1)):
        folder = save_model(tmp_path / commit, "llama", num_hidden_layers=blocks)
        save_tokenizer(folder)
        files = {path.name: path.read_bytes() for path in folder.iterdir()}
        unwanted = {
            "pytorch_model.bin": b"pickle",
            "onnx/model.onnx": b"x",
            "original/weights.pth": b"pickle",
            "original/model.safetensors": b"the same again",
            "consolidated.safetensors": b"and again",
        }
        revisions[commit] = files | unwanted | {"LICENSE": b"MIT", TEMPLATE: b"{{ messages }}"}
    hub_server.repos["models/org/name"] = Repo(revisions, {"main": SHA, "v1": OLDER}, "private")
    return hub_server


def test_a_job_by_hub_ids_and_again_offline(hub, tmp_path):
    home = tmp_path / "home"
    home.mkdir()
    with Elsewhere(home, hub.url, TOKEN) as process:

        def quantkit(arguments: str) -> dict:
            answer = process.ask(do="run", arguments=f"gptq org/name {OPTIONS} {arguments}".split())
            assert TOKEN not in json.dumps(answer)
            return answer

        # Nothing in the cache: an error, and no request.
        refused = quantkit("--dry-run --offline")
        assert refused["code"] == 3 and "org/name is not a local folder and is not in" in refused["err"]
        assert "hint: give a local folder, or fetch it once" in refused["err"] and not hub.seen

        # A dry run fetches what a checkpoint needs, with the token of the environment, and no pickles.
        plan = quantkit("--dry-run --json")
        assert plan["code"] == 0, plan["err"]
        record = json.loads(plan["out"])["calibration"]
        assert record["source"] == "org/data@default:train:text" and record["dataset"]["revision"] == SHA
        files = hub.repos["models/org/name"].revisions[SHA]
        wanted = {name for name in files if "/" not in name} | {TEMPLATE}
        assert hub.fetched() == (wanted - {"pytorch_model.bin", "consolidated.safetensors"}) | {
            "train.parquet"
        }
        assert {token for *_, token in hub.seen} == {f"Bearer {TOKEN}"}

        # Another revision is another model.
        older = json.loads(quantkit("--dry-run --json --revision v1")["out"])
        blocks = {row["name"].split(".")[2] for row in older["linears"]}
        assert blocks == {"0"}

        # The model is in the cache; the dataset, streamed, is not.
        hub.forget()
        lacking = quantkit("--offline -o out")
        assert lacking["code"] == 3 and "error: dataset org/data is not in the local cache" in lacking["err"]
        assert not hub.seen
        process.ask(do="download", repo="org/data")

        # The job offline: its manifest says what the dry run said, and the hub was not asked.
        hub.forget()
        done = quantkit("--offline -o out")
        assert done["code"] == 0, done["err"]
        assert not hub.seen
    assert json.loads((home / "out" / "quantkit.json").read_text())["job"]["calibration"] == record
    assert (home / "out" / TEMPLATE).read_bytes() == files[TEMPLATE]
