"""Talk to a model in the terminal.

Examples:
  quantkit chat ./model-gptq-w4g128
  quantkit chat model-Q4_K_M.gguf --kv-dtype q8_0 --ctx 16384     # through llama.cpp
  quantkit chat ./model --system "Answer in one sentence." --temperature 0
  quantkit chat ./base-model --raw     # no roles: it goes on from your text
  printf 'Hello\\nAnd now?\\n' | quantkit chat ./model --json     # a line of JSON per answer

In the conversation /help lists its commands; Ctrl-C stops an answer, Ctrl-D leaves.
"""

from typing import Any

from quantkit.cli import flags, streams
from quantkit.serving.chat.settings import ChatSettings


@flags.command(*flags.of("options", ChatSettings))
def command(model: flags.MODEL, **values: Any) -> None:
    quiet = values["quiet"]
    with streams.listener(quiet) as progress:
        from quantkit.cli import chat_terminal
        from quantkit.serving.chat.start import start

        settings = flags.options(ChatSettings, values)
        trusted = values["revision"], values["offline"], values["trust_remote_code"]
        session = start(model, settings, *trusted, progress)
    try:
        chat_terminal.Terminal(session, values["as_json"], quiet).run()
    finally:
        session.engine.close()
