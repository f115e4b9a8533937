"""Archives in an object store under faults and races: nothing wrong is read, nothing hangs, nothing is lost.

Usage: python -m benchmarks.remote [--faults 1000] [--races 200] [--seed 0] [--encrypt]

An S3 server (moto, in memory, over HTTP on loopback) stands behind a proxy that breaks answers
(`benchmarks.faulty_proxy`). First reads of random parts and appends go through it until so many faults were injected:
every value must be that of the dump, every operation must end before its deadline, and every append that was reported
done must be there. Then two writers append to one archive at the same moment, again and again: just one of each two
must win, the other get `ConflictError`. With --encrypt, both archives are encrypted.
"""

from __future__ import annotations

import argparse
import contextlib
import logging
import os
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator

import numpy as np

import pltpack
from benchmarks.faulty_proxy import FaultyProxy
from pltpack.errors import ConflictError, StoreError
from pltpack.format.sealing import using_key
from pltpack.snapshot import Identity, Snapshot
from pltpack.store import Store, open_store
from pltpack.store.patience import Patience

LAYERS, HEADS, DIM = 3, 2, 16
#: Requests are given up early, so that many slow answers take little time.
PATIENCE = Patience(request_s=0.4, deadline_s=20.0, pause_s=0.01)
#: Seconds that an operation of several requests may take beyond one deadline each.
SLACK_S = 5.0


@contextlib.contextmanager
def s3_server(bucket: str) -> Iterator[int]:
    """An S3 server on loopback with one bucket, in memory; gives its port."""
    import boto3
    from moto.server import ThreadedMotoServer

    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    _, port = server.get_host_and_port()
    try:
        client = boto3.client("s3", endpoint_url=f"http://127.0.0.1:{port}", region_name="us-east-1",
                              aws_access_key_id="k", aws_secret_access_key="s")  # fmt: skip
        client.create_bucket(Bucket=bucket)
        yield port
    finally:
        server.stop()


def session(name: str, tokens: int, seed: int) -> Snapshot:
    """Random values, of a seed."""
    rng = np.random.default_rng(seed)
    shapes = [(HEADS, tokens, DIM), (HEADS, tokens, DIM)]
    layers = [tuple(rng.standard_normal(shape).astype(np.float16) for shape in shapes) for _ in range(LAYERS)]
    return Snapshot.from_arrays(name, rng.integers(0, 1000, tokens, dtype=np.int32), layers, Identity(model="toy"))


def store_at(url: str, name: str, patience: Patience = PATIENCE) -> Store:
    """An archive's store behind an endpoint."""
    return open_store(f"s3://archives/{name}", endpoint_url=url, key="k", secret="s", patience=patience)


def same(a: Snapshot, b: Snapshot, start: int, stop: int, layers: range) -> bool:
    """Whether a part that was read is that of the session."""
    if not np.array_equal(a.tokens, b.tokens[start:stop]):
        return False
    for index, layer in enumerate(layers):
        for x, y in zip(a.layer(index), b.layer(layer, start, stop), strict=True):
            if not np.array_equal(np.ascontiguousarray(x).view(np.uint8), np.ascontiguousarray(y).view(np.uint8)):
                return False
    return True


class Clock:
    """Seconds that this process has had: no operation hangs because the machine stops it, or has no time for it."""

    def __init__(self, tick_s: float = 0.1, most_s: float = 1.0) -> None:
        self._tick, self._most, self._lost, self._last = tick_s, most_s, 0.0, time.monotonic()
        self._lock = threading.Lock()
        threading.Thread(target=self._beat, daemon=True).start()

    def _beat(self) -> None:
        while True:
            time.sleep(self._tick)
            self.now()

    def now(self) -> float:
        """Seconds, without those in which not even this was called."""
        with self._lock:
            now = time.monotonic()
            if now - self._last > self._most:
                self._lost += now - self._last
            self._last = now
            return now - self._lost


def under_faults(
    proxy: FaultyProxy, wanted: int, rng: np.random.Generator, archive: str = "faults", encrypt: bool = False
) -> Counter[str]:
    """Read and append through the proxy until `wanted` faults were injected; counts what happened."""
    seen: Counter[str] = Counter()
    sessions = {f"s{i}": session(f"s{i}", 1000 + 200 * i, i) for i in range(3)}
    first = store_at(proxy.url, archive, Patience())
    pltpack.compress(list(sessions.values()), first, quality="lossless", encrypt=encrypt)
    proxy.rate = 0.25
    number, clock = len(sessions), Clock()
    while sum(proxy.counts.values()) < wanted:
        begin, requests = clock.now(), proxy.requests
        try:
            if rng.random() < 0.3:
                name = f"s{number}"
                number += 1
                _append(proxy, archive, name, sessions, seen)
            else:
                _read(proxy, archive, sessions, rng)
                seen["reads"] += 1
        except StoreError:
            seen["gave up"] += 1
        took = clock.now() - begin
        most = PATIENCE.deadline_s * max(1, proxy.requests - requests) + SLACK_S
        if took > min(most, 4 * PATIENCE.deadline_s + SLACK_S):
            raise AssertionError(f"an operation took {took:.0f} s")
    proxy.rate = 0.0
    with pltpack.open(first) as opened:
        missing = set(sessions) - set(opened.sessions)
        if missing:
            raise AssertionError(f"lost commits: {sorted(missing)}")
        for name in opened.sessions:
            whole = opened.read(name)
            if not same(whole, sessions[name], 0, len(whole), range(LAYERS)):
                raise AssertionError(f"wrong values in {name}")
    return seen


