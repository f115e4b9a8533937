"""Fuzz targets over whole archives: manifest, library segments, shards, session files; see `benchmarks.fuzz`."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import random
import shutil
import struct
from pathlib import Path

import ml_dtypes
import numpy as np
import xxhash

import pltpack
from benchmarks.golden_profiles import drawn_profile, save_profile
from benchmarks.mutations import mutate, mutate_json
from benchmarks.near_archives import Builder, Node, Row
from pltpack.archive.sampling import JobSamples, TokenRange
from pltpack.codec import registry
from pltpack.format import tables
from pltpack.format.container import PAYLOAD
from pltpack.format.manifest import NAME
from pltpack.snapshot import Identity, Snapshot

CODECS = ("lossless", "q4", "q2", "turboquant-3")


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
        self.sessions = []
        for number, archive in enumerate((self.archives[0], *self.archives[-3:])):
            self.sessions.append(folder / f"{number}.pltsession")
            pltpack.export_session(archive, "s1" if number else "s0", self.sessions[-1])
        # Loops are compiled here: in a case that would take long, deaf to its alarm.
        for archive in self.archives:
            use_archive(archive)

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
        """Mutations of an exported session, predicted or not."""
        path = work / "s.pltsession"
        path.write_bytes(mutate(rng.choice(self.sessions).read_bytes(), rng))
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
