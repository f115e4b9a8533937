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
import json
import os
import random
import resource
import shutil
import signal
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

import pltpack
from benchmarks.fuzz_archives import Archives, snapshots
from benchmarks.golden_profiles import drawn_profile, save_profile
from benchmarks.mutations import mutate
from pltpack.archive import profiles
from pltpack.archive.segments import fresh
from pltpack.codec import registry
from pltpack.codec.base import Codec, KeyValue, Unit
from pltpack.errors import PltpackError
from pltpack.snapshot import Snapshot

#: Address space a case may add to what the process had, and seconds it may take.
MEMORY = 1 << 30
SECONDS = 20

Case = Callable[[random.Random, Path], None]
Reference = list[KeyValue] | None


class Dumps:
    """Fuzz targets over dump files."""

    def __init__(self, folder: Path) -> None:
        self.files = {}
        for dump_format, suffix in (("safetensors", ".safetensors"), ("hdf5", ".h5")):
            written = pltpack.write_dump(snapshots(), folder / f"dump-{dump_format}", dump_format)
            self.files[dump_format] = (written[0].read_bytes(), suffix)
        plain = [dataclasses.replace(s, identity=dataclasses.replace(s.identity, salt=None)) for s in snapshots()]
        for name, dump_format, options in (
            ("llama.cpp", "llama.cpp", {"arch": "llama", "type": "f16", "token_list": "packed"}),
            ("llama.cpp-transposed", "llama.cpp", {"arch": "llama", "v_trans": "yes", "kind": "session"}),
            ("mlx", "mlx", {}),
            ("mlx-sliced", "mlx", {"layout": "sliced"}),
        ):
            (written, *_) = pltpack.write_dump(plain, folder / f"dump-{name}", dump_format, options)
            self.files[name] = (written.read_bytes(), written.suffix)
        self.ids = {s.session: s.tokens.tolist() for s in snapshots()} | {"dump": snapshots()[0].tokens.tolist()}

    def case(self, dump_format: str) -> Case:
        """Mutations of a dump file of one format, read under its name and by sniffing."""

        def run(rng: random.Random, work: Path) -> None:
            data, suffix = self.files[dump_format]
            path = work / f"dump{suffix}"
            path.write_bytes(mutate(data, rng))
            forced = rng.random() < 0.5
            engine = dump_format.partition("-")[0]
            if engine == "mlx":
                (work / f"dump{suffix}.tokens.json").write_text(json.dumps(self.ids["dump"]))
            options = {"arch": "llama", "head_dim": "16"} if engine == "llama.cpp" else {}
            for snapshot in pltpack.open_dumps([path], format=engine if forced else None, options=options):
                for layer in range(len(snapshot.identity.layers)):
                    snapshot.layer(layer)

        return run


def off(array: np.ndarray) -> np.ndarray:
    """Values a little off."""
    return (1.02 * array.astype(np.float32)).astype(array.dtype)


class Transform:
    """Fuzz targets over the codec of layer groups and its profiles, without an archive around them."""

    def __init__(self) -> None:
        self.arrays = drawn_profile(snapshots()[0], layer_group=2)
        self.identity = snapshots()[0].identity
        self.codec = self._started(self.arrays)
        self.payloads = [(unit, *self._encode(snapshot, unit)) for snapshot in snapshots()
                         for start, stop in ((0, 9), (4, 15), (9, 12)) for near in (False, True)
                         for unit in [Unit(0, self.identity.layers[0], start, stop - start, 0, self.identity.layers,
                                           near)]
                         if stop <= len(snapshot)]  # fmt: skip

    def _started(self, arrays: dict[str, np.ndarray]) -> Codec:
        codec = registry.codec("transform", {"step": 0.05})
        codec.start(arrays, self.identity)
        return codec

    def _encode(self, snapshot: Snapshot, unit: Unit) -> tuple[bytes, Reference]:
        """A unit's payload, and what a near unit is predicted from."""
        stop = unit.position + unit.tokens
        arrays = [snapshot.layer(layer, unit.position, stop) for layer in range(len(unit.layers))]
        reference = [(off(keys), off(values)) for keys, values in arrays] if unit.near else None
        return self.codec.encode_span(unit, arrays, reference), reference

    def payload(self, rng: random.Random, work: Path) -> None:
        """Mutations of a unit's payload."""
        unit, payload, reference = rng.choice(self.payloads)
        self._decode(self.codec, unit, mutate(payload, rng), reference)

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
        unit, payload, reference = rng.choice(self.payloads)
        try:
            codec = self._started(arrays)
        except ValueError as error:
            raise PltpackError(str(error)) from None
        self._decode(codec, unit, payload, reference)

    def file(self, rng: random.Random, work: Path) -> None:
        """Mutations of a profile file."""
        path = work / "profile.safetensors"
        save_profile(path, self.arrays, snapshots()[0])
        path.write_bytes(mutate(path.read_bytes(), rng))
        profiles.load(path)

    @staticmethod
    def _decode(codec: Codec, unit: Unit, payload: bytes, reference: Reference) -> None:
        out = [fresh(layer, unit.tokens) for layer in unit.layers]
        try:
            codec.decode_span(memoryview(payload), unit, out, reference)
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
        "llama.cpp": dumps.case("llama.cpp"),
        "llama.cpp-transposed": dumps.case("llama.cpp-transposed"),
        "mlx": dumps.case("mlx"),
        "mlx-sliced": dumps.case("mlx-sliced"),
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
