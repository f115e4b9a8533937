"""Everything that kernels do, on this machine's GPU: right against the CPU, and how fast, stage by stage.

Caches are drawn from a seed (8 heads of 128 channels, BF16), encoded on the CPU in units of 256 tokens, and decoded on
the device many times over, straight to pages. Rates are raw bytes of cache per second. Every unit's words are compared
with those that the CPU decodes, and encoders' bytes with the CPU's. Prints a table and writes JSON.

``--tiny`` runs all of it at sizes for numba's simulator (NUMBA_ENABLE_CUDASIM=1), whose times mean nothing.

Usage: python -m benchmarks.gpu [--tiny] [--repeat N] [--rounds N] [--json FILE]
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

import pltpack
from benchmarks.golden_profiles import drawn_profile
from pltpack.codec import coefficients, delta, rate, symbols
from pltpack.codec.base import Codec, EncodeJob, KeyValue, LayerSample, Unit
from pltpack.codec.classes import LAYOUTS
from pltpack.codec.coefficients import Order
from pltpack.codec.group import GroupCodec
from pltpack.codec.lossless import STATIC, LosslessCodec
from pltpack.codec.transform import TransformCodec
from pltpack.codec.turboquant import TurboQuantCodec
from pltpack.gpu import compiled, device
from pltpack.gpu.backend import CpuBackend, CudaBackend
from pltpack.gpu.codec import DeviceCodec
from pltpack.gpu.jobs import Job, LayerPlace, places_of
from pltpack.gpu.lossless_units import LosslessDecoder
from pltpack.gpu.place import Pages
from pltpack.gpu.spectrum_units import encode_values
from pltpack.gpu.sphere_units import SphereDecoder
from pltpack.snapshot import DTYPES, Identity, LayerGeometry, Snapshot

ROPE = {"type": "default", "theta": 500000.0, "style": "half"}


@dataclasses.dataclass(frozen=True)
class Size:
    """Heads, channels, layers, tokens of a unit, units a layer, and components of a layer group of two."""

    heads: int
    dim: int
    layers: int
    tokens: int
    units: int
    rank: int


FULL, TINY = Size(8, 128, 4, 256, 2, 512), Size(1, 16, 2, 8, 1, 12)


class Sample(NamedTuple):
    """Keys and values of all layers, and the identity of their model."""

    layers: list[KeyValue]
    identity: Identity

    def layer(self, index: int) -> list[LayerSample]:
        """What a codec learns from."""
        keys, values = self.layers[index]
        unit = Unit(index, self.identity.layers[index], 0, keys.shape[1])
        return [LayerSample(unit, keys, values)]


class Case(NamedTuple):
    """A started codec with payloads of units, and their raw arrays."""

    name: str
    codec: Codec
    units: list[tuple[bytes, Unit]]
    arrays: list[list[KeyValue]]


def draw(size: Size) -> Sample:
    """Channels of different scales and means, as caches have them; each token like the one before it by half."""
    rng, layers = np.random.default_rng(0), []
    geometry = LayerGeometry(size.heads, size.dim, size.dim, "BF16")
    count = size.tokens * size.units + 8
    for _ in range(size.layers):
        pair = []
        for _ in range(2):
            scale = np.exp(rng.normal(size=(size.heads, 1, size.dim)) / 2)
            x = rng.standard_normal((size.heads, count, size.dim))
            x[:, 1:] = x[:, 1:] * 0.87 + x[:, :-1] * 0.5
            x = scale * (x + rng.normal(size=scale.shape))
            pair.append(x.astype(np.float32).astype(DTYPES["BF16"]))
        layers.append((pair[0], pair[1]))
    return Sample(layers, Identity(rope=ROPE, keys="rotated", layers=(geometry,) * size.layers))


def cases(size: Size, sample: Sample) -> Iterator[Case]:
    """Every tier of every codec."""
    single = [(f"q{bits}", GroupCodec(bits)) for bits in (4, 3, 2, 1)]
    kinds: list[tuple[str, Codec]] = [("lossless", LosslessCodec()), *single, ("turboquant-4", TurboQuantCodec(4))]
    for name, codec in kinds:
        codec.start(codec.learn(sample, sample.identity), sample.identity)
        units, arrays = [], []
        for layer, position in ((i, 4 + n * size.tokens) for n in range(size.units) for i in range(size.layers)):
            unit = Unit(layer, sample.identity.layers[layer], position, size.tokens)
            part = slice(position, position + size.tokens)
            pair = tuple(np.ascontiguousarray(x[:, part]) for x in sample.layers[layer])
            units.append((codec.encode(unit, pair[0], pair[1]), unit))
            arrays.append([(pair[0], pair[1])])
        yield Case(name, codec, units, arrays)
    # One layer group: bases of more would take longer to draw than all the rest.
    sample = Sample(sample.layers[:2], dataclasses.replace(sample.identity, layers=sample.identity.layers[:2]))
    tokens = np.arange(8, dtype=np.int32)
    first = Snapshot.from_arrays("s", tokens, [(k[:, :8], v[:, :8]) for k, v in sample.layers], sample.identity)
    profile = drawn_profile(first, layer_group=2, rank=size.rank)
    for name, step in (("transform, fine", 0.5), ("transform, coarse", 4.0)):
        transform = TransformCodec(step=step)
        transform.start(profile, sample.identity)
        units, arrays = [], []
        for group in transform.layer_groups(2):
            for n in range(size.units):
                position = 4 + n * size.tokens
                layers = sample.identity.layers[group.start : group.stop]
                unit = Unit(group.start, layers[0], position, size.tokens, layers=layers)
                part = slice(position, position + size.tokens)
                pairs = [(np.ascontiguousarray(k[:, part]), np.ascontiguousarray(v[:, part]))
                         for k, v in sample.layers[group.start : group.stop]]  # fmt: skip
                units.append((transform.encode_span(unit, pairs), unit))
                arrays.append(pairs)
        yield Case(name, transform, units, arrays)


def paged(geometry: LayerGeometry, words: Any, first: int, tokens: int, block: int = 16) -> LayerPlace:
    """Keys and values in pages of the layout HND, ``[pages, H, block, 2 D]``, in an order that is not theirs."""
    count = -(-tokens // block)
    pages = tuple(first + (7 * i) % count if count % 7 else first + i for i in range(count))
    return LayerPlace(words, *Pages.vllm("HND", geometry.heads, geometry.k_dim, block, count, pages))


def jobs_of(case: Case, backend: Any, repeat: int) -> tuple[Any, list[Job]]:
    """A buffer, and each unit `repeat` times with pages of its own in it."""
    shapes = [unit.layers or (unit.geometry,) for _, unit in case.units]
    block, geometry = 16, shapes[0][0]
    pages_of = -(-case.units[0][1].tokens // block)
    count = repeat * sum(map(len, shapes))
    words = backend.buffer(count * pages_of * block * geometry.elements_per_token, "BF16")
    jobs, at = [], 0
    for _ in range(repeat):
        for (payload, unit), layers in zip(case.units, shapes, strict=True):
            places = []
            for g in layers:
                places.append(paged(g, words, at, unit.tokens, block))
                at += pages_of
            jobs.append(Job(memoryview(payload), unit, tuple(places)))
    return words, jobs


def compare(case: Case, cuda: CudaBackend) -> dict[str, float]:
    """Decode once on both sides: how far values are apart, and which shares by how many units in the last place."""
    found = []
    for backend in (cuda, CpuBackend()):
        words, jobs = jobs_of(case, backend, 1)
        backend.decode_units(case.codec, jobs)
        found.append(np.array(backend.to_host(words)))
    apart = np.abs(delta.ordered(found[0]).astype(np.int64) - delta.ordered(found[1]).astype(np.int64))
    return {"differ": float(np.mean(apart > 0)), "by_more_than_1": float(np.mean(apart > 1)), "most": int(apart.max())}


def is_right(case: str, apart: dict[str, float]) -> bool:
    """Whether that is what the codec promises: equal bits, or the specification's tolerance."""
    if not case.startswith("transform"):
        return apart["most"] == 0
    return apart["most"] <= 2 and apart["by_more_than_1"] <= 0.001


