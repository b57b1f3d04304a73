"""Regenerate quantkit/evaluation/tasks/cloze.jsonl: passages whose last word is to be guessed.

    python scripts/make_cloze.py [-o FILE]

As in LAMBADA (Paperno et al. 2016, section 3) the word to be guessed is to follow from the passage, hardly
from its last sentence: here it is one that the passage has had before, and not just before. Nobody has
tried these passages on people, so not every one can be guessed. They come from tests/data/heldout.txt, on
which nothing is trained or calibrated; neighbours overlap, and end at least STEP words apart.
"""

from __future__ import annotations

import argparse
import json
import re
from pathlib import Path

ROOT = Path(__file__).parent.parent
WORDS = 100  # of a passage at least, before the word to be guessed
STEP = 12  # words between two of them
RECENT = 4  # words: what was said just before would be an echo
COMMON = set(
    """
    about above after again against also another away back because been before being below between both
    came could days done down during each even ever every found from further gave given goes gone great
    hand have having head here himself however into itself just knew know last less like little long
    look looked made make many might mine more most much must myself never nothing once only other
    others over quite rather said same seen shall should since some still such take than that their them
    then there these they thing things think this those though thought three through time told took
    twice under until upon very want well went were what when where whether which while whole will with
    within without work would year years your
    """.split()
)


def passages(text: str) -> list[str]:
    """Passages that end in the word to be guessed, in the order of the text."""
    found, last = [], -STEP
    tokens = list(re.finditer(r"\S+", text))
    starts = [0] + [k + 1 for k, token in enumerate(tokens[:-1]) if re.search(r"[.!?][\"”’']?$", token[0])]
    for index, token in enumerate(tokens):
        ends = re.fullmatch(r"([A-Za-z]{4,})[.,;:!?]?[\"”’']?", token[0])
        if not ends or ends[1].lower() in COMMON or index - last < STEP:
            continue
        begin = max((start for start in starts if start <= index - WORDS), default=None)
        if begin is None:
            continue
        before = [re.sub(r"\W+$|^\W+", "", other[0]) for other in tokens[begin:index]]
        if ends[1] in before[:-RECENT] and ends[1] not in before[-RECENT:]:
            passage = text[tokens[begin].start() : token.start() + len(ends[1])]
            found.append(" ".join(passage.split()))
            last = index
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("-o", "--output", type=Path, default=ROOT / "quantkit/evaluation/tasks/cloze.jsonl")
    output = parser.parse_args().output
    text = (ROOT / "tests" / "data" / "heldout.txt").read_text(encoding="utf-8")
    found = passages(text)
    lines = "".join(json.dumps({"text": passage}, ensure_ascii=False) + "\n" for passage in found)
    output.write_text(lines, encoding="utf-8")
    print(f"{len(found)} passages")


if __name__ == "__main__":
    main()
