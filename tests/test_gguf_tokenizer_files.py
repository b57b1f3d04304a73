"""What a folder's tokenizer files become in GGUF metadata, what is refused, and what comes back of it."""

import json
import shutil
import unicodedata

import numpy as np
import pytest
import transformers as hf
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
from vocabularies import (
    BYTE,
    CONTROL,
    NORMAL,
    UNKNOWN,
    UNUSED,
    USER_DEFINED,
    ids_of,
    pieces,
    save,
    spaced,
    trained,
)

from quantkit.errors import NOT_FOUND, RUNTIME, UNSUPPORTED, USAGE, QuantkitError
from quantkit.models.gguf.metadata import of_folder as metadata
from quantkit.models.gguf.pre_tokenizers import BY_NAME, CONTRACTION, PATTERNS, ROWS, split
from quantkit.models.gguf.tokenizer import from_metadata
from quantkit.models.gguf.tokenizer_hash import SAMPLE, tokenizer_sha256

SMALL = {"<s>": 0, "</s>": 1, "a": 2, "b": 3, "Ġ": 4, "c": 5, "ab": 6, "Ġab": 7}
MERGES = [("a", "b"), ("Ġ", "ab")]
KEY = "tokenizer.ggml."


def small(**changes) -> str:
    """tokenizer.json of SMALL and one user-defined token; `changes` go into it."""
    tokenizer = Tokenizer(models.BPE(SMALL, MERGES))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<s>", "</s>"])
    tokenizer.add_tokens(["<|x|>"])
    return json.dumps(json.loads(tokenizer.to_str()) | changes)


def change(folder, name: str, **entries) -> None:
    """Set entries of a JSON file, which may be new; None takes one out."""
    path = folder / name
    stored = json.loads(path.read_text()) if path.exists() else {}
    path.write_text(json.dumps({k: v for k, v in (stored | entries).items() if v is not None}))


@pytest.fixture
def folder(tmp_path):
    """A folder with the small tokenizer."""
    (tmp_path / "tokenizer.json").write_text(small())
    change(tmp_path, "tokenizer_config.json", bos_token="<s>", eos_token={"content": "</s>", "special": True})
    return tmp_path


def warned(folder, size: int = 9, pre: str | None = None) -> tuple[dict, list[str]]:
    warnings: list[str] = []
    return metadata(folder, size, pre, warnings.append), warnings


def refused(folder, size: int = 9, pre: str | None = None) -> QuantkitError:
    with pytest.raises(QuantkitError) as caught:
        metadata(folder, size, pre)
    assert caught.value.hint
    return caught.value


# ---- every key


def test_every_key_of_a_small_tokenizer(folder):
    stored = json.loads(small())
    del stored["model"]["vocab"]["c"]
    stored["model"]["vocab"]["<|x|>"] = 8
    (folder / "tokenizer.json").write_text(json.dumps(stored))
    change(folder, "tokenizer_config.json", pad_token="</s>", chat_template="{{ messages }}")
    found, warnings = warned(folder, 11)
    tokens, types = found.pop(f"{KEY}tokens"), found.pop(f"{KEY}token_type")
    assert tokens == ["<s>", "</s>", "a", "b", "Ġ", "[PAD5]", "ab", "Ġab", "<|x|>", "[PAD9]", "[PAD10]"]
    kinds = [CONTROL, CONTROL, NORMAL, NORMAL, NORMAL, UNUSED, NORMAL, NORMAL, USER_DEFINED, UNUSED, UNUSED]
    assert types.dtype == np.int32 and types.tolist() == kinds
    assert found == {
        f"{KEY}model": "gpt2",
        f"{KEY}pre": "gpt-2",
        f"{KEY}merges": ["a b", "Ġ ab"],
        f"{KEY}bos_token_id": 0,
        f"{KEY}eos_token_id": 1,
        f"{KEY}padding_token_id": 1,
        f"{KEY}add_bos_token": False,
        f"{KEY}add_eos_token": False,
        "tokenizer.chat_template": "{{ messages }}",
    }
    assert warnings == []


