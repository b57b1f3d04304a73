"""`quantkit push` against a stand-in for the hub: what is sent, by which token, what is refused."""

import json
import shutil
from functools import partial

import jobs
import pytest
from huggingface_hub import ModelCard, constants
from stand_in_hub import SHA, TOKEN, Elsewhere

HEAD = "---\nlicense: apache-2.0\n---\n# Original\n"


@pytest.fixture
def made(tiny_model, tmp_path):
    """A folder that names base and licence, made from a snapshot in the hub's cache."""
    source = tiny_model("llama", name="models--org--tiny/snapshots/0123")
    (source / "README.md").write_text(HEAD)
    (source / "LICENSE[1].txt").write_text("free")  # no pattern
    jobs.quantize("nf4", source, tmp_path / "out")
    return tmp_path / "out"


@pytest.fixture
def push(hub_server, tmp_path):
    """`push("out", "org/name")`: the answer of a process that has a token."""
    home = tmp_path / "home"
    home.mkdir()
    with Elsewhere(home, hub_server.url, TOKEN) as process:

        def run(*arguments) -> dict:
            answer = process.ask(do="run", arguments=list(map(str, arguments)))
            assert TOKEN not in json.dumps(answer)
            return answer

        sent = partial(run, "push")
        sent.run = run
        yield sent


def test_what_quantkit_wrote_is_sent_and_nothing_else(made, push, hub_server):
    (made / "secret.env").write_text("HF_TOKEN=hf_mine")
    hub_server.refusals = 1
    failed = push(made, "org/new", "--private")
    assert failed["code"] == 1 and "error: org/new was not written: " in failed["err"]
    assert f"the token may write to org/new; continue with: quantkit push {made} org/new\n" in failed["err"]
    done = push(made, "org/new", "--private", "--json")
    assert done["code"] == 0, done["err"]
    assert json.loads(done["out"]) == {
        "schema": "quantkit.push/1",
        "source": str(made),
        "repo": "org/new",
        "url": f"{hub_server.url}/org/new/commit/{SHA}",
    }
    repo = hub_server.repos["models/org/new"]
    sent, manifest = repo.revisions[SHA], json.loads((made / "quantkit.json").read_text())
    assert "LICENSE[1].txt" in sent
    assert repo.state == "private" and sent.keys() == {*manifest["files"], "quantkit.json", "README.md"}
    assert all(sent[name] == (made / name).read_bytes() for name in sent)
    assert "from_pretrained('org/new')" in ModelCard(sent["README.md"].decode()).text
    writes = [row for row in hub_server.seen if row[0] == "POST" and "validate" not in row[1]]
    assert {token for _, _, token in writes} == {f"Bearer {TOKEN}"}

    branched = push(made, "org/new", "--revision", "trial")
    assert branched["code"] == 0 and repo.revisions[repo.names["trial"]].keys() == sent.keys()

    # A public repository gets nothing of a private push.
    hub_server.add("models/org/public", {})
    refused = push(made, "org/public", "--private")
    assert refused["code"] == 2 and "error: org/public is public" in refused["err"]
    assert hub_server.repos["models/org/public"].revisions[SHA] == {}

    # What is refused, without a request.
    hub_server.forget()
    (made / "README.md").write_text("# Mine\n")
    refused = push(made, "org/new")
    assert refused["code"] == 2 and "names no base_model" in refused["err"]
    assert "`base_model: ORG/NAME`" in refused["err"]
    weights = made / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1] + b"\1")
    assert push(made, "org/new")["code"] == 6
    for name in ("new", "org/new--er", "org/.new", "a/b/c"):  # before the damage is found
        refused = push(made, name)
        assert refused["code"] == 2 and f"error: {name} is not the name of a repository" in refused["err"]
    assert not hub_server.seen


