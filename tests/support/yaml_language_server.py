"""A client of yaml-language-server over standard input and output: diagnostics and completions of one document."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

SERVER = shutil.which("yaml-language-server")
NOT_INSTALLED = "yaml-language-server is not installed: npm install -g yaml-language-server"


class YamlLanguageServer:
    """A running server, with one schema for every file."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self._process = process
        self._requests = 0
        self._documents = 0
        self._diagnostics: dict[str, list[str]] = {}

    def problems(self, folder: Path, text: str) -> list[str]:
        """Return the messages that an editor would show beside a text."""
        uri = self._open(folder, text)
        while uri not in self._diagnostics:
            self._read()
        return self._diagnostics[uri]

    def completions(self, folder: Path, text: str) -> list[str]:
        """Return the words proposed at the end of a text."""
        uri = self._open(folder, text)
        lines = text.split("\n")
        place = {"line": len(lines) - 1, "character": len(lines[-1])}
        answer = self.request("textDocument/completion", {"textDocument": {"uri": uri}, "position": place})
        return [item["label"] for item in answer["items"]]

    def request(self, method: str, params: Mapping[str, Any]) -> Any:
        """Send a request; return its result."""
        self._requests += 1
        own = self._requests
        self._send({"id": own, "method": method, "params": params})
        while True:
            message = self._read()
            if message.get("id") == own and "method" not in message:
                return message["result"]

    def notify(self, method: str, params: Mapping[str, Any]) -> None:
        """Send a notification."""
        self._send({"method": method, "params": params})

    def _open(self, folder: Path, text: str) -> str:
        self._documents += 1
        uri = (folder / f"file{self._documents}.yaml").as_uri()
        document = {"uri": uri, "languageId": "yaml", "version": 1, "text": text}
        self.notify("textDocument/didOpen", {"textDocument": document})
        return uri

    def _send(self, message: Mapping[str, Any]) -> None:
        content = json.dumps({"jsonrpc": "2.0", **message}).encode()
        assert self._process.stdin is not None
        self._process.stdin.write(b"Content-Length: %d\r\n\r\n%b" % (len(content), content))
        self._process.stdin.flush()

    def _read(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        size = 0
        while line := self._process.stdout.readline().strip():
            if line.lower().startswith(b"content-length:"):
                size = int(line.split(b":")[1])
        assert size, "the server ended"
        message: dict[str, Any] = json.loads(self._process.stdout.read(size))
        if message.get("method") == "textDocument/publishDiagnostics":
            found = message["params"]
            self._diagnostics[found["uri"]] = [item["message"] for item in found["diagnostics"]]
        elif "method" in message and "id" in message:
            wanted = message["params"]["items"] if message["method"] == "workspace/configuration" else None
            answer = None if wanted is None else [SETTINGS.get(item.get("section"), {}) for item in wanted]
            self._send({"id": message["id"], "result": answer})
        return message


SETTINGS: dict[str, Any] = {
    "yaml": {"validate": True, "completion": True, "hover": True, "schemaStore": {"enable": False}}
}


@contextmanager
def running_server() -> Iterator[YamlLanguageServer]:
    """Start the server, and end it with the block."""
    assert SERVER is not None
    with subprocess.Popen([SERVER, "--stdio"], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        server = YamlLanguageServer(process)
        try:
            server.request(
                "initialize",
                {"processId": None, "rootUri": None, "capabilities": {"workspace": {"configuration": True}}},
            )
            server.notify("initialized", {})
            yield server
        finally:
            process.kill()
