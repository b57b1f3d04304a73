"""A stand-in for the hub, on this machine: the routes that models and datasets need, and what was asked.

Point `HF_ENDPOINT` at `url`. huggingface_hub reads its variables when it is imported, so what talks to
the stand-in runs in a process of its own (`environment`, `Elsewhere`).
"""

from __future__ import annotations

import base64
import hashlib
import json
import os
import re
import subprocess
import sys
import threading
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

REPOSITORY = Path(__file__).parents[1]
SHA = "0123456789abcdef0123456789abcdef01234567"
TOKEN = "hf_standinsecret"
KINDS = {"api/models/": "models", "api/datasets/": "datasets", "datasets/": "datasets", "": "models"}
ROUTE = re.compile(
    r"/(?P<kind>api/models/|api/datasets/|datasets/|)(?P<repo>[\w.-]+/[\w.-]+)"
    r"(?:/(?P<verb>[\w-]+)(?:/(?P<revision>[^/]+)(?:/(?P<path>.*))?)?)?"
)


@dataclass
class Repo:
    """`revisions` maps commits to files; branches and tags are names of commits.

    `state`: public, private or gated (without the token), broken, portal or cut (in any case).
    """

    revisions: dict[str, dict[str, bytes]]
    names: dict[str, str] = field(default_factory=lambda: {"main": SHA})
    state: str = "public"


class StandInHub(ThreadingHTTPServer):
    """`repos` maps "models/org/name" and "datasets/org/name"; `seen` lists (method, path, Authorization)."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.url = f"http://127.0.0.1:{self.server_port}"
        self.repos: dict[str, Repo] = {}
        self.seen: list[tuple[str, str, str | None]] = []
        self.sent: dict[str, int] = {}  # bytes of every file that went out
        self.refusals = 0  # commits that are answered with an error

    def add(self, name: str, files: dict[str, bytes], state: str = "public") -> Repo:
        """One more repository, of one commit."""
        self.repos[name] = Repo({SHA: files}, state=state)
        return self.repos[name]

    def fetched(self, suffix: str = "") -> set[str]:
        """Files whose contents went out, at least in part."""
        return {path for path in self.sent if path.endswith(suffix)}

    def forget(self) -> None:
        """Begin the log anew."""
        self.seen.clear()
        self.sent.clear()

    def __enter__(self) -> StandInHub:
        self.thread = threading.Thread(target=self.serve_forever, args=(0.01,))
        self.thread.start()
        return self

    def __exit__(self, *exception: Any) -> None:
        self.shutdown()
        self.thread.join()
        self.server_close()


def environment(home: Path, endpoint: str, token: str = "") -> dict[str, str]:
    """Variables for a process that takes `endpoint` for the hub and `home` for its cache."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("HF_")}
    own = {
        "HF_HOME": str(home),
        "HF_ENDPOINT": endpoint,
        "HF_TOKEN": token,
        "HF_HUB_DISABLE_TELEMETRY": "1",
        "HF_HUB_DISABLE_XET": "1",
        "HF_HUB_DISABLE_PROGRESS_BARS": "1",
        "PYTHONPATH": str(REPOSITORY),
    }
    return kept | own


