"""Whether caches belong together, or to a model, as far as both sides are known."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import TYPE_CHECKING

from pltpack.errors import UnsupportedError
from pltpack.snapshot import Identity, Snapshot

if TYPE_CHECKING:
    from pltpack.quality.model import Model


def require_agreement(mine: Identity, other: Identity, path: str | None = None) -> None:
    """Check every field that both identities know, salts and sliding windows apart.

    Raises
    ------
    IdentityError
        Naming the first field that differs.
    """
    left, right = _comparable(mine), _comparable(other)
    common = [
        name
        for name in Identity.ARCHIVE_FIELDS
        if all(getattr(side, name) not in (None, ()) for side in (left, right))
    ]
    fields = [{name: getattr(side, name) for name in common} for side in (left, right)]
    if "rope" in common:
        known = left.rope.keys() & right.rope.keys()  # type: ignore[union-attr]
        for side in fields:
            side["rope"] = {name: side["rope"][name] for name in sorted(known)}
    Identity(**fields[1]).require_same(Identity(**fields[0]), path)


def require_model(model: Model, snapshots: Iterable[Snapshot]) -> None:
    """Check that a model can continue from caches: identities agree in what both know, and keys are rotated.

    A model's name is a label, and the folder's if nobody gave one; so names are not compared, weights are.

    Raises
    ------
    IdentityError
        Naming the dump and the first field that differs.
    UnsupportedError
        If keys are stored un-rotated.
    """
    for snapshot in snapshots:
        if snapshot.identity.keys == "unrotated":
            raise UnsupportedError("a model cannot continue from keys that are stored un-rotated", snapshot.origin)
        known = dataclasses.replace(model.identity("F32"), model=None)
        # A cache may be kept in any dtype, whatever the model computes in.
        caches = dataclasses.replace(
            snapshot.identity, layers=tuple(dataclasses.replace(one, dtype="F32") for one in snapshot.identity.layers)
        )
        require_agreement(known, caches, snapshot.origin)


def _comparable(identity: Identity) -> Identity:
    # Arrays do not show a window, so a dump may not know what its model knows.
    layers = tuple(dataclasses.replace(layer, window=None) for layer in identity.layers)
    return dataclasses.replace(identity, layers=layers)