def test_every_key_of_a_sentencepiece_tokenizer(tmp_path):
    save(tmp_path, spaced(prefix=False), bos=True)
    found = metadata(tmp_path, len(pieces()) + 3)
    tokens, types, scores = (found.pop(KEY + name) for name in ("tokens", "token_type", "scores"))
    assert tokens[: len(pieces())] == [token for token, _ in pieces()]
    assert tokens[len(pieces()) :] == ["<|user|>", "< x >", f"[PAD{len(pieces()) + 2}]"]  # spaces are spaces
    assert types.tolist() == [kind for _, kind in pieces()] + [USER_DEFINED, USER_DEFINED, UNUSED]
    assert [types[k] for k in (0, 1, 2, 3)] == [UNKNOWN, CONTROL, CONTROL, BYTE]
    assert scores.dtype == np.float32 and scores[-3:].tolist() == [-1000.0, -1000.0, -10000.0]
    merged = [k for k, (token, kind) in enumerate(pieces()) if kind == NORMAL and len(token) > 1]
    assert scores[merged].tolist() == [-float(rank) for rank in range(len(merged))]
    assert found == {
        f"{KEY}model": "llama",
        f"{KEY}pre": "default",
        f"{KEY}add_space_prefix": False,
        f"{KEY}bos_token_id": 1,
        f"{KEY}eos_token_id": 2,
        f"{KEY}unknown_token_id": 0,
        f"{KEY}add_bos_token": True,
        f"{KEY}add_eos_token": False,
    }


def test_merges_are_read_in_both_forms(folder):
    expected = metadata(folder, 9)
    stored = json.loads(small())
    stored["model"]["merges"] = [" ".join(pair) for pair in stored["model"]["merges"]]
    (folder / "tokenizer.json").write_text(json.dumps(stored))
    assert str(metadata(folder, 9)) == str(expected)


def test_older_files_are_read_through_transformers(tmp_path):
    stored = json.loads(trained(names().index("gpt-2")))
    (tmp_path / "vocab.json").write_text(json.dumps(stored["model"]["vocab"]))
    merges = [" ".join(pair) for pair in stored["model"]["merges"]]
    (tmp_path / "merges.txt").write_text("\n".join(["#version: 0.2", *merges]))
    change(tmp_path, "tokenizer_config.json", tokenizer_class="GPT2Tokenizer")
    change(tmp_path, "config.json", model_type="gpt2")
    found = metadata(tmp_path, 700)
    assert found[f"{KEY}pre"] == "gpt-2" and found[f"{KEY}merges"] == merges
    assert found[f"{KEY}tokens"] == sorted(stored["model"]["vocab"], key=stored["model"]["vocab"].get)


def names() -> list[str]:
    return [row.names[0] for row in ROWS]


# ---- special tokens


@pytest.mark.parametrize(
    ("processor", "adds"),
    [
        (None, (False, False)),
        (processors.ByteLevel(), (False, False)),
        (processors.TemplateProcessing("<s> $A", None, [("<s>", 0)]), (True, False)),
        (processors.TemplateProcessing("<s> $A </s>", None, [("<s>", 0), ("</s>", 1)]), (True, True)),
        (processors.TemplateProcessing("$A </s>", None, [("</s>", 1)]), (False, True)),
        (processors.RobertaProcessing(("</s>", 1), ("<s>", 0)), (True, True)),
        (
            processors.Sequence(
                [processors.ByteLevel(), processors.TemplateProcessing("<s> $A", None, [("<s>", 0)])]
            ),
            (True, False),
        ),
    ],
)
def test_tokens_around_a_text_are_those_the_tokenizer_puts_there(processor, adds, folder):
    tokenizer = Tokenizer.from_str(small())
    if processor is not None:
        tokenizer.post_processor = processor
    tokenizer.enable_padding(length=16)
    tokenizer.save(str(folder / "tokenizer.json"))
    tokenizer.no_padding()
    change(folder, "tokenizer_config.json", add_bos_token=not adds[0])  # transformers does not heed it either
    found = metadata(folder, 9)
    assert (found[f"{KEY}add_bos_token"], found[f"{KEY}add_eos_token"]) == adds
    assert ids_of(from_metadata(found), "ab", True) == tokenizer.encode("ab").ids