@pytest.mark.nightly
def test_a_job_sends_its_result_or_does_not_start(made, push, hub_server, tmp_path):
    source = tmp_path / "models--org--tiny/snapshots/0123"
    done = push.run("nf4", source, "-o", tmp_path / "new", "--push", "org/job", "-q", "--json")
    assert done["code"] == 0, done["err"]
    assert json.loads(done["out"])["linears"] == 21
    assert done["err"].endswith(f"published  {hub_server.url}/org/job/commit/{SHA}\n")
    sent = hub_server.repos["models/org/job"].revisions[SHA]
    assert sent["model.safetensors"] == (tmp_path / "new" / "model.safetensors").read_bytes()
    again = push.run("nf4", source, "-o", tmp_path / "new", "--push", "org/job", "-q", "--resume")
    assert again["code"] == 0 and again["out"].endswith(f"/org/job/commit/{SHA}\n")  # it was finished

    hub_server.forget()
    bare = shutil.copytree(source, tmp_path / "bare")  # a folder has no name on the hub
    (source / "README.md").write_text("# Original\n")
    for model, name, words in (
        (source, "org/job", "README.md names no license"),
        (bare, "org/job", "README.md names no base_model"),
        (source, "job", "error: job is not the name of a repository"),
    ):
        refused = push.run("nf4", model, "-o", tmp_path / "no", "--push", name, "-q")
        assert refused["code"] == 2 and words in refused["err"] and not list(tmp_path.glob("no*"))
    assert not hub_server.seen


def test_a_token_that_the_hub_does_not_give_is_no_bug(refuse, quantkit, monkeypatch, tmp_path):
    """It is found before anything is verified: the folder is empty."""
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setenv("HF_OIDC_RESOURCE", "org/new")
    monkeypatch.delenv("GITHUB_ACTIONS", raising=False)
    error, hint = refuse(2, "push", tmp_path, "org/new")
    assert error.startswith("no token for the hub: HF_OIDC_RESOURCE is set but no OIDC id token is available")
    assert hint == "unset HF_OIDC_RESOURCE, or run in the CI job that the hub trusts"
    monkeypatch.setenv("HF_OIDC_ID_TOKEN", "bad")
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    error, _ = refuse(3, "push", tmp_path, "org/new")
    assert error == "no token for the hub: [Errno 111] Connection refused"
    assert "hub token          none ([Errno 111] Connection refused)" in quantkit("doctor").out


def test_offline_nothing_is_verified(refuse, monkeypatch, tmp_path):
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    refused = "org/new cannot be written offline"
    assert refuse(3, "push", tmp_path, "org/new") == (refused, "unset HF_HUB_OFFLINE")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    assert refuse(3, "nf4", tmp_path, "--push", "org/new", "--offline") == (refused, "leave out --offline")


@pytest.mark.nightly
def test_without_a_token_or_a_network_it_says_so(made, tmp_path):
    home = tmp_path / "home"
    home.mkdir()
    with Elsewhere(home, "http://127.0.0.1:9", "") as process:
        for command in (["push", str(made), "org/new"], ["nf4", "org/any", "--push", "org/new"]):
            refused = process.ask(do="run", arguments=command)
            assert refused["code"] == 2 and "error: there is no token for the hub\n" in refused["err"]
    with Elsewhere(home, "http://127.0.0.1:9", TOKEN) as process:
        failed = process.ask(do="run", arguments=["push", str(made), "org/new"])
    assert (
        failed["code"] == 3
        and "error: org/new was not written: http://127.0.0.1:9 does not answer: " in failed["err"]
    )
    assert "hint: check the network; continue with: quantkit push" in failed["err"]


@pytest.mark.nightly
def test_a_gguf_file_is_sent_with_its_card(tiny_model, tmp_path, push, hub_server, quantkit):
    source = tiny_model("llama", name="models--org--tiny/snapshots/0123", tokenizer=True)
    (source / "README.md").write_text(HEAD)
    assert quantkit("gguf", source, "-t", "Q8_0", "--solver", "rtn", "-o", "tiny.gguf", "-q").code == 0
    assert push(tmp_path / "tiny.gguf", "org/tiny-GGUF")["code"] == 0
    sent = hub_server.repos["models/org/tiny-GGUF"].revisions[SHA]
    assert sent.keys() == {"tiny.gguf", "README.md"}
    assert sent["tiny.gguf"] == (tmp_path / "tiny.gguf").read_bytes()
    assert b"`llama-server -hf org/tiny-GGUF`" in sent["README.md"]

    flags = ("--solver", "rtn", "--max-shard-gb", 1e-4, "-o", "m.gguf", "-q")
    assert quantkit("gguf", source, "-t", "Q8_0", *flags).code == 0
    assert push(tmp_path / "m-00002-of-00002.gguf", "org/shards")["code"] == 0
    sent = hub_server.repos["models/org/shards"].revisions[SHA]
    assert sent.keys() == {"m-00001-of-00002.gguf", "m-00002-of-00002.gguf", "README.md"}
    assert all(sent[path.name] == path.read_bytes() for path in tmp_path.glob("m-*.gguf"))
