"""`segtrain report --follow`: the report on a local port while a run goes on.

Only this machine reaches it, under its own names (a foreign site that points its name here is refused), and only to
read two paths. Nothing is written: the run's directory is only read.
"""

import json
import os
import socket
import threading
import time
from collections.abc import Callable
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from socketserver import TCPServer
from typing import Any

from segtrain.errors import UserError
from segtrain.report.page import asset, render, require_plotly

HOST = "127.0.0.1"
SECONDS = 2.0  # between two looks at the run, and between two questions of a page
WAITING = "<!doctype html><title>segtrain</title><body>There is nothing to show of this run yet.</body>"
POLICY = "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src data: blob:"


def follow(run: Path, port: int, say: Callable[[str], object], seconds: float = SECONDS) -> None:
    """Serve the report of `run` until it ends; port 0: any free one.

    Raises UserError where plotly isn't installed, no run is going on in a directory that holds one, or the port can't
    be had.
    """
    require_plotly()
    live = Live(Path(run), seconds)
    if live.ended:
        raise UserError(f"no run is going on in {run}, so there is nothing to follow; leave out --follow")
    with _listen(live, port) as server:
        threading.Thread(target=server.serve_forever, args=(seconds / 4,), daemon=True).start()
        try:
            say(f"http://{HOST}:{server.server_port}/ shows the run as it goes; Ctrl-C ends this, not the run")
            live.watch(say)
        finally:
            server.shutdown()


class Live:
    """What there is to see of a run. Whatever is asked and how often, it is looked at once in `seconds`."""

    def __init__(self, run: Path, seconds: float):
        self.run, self.seconds = run, seconds
        self.seen = False  # whether the run was going on at any look
        self._lock = threading.Lock()
        self._page: tuple[str, bytes] = "", b""
        self.look()

    def look(self) -> None:
        going = is_going(self.run)  # before the file, whose last lines come before its run's end
        self.seen |= going
        self.has_metrics, self.version = _version(self.run / "metrics.jsonl")
        self.ended = not going and (self.seen or self.has_metrics)
        self.version += "-ended" if self.ended else ""

    def watch(self, say: Callable[[str], object]) -> None:
        """Return when the run has ended and pages have had the time to show its last state."""
        if not self.has_metrics:
            say(f"waiting for the first metrics of {self.run}")
        while not self.ended:
            time.sleep(self.seconds)
            self.look()
        say("the run has ended; open pages get its last state")
        time.sleep(2 * self.seconds)

    def page(self) -> bytes:
        """The page of the last look; made once, however many ask for it."""
        with self._lock:
            version = self.version
            if self._page[0] != version:
                self._page = version, self._rendered(version).encode()
            return self._page[1]

    def _rendered(self, version: str) -> str:
        try:
            page = render(self.run)
        except UserError:  # not begun yet, or --overwrite is just replacing it
            page = WAITING
        script = asset("live.js").replace("{{seconds}}", str(self.seconds))
        body, end, rest = page.replace(POLICY, f"{POLICY}; connect-src 'self'", 1).rpartition("</body>")
        return f'{body}<script data-version="{version}">{script}</script>{end}{rest}'


def is_going(run: Path) -> bool:
    """Whether a process trains in `run`: the lock that it holds names it, and goes with it."""
    try:
        content = (run / ".lock").read_text(encoding="utf-8")
    except OSError:
        return False
    try:
        holder = json.loads(content)
        here, pid = holder["host"] == socket.gethostname(), int(holder["pid"])
    except (ValueError, KeyError, TypeError):
        return True  # just taken
    return not here or _lives(pid)


def _lives(pid: int) -> bool:
    try:
        os.kill(pid, 0)  # sends nothing
    except (ProcessLookupError, OverflowError):
        return False
    except PermissionError:
        pass  # somebody else's
    return True


def _version(metrics: Path) -> tuple[bool, str]:
    try:
        found = metrics.stat()
    except OSError:
        return False, "none"
    return True, f"{found.st_mtime_ns}-{found.st_size}"


class Server(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self, live: Live, port: int):
        self.live = live
        super().__init__((HOST, port), Handler)

    def server_bind(self) -> None:
        """As HTTPServer's, without its look-up of the host's name, which may take seconds."""
        TCPServer.server_bind(self)
        self.server_name, self.server_port = HOST, self.server_address[1]

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A browser that leaves in the middle of an answer is nothing to tell."""


def _listen(live: Live, port: int) -> Server:
    try:
        return Server(live, port)
    except OSError as error:
        raise UserError(f"port {port} can't be used: {error.strerror or error}; give another --port") from None


class Handler(BaseHTTPRequestHandler):
    server: Server
    server_version, sys_version = "segtrain", ""
    timeout = 10.0  # seconds for a request to arrive

    def parse_request(self) -> bool:
        """False where the request is refused, which it has been told by then."""
        if not super().parse_request():
            return False
        names = {f"{name}:{self.server.server_port}" for name in (HOST, "localhost")}
        if not names.issuperset(self.headers.get_all("Host") or [""]):
            self.send_error(HTTPStatus.FORBIDDEN)
        elif self.command not in ("GET", "HEAD"):
            self.send_error(HTTPStatus.METHOD_NOT_ALLOWED)
        else:
            return True
        return False

    def do_GET(self) -> None:
        if self.path == "/":
            self._answer(self.server.live.page(), "text/html; charset=utf-8")
        elif self.path == "/version":
            self._answer(self.server.live.version.encode(), "text/plain; charset=utf-8")
        else:
            self.send_error(HTTPStatus.NOT_FOUND)

    do_HEAD = do_GET

    def _answer(self, content: bytes, kind: str) -> None:
        self.send_response(HTTPStatus.OK)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(content)

    def end_headers(self) -> None:
        for name, value in (
            ("Cache-Control", "no-store"),
            ("X-Content-Type-Options", "nosniff"),
            ("Cross-Origin-Resource-Policy", "same-origin"),
            ("X-Frame-Options", "DENY"),
        ):
            self.send_header(name, value)
        super().end_headers()

    def log_message(self, format: str, *arguments: Any) -> None:
        """Requests are no news."""
