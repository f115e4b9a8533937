"""Golden cases of the codec ``transform``: drawn sessions and drawn profiles, embedded and external."""

from __future__ import annotations

import dataclasses
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.golden_profiles import drawn_profile, save_profile
from benchmarks.golden_sessions import RealDumps, Shape, drawn, ids
from benchmarks.golden_steps import Case, Step, append, compress
from pltpack.snapshot import DTYPES, Snapshot

SHAPES: tuple[Shape, ...] = ((1, 8, 6), (2, 4, 4), (1, 6, 8))
SMALL: tuple[Shape, ...] = ((1, 4, 5), (1, 4, 4), (1, 3, 4))


def odd(session: Snapshot, start: int = 20) -> Snapshot:
    """The session with NaNs, an infinity, zeros of both signs and a subnormal number from a token on."""
    layers = []
    for index in range(len(session.identity.layers)):
        keys, values = (np.array(part) for part in session.layer(index))
        words = f"u{keys.dtype.itemsize}"
        for array in (keys, values):
            flat, bits = array[0, start:].view(words), 8 * array.dtype.itemsize
            flat[2, 1], flat[4, 0] = (1 << bits) - 1, 1 << (bits - 1)
            flat[5, 2], flat[4, 1] = 1, 0
        values[0, start + 7, 3] = np.array(np.inf, np.float32).astype(values.dtype)
        layers.append((keys, values))
    return Snapshot.from_arrays(session.session, session.tokens, layers, session.identity)


def profile_of(session: Snapshot, **options: Any) -> bytes:
    """The file of a drawn profile."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "profile.safetensors"
        save_profile(path, drawn_profile(session, **options), session)
        return path.read_bytes()


def _sessions(dtype: str = "BF16", layers: tuple[Shape, ...] = SHAPES, **identity: Any) -> tuple[Snapshot, Snapshot]:
    shared = ids(20, 40)
    return (
        odd(drawn("first", [*shared, *ids(15, 41)], layers=layers, dtype=dtype, **identity)),
        drawn("second", [*shared[:16], 7, *ids(9, 42)], layers=layers, dtype=dtype, **identity),
    )


def _case(
    title: str,
    *,
    dtype: str = "BF16",
    place: str = "embedded",
    profile: dict[str, Any],
    identity: Any = None,
    count: int = 2,
    **options: Any,
) -> Callable[[RealDumps], Case]:
    def make(real: RealDumps) -> Case:
        sessions = _sessions(dtype, **(identity or {}))[:count]
        made = profile_of(sessions[0], **profile)
        return Case(f"transform on {dtype}: {title}", [compress(*sessions, profile=place, **options)], profile=made)

    return make


def _mixed(real: RealDumps) -> Case:
    parts = [_sessions(dtype)[0] for dtype in ("BF16", "F8_E4M3", "F32")]
    layers = [part.layer(index) for index, part in enumerate(parts)]
    geometry = tuple(part.identity.layers[index] for index, part in enumerate(parts))
    identity = dataclasses.replace(parts[0].identity, layers=geometry)
    session = Snapshot.from_arrays("mixed", parts[0].tokens, layers, identity)
    assert [DTYPES[layer.dtype] for layer in session.identity.layers] == [keys.dtype for keys, _ in layers]
    steps = [compress(session, profile="embedded", quality="transform")]
    made = profile_of(session, layer_group=3, templates=0)
    return Case("transform: three dtypes in one layer group", steps, profile=made)


def _append(real: RealDumps) -> Case:
    one, two = _sessions(layers=SMALL)
    exact = drawn("third", [*ids(20, 40), 3], layers=SMALL)
    steps = [
        compress(one, profile="embedded", quality="near"),
        append(two, quality="small"),
        append(exact, quality="lossless"),
    ]
    made = profile_of(one, templates=1, seed=5)
    return Case("near, then small and lossless appended: two states with one profile", steps, profile=made)


def _compacted(real: RealDumps) -> Case:
    case = _append(real)
    return dataclasses.replace(case, title="the appended archive of two states with one profile, compacted",
                               steps=[*case.steps, Step("compact")], inputs="045-transform-append")  # fmt: skip


def _small(real: RealDumps) -> Case:
    session = drawn("a", ids(12, 47), layers=SMALL)
    other = drawn("b", [*ids(12, 47)[:8], 1, 2], layers=SMALL)
    return Case("small transform: a base of broken archives",
                [compress(session, other, quality="transform", block=4, profile="embedded")],
                profile=profile_of(session, rank=3))  # fmt: skip


def _scaled(real: RealDumps) -> Case:
    usual, other = _sessions()
    layers = [tuple((part.astype(np.float32) * 6).astype(part.dtype) for part in other.layer(index))
              for index in range(len(other.identity.layers))]  # fmt: skip
    loud = Snapshot.from_arrays("loud", other.tokens, layers, other.identity)
    made = profile_of(usual, seed=7)
    return Case("transform: a session whose components are larger than the profile's", [
        compress(usual, profile="embedded", quality="transform"), append(loud)], profile=made)  # fmt: skip


#: Parts of `benchmarks.golden_cases.CASES`.
SCALED: dict[str, Callable[[RealDumps], Case]] = {"062-transform-scaled": _scaled}
TRANSFORM: dict[str, Callable[[RealDumps], Case]] = {
    "039-transform-bf16": _case("layer groups of 2 of 3 layers, templates, NaNs, a shared prefix", profile={},
                                quality="balanced"),
    "040-transform-external": _case("a profile beside the archive, every layer a group", place="external",
                                    profile={"layer_group": 1, "rank": 3, "seed": 1}, quality="small"),
    "041-transform-f16": _case("interleaved rotary of 4 channels, one group", dtype="F16",
                               profile={"layer_group": 9, "rank": 20, "templates": 0, "seed": 2}, quality="transform",
                               identity={"rope": {"theta": 10000, "dim": 4, "style": "interleaved"}}),
    "042-transform-f32": _case("unrotated keys, a target of KL", dtype="F32", profile={"seed": 3, "templates": 0},
                               quality="balanced", target={"kl": 0.05}, count=1, identity={"keys": "unrotated"}),
    "043-transform-f8": _case("no shared components, a coarse target", dtype="F8_E5M2",
                              profile={"seed": 4, "rank": 0, "templates": 0}, quality="balanced", target={"kl": 0.5}),
    "044-transform-mixed": _mixed,
    "045-transform-append": _append,
    "046-transform-compacted": _compacted,
    "047-small-transform": _small,
}  # fmt: skip