def test_what_llama_cpp_cannot_put_around_a_text_is_told(folder):
    template = processors.TemplateProcessing("<s> </s> $A", None, [("<s>", 0), ("</s>", 1)])
    tokenizer = Tokenizer.from_str(small())
    tokenizer.post_processor = template
    tokenizer.save(str(folder / "tokenizer.json"))
    found, warnings = warned(folder)
    assert not found[f"{KEY}add_bos_token"]
    assert warnings == ["llama.cpp will not put <s>, </s> before a text"]


def test_special_tokens_come_from_whatever_file_names_them(folder):
    (folder / "tokenizer_config.json").unlink()
    change(folder, "special_tokens_map.json", bos_token={"content": "<s>"}, pad_token="never")
    change(folder, "generation_config.json", eos_token_id=[1, 8], pad_token_id=0)
    change(folder, "config.json", eos_token_id=0)
    found = metadata(folder, 9)
    roles = ("bos", "eos", "padding", "eot")  # a generation ends at <|x|>, too
    assert [found[f"{KEY}{role}_token_id"] for role in roles] == [0, 1, 0, 8]
    assert f"{KEY}unknown_token_id" not in found


def test_ends_that_llama_cpp_knows_are_not_named_again(folder):
    stored = json.loads(small())
    for number, text in ((8, "<|im_end|>"), (9, "<stop>"), (10, "<halt>"), (11, "<quit>")):
        stored["added_tokens"][2:] = [*stored["added_tokens"][2:], entry(number, text)]
    stored["added_tokens"] = [e for e in stored["added_tokens"] if e["content"] != "<|x|>"]
    (folder / "tokenizer.json").write_text(json.dumps(stored))
    change(folder, "generation_config.json", eos_token_id=[1, 8, 9, 10, 11])
    found, warnings = warned(folder, 12)
    assert [found[f"{KEY}{role}_token_id"] for role in ("eos", "eot", "eom")] == [1, 9, 10]
    assert warnings == ["llama.cpp will not stop at <quit>"]


def entry(number: int, text: str, **flags) -> dict:
    plain = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    return {"id": number, "content": text, "special": True} | plain | flags


def test_a_text_without_an_end(folder):
    (folder / "tokenizer_config.json").unlink()
    found, warnings = warned(folder)
    assert f"{KEY}eos_token_id" not in found
    assert warnings == ["llama.cpp will stop at token 11, as no token ends a text"]


def test_added_tokens_of_the_configuration(folder):
    change(
        folder, "tokenizer_config.json", added_tokens_decoder={"5": {"content": "<five>", "special": True}}
    )
    change(folder, "added_tokens.json", **{"<six>": 9})
    found = metadata(folder, 10)
    assert [found[f"{KEY}tokens"][k] for k in (5, 9)] == ["<five>", "<six>"]
    assert found[f"{KEY}token_type"][[5, 9]].tolist() == [CONTROL, USER_DEFINED]


def test_an_added_token_takes_the_place_of_the_models(folder):
    """A text has one id; llama.cpp refuses a file where it has two."""
    change(folder, "tokenizer_config.json", added_tokens_decoder={"9": {"content": "ab", "special": True}})
    found = metadata(folder, 10)
    assert found[f"{KEY}tokens"][6] == "[PAD6]" and found[f"{KEY}tokens"][9] == "ab"


