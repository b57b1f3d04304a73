"""Which clients are known to load a checkpoint: the rules that its layout's file has for each (`CLIENTS`).

Proven by tests/clients, scripts/clients_vllm.py and scripts/clients_legacy.py (docs/clients.md), on a CPU,
with the versions named here. Of the rules of a client the first that matches counts: every key must have one
of the listed values among those of the checkpoint's linears (`not_KEY`: a value that is not listed), and
`loads` and `note` say what happens; `needs` which packages the client wants for it, and `option` what has to
be said where a program loads it, which no command line says. Where none matches, nobody here has tried it.
Keys:

layout form bits symmetric desc_act version g_idx   as stored; form: a ggml type, int8, nf4, pack-quantized …
model_type                                          of GGUF files the architecture, by llama.cpp's name
group_size                                          -1 for whole rows
mixed, kept                                         not all linears alike; linears left in 16 bit
activations, biases, rope_scaled                    whether there are such
static, cache                                       stored scales: of inputs of linears; of keys and values
experts                                             whether there are tensors of all experts of a layer

Hybrids (blocks with parameters that are no linear: convolutions, state spaces) and towers of other modalities
were tried in the clients and layouts that `TRIED` names alone, whatever the rules say.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from quantkit import layouts

OUTCOMES = ("loads", "note", "needs", "option")
DAMAGED = "the checkpoint is damaged, see below"
TRIED = {  # fact -> layouts and clients of which it is known, by tests/clients
    "hybrid": set(),
    "towers": {(layout, "transformers") for layout in ("none", "bitsandbytes", "compressed-tensors")},
}


@dataclass(frozen=True)
class Client:
    """plain: whether it loads what is not quantized; reads: all that it loads, where it is said to be all."""

    name: str
    version: str
    plain: bool | None = None
    reads: str = ""


CLIENTS = (
    Client("transformers", "5.23", plain=True),
    Client("GPTQModel", "7.6", reads="gptq and awq"),
    Client("vLLM", "0.32, CPU", plain=True),
    Client("AutoGPTQ", "0.7.1", reads="gptq"),
    Client("AutoAWQ", "0.2.9", reads="awq"),
    Client("llama.cpp", "2026.10", reads="GGUF files"),
)


def known(facts: Mapping[str, set]) -> list[dict[str, Any]]:
    """Each client with `loads` (None: not tried), `note`, `needs` and `option`; `facts`: the values that
    linears have."""
    found = []
    for client in CLIENTS:
        rule = rule_of(client, facts)
        outcome = {"loads": rule.get("loads"), "note": rule.get("note", "")}
        outcome |= {"needs": rule.get("needs", []), "option": rule.get("option", "")}
        if outcome["loads"] and (strange := _untried(client, facts)):
            outcome = {"loads": None, "note": f"not tried with {strange}"}
        found.append({"client": client.name, "version": client.version} | outcome)
    return found


def _untried(client: Client, facts: Mapping[str, set]) -> str:
    """What the checkpoint has that nobody loaded in this client; empty for nothing."""
    (layout,) = facts["layout"]
    strange = {"hybrid": "blocks of this kind", "towers": "towers of other modalities"}
    return next(
        (words for fact, words in strange.items()
         if True in facts.get(fact, ()) and (layout, client.name) not in TRIED[fact]), "",
    )  # fmt: skip


def rule_of(client: Client, facts: Mapping[str, set]) -> Mapping[str, Any]:
    """The rule that decides, {} where there is none."""
    (layout,) = facts["layout"]
    own = next((m.CLIENTS for m in layouts.modules() if layout == m.NAME), {}).get(client.name)
    if own is not None:
        return next((rule for rule in own if _matches(rule, facts)), {})
    if layout == "none" and client.plain:
        return {"loads": True}
    return {"loads": False, "note": f"it reads {client.reads}"} if client.reads else {}


def of_damaged(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The same of a checkpoint that is damaged: nobody loads it as it was meant."""
    return [row | {"loads": False, "note": DAMAGED} if row["loads"] else row for row in rows]


def _matches(rule: Mapping[str, Any], facts: Mapping[str, set]) -> bool:
    for key, wanted in rule.items():
        if key in OUTCOMES:
            continue
        listed = set(wanted) if isinstance(wanted, list) else {wanted}
        name = key.removeprefix("not_")
        values = facts.get(name, set())
        if not (values - listed if name != key else values & listed):
            return False
    return True
