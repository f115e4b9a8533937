"""What golden archives are made by: cases, their steps, and how they are run."""

from __future__ import annotations

import contextlib
import dataclasses
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

import pltpack
from benchmarks.near_archives import Builder, Node, Row
from pltpack.archive import profiles
from pltpack.archive.sampling import JobSamples, TokenRange
from pltpack.archive.settings import Target
from pltpack.codec import registry
from pltpack.snapshot import Snapshot

#: File name of a case's profile.
PROFILE = "profile.safetensors"


@dataclasses.dataclass(frozen=True)
class Step:
    """One command: ``compress``, ``append``, ``compact`` or ``place``, its sessions and its options.

    ``place`` writes an archive whose nodes and rows of mapping tables are given, see `_place`.
    """

    command: str
    sessions: tuple[Snapshot, ...] = ()
    options: dict[str, Any] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class Case:
    """One golden archive.

    Attributes
    ----------
    title : str
        What it shows.
    steps : list of Step
    references : bool
        Let lossy codecs code differences to the mapped values, and keep differences that are nothing: the format
        allows both and the writer does neither.
    inputs : str or None
        Golden archive that has the same inputs, which are stored once.
    profile : bytes or None
        File of the profile. Steps say where it goes: option ``profile`` is ``embedded`` or ``external``; an external
        one is put beside the manifest. Option ``target`` holds the members of `pltpack.archive.settings.Target`.
    free : bool
        Readers are held to the archive, but not writers: what predicts what, and how an encoder makes use of it, may
        change.
    """

    title: str
    steps: list[Step]
    references: bool = False
    inputs: str | None = None
    profile: bytes | None = None
    free: bool = False


def compress(*sessions: Snapshot, **options: Any) -> Step:
    """A first step."""
    return Step("compress", sessions, {"block": 8, **options})


def append(*sessions: Snapshot, **options: Any) -> Step:
    """A later step."""
    return Step("append", sessions, options)


def run(case: Case, folder: Path) -> None:
    """Make the archive."""
    with coding_differences() if case.references else contextlib.nullcontext():
        for step in case.steps:
            if step.command == "compact":
                pltpack.compact(folder)
            elif step.command == "append":
                pltpack.append(folder, step.sessions, **step.options)
            elif step.command == "place":
                _place(case.profile, step, folder)
            elif case.profile is None:
                pltpack.compress(step.sessions, folder, **step.options)
            else:
                _with_profile(case.profile, step, folder)


def _with_profile(profile: bytes, step: Step, folder: Path) -> None:
    options = dict(step.options)
    external = options.pop("profile") == "external"
    target = Target(**options.pop("target", {}))
    with tempfile.TemporaryDirectory() as temp:
        path = Path(temp) / PROFILE
        path.write_bytes(profile)
        options["external_profile" if external else "profile"] = path
        pltpack.compress(step.sessions, folder, target=target, **options)
    if external:
        (folder / PROFILE).write_bytes(profile)


def _place(profile: bytes | None, step: Step, folder: Path) -> None:
    """Write an archive by hand.

    Options: `codec`, its `config`, `nodes` (session, start, stop), `rows` of each session (start, length, node, start
    in the node), and for `Builder` `seed`, `unit` and `exact_units`.
    """
    options, identity = step.options, step.sessions[0].identity
    by_name = {snapshot.session: snapshot for snapshot in step.sessions}
    codec = registry.codec(options["codec"], options["config"])
    if profile is None:
        arrays = codec.learn(JobSamples([TokenRange(one, 0, len(one)) for one in step.sessions]), identity)
    else:
        with tempfile.TemporaryDirectory() as temp:
            path = Path(temp) / PROFILE
            path.write_bytes(profile)
            arrays, _ = profiles.load(path)
    nodes = [Node(by_name[name], start, stop) for name, start, stop in options["nodes"]]
    builder = Builder(folder, codec, arrays, identity, nodes, np.random.default_rng(options["seed"]), options["unit"])
    for snapshot in step.sessions:
        rows = [Row(*row) for row in options["rows"].get(snapshot.session, [])]
        builder.add(snapshot, rows, exact_units=options["exact_units"])
    builder.finish()


@contextlib.contextmanager
def coding_differences() -> Iterator[None]:
    """Make the group codec pass for an exact one, and no unit for equal to its reference."""
    from pltpack.archive import encoding
    from pltpack.archive.draft import Draft
    from pltpack.codec.group import GroupCodec

    same_bits, owner = encoding.same_bits, Draft._owner
    try:
        GroupCodec.exact = True
        encoding.same_bits = lambda a, b: False
        # What it decodes is not what it was given.
        Draft._owner = lambda *_: None
        yield
    finally:
        GroupCodec.exact = False
        encoding.same_bits, Draft._owner = same_bits, owner
