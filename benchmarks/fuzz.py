"""Fuzz every parser: manifest, library, shard, codec payloads, profiles, session files, safetensors and HDF5 dumps.

Mutated files must be read or be refused with one of our own errors: no crash, no hang, no allocation beyond 1 GB. The
`deep` targets recompute every checksum after mutating, so that the code behind the checksums is reached too.

Usage: python -m benchmarks.fuzz [--seconds 600] [--seed 0] [--target NAME]... [--case N]
A failing case is reported with its target, seed and number; `--case` replays it in this process.
"""

from __future__ import annotations

import argparse
import collections
import dataclasses
import hashlib
import json
import os
import random
import resource
import shutil
import signal
import struct
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import ml_dtypes
import numpy as np
import xxhash

import pltpack
from benchmarks.golden_profiles import drawn_profile, save_profile
from benchmarks.near_archives import Builder, Node, Row
from pltpack.archive import profiles
from pltpack.archive.sampling import JobSamples, TokenRange
from pltpack.archive.segments import fresh
from pltpack.codec import registry
from pltpack.codec.base import Codec, Unit
from pltpack.errors import PltpackError
from pltpack.format import tables
from pltpack.format.container import PAYLOAD
from pltpack.format.manifest import NAME
from pltpack.snapshot import Identity, Snapshot

#: Address space a case may add to what the process had, and seconds it may take.
MEMORY = 1 << 30
SECONDS = 20
CODECS = ("lossless", "q4", "q2", "turboquant-3")
INTERESTING = (0, 1, 0x7F, 0x80, 0xFF, 0x7FFF, 0xFFFF, 0x7FFFFFFF, 0xFFFFFFFF, 1 << 40, (1 << 64) - 1)

Case = Callable[[random.Random, Path], None]


def snapshots(seed: int = 0) -> list[Snapshot]:
    """Three small sessions: two share 8 tokens up to noise, one has another salt; some values are not finite."""
    rng = np.random.default_rng(seed)
    rope = {"type": "default", "theta": 10000.0, "dim": 16, "style": "half"}
    shared = rng.standard_normal((2, 2, 2, 8, 16)).astype(np.float32)
    out = []
    for index in range(3):
        own = rng.standard_normal((2, 2, 2, 7 + index, 16)).astype(np.float32)
        own[0, 0, 0, 5, 3] = np.inf
        noise = 1 + 0.004 * (rng.random(shared.shape) < 0.05) * (index == 1)
        whole = np.concatenate([shared * noise, own], axis=3).astype(ml_dtypes.bfloat16)
        identity = Identity(model="fuzz", rope=rope, keys="rotated", salt="other" if index == 2 else None)
        ids = np.concatenate([np.arange(8), rng.integers(0, 99, own.shape[3])])
        out.append(Snapshot.from_arrays(f"s{index}", ids, [(k, v) for k, v in whole], identity))
    return out


def mutate(data: bytes, rng: random.Random) -> bytes:
    """A few random edits: flips, interesting integers, cuts, repeats, insertions."""
    out = bytearray(data)
    for _ in range(rng.choice((1, 1, 1, 2, 4, 16))):
        if not out:
            break
        at = rng.randrange(len(out))
        kind = rng.randrange(7)
        if kind <= 1:
            out[at] ^= 1 << rng.randrange(8)
        elif kind == 2:
            out[at] = rng.randrange(256)
        elif kind == 3:
            size = rng.choice((1, 2, 4, 8))
            value = rng.choice(INTERESTING) & ((1 << 8 * size) - 1)
            out[at : at + size] = value.to_bytes(size, "little")
        elif kind == 4:
            del out[at : at + rng.choice((1, 2, 8, len(out)))]
        elif kind == 5:
            out[at:at] = out[at : at + rng.choice((1, 8, 64))]
        else:
            out[at:at] = rng.randbytes(rng.choice((1, 4, 32)))
    return bytes(out)


def mutate_json(value: object, rng: random.Random) -> object:
    """Replace one random part of a JSON value."""
    if isinstance(value, dict) and value and rng.random() < 0.9:
        key = rng.choice(sorted(value))
        changed = dict(value)
        if rng.random() < 0.05:
            del changed[key]
        else:
            changed[key] = mutate_json(value[key], rng)
        return changed
    if isinstance(value, list) and value and rng.random() < 0.9:
        at = rng.randrange(len(value))
        return [*value[:at], mutate_json(value[at], rng), *value[at + 1 :]]
    junk = (None, True, -1, 0, 1, 1 << 31, 1 << 63, 1.5, "", "..", "a/../b", "0" * 64, [], {}, [[]], "x" * 300)
    return rng.choice(junk)


def use_archive(path: Path) -> None:
    """What users do with an archive that they were given."""
    with pltpack.open(path) as archive:
        archive.describe()
        for session in archive.sessions:
            archive.read(session)
    pltpack.verify(path)


