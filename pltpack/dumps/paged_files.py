"""Stores of pages: files that hold the caches of a run of tokens each, all layers of them, named by chained digests.

What the stores of vLLM, LMCache and SGLang have in common. A page's arrays are described by one letter per axis: ``2``
keys and values, ``L`` layers, ``B`` blocks and ``N`` their tokens, ``H`` heads, ``D`` elements.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np

from pltpack.dumps import base
from pltpack.dumps.atomic import make_folder, replacing
from pltpack.dumps.safetensors_header import read_into
from pltpack.dumps.tokens import TokenLookup
from pltpack.errors import DumpError, UnsupportedError
from pltpack.snapshot import DTYPES, Identity, LayerGeometry, Snapshot

#: Most files of one store.
MAX_FILES = 1 << 20


@dataclasses.dataclass(frozen=True, slots=True)
class PageLayout:
    """How a page's bytes are ordered.

    Attributes
    ----------
    axes : str
    layers : int
    geometry : LayerGeometry
        Of every layer; keys and values have one dimension.
    block : int
        Tokens of a block where the axes have ``B``.
    """

    axes: str
    layers: int
    geometry: LayerGeometry
    block: int = 1

    @property
    def token_bytes(self) -> int:
        """Bytes of a token."""
        return self.layers * self.geometry.bytes_per_token

    def sizes(self, tokens: int) -> dict[str, int]:
        """Length of each axis in a page of so many tokens."""
        inner = self.block if "B" in self.axes else tokens
        return {"2": 2, "L": self.layers, "B": tokens // inner, "N": inner, "H": self.geometry.heads,
                "D": self.geometry.k_dim}  # fmt: skip

    def read(self, fd: int, path: str, offset: int, tokens: int, layer: int) -> tuple[np.ndarray, np.ndarray]:
        """One layer of a page: keys and values ``[H, T, D]``."""
        sizes = self.sizes(tokens)
        at = self.axes.index("L")
        outer = [sizes[axis] for axis in self.axes[:at]]
        inner = [sizes[axis] for axis in self.axes[at + 1 :]]
        out = np.empty((math.prod(outer), *inner), DTYPES[self.geometry.dtype])
        run = out[:1].nbytes
        for index, part in enumerate(out):
            place = offset + (index * self.layers + layer) * run
            read_into(fd, place, np.atleast_1d(part).reshape(-1).view(np.uint8).data, path)
        return self._split(out.reshape(*outer, *inner), self.axes.replace("L", ""))

    def _split(self, array: np.ndarray, axes: str) -> tuple[np.ndarray, np.ndarray]:
        wanted = "2HBND" if "B" in axes else "2HND"
        both = array.transpose([axes.index(letter) for letter in wanted])
        both = both.reshape(2, self.geometry.heads, -1, self.geometry.k_dim)
        return both[0], both[1]

    def page(self, pairs: Sequence[tuple[np.ndarray, np.ndarray]]) -> np.ndarray:
        """A page of all layers' keys and values ``[H, T, D]``, as bytes."""
        sizes = self.sizes(pairs[0][0].shape[1])
        both = np.stack([np.stack(pair) for pair in pairs])
        wanted = "L2HBND" if "B" in self.axes else "L2HND"
        both = both.reshape([sizes[axis] for axis in wanted])
        both = both.transpose([wanted.index(axis) for axis in self.axes])
        return np.ascontiguousarray(both).reshape(-1).view(np.uint8)


@dataclasses.dataclass(frozen=True, slots=True)
class PageFile:
    """One page: its file, the stamp of that, where the page begins in it, and its tokens."""

    path: str
    stamp: base.FileStamp
    offset: int
    tokens: int


@dataclasses.dataclass(frozen=True, slots=True)
class PagedSource:
    """A `LayerSource` over pages in the order of their tokens."""

    pages: tuple[PageFile, ...]
    layout: PageLayout

    def layer(self, index: int, start: int, stop: int) -> tuple[np.ndarray, np.ndarray]:
        """See `LayerSource.layer`."""
        geometry = self.layout.geometry
        base.check_range(start, stop, sum(page.tokens for page in self.pages))
        shape = geometry.heads, stop - start, geometry.k_dim
        keys, values = (np.empty(shape, DTYPES[geometry.dtype]) for _ in range(2))
        at = 0
        for page in self.pages:
            first, last = max(start, at), min(stop, at + page.tokens)
            if first < last:
                with base.reading(page.path, page.stamp) as fd:
                    pair = self.layout.read(fd, page.path, page.offset, page.tokens, index)
                for target, part in zip((keys, values), pair, strict=True):
                    target[:, first - start : last - start] = part[:, first - at : last - at]
            at += page.tokens
        return keys, values


@dataclasses.dataclass(frozen=True, slots=True)
class Found:
    """A session that lies in a store: its name, its token ids, and its pages."""

    name: str
    tokens: np.ndarray
    pages: tuple[PageFile, ...]