def measure(case: Case, cuda: CudaBackend, repeat: int, rounds: int) -> dict[str, Any]:
    """Decoding of one case: correctness, seconds of the whole and of its stages (the fastest round)."""
    apart = compare(case, cuda)
    _, jobs = jobs_of(case, cuda, repeat)
    raw = sum(job.unit.tokens * sum(g.bytes_per_token for g in job.unit.layers or (job.unit.geometry,)) for job in jobs)
    coded = sum(len(job.payload) for job in jobs)
    best: tuple[float, dict[str, float]] | None = None
    for _ in range(rounds + 1):
        start = time.perf_counter()
        with device.Stages() as stages:
            cuda.decode_units(case.codec, jobs)
            seconds = stages.seconds()
        taken = time.perf_counter() - start
        if best is None or taken < best[0]:
            best = taken, seconds
    assert best is not None
    on_device = sum(taken for name, taken in best[1].items() if name not in ("start", "read payloads", "plan"))
    return {
        "case": case.name, "right": is_right(case.name, apart), "apart": apart, "units": len(jobs),
        "raw_bytes": raw, "coded_bytes": coded,
        "ratio": raw / coded, "seconds": best[0], "gb_per_second": raw / best[0] / 1e9,
        "device_gb_per_second": raw / max(on_device, 1e-9) / 1e9, "stages": best[1],
    }  # fmt: skip


