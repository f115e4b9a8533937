"""An HTTP proxy on loopback that breaks answers on purpose: what a network and a busy object store do.

Faults: ``500`` (an error before the request is passed on), ``lost`` (the request is done, and the answer an error),
``cut`` (the connection ends within the answer), ``silent`` (it ends after the request was done, without an answer),
``short`` (a whole answer with fewer bytes than there are), ``slow`` (the answer takes longer than anybody waits).
"""

from __future__ import annotations

import collections
import http.client
import http.server
import random
import threading
import time
from collections.abc import Iterable
from types import TracebackType

FAULTS = ("500", "lost", "cut", "silent", "short", "slow")
_HOP = frozenset({"connection", "keep-alive", "transfer-encoding", "expect", "content-length", "date", "server"})


class FaultyProxy:
    """Passes requests on to `port`, and breaks some.

    Parameters
    ----------
    port : int
        Of the server behind it, on loopback.
    rate : float
        Part of the requests that is broken.
    seed : int
    slow_s : float
        Seconds that a slow answer takes.
    faults : iterable of str
    """

    def __init__(
        self, port: int, rate: float = 0.0, seed: int = 0, slow_s: float = 1.0, faults: Iterable[str] = FAULTS
    ) -> None:
        self.rate, self.slow_s, self.faults = rate, slow_s, tuple(faults)
        self.counts: collections.Counter[str] = collections.Counter()
        self.requests = 0
        #: ``(method, path, Range header)`` of every request.
        self.log: list[tuple[str, str, str]] = []
        self._random, self._lock, self._behind = random.Random(seed), threading.Lock(), port
        proxy = self

        class Handler(_Handler):
            owner = proxy

        self._server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.port = self._server.server_address[1]
        self.url = f"http://127.0.0.1:{self.port}"

    def __enter__(self) -> FaultyProxy:
        threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True).start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._server.shutdown()
        self._server.server_close()

    def choose(self, method: str, path: str, span: str) -> str | None:
        """The fault of the next request, if it is to have one."""
        with self._lock:
            self.requests += 1
            self.log.append((method, path, span))
            if self._random.random() >= self.rate:
                return None
            fault = self._random.choice(self.faults)
            self.counts[fault] += 1
            return fault

    def ask(
        self, method: str, path: str, body: bytes, headers: dict[str, str]
    ) -> tuple[int, list[tuple[str, str]], bytes]:
        """What the server behind answers."""
        connection = http.client.HTTPConnection("127.0.0.1", self._behind, timeout=60)
        try:
            connection.request(method, path, body or None, headers)
            answer = connection.getresponse()
            return answer.status, answer.getheaders(), answer.read()
        finally:
            connection.close()


class _Handler(http.server.BaseHTTPRequestHandler):
    owner: FaultyProxy
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True

    def _pass(self) -> None:
        fault = self.owner.choose(self.command, self.path, self.headers.get("Range", ""))
        body = self._body()
        if fault == "500":
            self._answer(500, [], b"<Error><Code>InternalError</Code></Error>")
            return
        headers = {name: value for name, value in self.headers.items() if name.lower() not in _HOP}
        if body or self.command in ("PUT", "POST"):
            headers["Content-Length"] = str(len(body))
        status, found, data = self.owner.ask(self.command, self.path, body, headers)
        kept = [(name, value) for name, value in found if name.lower() not in _HOP]
        length = next((int(v) for n, v in found if n.lower() == "content-length"), len(data))
        if fault == "lost":
            self._answer(503, [], b"<Error><Code>SlowDown</Code></Error>")
        elif fault == "silent":
            self.close_connection = True
        elif fault == "cut":
            self._answer(status, kept, data, length, sent=len(data) // 2)
            self.close_connection = True
        elif fault == "short":
            self._answer(status, kept, data[: len(data) // 2])
        elif fault == "slow":
            time.sleep(self.owner.slow_s / 2)
            self._answer(status, kept, data, length, pause=self.owner.slow_s / 2)
        else:
            self._answer(status, kept, data, length)

    def _body(self) -> bytes:
        if "chunked" in self.headers.get("Transfer-Encoding", "").lower():
            parts = []
            while size := int(self.rfile.readline().split(b";")[0], 16):
                parts.append(self.rfile.read(size))
                self.rfile.readline()
            while self.rfile.readline().strip():
                pass
            return b"".join(parts)
        return self.rfile.read(int(self.headers.get("Content-Length") or 0))

    def _answer(
        self, status: int, headers: list[tuple[str, str]], data: bytes, length: int | None = None,
        sent: int | None = None, pause: float = 0.0,
    ) -> None:  # fmt: skip
        try:
            self.send_response_only(status)
            for name, value in headers:
                self.send_header(name, value)
            if status not in (204, 304):
                self.send_header("Content-Length", str(len(data) if length is None else length))
            self.end_headers()
            if self.command == "HEAD":
                return
            if pause:
                self.wfile.write(data[: len(data) // 2])
                self.wfile.flush()
                time.sleep(pause)
                self.wfile.write(data[len(data) // 2 :])
            else:
                self.wfile.write(data if sent is None else data[:sent])
        except OSError:
            # The client did not wait.
            self.close_connection = True

    do_GET = do_PUT = do_POST = do_DELETE = do_HEAD = _pass  # noqa: N815 - the names are the base class's

    def handle_one_request(self) -> None:
        """Also end quietly when the client has gone."""
        try:
            super().handle_one_request()
        except ConnectionError:
            self.close_connection = True

    def log_message(self, format: str, *args: object) -> None:
        """Nothing: what happened is counted."""