def test_tokens_beyond_the_embedding_are_left_out(folder):
    found, warnings = warned(folder, 7)
    assert found[f"{KEY}tokens"] == ["<s>", "</s>", "a", "b", "Ġ", "c", "ab"]
    assert found[f"{KEY}merges"] == ["a b"]
    assert warnings == ["tokens beyond the embedding's 7 rows are left out: Ġab, <|x|>"]
    change(folder, "tokenizer_config.json", eos_token="<|x|>")
    assert f"{KEY}eos_token_id" in metadata(folder, 7)  # bos, as llama.cpp would stop at token 11


def test_padding_has_names_of_its_own(folder):
    change(folder, "added_tokens.json", **{"[PAD9]": 10})
    assert metadata(folder, 12)[f"{KEY}tokens"][8:] == ["<|x|>", "[PAD9]_", "[PAD9]", "[PAD11]"]
    change(folder, "added_tokens.json", **{"[PAD9]": 9})
    found = metadata(folder, 12)
    assert found[f"{KEY}tokens"][8:] == ["<|x|>", "[PAD9]", "[PAD10]", "[PAD11]"]
    assert len(from_metadata(found)) == 10 and from_metadata(found).get_vocab()["[PAD9]"] == 9


# ---- chat templates


def test_chat_templates(folder):
    key = "tokenizer.chat_template"
    change(folder, "chat_template.json", chat_template="legacy")
    assert metadata(folder, 9)[key] == "legacy"
    named = [{"name": "default", "template": "d"}, {"name": "tool_use", "template": "t"}]
    change(folder, "tokenizer_config.json", chat_template=named)
    found = metadata(folder, 9)
    assert (found[key], found[f"{key}s"], found[f"{key}.tool_use"]) == ("d", ["tool_use"], "t")
    assert from_metadata(found).chat_template == {"default": "d", "tool_use": "t"}
    found[f"{key}s"] = "tool_use"  # a text in place of the list of one text
    assert from_metadata(found).chat_template == {"default": "d", "tool_use": "t"}
    (folder / "chat_template.jinja").write_text("file")
    found = metadata(folder, 9)
    assert found[key] == "file" and f"{key}s" not in found
    assert from_metadata(found).chat_template == "file"
    (folder / "additional_chat_templates").mkdir()
    (folder / "additional_chat_templates" / "rag.jinja").write_text("r")
    found = metadata(folder, 9)
    assert (found[key], found[f"{key}s"], found[f"{key}.rag"]) == ("file", ["rag"], "r")


# ---- pre-tokenizers


@pytest.mark.parametrize(
    ("pattern", "name"),
    [
        (PATTERNS["llama3"].replace(CONTRACTION, "'(?i:[sdmt]|ll|ve|re)"), "dbrx"),
        (PATTERNS["llama3"].replace(r"|\s*[\r\n]+|", r"|\s*[\r\n]|"), "dbrx"),
        (PATTERNS["qwen2"].replace(r"\p{N}]+[", r"\p{N}]++[").replace(r"]?\p{L}+", r"]?+\p{L}+"), "qwen2"),
        (PATTERNS["qwen2"].replace(r"\p{N}|", r"\p{N}{1}|").replace(r"[\r\n]", "[\r\n]"), "qwen2"),
        (PATTERNS["gpt2"], "gpt-2"),
    ],
)
@pytest.mark.parametrize("behavior", [("Isolated", False), ("Removed", True)])
def test_a_pattern_is_recognised_however_it_is_written(pattern, name, behavior, folder):
    step = split(pattern) | {"behavior": behavior[0], "invert": behavior[1]}
    last = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    sequence = {"type": "Sequence", "pretokenizers": [{"type": "Sequence", "pretokenizers": [step]}, last]}
    (folder / "tokenizer.json").write_text(small(pre_tokenizer=sequence))
    assert metadata(folder, 9)[f"{KEY}pre"] == name


