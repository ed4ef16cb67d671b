"""A Hugging Face hub of one repository on this machine: the three requests that fetching a model takes."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from typing import Any

COMMIT = "0123456789abcdef0123456789abcdef01234567"
LARGE = (".safetensors", ".gguf")


@dataclass
class FakeHub:
    """`files` by path; `listed` overrides the size and checksums that the hub claims for a file."""

    repository: str
    files: dict[str, bytes]
    listed: dict[str, dict[str, Any]] = field(default_factory=dict)
    endpoint: str = ""
    requests: list[str] = field(default_factory=list)

    def listing(self) -> dict[str, Any]:
        return {"id": self.repository, "sha": COMMIT, "siblings": [self._sibling(name) for name in self.files]}

    def _sibling(self, name: str) -> dict[str, Any]:
        data = self.files[name]
        entry: dict[str, Any] = {"rfilename": name, "size": len(data), "blobId": git_blob_id(data)}
        if name.endswith(LARGE):
            entry["lfs"] = {"sha256": hashlib.sha256(data).hexdigest(), "size": len(data), "pointerSize": 134}
        return entry | self.listed.get(name, {})


def git_blob_id(data: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()


@contextmanager
def serve(hub: FakeHub) -> Iterator[FakeHub]:
    class Handler(BaseHTTPRequestHandler):
        def respond(self, *, body: bool) -> None:
            path = self.path.partition("?")[0]
            hub.requests.append(f"{self.command} {path}")
            resolve = f"/{hub.repository}/resolve/{COMMIT}/"
            headers = {}
            if path == f"/api/models/{hub.repository}/revision/main":
                data = json.dumps(hub.listing()).encode()
            elif path.startswith(resolve) and path.removeprefix(resolve) in hub.files:
                data = hub.files[path.removeprefix(resolve)]
                headers = {"ETag": f'"{hashlib.sha256(data).hexdigest()}"', "X-Repo-Commit": COMMIT}
            else:
                self.send_error(404)
                return
            self.send_response(200)
            for key, value in headers.items():
                self.send_header(key, value)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            if body:
                self.wfile.write(data)

        def do_GET(self) -> None:
            self.respond(body=True)

        def do_HEAD(self) -> None:
            self.respond(body=False)

        def log_message(self, format: str, *args: Any) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        hub.endpoint = f"http://127.0.0.1:{server.server_port}"
        thread = Thread(target=server.serve_forever, daemon=True)
        thread.start()
        try:
            yield hub
        finally:
            server.shutdown()
            thread.join()
