"""Recipes that break what format 1.2 adds: mapping rows that predict, and references of several layers."""

from __future__ import annotations

import hashlib
import json
from typing import Any

import numpy as np

from benchmarks.broken import recipe
from benchmarks.surgery import Part, Surgery


def _predicting(s: Surgery) -> Part:
    """The first session's shard, of the version that knows predictions."""
    part = s.shard()
    part.metadata["format_version"] = "1.2"
    return part


def _moved(s: Surgery) -> np.ndarray:
    """Its mapping, whose only row is moved by a token."""
    runs = _predicting(s).table("map")
    runs["session_start"] += 1
    runs["position_shift"] += 1
    runs["length"] -= 1
    return runs


@recipe("prediction-uncovered")
def _(s: Surgery) -> None:
    _moved(s)


@recipe("prediction-tokens-uncovered")
def _(s: Surgery) -> None:
    _predicting(s).tensors["tokens"][2] += 1


@recipe("prediction-tokens-version")
def _(s: Surgery) -> None:
    s.shard().metadata["format_version"] = "1.1"
    s.shard().tensors["tokens"][2] += 1


@recipe("prediction-shift-version")
def _(s: Surgery) -> None:
    _moved(s)
    s.shard().metadata["format_version"] = "1.1"


def _shift(name: str, shift: int) -> None:
    @recipe(f"prediction-shift-{name}")
    def _(s: Surgery) -> None:
        _moved(s)["position_shift"] = shift


_shift("other", 2)
_shift("most", 2**31 - 1)
_shift("least", -(2**31))


@recipe("prediction-outside-node")
def _(s: Surgery) -> None:
    _moved(s)["length"] += 2


@recipe("prediction-tenant")
def _(s: Surgery) -> None:
    _moved(s)
    s.library.set_items("salts", ["s"])


def _identity(name: str, **members: Any) -> None:
    """A recipe that moves keys where the identity has other members."""

    @recipe(f"prediction-{name}")
    def _(s: Surgery) -> None:
        _moved(s)
        identity = {key: value for key, value in {**s.body["identity"], **members}.items() if value is not None}
        text = json.dumps(identity, sort_keys=True, separators=(",", ":"))
        s.body["identity"] = identity
        for part in s.parts.values():
            part.metadata.update(identity=text, identity_sha256=hashlib.sha256(text.encode()).hexdigest())


_identity("rope-unknown", rope={"type": "spiral", "theta": 10000.0})
_identity("rope-missing", rope=None)
_identity("keys-unknown", keys=None)


@recipe("prediction-layers-version", "transform")
def _(s: Surgery) -> None:
    _group(s)["flags"] = 1


@recipe("prediction-layers-outside", "transform")
def _(s: Surgery) -> None:
    _group(s)["flags"] = 1
    for part in s.parts.values():
        part.metadata["format_version"] = "1.2"


def _group(s: Surgery) -> np.ndarray:
    """Records of the first shard that holds units of several layers."""
    for index in range(len(s.body["sessions"])):
        units = s.shard(index).table("unit.index")
        if (units["layer_count"] > 1).any():
            return units
    raise AssertionError("the base has no unit of several layers")