@pytest.mark.parametrize(
    ("nfc", "ignore_merges", "row", "name"),
    [
        (False, True, "llama-bpe", "llama-bpe"),
        (False, False, "llama-bpe", "dbrx"),
        (True, False, "olmo", "olmo"),
        (False, False, "olmo", "gpt-2"),
        (True, False, "starcoder", "command-r"),
        (True, True, "gpt-4o", "gpt-4o"),  # every token is made by merges, so it does not matter
    ],
)
def test_names_are_told_apart_by_normalizer_and_merges(nfc, ignore_merges, row, name, folder):
    stored = json.loads(small(pre_tokenizer=BY_NAME[row].pre_tokenizer))
    stored["normalizer"] = {"type": "NFC"} if nfc else None
    stored["model"]["ignore_merges"] = ignore_merges
    (folder / "tokenizer.json").write_text(json.dumps(stored))
    found, warnings = warned(folder)
    assert found[f"{KEY}pre"] == name
    expected = ["llama.cpp does not normalize text (NFC)"] * nfc
    assert warnings == expected + [f"llama.cpp's {name} {BY_NAME[name].otherwise}"] * (name == "gpt-4o")


def test_ignored_merges_are_refused_where_they_matter(folder):
    stored = json.loads(small(pre_tokenizer=BY_NAME["gpt-4o"].pre_tokenizer))
    stored["model"] |= {"ignore_merges": True, "merges": stored["model"]["merges"][:1]}
    (folder / "tokenizer.json").write_text(json.dumps(stored))
    error = refused(folder)
    assert "'Ġab'" in error.message and "gpt-4o" in error.message and error.exit_code == UNSUPPORTED


def test_an_unknown_pre_tokenizer_is_named(folder):
    steps = {"type": "Sequence", "pretokenizers": [split(r"\p{N}{4}"), pre_tokenizer_bytes()]}
    (folder / "tokenizer.json").write_text(small(pre_tokenizer=steps))
    error = refused(folder)
    assert (
        r"\\p{N}{4}" in error.message
        and "--pre-tokenizer NAME" in error.hint
        and error.exit_code == UNSUPPORTED
    )
    assert "llama-bpe" in error.hint
    assert metadata(folder, 9, "tekken")[f"{KEY}pre"] == "tekken"
    error = refused(folder, pre="tekke")
    assert error.exit_code == USAGE and "tekken" in error.hint


def pre_tokenizer_bytes(**changes) -> dict:
    plain = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    return plain | changes


# ---- refusals and warnings


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"pre_tokenizer": pre_tokenizer_bytes(add_prefix_space=True)}, "'add_prefix_space': True"),
        ({"normalizer": {"type": "Lowercase"}}, "Lowercase"),
        ({"pre_tokenizer": None}, "neither byte-level nor has byte fallback"),
        ({"pre_tokenizer": {"type": "Whitespace"}}, "neither byte-level nor has byte fallback"),
    ],
)
def test_tokenizers_that_llama_cpp_cannot_run(changes, words, folder):
    (folder / "tokenizer.json").write_text(small(**changes))
    error = refused(folder)
    assert words in error.message and error.exit_code == UNSUPPORTED and str(folder) in error.message


@pytest.mark.parametrize(
    ("model", "words"),
    [
        (models.WordPiece({"[UNK]": 0, "a": 1}, unk_token="[UNK]"), "WordPiece"),
        (models.Unigram([("<unk>", 0.0), ("a", -1.0)], unk_id=0), "Unigram"),
        (models.WordLevel({"[UNK]": 0}, unk_token="[UNK]"), "WordLevel"),
        (models.BPE(SMALL, MERGES, end_of_word_suffix="</w>"), "end_of_word_suffix ('</w>')"),
        (models.BPE(SMALL, MERGES, byte_fallback=True), "lacks the byte tokens <0x00>"),
    ],
)
def test_models_that_llama_cpp_cannot_run(model, words, tmp_path):
    Tokenizer(model).save(str(tmp_path / "tokenizer.json"))
    error = refused(tmp_path)
    assert words in error.message and error.exit_code == UNSUPPORTED