def sessions_in(
    folder: Path,
    pages: Mapping[str, PageFile],
    tokens: TokenLookup,
    chain: Callable[[np.ndarray], list[str]],
    size: int,
    partly: bool,
) -> Iterator[Found]:
    """The sessions of a store: of each list of token ids, as many pages as are there.

    Parameters
    ----------
    folder : Path
    pages : mapping of str to PageFile
        By their names.
    tokens : TokenLookup
    chain : callable
        Names of the pages of some tokens.
    size : int
        Tokens of a whole page.
    partly : bool
        Whether pages of other sessions may be left out.

    Raises
    ------
    DumpError
        If no list is there, none begins in this store, or pages belong to none.
    """
    reached: set[str] = set()
    lists = 0
    for label, ids in tokens.lists(folder):
        lists += 1
        names = list(itertools.takewhile(lambda name: name in pages, chain(ids)))
        chosen = tuple(pages[name] for name in names)
        count = sum(page.tokens for page in chosen)
        whole = all(page.tokens == size for page in chosen[:-1])
        if not names or count > len(ids) or not whole or count > base.MAX_TOKENS:
            continue
        reached.update(names)
        yield Found(label or names[-1][:24], ids[:count], chosen)
    if not lists:
        tokens.require(folder, folder.name, size)
    if not reached:
        raise DumpError(f"none of {lists} token lists begins with one of its {len(pages)} pages, which are named by "
                        "digests of their tokens (are page size and hash those of the engine?)", folder)  # fmt: skip
    if len(reached) < len(pages) and not partly:
        raise DumpError(f"{len(pages) - len(reached)} of {len(pages)} pages belong to none of {lists} token lists "
                        "(leave them out: --from-option partly=yes)", folder)  # fmt: skip


def snapshot_of(found: Found, layout: PageLayout, folder: Path, identity: Identity) -> Snapshot:
    """A found session as a snapshot."""
    base.check_dims(0, layout.geometry.heads, layout.geometry.k_dim, layout.geometry.v_dim)
    if not 0 < layout.layers <= base.MAX_LAYERS:
        raise DumpError(f"{layout.layers} layers (allowed: 1 to {base.MAX_LAYERS})", folder)
    layers = (layout.geometry,) * layout.layers
    identity = dataclasses.replace(identity, layers=layers, keys="rotated")
    return Snapshot(found.name, found.tokens, identity, PagedSource(found.pages, layout), os.fspath(folder))


def page_file(path: Path, offset: int, layout: PageLayout, tokens: int | None = None, padded: bool = False) -> PageFile:
    """A page of a store, its size checked: of `tokens`, or of as many as the file holds.

    Raises
    ------
    DumpError
        If the file's size is not that of such a page.
    """
    stamp = base.FileStamp.of(path)
    count, rest = divmod(max(0, stamp.size - offset), layout.token_bytes)
    if tokens is not None:
        needed = offset + tokens * layout.token_bytes
        if stamp.size != needed and not (padded and needed <= stamp.size < needed + 4096):
            raise DumpError(f"is {stamp.size} bytes, not the {needed} of {tokens} tokens in {layout.layers} layers of "
                            f"{layout.geometry.heads} heads and {layout.geometry.k_dim} elements", path)  # fmt: skip
        count = tokens
    elif rest or not count:
        raise DumpError(f"is {stamp.size} bytes, which is no number of tokens of {layout.token_bytes} bytes", path)
    return PageFile(os.fspath(path), stamp, offset, count)


def geometry_of(snapshot: Snapshot) -> LayerGeometry:
    """The one geometry of all layers, which pages need.

    Raises
    ------
    UnsupportedError
        If layers differ, or keys and values do.
    """
    first, *others = (dataclasses.replace(layer, window=None) for layer in snapshot.identity.layers)
    if any(other != first for other in others) or first.k_dim != first.v_dim:
        raise UnsupportedError(f"session {snapshot.session!r}: pages hold layers of one shape, keys as long as values")
    return first


def write_pages(
    snapshot: Snapshot, layout: PageLayout, starts: Sequence[int], files: Sequence[Path], head: Callable[[int], bytes],
    pad: int = 1,
) -> None:  # fmt: skip
    """Write pages that are not there yet: tokens from each of `starts` to the next, after ``head(tokens)``.

    Parameters
    ----------
    starts : sequence of int
        One more than there are files.
    """
    for (start, stop), file in zip(itertools.pairwise(starts), files, strict=True):
        if file.exists():
            continue
        make_folder(file.parent)
        pairs = [snapshot.layer(index, start, stop) for index in range(layout.layers)]
        data = layout.page(pairs)
        with replacing(file) as temporary, open(temporary, "xb") as out:
            begin = head(stop - start)
            out.write(begin)
            out.write(data.data)
            out.write(bytes(-(len(begin) + len(data)) % pad))


def whole_option(
    chosen: Mapping[str, str], name: str, default: int | None = None, said_by: str = "--from-option"
) -> int:
    """A positive integer among a format's options; `said_by` is the option that gives it.

    Raises
    ------
    UnsupportedError
        If it is missing and has no default, or is something else.
    """
    text = chosen.get(name)
    if text is None:
        if default is not None:
            return default
        raise UnsupportedError(f"what this store does not record has to be said: {said_by} {name}=N")
    if not (text.isascii() and text.isdigit() and len(text) < 8 and int(text)):
        raise UnsupportedError(f"option {name!r} is {text!r}, not a positive integer")
    return int(text)
