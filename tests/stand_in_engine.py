"""A stand-in for an engine's server, as a program: stand_in_engine.py PORT HOW.

HOW: well; dies (before it listens); mute (answers requests with an error); prose (answers
without JSON); deaf (to SIGTERM, with a child).
"""

import json
import signal
import subprocess
import sys
from http.server import BaseHTTPRequestHandler, HTTPServer

port, how = int(sys.argv[1]), sys.argv[2]
print("loading the model", flush=True)
if how == "dies":
    print("no kernel for this layout", file=sys.stderr)
    sys.exit(3)
if how == "deaf":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    print(f"child {child.pid}", flush=True)


class Handler(BaseHTTPRequestHandler):
    def log_message(self, *arguments):
        pass

    def answer(self, code, found):
        data = json.dumps(found).encode()
        self.send_response(code)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def do_GET(self):
        self.answer(200, {})

    def do_POST(self):
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if how == "mute":
            print("the worker is dead", flush=True)
            return self.answer(500, {"detail": f"no worker for {self.headers['Authorization']}"})
        if how == "prose":
            return self.answer(200, "not a completion")
        text = f" as {asked['model']} says"
        choice = {"text": text} if self.path == "/v1/completions" else {"message": {"content": f"chat{text}"}}
        self.answer(200, {"choices": [choice], "usage": {"total_tokens": 4}})


HTTPServer(("127.0.0.1", port), Handler).serve_forever()