def predicting(folder: Path, tier: str) -> Path:
    """An archive with mapping rows that predict: a session that repeats, moved and edited, what another holds."""
    source, other = snapshots()[0], snapshots(1)[1]
    ids = other.tokens.copy()
    ids[6:13] = source.tokens[2:9]
    ids[9] = 98
    codec = registry.tier(tier)
    arrays = drawn_profile(source, layer_group=2) if codec.calibrated else codec.learn(
        JobSamples([TokenRange(source, 0, len(source))]), source.identity)  # fmt: skip
    nodes = [Node(source, 0, 4), Node(source, 2, 9)]
    builder = Builder(folder, codec, arrays, source.identity, nodes, np.random.default_rng(3), unit=4)
    builder.add(source, [Row(2, 7, 1, 0)])
    builder.add(dataclasses.replace(other, tokens=ids), [Row(0, 4, 0, 0), Row(6, 7, 1, 0)], exact_units=True)
    return builder.finish()


class Archives:
    """Fuzz targets over one small archive per codec."""

    def __init__(self, folder: Path) -> None:
        self.archives = []
        for codec in CODECS:
            pltpack.compress(snapshots()[:2], folder / codec, quality=codec, block=4)
            pltpack.append(folder / codec, snapshots()[2:])
            self.archives.append(folder / codec)
        save_profile(folder / "profile.safetensors", drawn_profile(snapshots()[0], layer_group=2), snapshots()[0])
        for quality in ("transform", "balanced"):
            pltpack.compress(snapshots(), folder / quality, quality=quality, block=4,
                             profile=folder / "profile.safetensors")  # fmt: skip
            self.archives.append(folder / quality)
        self.archives += [predicting(folder / f"near-{tier}", tier) for tier in ("lossless", "q4", "transform")]
        self.session = folder / "s0.pltsession"
        pltpack.export_session(self.archives[0], "s0", self.session)

    def manifest(self, rng: random.Random, work: Path) -> None:
        """Raw mutations of MANIFEST.json."""
        archive = self._copy(rng, work)
        (archive / NAME).write_bytes(mutate((archive / NAME).read_bytes(), rng))
        use_archive(archive)

    def manifest_deep(self, rng: random.Random, work: Path) -> None:
        """JSON-level mutations with the right checksum."""
        archive = self._copy(rng, work)
        body = json.loads((archive / NAME).read_bytes())["body"]
        self._write_manifest(archive, mutate_json(body, rng))
        use_archive(archive)

    def container(self, rng: random.Random, work: Path) -> None:
        """Raw mutations of a library segment or shard."""
        archive = self._copy(rng, work)
        path = self._pick(archive, rng)
        path.write_bytes(mutate(path.read_bytes(), rng))
        use_archive(archive)

    def container_deep(self, rng: random.Random, work: Path) -> None:
        """Mutations of header, tables or payload with all checksums recomputed."""
        archive = self._copy(rng, work)
        path = self._pick(archive, rng)
        data = path.read_bytes()
        head, payload, tail = split_container(data)
        part = rng.randrange(4)
        if part == 0:
            length = struct.unpack("<Q", head[:8])[0]
            header = mutate(head[8:].rstrip(b" "), rng)
            head = struct.pack("<Q", max(length, len(header))) + header.ljust(length, b" ")
        elif part == 1:
            tail = mutate(tail, rng)
        else:
            payload = bytes(payload)
            edited = mutate(payload, rng)
            # The index gives fixed lengths: keep the size, so that the codec sees the edit.
            payload = edited[: len(payload)].ljust(len(payload), b"\0")
            tail = refresh_checksums(head, payload, tail)
        path.write_bytes(head + payload + tail)
        body = json.loads((archive / NAME).read_bytes())["body"]
        old = None
        for entry in (*body["libraries"], *body["sessions"]):
            if archive / entry["file"] == path:
                old, entry["head_sha256"] = entry["head_sha256"], hashlib.sha256(head + tail).hexdigest()
                entry["payload_sha256"] = hashlib.sha256(payload).hexdigest()
                entry["bytes"] = len(head + payload + tail)
                new = entry["head_sha256"]
        if path.suffix == ".pltlib" and old is not None:
            rename_library(archive, body, old.encode(), new.encode())
        self._write_manifest(archive, body)
        use_archive(archive)

    def session_file(self, rng: random.Random, work: Path) -> None:
        """Mutations of an exported session."""
        path = work / "s.pltsession"
        path.write_bytes(mutate(self.session.read_bytes(), rng))
        pltpack.import_session(work / "imported", path)

    def _copy(self, rng: random.Random, work: Path) -> Path:
        archive = work / "archive"
        shutil.copytree(rng.choice(self.archives), archive)
        return archive

    @staticmethod
    def _pick(archive: Path, rng: random.Random) -> Path:
        return rng.choice(sorted([*archive.glob("*.pltlib"), *archive.glob("shards/*")]))

    @staticmethod
    def _write_manifest(archive: Path, body: object) -> None:
        canonical = json.dumps(body, sort_keys=True, separators=(",", ":"))
        digest = hashlib.sha256(canonical.encode()).hexdigest()
        (archive / NAME).write_text(json.dumps({"body": body, "sha256": digest}))