def test_merges_that_no_scores_express_are_refused(tmp_path):
    stored = json.loads(spaced())
    merges = stored["model"]["merges"]
    lost = next(pair for pair in merges if sum("".join(other) == "".join(pair) for other in merges) > 1)
    merges.remove(lost)
    (tmp_path / "tokenizer.json").write_text(json.dumps(stored))
    error = refused(tmp_path)
    assert f"whose merges no scores express: those that make {''.join(lost)!r}" in error.message


@pytest.mark.parametrize(
    ("step", "words"),
    [
        (normalizers.Lowercase(), "Lowercase"),
        (normalizers.Replace("a", "b"), "Replace"),
    ],
)
def test_sentencepiece_normalizers_that_change_ordinary_text(step, words, tmp_path):
    tokenizer = Tokenizer.from_str(spaced())
    spaces = tokenizer.normalizer
    tokenizer.normalizer = normalizers.Sequence([step, spaces])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    assert words in refused(tmp_path).message
    tokenizer.normalizer = normalizers.Sequence([normalizers.NFKC(), spaces])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    assert warned(tmp_path)[1][0] == "llama.cpp does not normalize text (NFKC)"


def test_sentencepiece_words_cut_in_any_other_way(tmp_path):
    tokenizer = Tokenizer.from_str(spaced())
    tokenizer.pre_tokenizer = pre_tokenizers.Digits(individual_digits=True)
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    assert "cuts text with {'type': 'Digits'" in refused(tmp_path).message
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="never", split=True)
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    found, warnings = warned(tmp_path, len(pieces()) + 2)
    assert found[f"{KEY}add_space_prefix"] is True  # of the normalizer
    assert warnings[:1] == ["llama.cpp also makes tokens that hold a space after their first character"]


def test_pre_is_for_byte_level_tokenizers(tmp_path):
    save(tmp_path, spaced())
    assert refused(tmp_path, pre="gpt-2").exit_code == USAGE


def test_spaces_beside_added_tokens_are_told(folder):
    stored = json.loads(small())
    stored["added_tokens"][2]["rstrip"] = True
    (folder / "tokenizer.json").write_text(json.dumps(stored))
    assert warned(folder)[1] == ["llama.cpp keeps the spaces next to <|x|>, which this tokenizer drops"]
    tokenizer = Tokenizer.from_str(spaced())
    tokenizer.add_tokens(["<|loose|>"])  # found as "▁<|loose|>" in what the normalizer leaves
    tokenizer.save(str(folder / "tokenizer.json"))
    number = tokenizer.token_to_id("<|loose|>")
    assert number in tokenizer.encode("a <|loose|>").ids and number not in tokenizer.encode("a<|loose|>").ids
    assert warned(folder, 2000)[1][0] == "llama.cpp finds <|loose|> also where no space stands before"


def test_files_that_are_absent_or_damaged(folder):
    path = folder / "tokenizer.json"
    path.write_text(path.read_text()[:-20])
    assert str(path) in refused(folder).message
    path.write_text(small())
    for name, entries, words in (
        ("tokenizer_config.json", {"added_tokens_decoder": {"x": {}}}, "invalid literal for int"),
        ("tokenizer_config.json", {"added_tokens_decoder": {"9": "x"}}, "damaged: TypeError"),
        ("tokenizer_config.json", {"chat_template": ["x"]}, "damaged: TypeError"),
        ("added_tokens.json", {"x": "y"}, "damaged: TypeError"),
    ):
        change(folder, name, **entries)
        assert words in refused(folder).message
        change(folder, name, **dict.fromkeys(entries))
    (folder / "tokenizer_config.json").write_text("[]")
    assert "tokenizer_config.json is not a JSON object" in refused(folder).message
    (folder / "tokenizer_config.json").write_text("{")
    assert "tokenizer_config.json is not JSON" in refused(folder).message
    shutil.rmtree(folder)
    folder.mkdir()
    error = refused(folder)
    assert error.exit_code == NOT_FOUND and str(folder) in error.message


