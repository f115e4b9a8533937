"""Sessions whose caches a model makes again from their tokens: what their shards say of it (spec/format.md).

The archive runs no model. Who opens it gives a `Rebuild`, which does; without one, such sessions can be listed, checked
and copied, but not decoded.
"""

from __future__ import annotations

import dataclasses
import json
import os
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import xxhash

from pltpack.codec.base import KeyValue
from pltpack.errors import FormatError
from pltpack.format import json_text

if TYPE_CHECKING:
    from pltpack.archive.shard import Shard

#: Metadata key of a shard that is rebuilt.
METADATA = "recompute"
#: Tensors: digests of the rebuilt values, and tokens that are coded with the model's probabilities.
DIGESTS, CODED = "recompute.digests", "recompute.tokens"
#: How the model is run: in which dtype, or with weights rounded to how many bits.
PREDICTORS = ("float32", "bfloat16", "float16", "int8")
#: Most tokens of one digest, so that what follows from it is bounded.
MAX_RUN = 1 << 16


class Rebuild(Protocol):
    """A model that makes caches, and tokens coded with its probabilities, again."""

    def tokens(self, shard: Shard) -> np.ndarray:
        """The token ids of a session that are coded with the model's probabilities, int32 ``[T]``."""
        ...

    def layers(self, shard: Shard) -> Sequence[KeyValue]:
        """What the model makes of a session's tokens, one pair ``[H, T, D]`` a layer in the stored dtype, checked."""
        ...


@dataclasses.dataclass(frozen=True)
class Recipe:
    """How a session is made again.

    Attributes
    ----------
    weights : str
        Digest of the model's weights.
    predictor : str
        One of `PREDICTORS`.
    exact : bool
        Whether the session's values are the captured ones bit by bit.
    run : int
        Tokens of each digest but the last.
    text : int or None
        First text of the session in the state of the codec ``recompute``; None: the model's probabilities code tokens.
    """

    weights: str
    predictor: str
    exact: bool
    run: int
    text: int | None

    def to_text(self) -> str:
        """As metadata of a shard."""
        return json.dumps(dataclasses.asdict(self), sort_keys=True, separators=(",", ":"))

    @classmethod
    def parse(cls, text: str, path: str | os.PathLike[str]) -> Recipe:
        """Inverse of `to_text`; `FormatError` for anything else."""
        try:
            found: Any = json_text.parse(text)
        except ValueError:
            found = None
        names = {field.name for field in dataclasses.fields(cls)}
        if not isinstance(found, dict) or set(found) != names:
            raise FormatError(f"metadata {METADATA!r} is malformed", path)
        recipe = cls(**found)
        good = isinstance(recipe.weights, str) and bool(re.fullmatch("sha256:[0-9a-f]{64}", recipe.weights))
        good = good and type(recipe.exact) is bool and type(recipe.run) is int and 0 < recipe.run <= MAX_RUN
        good = good and (recipe.text is None or (type(recipe.text) is int and recipe.text >= 0))
        if not good:
            raise FormatError(f"metadata {METADATA!r} is malformed", path)
        if recipe.predictor not in PREDICTORS:
            raise FormatError(f"metadata {METADATA!r} names an unknown predictor {recipe.predictor!r}", path)
        return recipe


def digests(layers: Sequence[KeyValue], run: int) -> np.ndarray:
    """XXH3-64 of runs of tokens: of every layer in turn, the bytes of keys and then values ``[H, n, D]``.

    Parameters
    ----------
    layers : sequence of (ndarray, ndarray)
        ``[H, T, D]`` each.
    run : int
        Tokens of each digest but the last.

    Returns
    -------
    ndarray
        uint64 ``[ceil(T / run)]``.
    """
    tokens = layers[0][0].shape[1] if layers else 0
    found = []
    for start in range(0, tokens, run):
        digest = xxhash.xxh3_64()
        for keys, values in layers:
            for array in (keys, values):
                digest.update(np.ascontiguousarray(array[:, start : start + run]).view(np.uint8).data)
        found.append(digest.intdigest())
    return np.array(found, np.uint64)


def of_archive(shards: Sequence[Shard]) -> bool | None:
    """Whether the sessions of an archive are rebuilt by a model; None if it has none. They do not mix."""
    kinds = {shard.recipe is not None for shard in shards}
    return None if not kinds else True in kinds
