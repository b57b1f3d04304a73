"""Start an OpenAI-compatible server with vLLM, llama.cpp, transformers or mlx-lm.

Examples:
  quantkit serve ./model                       # the engine follows from the layout and from what is here
  quantkit serve ./model.gguf --port 8080 --ctx 4096 --parallel 8
  quantkit serve ./model --print               # the engine's own command, and nothing is started
  quantkit serve ./model --check --port 0      # compare, start, ask for one completion, stop: for CI
  QUANTKIT_API_KEY=… quantkit serve ./model-gptq --engine vllm --host 0.0.0.0
  quantkit serve ./model -- --log-level info   # what follows -- is the engine's
"""

import json
import sys
from typing import Any

from quantkit.cli import flags, running, streams
from quantkit.errors import printable
from quantkit.evaluation.comparison.columns import check_line
from quantkit.serving.server.settings import KEY_VARIABLE, ServeSettings
from quantkit.tables import make_console, print_facts, print_line, size


@flags.command(*flags.of("options", ServeSettings))
def command(
    model: flags.MODEL,
    extra: flags.argument("Further arguments for the engine.", list[str] | None, metavar="[-- …]") = None,
    api_key: flags.flag(
        "API key that requests must contain. Other users of this machine can read flags, not variables.",
        envvar=KEY_VARIABLE,
    ) = None,
    print_only: flags.flag(
        "Print the engine's command on one line, and start nothing.", bool, "--print"
    ) = False,
    check: flags.flag(
        "Compare what the engine computes with quantkit's decode, as verify --engine does, start the server, "
        "and stop after one completion. Exit code 0: it answered; 6: the engine computes something else.",
        bool,
        "--check",
    ) = False,
    **values: Any,
) -> None:
    quiet, as_json = values["quiet"], values["as_json"]
    settings = flags.options(ServeSettings, values | {"api_key": api_key, "extra": extra or []})
    with streams.listener(quiet, computes=False) as progress:
        from quantkit.serving.server.job import compare, prepare

        opened = values["revision"], values["offline"]
        prepared = prepare(model, settings, *opened, progress, starts=not print_only)
        for warning in prepared.warnings:
            progress.warn(warning)
        checked = check and not print_only
        compared = compare(prepared, *opened, progress) if checked else None
    if print_only:
        print(json.dumps(prepared.record(), indent=2) if as_json else prepared.command.line())
        return
    with running.stopping() as signals:
        try:
            _stay(prepared, check, compared, as_json, quiet)
        except BaseException:
            if not signals:
                raise
            if not quiet:
                print(f"stopped {prepared.offer.engine}", file=sys.stderr)
            raise SystemExit(signals[0]) from None  # typer.Exit(130) would print `error: interrupted`


def _stay(prepared: Any, check: bool, compared: dict[str, Any] | None, as_json: bool, quiet: bool) -> None:
    """Serve until the engine ends; with `check`, only until it has answered once."""
    from quantkit.cli.progress import Lines, Quiet
    from quantkit.serving.server.process import serving

    output = None if quiet else sys.stderr.buffer
    progress = Quiet() if quiet else Lines()  # no bar: the engine writes to the same terminal
    try:
        if not quiet:
            _announce(prepared)
        with serving(prepared, progress, output) as (engine, proof):
            progress.close()
            if as_json:
                print(json.dumps(prepared.record(proof, compared), indent=2), flush=True)
            else:
                _show_answer(prepared, proof, compared, staying=not check)
            if check:
                return
            raise engine.ended(engine.wait())
    finally:
        progress.close()


def _announce(prepared: Any) -> None:
    """Print the engine, its memory and lengths, and its command on stderr."""
    console = make_console(stderr=True)
    sized, offer = prepared.size, prepared.offer
    cache = "" if sized.cache_bytes is None else f", cache {size(sized.cache_bytes)}"
    facts = {
        "engine": offer.engine + (f" ({offer.reason})" if offer.reason else ""),
        "room": f"{sized.parallel} × {sized.ctx:,} tokens{cache}, weights {size(sized.weight_bytes)}",
    }
    print_facts(console, facts)
    line = f"{'command':12s} {prepared.command.line()}"
    console.print(printable(line), soft_wrap=True)  # unwrapped, so that users can copy it
    for note in prepared.command.notes:
        print_line(console, f"note: {note}")


def _show_answer(prepared: Any, proof: dict[str, Any], compared: dict | None, staying: bool) -> None:
    """Print the result of `compare`, the first answer and the address on stdout; if `staying`, also a command
    with curl."""
    console = make_console()
    text = " ".join(proof["text"].split())
    facts = {"compared": check_line(compared)} if compared else {}
    facts |= {
        "healthy": f"after {proof['started_seconds']:.1f} s",
        "answered": f"{proof['prompt']!r} with {text!r} in {proof['seconds']:.1f} s",
        "base URL": prepared.url,
        "model": prepared.command.model,
    }
    print_facts(console, facts)
    if staying:
        path, _, body = prepared.request("Hello!" if prepared.chat else None)
        key = f' -H "Authorization: Bearer ${KEY_VARIABLE}"' if prepared.settings.api_key else ""
        data = json.dumps(body | {"max_tokens": 64}, ensure_ascii=False).replace("'", "'\\''")
        line = f"curl {prepared.url}{path} -H 'Content-Type: application/json'{key} -d '{data}'"
        console.print(f"\n{line}\n\nCtrl-C stops it.", soft_wrap=True)
    sys.stdout.flush()