# ---- back from metadata


@pytest.mark.parametrize(
    ("key", "value", "code", "words"),
    [
        ("model", None, UNSUPPORTED, "None"),
        ("model", "bert", UNSUPPORTED, "'bert'"),
        ("model", 3, UNSUPPORTED, "kind 3"),
        ("pre", "never", UNSUPPORTED, "'never'"),
        ("tokens", None, RUNTIME, "tokens"),
        ("tokens", [1, 2], RUNTIME, "no texts"),
        ("tokens", ["a"] * 9, RUNTIME, "a token has two ids"),
        ("token_type", np.ones(8, np.int32), RUNTIME, "not as many as their types"),
        ("merges", None, RUNTIME, "merges"),
        ("merges", ["ab"], RUNTIME, "'ab' is no merge"),
        ("merges", ["a never"], RUNTIME, "never"),
    ],
)
def test_damaged_metadata(key, value, code, words, folder):
    keys = metadata(folder, 9) | {KEY + key: value}
    with pytest.raises(QuantkitError) as caught:
        from_metadata({key: value for key, value in keys.items() if value is not None})
    assert words in caught.value.message and caught.value.hint and caught.value.exit_code == code


def test_damaged_metadata_of_sentencepiece(tmp_path):
    save(tmp_path, spaced())
    keys = metadata(tmp_path, len(pieces()) + 2)
    long = keys[f"{KEY}tokens"][:-3] + ["x" * 2000] + keys[f"{KEY}tokens"][-2:]
    types = keys[f"{KEY}token_type"].copy()
    types[-3] = NORMAL
    for change in ({"scores": np.zeros(3, np.float32)}, {"tokens": long, "token_type": types}):
        with pytest.raises(QuantkitError) as caught:
            from_metadata(keys | {KEY + name: value for name, value in change.items()})
        assert "damaged" in caught.value.message


def test_defaults_are_those_of_llama_cpp(tmp_path):
    save(tmp_path, spaced(), bos=True)
    keys = metadata(tmp_path, len(pieces()) + 2)
    for name in ("add_bos_token", "bos_token_id", "eos_token_id", "unknown_token_id", "add_space_prefix"):
        del keys[KEY + name]
    tokenizer = from_metadata(keys)
    assert (tokenizer.bos_token, tokenizer.eos_token, tokenizer.unk_token) == ("<s>", "</s>", "<unk>")
    assert (
        ids_of(tokenizer, "", True) == [1]
        and tokenizer.convert_ids_to_tokens(ids_of(tokenizer, "a"))[0][0] == "▁"
    )
    save(tmp_path / "bpe", trained(names().index("llama-bpe")))
    keys = metadata(tmp_path / "bpe", 701)
    del keys[f"{KEY}add_bos_token"]
    assert ids_of(from_metadata(keys), "", True) == [0]
    with pytest.raises(QuantkitError, match="adds bos"):
        from_metadata(keys | {f"{KEY}bos_token_id": 1000})


def test_added_tokens_do_not_move(folder):
    tokenizer = from_metadata(metadata(folder, 12))
    expected = Tokenizer.from_str(small()).get_vocab()
    assert tokenizer.get_vocab() == expected and len(tokenizer) == len(expected)
    assert ids_of(tokenizer, "a<|x|>b<s>", parse_special=True) == [2, 8, 3, 0]


# ---- one tokenizer or two