def encoders(found: Sequence[Case], cuda: CudaBackend, rounds: int) -> list[dict[str, Any]]:
    """Encoders on the device: the CPU's bytes, and raw bytes per second with all copies."""
    out = [whole_encoder(case, cuda, rounds) for case in found]
    for case in found:
        pairs = [pair for arrays in case.arrays for pair in arrays]
        raw = sum(k.nbytes + v.nbytes for k, v in pairs)
        if case.name == "lossless":
            mine = _contiguous(case)
            lossless = LosslessDecoder(case.codec)  # type: ignore[arg-type]
            wanted = [_static(case, i) for i in range(len(case.units))]
            work: Any = lambda coder=lossless, mine=mine: coder.encode(mine, LAYOUTS["BF16"])  # noqa: E731
        elif case.name.startswith("turboquant"):
            mine = _contiguous(case)
            sphere, wanted = SphereDecoder(case.codec), [payload for payload, _ in case.units]  # type: ignore[arg-type]
            work = lambda coder=sphere, mine=mine: coder.encode(mine)  # noqa: E731
        elif case.name == "transform, fine":
            quantized, orders, wanted = _coefficients(case)
            tables = case.codec._tables  # type: ignore[attr-defined]
            on_device = device.put(quantized)
            work = lambda q=on_device, o=orders, t=tables: encode_values(q, o, t)  # noqa: E731
        else:
            continue
        best = min(_timed(work)[0] for _ in range(rounds + 1))
        out.append({"case": f"{case.name}, kernels", "equal": work() == wanted, "raw_bytes": raw, "seconds": best,
                    "gb_per_second": raw / best / 1e9})  # fmt: skip
    return out