def split_container(data: bytes) -> tuple[bytes, bytes, bytes]:
    """Header with its length, payload, tables."""
    length = struct.unpack("<Q", data[:8])[0]
    end = json.loads(data[8 : 8 + length])[PAYLOAD]["data_offsets"][1]
    return data[: 8 + length], data[8 + length : 8 + length + end], data[8 + length + end :]


def refresh_checksums(head: bytes, payload: bytes, tail: bytes) -> bytes:
    """The tables with every unit's checksum recomputed."""
    begin, end = json.loads(head[8:])["unit.index"]["data_offsets"]
    units = np.frombuffer(tail[begin - len(payload) : end - len(payload)], tables.UNIT).copy()
    for unit in units:
        start = int(unit["offset"])
        unit["checksum"] = xxhash.xxh3_64_intdigest(payload[start : start + int(unit["length"])])
    return tail[: begin - len(payload)] + units.tobytes() + tail[end - len(payload) :]


def rename_library(archive: Path, body: dict, old: bytes, new: bytes) -> None:
    """Let every other file refer to a segment by its new digest."""
    for entry in (*body["libraries"], *body["sessions"]):
        path = archive / entry["file"]
        data = path.read_bytes()
        if old in data:
            data = data.replace(old, new)
            head, _, tail = split_container(data)
            path.write_bytes(data)
            entry["head_sha256"] = hashlib.sha256(head + tail).hexdigest()


class Dumps:
    """Fuzz targets over dump files."""

    def __init__(self, folder: Path) -> None:
        self.files = {}
        for dump_format, suffix in (("safetensors", ".safetensors"), ("hdf5", ".h5")):
            written = pltpack.write_dump(snapshots(), folder / f"dump-{dump_format}", dump_format)
            self.files[dump_format] = (written[0].read_bytes(), suffix)

    def case(self, dump_format: str) -> Case:
        """Mutations of a dump file of one format, read under its name and by sniffing."""

        def run(rng: random.Random, work: Path) -> None:
            data, suffix = self.files[dump_format]
            path = work / f"dump{suffix}"
            path.write_bytes(mutate(data, rng))
            forced = rng.random() < 0.5
            for snapshot in pltpack.open_dumps([path], format=dump_format if forced else None):
                for layer in range(len(snapshot.identity.layers)):
                    snapshot.layer(layer)

        return run


class Transform:
    """Fuzz targets over the codec of layer groups and its profiles, without an archive around them."""

    def __init__(self) -> None:
        self.arrays = drawn_profile(snapshots()[0], layer_group=2)
        self.identity = snapshots()[0].identity
        self.codec = self._started(self.arrays)
        self.payloads = [(unit, self._encode(snapshot, unit)) for snapshot in snapshots()
                         for start, stop in ((0, 9), (4, 15), (9, 12))
                         for unit in [Unit(0, self.identity.layers[0], start, stop - start, 0, self.identity.layers)]
                         if stop <= len(snapshot)]  # fmt: skip

    def _started(self, arrays: dict[str, np.ndarray]) -> Codec:
        codec = registry.codec("transform", {"step": 0.05})
        codec.start(arrays, self.identity)
        return codec

    def _encode(self, snapshot: Snapshot, unit: Unit) -> bytes:
        stop = unit.position + unit.tokens
        arrays = [snapshot.layer(layer, unit.position, stop) for layer in range(len(unit.layers))]
        return self.codec.encode_span(unit, arrays)

    def payload(self, rng: random.Random, work: Path) -> None:
        """Mutations of a unit's payload."""
        unit, payload = rng.choice(self.payloads)
        self._decode(self.codec, unit, mutate(payload, rng))

    def profile(self, rng: random.Random, work: Path) -> None:
        """Mutations of a profile's arrays, used to decode a sound or mutated unit."""
        arrays = dict(self.arrays)
        for name in rng.sample(sorted(arrays), rng.choice((1, 1, 2))):
            array = arrays[name]
            if rng.random() < 0.2:
                arrays[name] = array[: rng.randrange(len(array) + 1)]
            elif rng.random() < 0.1:
                del arrays[name]
            else:
                data = mutate(array.tobytes(), rng)[: array.nbytes].ljust(array.nbytes, b"\0")
                arrays[name] = np.frombuffer(data, array.dtype).reshape(array.shape)
        unit, payload = rng.choice(self.payloads)
        try:
            codec = self._started(arrays)
        except ValueError as error:
            raise PltpackError(str(error)) from None
        self._decode(codec, unit, payload)

    def file(self, rng: random.Random, work: Path) -> None:
        """Mutations of a profile file."""
        path = work / "profile.safetensors"
        save_profile(path, self.arrays, snapshots()[0])
        path.write_bytes(mutate(path.read_bytes(), rng))
        profiles.load(path)

    @staticmethod
    def _decode(codec: Codec, unit: Unit, payload: bytes) -> None:
        out = [fresh(layer, unit.tokens) for layer in unit.layers]
        try:
            codec.decode_span(memoryview(payload), unit, out)
        except ValueError as error:
            raise PltpackError(str(error)) from None