def sha256(stored: dict, size: int | None = None) -> str:
    tokenizer = Tokenizer.from_str(json.dumps(stored))
    return tokenizer_sha256(hf.PreTrainedTokenizerFast(tokenizer_object=tokenizer), size)


def swap(entries, one, other) -> None:
    entries[one], entries[other] = entries[other], entries[one]


CHANGES = {
    "less merges": lambda stored: stored["model"]["merges"].pop(),
    "another token": lambda stored: stored["model"]["vocab"].update(never=len(stored["model"]["vocab"]) + 5),
    "lower case": lambda stored: stored.update(normalizer={"type": "Lowercase"}),
    "swapped merges": lambda stored: swap(stored["model"]["merges"], 10, 11),
    "swapped tokens": lambda stored: swap(stored["model"]["vocab"], "th", "in"),
    "other words": lambda stored: stored.update(pre_tokenizer=BY_NAME["qwen2"].pre_tokenizer),
    "another name": lambda stored: stored["added_tokens"][1].update(content="<end>"),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_different_tokenizers_have_different_hashes(change):
    stored = json.loads(trained(names().index("gpt-2")))
    expected = sha256(stored)
    change(stored)
    assert sha256(stored) != expected


@pytest.mark.parametrize("change", list(CHANGES.values())[:4])
def test_different_sentencepiece_tokenizers_have_different_hashes(change):
    stored = json.loads(spaced())
    expected = sha256(stored)
    change(stored)
    assert sha256(stored) != expected


def test_what_a_sample_cannot_show_changes_the_hash():
    """Cuts and tokens that the sample has no word for."""
    stored = json.loads(small())
    found = {sha256(stored)}
    stored["pre_tokenizer"] = BY_NAME["starcoder"].pre_tokenizer
    found.add(sha256(stored))
    stored["model"]["merges"].pop()
    found.add(sha256(stored))
    stored["model"]["ignore_merges"] = True
    found.add(sha256(stored))
    assert len(found) == 4


def test_merges_to_added_tokens_do_not_change_a_hash(tmp_path):
    """A GGUF file has none of SentencePiece's: they are found before anything is merged."""
    tokenizer = Tokenizer.from_str(spaced())
    normal = [(k, token) for k, (token, kind) in enumerate(pieces()) if kind == NORMAL]
    number, merged = next((k, token) for k, token in normal if token.isalpha())
    tokenizer.add_tokens([AddedToken(merged, normalized=False)])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    found = metadata(tmp_path, len(pieces()) + 2)
    assert len(merged) > 1 and found[f"{KEY}token_type"][number] == USER_DEFINED
    assert tokenizer_sha256(from_metadata(found)) == sha256(json.loads(tokenizer.to_str()))


def test_ways_to_write_a_tokenizer_do_not_change_its_hash():
    stored = json.loads(trained(names().index("llama-bpe")))
    expected = sha256(stored)
    step = stored["pre_tokenizer"]["pretokenizers"][0]
    step["pattern"]["Regex"] = step["pattern"]["Regex"].replace(CONTRACTION, "'(?i:[sdmt]|ll|ve|re)")
    stored["model"] |= {"fuse_unk": True}
    stored["model"]["vocab"] |= {"<|user|>": 700, "beyond": 5000}
    assert sha256(stored, 702) == expected != sha256(stored)


def test_tokenizers_that_are_not_bpe_are_compared_as_they_are_written():
    tokenizer = Tokenizer(models.WordPiece({"[UNK]": 0, "a": 1}, unk_token="[UNK]"))
    stored = json.loads(tokenizer.to_str())
    expected = sha256(stored)
    stored["model"]["max_input_chars_per_word"] = 7
    assert sha256(stored) != expected


def test_the_sample_is_normalized_text():
    """Or the normalization that GGUF files do not state would tell tokenizers apart."""
    assert unicodedata.normalize("NFC", SAMPLE) == SAMPLE and SAMPLE[0] != " "