def whole_encoder(case: Case, cuda: CudaBackend, rounds: int) -> dict[str, Any]:
    """Encoding as archives do it, from host arrays, with what the host chooses; `transform` is judged by its values."""
    codec, units = DeviceCodec(case.codec, cuda), [unit for _, unit in case.units]
    raw = sum(x.nbytes for arrays in case.arrays for pair in arrays for x in pair)
    if case.codec.spans:
        work: Any = lambda: [codec.encode_span(*given) for given in zip(units, case.arrays, strict=True)]  # noqa: E731
    else:
        jobs = [EncodeJob(unit, *arrays[0]) for unit, arrays in zip(units, case.arrays, strict=True)]
        work = lambda: codec.encode_many(jobs)  # noqa: E731
    payloads = work()
    equal = payloads == [payload for payload, _ in case.units]
    if case.codec.spans and not equal:
        found = []
        for coded in (list(zip(payloads, units, strict=True)), case.units):
            words, decoding = jobs_of(case._replace(units=coded), CpuBackend(), 1)
            CpuBackend().decode_units(case.codec, decoding)
            found.append(delta.ordered(words).astype(np.int64))
        # A product that differs in its last bits rounds a coefficient to another integer here and there.
        equal = bool(np.mean(np.abs(found[0] - found[1]) > 2) <= 0.01)
    best = min(_timed(work)[0] for _ in range(rounds + 1))
    return {"case": case.name, "equal": equal, "raw_bytes": raw, "seconds": best, "gb_per_second": raw / best / 1e9}


def loads(sample: Sample, rounds: int) -> list[dict[str, Any]]:
    """Archives loaded to the device by depth, files in the page cache: values as the CPU reads them, and seconds."""
    tokens = np.arange(sample.layers[0][0].shape[1], dtype=np.int32)
    snapshot = Snapshot.from_arrays("s", tokens, sample.layers, sample.identity)
    raw, out = sum(k.nbytes + v.nbytes for k, v in sample.layers), []
    with tempfile.TemporaryDirectory() as folder:
        for quality in ("lossless", "q4", "turboquant-4"):
            pltpack.compress([snapshot], Path(folder) / quality, quality=quality, block=4)
            for depth in (1, 3):
                with pltpack.open(Path(folder) / quality) as archive:
                    loader = archive.loader(device="cuda", depth=depth)
                    hit, read = loader.lookup(tokens), archive.read("s")
                    best = min(_timed(lambda loader=loader, hit=hit: loader.load(hit))[0] for _ in range(rounds + 1))
                    right = all(
                        np.array_equal(device.get(mine), theirs.view(np.uint16))
                        for layer in loader.load(hit)
                        for mine, theirs in zip(layer[1:], read.layer(layer.layer, 0, hit.tokens), strict=True)
                    )
                out.append({"case": f"{quality}, depth {depth}", "right": right, "raw_bytes": raw, "seconds": best,
                            "gb_per_second": raw / best / 1e9})  # fmt: skip
    return out


def _timed(work: Any) -> tuple[float, Any]:
    start = time.perf_counter()
    result = work()
    return time.perf_counter() - start, result


def _contiguous(case: Case) -> list[Job]:
    words = np.concatenate([x.view(np.uint16).reshape(-1) for arrays in case.arrays for pair in arrays for x in pair])
    buffer, jobs, at = device.put(words), [], 0
    for _, unit in case.units:
        jobs.append(Job(memoryview(b""), unit, places_of((unit.geometry,), unit.tokens, buffer, at)))
        at += unit.tokens * unit.geometry.elements_per_token
    return jobs


def _static(case: Case, number: int) -> bytes:
    """A payload in the static mode, which the encoder on the device always takes."""
    codec: Any = case.codec
    unit, (keys, values) = case.units[number][1], case.arrays[number][0]
    rows = delta.channel_rows((keys.view(np.uint16), values.view(np.uint16)))
    body, _ = symbols.encode(rows, codec._static(unit), codec._tables, LAYOUTS["BF16"])
    return b"".join([bytes([STATIC]), *body])


def _coefficients(case: Case) -> tuple[np.ndarray, list[Order], list[bytes]]:
    codec: Any = case.codec
    rng, quantized, orders, wanted = np.random.default_rng(1), [], [], []
    logs = codec._bases_of(case.units[0][1]).logs
    for _, unit in case.units:
        order = Order.of(logs, rate.steps(-24), rng.integers(0, 16, unit.tokens), codec._tables)
        values = (rng.laplace(size=(unit.tokens, len(logs))) * 3).astype(np.int32)
        orders.append(order)
        quantized.append(values)
        wanted.append(coefficients.encode(values, order, codec._tables))
    return np.concatenate(quantized), orders, wanted