def _append(proxy: FaultyProxy, archive: str, name: str, sessions: dict[str, Snapshot], seen: Counter[str]) -> None:
    new = session(name, 300, len(sessions) + 1000)
    try:
        pltpack.append(store_at(proxy.url, archive), [new])
    except StoreError:
        # What became of it is not known to the writer: it may be there, but then whole.
        rate, proxy.rate = proxy.rate, 0.0
        with pltpack.open(store_at(proxy.url, archive)) as opened:
            there = name in opened.sessions
        proxy.rate = rate
        if there:
            sessions[name] = new
        seen["appends that ended unknown"] += 1
        raise
    sessions[name] = new
    seen["appends"] += 1


def _read(proxy: FaultyProxy, archive: str, sessions: dict[str, Snapshot], rng: np.random.Generator) -> None:
    name = str(rng.choice(sorted(sessions)))
    first, last = sorted(rng.choice(len(sessions[name]) + 1, 2, replace=False).tolist())
    low, high = sorted(rng.choice(LAYERS + 1, 2, replace=False).tolist())
    with pltpack.open(store_at(proxy.url, archive)) as opened:
        found = opened.read(name, layers=range(low, high), tokens=slice(first, last))
    if not same(found, sessions[name], first, last, range(low, high)):
        raise AssertionError(f"wrong values in {name}, layers {low}:{high}, tokens {first}:{last}")


def races(url: str, rounds: int, encrypt: bool = False) -> Counter[str]:
    """Let two writers append at the same moment, `rounds` times; counts who won."""
    won: Counter[str] = Counter()
    stores = [store_at(url, "races") for _ in range(2)]
    pltpack.compress([session("first", 40, 0)], stores[0], quality="lossless", encrypt=encrypt)
    there = {"first"}
    for number in range(rounds):
        gate, results = threading.Barrier(2), ["", ""]

        def write(which: int, number: int = number, gate: threading.Barrier = gate,
                  results: list[str] = results) -> None:  # fmt: skip
            with _met(gate):
                try:
                    pltpack.append(stores[which], [session(f"{number}-{which}", 40, 2 * number + which)])
                    results[which] = "won"
                except ConflictError:
                    results[which] = "conflict"
                except Exception as error:  # a wrong kind of failure is what is looked for
                    results[which] = f"{type(error).__name__}: {error}"

        threads = [threading.Thread(target=write, args=(which,)) for which in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if sorted(results) != ["conflict", "won"]:
            raise AssertionError(f"race {number} ended {results}")
        won[f"writer {results.index('won')}"] += 1
        there.add(f"{number}-{results.index('won')}")
        if number % 20 == 19 or number == rounds - 1:
            # Many small segments make appends slow.
            pltpack.compact(stores[0])
    with pltpack.open(stores[1]) as archive:
        if set(archive.sessions) != there:
            raise AssertionError(f"sessions differ: {sorted(set(archive.sessions) ^ there)}")
    pltpack.verify(stores[0])
    return won


_now = threading.local()


@contextlib.contextmanager
def _met(gate: threading.Barrier) -> Iterator[None]:
    """Have this thread wait for the other one when both are about to commit."""
    from pltpack.store import remote

    if not hasattr(remote._RemoteWriting, "_commit_at_once"):
        plain = remote._RemoteWriting._replace

        def held(self: remote._RemoteWriting, data: bytes, mark: str) -> None:
            gate = getattr(_now, "gate", None)
            if gate is not None:
                gate.wait(60)
            plain(self, data, mark)

        remote._RemoteWriting._commit_at_once = plain  # type: ignore[attr-defined]
        remote._RemoteWriting._replace = held  # type: ignore[method-assign]
    _now.gate = gate
    try:
        yield
    finally:
        _now.gate = None


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--faults", type=int, default=1000)
    parser.add_argument("--races", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--encrypt", action="store_true")
    options = parser.parse_args()
    key = using_key(os.urandom(32)) if options.encrypt else contextlib.nullcontext()
    with key, s3_server("archives") as port:
        begin = time.monotonic()
        with FaultyProxy(port, seed=options.seed, slow_s=1.0) as proxy:
            seen = under_faults(proxy, options.faults, np.random.default_rng(options.seed), encrypt=options.encrypt)
            print(f"{sum(proxy.counts.values())} faults {dict(proxy.counts)} in {proxy.requests} requests, "
                  f"{time.monotonic() - begin:.0f} s: {dict(seen)}")  # fmt: skip
            print("no wrong bytes, no hang, no lost commit")
        won = races(f"http://127.0.0.1:{port}", options.races, options.encrypt)
        print(f"{options.races} races: {dict(won)}; every other writer got ConflictError, nothing was lost")
    return 0


if __name__ == "__main__":
    sys.exit(main())
