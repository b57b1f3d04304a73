"""A stand-in for an OpenAI endpoint on 127.0.0.1: answers at once, word by word, and does as it is told."""

from __future__ import annotations

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


class StandIn:
    """What it was asked, and how it is to answer; all tokens are words.

    refuses: fields it takes no request with; key: that it demands; chat_only, counts, models: what it has.
    failing: (every so many-th request, how): "503", "break", "error", "silence". gate: where so many
    requests must meet before any is answered.
    """

    def __init__(self, **told: Any) -> None:
        self.asked: list[dict[str, Any]] = []
        self.refuses: tuple[str, ...] = ()
        self.key: str | None = None
        self.chat_only, self.counts = False, True
        self.models: list[str] | None = ["stand-in"]
        self.failing: tuple[int, str] | None = None
        self.gate: threading.Barrier | None = None
        self.hold = threading.Event()  # set when the test is over: whoever is silent may go
        vars(self).update(told)
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), _handler(self))
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_port}"

    def __enter__(self) -> StandIn:
        threading.Thread(target=self._server.serve_forever, args=(0.01,), daemon=True).start()
        return self

    def __exit__(self, *raised: Any) -> None:
        self.hold.set()
        self._server.shutdown()
        self._server.server_close()

    def prompts(self) -> list[str]:
        """Of all requests that wanted more than one token: what belongs to the load."""
        return [body["prompt"] for body in self.asked if "prompt" in body and body["max_tokens"] > 1]


def _handler(told: StandIn) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        def log_message(self, *arguments: Any) -> None:
            pass

        def _answer(self, code: int, found: Any) -> None:
            data = json.dumps(found).encode()
            self.send_response(code)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def _event(self, found: Any) -> None:
            self.wfile.write(f"data: {json.dumps(found)}\n\n".encode())

        def do_GET(self) -> None:
            if self.path == "/health":
                self._answer(200, {"status": "ok"})
            elif self.path == "/v1/models" and told.models is not None:
                self._answer(200, {"data": [{"id": name} for name in told.models]})
            else:
                self._answer(404, {"error": "no such page"})

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            told.asked.append(body)
            number, chat = len(told.asked), self.path == "/v1/chat/completions"
            unwanted = [name for name in told.refuses if name in body]
            if told.key and self.headers["Authorization"] != f"Bearer {told.key}":
                given = self.headers["Authorization"]
                return self._answer(401, {"error": {"message": f"no entry with {given}"}})
            if not chat and told.chat_only:
                return self._answer(404, {"detail": "Not Found"})
            if unwanted:
                return self._answer(422, {"detail": f"Unexpected fields: {unwanted}"})
            if told.models is not None and body.get("model", told.models[0]) not in told.models:
                return self._answer(400, {"error": {"message": "no such model"}})
            how = None
            if told.failing and body["max_tokens"] > 1 and number % told.failing[0] == 0:
                how = told.failing[1]
            if how == "503":
                return self._answer(503, {"error": {"message": "too busy"}})
            if told.gate is not None and body["max_tokens"] > 1:
                told.gate.wait(10)
            if not body.get("stream"):
                return self._answer(200, {"choices": [{"text": " a b", "message": {"content": " a b"}}]})
            self.send_response(200)
            self.end_headers()
            self._stream(body, chat, how)

        def _stream(self, body: dict[str, Any], chat: bool, how: str | None) -> None:
            prompt = body["messages"][0]["content"] if chat else body["prompt"]
            self.wfile.write(b": a comment\n\n")
            for index in range(body["max_tokens"]):
                word = {"delta": {"content": f" w{index}"}} if chat else {"text": f" w{index}"}
                self._event({"choices": [word]})
                if how == "break":
                    return
                if how == "error":
                    return self._event({"error": {"message": "it broke"}})
                if how == "silence":
                    self.wfile.flush()
                    told.hold.wait(10)
                    return
            usage = {"prompt_tokens": len(prompt.split()) + 3, "completion_tokens": body["max_tokens"]}
            end = {"choices": [{"text": "", "finish_reason": "length"}]}
            self._event(end | ({"usage": usage} if told.counts else {}))
            self.wfile.write(b"data: [DONE]\n\n")

    return Handler
