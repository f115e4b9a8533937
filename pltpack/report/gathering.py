"""Everything that the page shows, as plain values."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pltpack.archive.encoding import Progress
    from pltpack.archive.reader import Archive
    from pltpack.snapshot import Snapshot


def gather(
    archive: Archive,
    *,
    scores: Path | None = None,
    against: Sequence[Snapshot] = (),
    text: Callable[[Sequence[int]], str] | None = None,
    progress: Progress | None = None,
) -> dict[str, Any]:
    """What an archive records of itself, and what was measured of it.

    Parameters
    ----------
    archive : Archive
    scores : Path, optional
        What ``pltpack score --json`` printed.
    against : sequence of Snapshot
        Dumps to compare with; without any, errors are the profile's predictions, if it has some.
    text : callable, optional
        Turns token ids into text.
    progress : callable, optional
        ``progress(stage, done, total)`` in raw bytes.

    Returns
    -------
    dict
        ``name``, ``archive`` (see `pltpack.archive.stats.describe`), ``provenance``
        (`pltpack.archive.provenance.provenance`), ``trie`` (`pltpack.archive.trie_view.trie_view`), ``errors``
        (`pltpack.archive.head_errors`, or None), ``exact`` (whether every session is stored in bit-exact codecs),
        ``scores`` (a list of `pltpack.report.scores.Point`) and ``own_score`` (the one that is of this very archive, or
        None).

    Raises
    ------
    PltpackError
        What reading the archive, the scores and the dumps raises.
    """
    from pltpack.archive import head_errors
    from pltpack.archive.create import quiet
    from pltpack.archive.figures import is_exact
    from pltpack.archive.provenance import provenance
    from pltpack.archive.trie_view import trie_view
    from pltpack.report.scores import read_scores

    points = [] if scores is None else read_scores(scores)

    def look() -> dict[str, Any]:
        described = archive.describe()
        size = described["stats"]["archive_bytes"]
        errors = (head_errors.measured(archive, against, progress or quiet) if against
                  else head_errors.predicted(archive))  # fmt: skip
        exact = all(is_exact(archive.shard(name)) for name in archive.sessions)
        return {
            "name": archive.path.resolve().name, "archive": described, "provenance": provenance(archive),
            "trie": trie_view(archive, text), "errors": errors, "exact": exact, "scores": points,
            # A scored archive is told by its exact size: its folder may have been renamed.
            "own_score": next((point for point in points if point.stored_bytes == size), None),
        }  # fmt: skip

    return archive.in_one_generation(look)
