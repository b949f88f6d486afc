"""Real servers that messages are sent to: one that speaks HTTP and does as it is told, one that speaks SMTP."""

from __future__ import annotations

import socketserver
import threading
import time
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


class Receiver:
    """An HTTP server; `plan` says how it answers one request after the other, then 200: a status, `hang` or `drip`."""

    def __init__(self) -> None:
        self.plan: list[Any] = []
        self.got: list[tuple[dict[str, str], bytes]] = []
        self.asked = 0
        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Request)
        self.server.receiver = self  # type: ignore[attr-defined]
        self.url = f"http://127.0.0.1:{self.server.server_port}/hooks/a-secret-path"
        serve(self.server)

    def close(self) -> None:
        self.server.shutdown()
        self.server.server_close()


class Request(BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        receiver: Receiver = self.server.receiver  # type: ignore[attr-defined]
        receiver.asked += 1
        body = self.rfile.read(int(self.headers["Content-Length"]))
        answer = receiver.plan.pop(0) if receiver.plan else 200
        if answer in ("hang", "drip"):
            self.drip(b"HTTP/1.1 200 OK\r\nX-Slow: xxxxxxxxxxxxxxxxxxxx" if answer == "drip" else b"")
            return
        if answer == 200:
            receiver.got.append(({k.lower(): v for k, v in self.headers.items()}, body))
        self.send_response(answer)
        if answer == 302:
            self.send_header("Location", "/elsewhere")
        self.end_headers()

    def do_GET(self) -> None:
        self.server.receiver.got.append(({"followed": self.path}, b""))  # type: ignore[attr-defined]
        self.send_response(200)
        self.end_headers()

    def drip(self, answer: bytes) -> None:
        """A byte now and then, so that no silence is long; then nothing."""
        with suppress(OSError):
            for byte in answer:
                self.wfile.write(bytes([byte]))
                time.sleep(0.2)
        time.sleep(10)

    def log_message(self, *args: Any) -> None:
        pass


class Mailbox:
    """An SMTP server (RFC 5321: EHLO, MAIL, RCPT, DATA, QUIT). It takes no mail for `nobody@…`."""

    def __init__(self) -> None:
        self.got: list[tuple[str, list[str], str]] = []
        self.server = socketserver.ThreadingTCPServer(("127.0.0.1", 0), Session)
        self.server.daemon_threads = True
        self.server.mailbox = self  # type: ignore[attr-defined]
        self.url = f"smtp://127.0.0.1:{self.server.server_address[1]}"
        serve(self.server)

    def close(self) -> None:
        self.server.shutdown()
        self.server.server_close()


class Session(socketserver.StreamRequestHandler):
    def handle(self) -> None:
        self.sender, self.recipients = "", []
        self.say("220 mailbox")
        while line := self.rfile.readline().decode().strip():
            verb, _, rest = line.partition(" ")
            if verb.upper() == "QUIT":
                self.say("221 bye")
                return
            self.say(self.answer(verb.upper(), rest.partition(":")[2].strip("<> ")))

    def answer(self, verb: str, address: str) -> str:
        if verb == "MAIL":
            self.sender = address.split(maxsplit=1)[0].strip("<>")
        elif verb == "RCPT" and address.startswith("nobody@"):
            return "550 no such user"
        elif verb == "RCPT":
            self.recipients.append(address)
        elif verb == "DATA":
            self.say("354 go on")
            self.server.mailbox.got.append((self.sender, self.recipients, self.read()))  # type: ignore[attr-defined]
        return "250 ok"

    def read(self) -> str:
        lines = iter(lambda: self.rfile.readline().decode().rstrip("\r\n"), ".")
        return "\n".join(line.removeprefix(".") for line in lines)

    def say(self, text: str) -> None:
        self.wfile.write(f"{text}\r\n".encode())


def serve(server: socketserver.BaseServer) -> None:
    threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()