def targets(folder: Path) -> dict[str, Case]:
    """All fuzz targets by name; their seed files are made in `folder`."""
    archives, dumps, transform = Archives(folder), Dumps(folder), Transform()
    return {
        "manifest": archives.manifest,
        "manifest-deep": archives.manifest_deep,
        "container": archives.container,
        "container-deep": archives.container_deep,
        "session-file": archives.session_file,
        "safetensors": dumps.case("safetensors"),
        "hdf5": dumps.case("hdf5"),
        "transform": transform.payload,
        "profile": transform.profile,
        "profile-file": transform.file,
    }


def run_case(case: Case, seed: str, folder: Path) -> str:
    """One case: ``read`` or ``refused``; anything else propagates."""
    work = folder / "work"
    shutil.rmtree(work, ignore_errors=True)
    work.mkdir()
    try:
        case(random.Random(seed), work)
    except PltpackError as error:
        assert str(error), "an error without a message"
        return "refused"
    return "read"


@dataclasses.dataclass
class Outcome:
    """Cases of one target by outcome, and the failures."""

    counts: collections.Counter[str]
    failures: list[str]


def fuzz(name: str, case: Case, seed: int, seconds: float, folder: Path) -> Outcome:
    """Run cases of one target for `seconds` in forked children, which survive nothing but our own errors."""
    outcome = Outcome(collections.Counter(), [])
    number, end = 0, time.monotonic() + seconds
    log = folder / "progress"
    while time.monotonic() < end:
        log.write_text(f"{number}\n")
        child = os.fork()
        if child == 0:
            os._exit(_child(name, case, seed, number, end, folder, log))
        status = _wait(child, log, end)
        lines = log.read_text().splitlines()
        number = int(lines[0]) + len(lines) - 1
        outcome.counts.update(line for line in lines[1:] if line in ("read", "refused"))
        if status != 0:
            what = f"signal {os.WTERMSIG(status)}" if os.WIFSIGNALED(status) else lines[-1]
            if os.WIFSIGNALED(status):
                number += 1
            outcome.failures.append(f"{name}: seed {seed}, case {number - 1}: {what}")
    return outcome


def _wait(child: int, log: Path, end: float) -> int:
    """Wait for a child; one that makes no progress, deaf to its own alarm inside a C library, is killed."""
    size, since = -1, time.monotonic()
    while True:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            return status
        now = time.monotonic()
        if log.stat().st_size != size:
            size, since = log.stat().st_size, now
        if now - since > 1.5 * SECONDS or now > end + 2 * SECONDS:
            os.kill(child, signal.SIGKILL)
        time.sleep(0.02)


def _child(name: str, case: Case, seed: int, number: int, end: float, folder: Path, log: Path) -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    limit = pages * resource.getpagesize() + MEMORY
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))

    def too_slow(*_: object) -> None:
        raise TimeoutError(f"still running after {SECONDS} s")

    signal.signal(signal.SIGALRM, too_slow)
    with open(log, "a", buffering=1) as lines:
        while time.monotonic() < end:
            signal.alarm(SECONDS)
            try:
                result = run_case(case, f"{name}-{seed}-{number}", folder)
            except BaseException as error:
                lines.write(f"{type(error).__name__}: {error}".replace("\n", " ")[:300] + "\n")
                return 1
            signal.alarm(0)
            lines.write(result + "\n")
            number += 1
    return 0


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seconds", type=float, default=600)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--target", action="append")
    parser.add_argument("--case", type=int)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        cases = targets(folder)
        chosen = args.target or list(cases)
        if args.case is not None:
            print(run_case(cases[chosen[0]], f"{chosen[0]}-{args.seed}-{args.case}", folder))
            return
        failures = []
        for target in chosen:
            outcome = fuzz(target, cases[target], args.seed, args.seconds / len(chosen), folder)
            failures += outcome.failures
            print(json.dumps({"target": target, **outcome.counts, "failures": len(outcome.failures)}), flush=True)
        for failure in failures:
            print(failure)
    raise SystemExit(1 if failures else 0)


if __name__ == "__main__":
    main()