class Elsewhere:
    """A process of its own that answers one request after another; see elsewhere.py for what it can do."""

    def __init__(self, home: Path, endpoint: str, token: str = "") -> None:
        command = [sys.executable, str(Path(__file__).with_name("elsewhere.py"))]
        self.process = subprocess.Popen(
            command,
            env=environment(home, endpoint, token),
            cwd=home,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def ask(self, **request: Any) -> dict:
        """The answer to a request; its standard error goes to that of the tests."""
        self.process.stdin.write(json.dumps(request) + "\n")
        self.process.stdin.flush()
        answer = self.process.stdout.readline()
        assert answer, "the other process has died"
        return json.loads(answer)

    def __enter__(self) -> Elsewhere:
        return self

    def __exit__(self, *exception: Any) -> None:
        self.process.stdin.close()
        self.process.wait(60)
        self.process.stdout.close()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: StandInHub

    def do_GET(self) -> None:
        length = int(self.headers.get("Content-Length") or 0)
        asked = self.rfile.read(length)
        token = self.headers.get("Authorization")
        self.server.seen.append((self.command, self.path, token))
        route = ROUTE.fullmatch(unquote(urlsplit(self.path).path))
        repo = self.server.repos.get(f"{KINDS[route['kind']]}/{route['repo']}") if route else None
        if route is None:
            return self._answer(404)
        if repo is None or (repo.state == "private" and token != f"Bearer {TOKEN}"):
            return self._answer(401, headers={"X-Error-Code": "RepoNotFound"})
        if repo.state == "broken":
            return self._answer(500)
        if repo.state == "portal":
            return self._answer(200, b"<html>Please log in</html>")
        if repo.state == "cut":
            self.close_connection = True
            return self._answer(200, b'{"id":', {"Content-Length": "100"})
        # A gated repository shows its card and its files' names to everyone, as the hub's do.
        open_verbs = ("revision", "tree", "paths-info", None)
        if repo.state == "gated" and token != f"Bearer {TOKEN}" and route["verb"] not in open_verbs:
            return self._answer(403, headers={"X-Error-Code": "GatedRepo"})
        if route["verb"] == "auth-check":
            return self._answer(200, b"{}")
        commit = repo.names.get(route["revision"] or "main", route["revision"])
        if commit not in repo.revisions:
            return self._answer(404, headers={"X-Error-Code": "RevisionNotFound"})
        files = repo.revisions[commit]
        if route["verb"] == "resolve":
            return self._file(files, route["path"], commit)
        if route["verb"] == "tree":
            found = _entries(files, route["path"] or "", "recursive=true" in self.path.lower())
        elif route["verb"] == "paths-info":
            found = _named(files, json.loads(asked))
        else:
            siblings = [{"rfilename": path, "size": len(data)} for path, data in files.items()]
            found = {"id": route["repo"], "sha": commit, "siblings": siblings, "tags": []}
            found["private"] = repo.state == "private"
        if found == [] and route["verb"] == "tree":
            return self._answer(404, headers={"X-Error-Code": "EntryNotFound"})
        self._answer(200, json.dumps(found).encode())

    do_HEAD = do_GET

    def do_POST(self) -> None:
        """Creates repositories and branches, and takes commits of small files, with the token."""
        path = unquote(urlsplit(self.path).path)
        route = ROUTE.fullmatch(path)
        if path not in ("/api/repos/create", "/api/validate-yaml") and (
            route is None or route["verb"] not in ("preupload", "commit", "branch")
        ):
            return self.do_GET()
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        self.server.seen.append((self.command, self.path, self.headers.get("Authorization")))
        if path == "/api/validate-yaml":
            return self._json({"errors": [], "warnings": []})
        if self.headers.get("Authorization") != f"Bearer {TOKEN}":
            return self._answer(401)
        if path == "/api/repos/create":
            made = json.loads(body)
            name = f"{made['organization']}/{made['name']}"
            known = f"models/{name}" in self.server.repos
            if not known:
                self.server.add(f"models/{name}", {}, made.get("visibility", "public"))
            return self._json({"url": f"{self.server.url}/{name}", "id": name}, 409 if known else 200)
        repo = self.server.repos[f"models/{route['repo']}"]
        if route["verb"] == "branch":
            sha = hashlib.sha1(route["revision"].encode()).hexdigest()
            repo.names[route["revision"]], repo.revisions[sha] = sha, {}
            return self._json({})
        if route["verb"] == "preupload":
            files = [
                {"path": one["path"], "uploadMode": "regular", "shouldIgnore": False}
                for one in json.loads(body)["files"]
            ]
            return self._json({"files": files})
        if self.server.refusals:
            self.server.refusals -= 1
            return self._answer(413)
        for row in map(json.loads, body.splitlines()):
            if row["key"] == "file":
                files = repo.revisions[repo.names[route["revision"]]]
                files[row["value"]["path"]] = base64.b64decode(row["value"]["content"])
        url = f"{self.server.url}/{route['repo']}/commit/{repo.names[route['revision']]}"
        self._json({"commitUrl": url, "commitOid": repo.names[route["revision"]], "success": True})

    def _json(self, found: Any, status: int = 200) -> None:
        self._answer(status, json.dumps(found).encode())

    def _file(self, files: dict[str, bytes], path: str, commit: str) -> None:
        if path not in files:
            return self._answer(404, headers={"X-Error-Code": "EntryNotFound"})
        data = files[path]
        headers = {"ETag": f'"{_oid(data)}"', "X-Repo-Commit": commit, "Accept-Ranges": "bytes"}
        wanted = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range") or "")
        if wanted:
            start, end = int(wanted[1]), min(int(wanted[2] or len(data)), len(data) - 1)
            headers["Content-Range"] = f"bytes {start}-{end}/{len(data)}"
            data = data[start : end + 1]
        if self.command == "GET":
            self.server.sent[path] = self.server.sent.get(path, 0) + len(data)
        self._answer(206 if wanted else 200, data, headers)

    def _answer(self, status: int, body: bytes = b"", headers: dict[str, str] | None = None) -> None:
        kind = "application/json" if self.path.startswith("/api") else "application/octet-stream"
        self.send_response(status)
        for key, value in {"Content-Type": kind, "Content-Length": str(len(body)), **(headers or {})}.items():
            self.send_header(key, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def log_message(self, *arguments: Any) -> None:
        pass


def _oid(data: bytes) -> str:
    return hashlib.sha1(data).hexdigest()


def _entry(files: dict[str, bytes], path: str) -> dict:
    return {"type": "file", "path": path, "size": len(files[path]), "oid": _oid(files[path])}


def _folders(files: dict[str, bytes]) -> set[str]:
    return {"/".join(path.split("/")[:depth]) for path in files for depth in range(1, path.count("/") + 1)}


def _entries(files: dict[str, bytes], folder: str, recursive: bool) -> list[dict]:
    prefix = f"{folder.rstrip('/')}/" if folder else ""
    found = [
        {"type": "directory", "path": path, "size": 0, "oid": _oid(path.encode())} for path in _folders(files)
    ]
    found += [_entry(files, path) for path in files]
    inside = [entry for entry in found if entry["path"].startswith(prefix)]
    return [entry for entry in inside if recursive or "/" not in entry["path"][len(prefix) :]]


def _named(files: dict[str, bytes], asked: dict) -> list[dict]:
    folders = _folders(files)
    found = [_entry(files, path) for path in asked["paths"] if path in files]
    return found + [
        {"type": "directory", "path": path, "size": 0, "oid": _oid(path.encode())}
        for path in asked["paths"]
        if path in folders
    ]