def copy_rate(size: int) -> float:
    """Bytes per second from pinned memory to the device."""
    host = device.staging(size)
    host[:] = 1
    return size / min(_timed(lambda: device.get(device.put(host)[:1]))[0] for _ in range(3))


def usage() -> dict[str, Any]:
    """What kernels take on this device, compiled by a program of its own; empty where that cannot be."""
    if device.is_simulated() or compiled.missing() is not None:
        return {}
    from numba import cuda

    major, minor = cuda.get_current_device().compute_capability
    done = subprocess.run([sys.executable, "-m", "pltpack.gpu.compiled", f"{major}{minor}"], capture_output=True,
                          text=True, check=False)  # fmt: skip
    found: dict[str, Any] = json.loads(done.stdout) if done.returncode == 0 else {"error": done.stderr[-500:]}
    return found


def device_name() -> str:
    """Of the device."""
    if device.is_simulated():
        return "numba's simulator: times mean nothing"
    return str(device.arrays().cuda.runtime.getDeviceProperties(0)["name"].decode())


def table(report: dict[str, Any]) -> str:
    """The report for people."""
    lines = [f"{report['device']}; host to device {report['copy_gb_per_second']:.1f} GB/s", ""]
    lines.append(f"{'decode':<18} {'raw MB':>8} {'ratio':>6} {'GB/s':>7} {'device GB/s':>11}  right; stages in ms")
    for line in report["decode"]:
        stages = ", ".join(f"{name} {1e3 * taken:.2f}" for name, taken in line["stages"].items())
        lines.append(f"{line['case']:<18} {line['raw_bytes'] / 1e6:>8.1f} {line['ratio']:>6.2f} "
                     f"{line['gb_per_second']:>7.2f} {line['device_gb_per_second']:>11.2f}  "
                     f"{line['right']}; {stages}")  # fmt: skip
    lines += ["", f"{'encode':<26} {'raw MB':>8} {'GB/s':>7}  bytes equal the CPU's"]
    for line in report["encode"]:
        lines.append(
            f"{line['case']:<26} {line['raw_bytes'] / 1e6:>8.1f} {line['gb_per_second']:>7.2f}  {line['equal']}"
        )
    lines += ["", f"{'load':<22} {'raw MB':>8} {'GB/s':>7}  values as the CPU's"]
    for line in report["load"]:
        lines.append(
            f"{line['case']:<22} {line['raw_bytes'] / 1e6:>8.1f} {line['gb_per_second']:>7.2f}  {line['right']}"
        )
    return "\n".join(lines)


def main() -> int:
    """Run, print, write; 1 if anything is not right."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--tiny", action="store_true", help="sizes for the simulator")
    parser.add_argument("--repeat", type=int, help="times that each unit is decoded at once (default 128, tiny 1)")
    parser.add_argument("--rounds", type=int, help="rounds, of which the fastest counts (default 5, tiny 1)")
    parser.add_argument("--json", type=Path, help="where to write the report")
    options = parser.parse_args()
    repeat, rounds = options.repeat or (1 if options.tiny else 128), options.rounds or (1 if options.tiny else 5)
    cuda, size = CudaBackend(), TINY if options.tiny else FULL
    sample = draw(size)
    found = list(cases(size, sample))
    copied = copy_rate(1 << 14 if options.tiny else 1 << 28)
    report: dict[str, Any] = {"device": device_name(), "copy_gb_per_second": copied / 1e9}
    report["decode"] = [measure(case, cuda, repeat, rounds) for case in found]
    report["encode"] = encoders(found, cuda, rounds)
    report["load"] = loads(sample, rounds)
    report["kernels"] = usage()
    print(table(report))
    if options.json:
        options.json.write_text(json.dumps(report, indent=1) + "\n")
    wrong = [line["case"] for line in report["decode"] if not line["right"]]
    wrong += [line["case"] for line in report["encode"] if not line["equal"]]
    wrong += [line["case"] for line in report["load"] if not line["right"]]
    if wrong:
        print(f"not right: {', '.join(wrong)}")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
