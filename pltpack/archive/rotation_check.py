"""Whether keys turn as a rotary embedding says they do, told from the keys alone.

Before the first layer's attention nothing but a token's embedding goes into its key, so a token that occurs twice has
the same key there, once each is rotated back from its position. Keys of another base, of the other style or in another
basis do not fit together.
"""

from __future__ import annotations

import numpy as np

from pltpack.codec.rope import Rotation
from pltpack.dumps.quantized import as_values
from pltpack.errors import IdentityError, UnsupportedError
from pltpack.snapshot import Snapshot

_SAMPLED = 1024
_PAIRS = 8
# Kernels and eight-bit caches leave a few hundredths, four-bit ones about a tenth; wrong embeddings far more.
_TOLERANCE = 0.2


def misfit(snapshot: Snapshot) -> float | None:
    """Median relative difference of the first layer's keys of equal tokens, rotated back; None where nothing tells.

    Parameters
    ----------
    snapshot : Snapshot
        Values, not integers.
    """
    identity, count = snapshot.identity, min(len(snapshot), _SAMPLED)
    rotation = Rotation.of(identity.rope, identity.keys, identity.layers[0].k_dim)
    if rotation is None:
        return None
    _, first, inverse = np.unique(snapshot.tokens[:count], return_index=True, return_inverse=True)
    again = np.flatnonzero(first[inverse] != np.arange(count))
    if len(again) < _PAIRS:
        return None
    keys = rotation.unrotate(snapshot.layer(0, 0, count)[0].astype(np.float32), 0)
    earlier, later = keys[:, first[inverse[again]]], keys[:, again]
    with np.errstate(all="ignore"):
        errors = np.linalg.norm(later - earlier, axis=-1) / np.linalg.norm(earlier, axis=-1)
    found = errors[np.isfinite(errors)]
    return float(np.median(found)) if len(found) else None


def check_rotation(snapshot: Snapshot) -> None:
    """Refuse a dump whose keys do not turn as its identity says.

    Raises
    ------
    IdentityError
    """
    try:
        found = misfit(as_values(snapshot))
    except UnsupportedError:
        return
    if found is not None and found > _TOLERANCE:
        rope = snapshot.identity.rope or dict(snapshot.identity.quantized or {}).get("rope")
        fact = f"those of equal tokens in layer 0 differ by {found:.0%} once rotated back by {rope}"
        where = f"session {snapshot.session!r}"
        raise IdentityError(f"{where}: identity field 'rope' does not fit the keys: {fact}", snapshot.origin)
