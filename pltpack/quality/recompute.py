"""Tiers that need the model: ``recompute`` keeps tokens alone, ``lossless+model`` also what the model gets wrong.

``recompute`` stores the tokens, and digests by which a cache that is made again can be told to be the same one. A model
in the precision and with the kernels of the capture makes it bit for bit; other kernels make one that differs in last
bits. ``lossless+model`` lets encoder and decoder run the same cheap predictor, by default the model in bfloat16, and
stores the difference: layer 2 of the sequential compression of caches (arXiv 2604.15356), also known as speculative
coding. Both make the prefill of a session in one pass.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from pltpack.archive import recompute
from pltpack.archive.create import PathLike, new_seal, open_for_writing, quiet, snapshots_of
from pltpack.archive.encoding import Progress
from pltpack.archive.reader import Archive
from pltpack.archive.recompute_writer import Made, Plan, write_generation
from pltpack.archive.segments import fresh
from pltpack.archive.settings import Settings
from pltpack.archive.shard import Shard
from pltpack.archive.writer import GenerationWriter
from pltpack.codec.base import KeyValue
from pltpack.dumps.torch_arrays import to_numpy
from pltpack.errors import IdentityError, NotFoundError, PromiseError, UnsupportedError
from pltpack.quality import token_model
from pltpack.quality.digests import weights_digest
from pltpack.quality.model import Model, load_model, model_folder, prefill, torch_dtype
from pltpack.snapshot import Identity, Snapshot
from pltpack.store import Store, open_store

#: How the model is run where nothing else is asked for.
DEFAULT_PREDICTORS = {"recompute": "float32", "lossless+model": "bfloat16"}
_COMPUTE = {"float32": "F32", "bfloat16": "BF16", "float16": "F16", "int8": "F32"}


class Predictor:
    """A model in one precision, as it makes caches.

    Parameters
    ----------
    folder : path
        Of a transformers model.
    name : str
        One of `pltpack.archive.recompute.PREDICTORS`: the dtype that the model computes in, or ``int8`` for weights of
        linear layers rounded to 8 bits, one scale a row, and computing in float32.
    device : str
        Torch device.

    Raises
    ------
    NotFoundError, UnsupportedError, DumpError
        As `pltpack.quality.model.load_model`; `UnsupportedError` for an unknown name.
    """

    def __init__(self, folder: PathLike, name: str, device: str = "cpu") -> None:
        if name not in recompute.PREDICTORS:
            raise UnsupportedError(f"predictor {name!r} is not one of {', '.join(recompute.PREDICTORS)}")
        self.name, self.model = name, load_model(Path(folder), dtype=_COMPUTE[name], device=device)
        if name == "int8":
            _round_weights(self.model)

    def values(self, tokens: np.ndarray, identity: Identity) -> list[KeyValue]:
        """The cache of tokens, int32 ``[T]``: per layer ``[H, T, D]`` in the identity's dtypes.

        Raises
        ------
        IdentityError
            If the model's layers have other shapes than the identity says.
        UnsupportedError
            If there are more tokens than the model takes, or ones that it does not know.
        """
        limit = self.model.max_tokens
        if limit is not None and len(tokens) > limit:
            raise UnsupportedError(f"{len(tokens)} tokens, but the model has {limit} positions", self.model.folder)
        if len(tokens) and int(tokens.max()) >= int(self.model.config.vocab_size):
            raise UnsupportedError(f"the model does not know token {int(tokens.max())}", self.model.folder)
        if not len(tokens):
            return [fresh(layer, 0) for layer in identity.layers]
        cache = prefill(self.model, tokens)
        if len(cache.layers) != len(identity.layers):
            raise IdentityError(f"identity field 'layers' differs: {len(identity.layers)} layers against "
                                f"{len(cache.layers)} of the model", self.model.folder)  # fmt: skip
        found = []
        for index, (layer, shape) in enumerate(zip(cache.layers, identity.layers, strict=True)):
            dtype = torch_dtype(shape.dtype)
            keys, values = (to_numpy(tensor[0].to(dtype)) for tensor in (layer.keys, layer.values))
            wanted = tuple((shape.heads, len(tokens), dim) for dim in (shape.k_dim, shape.v_dim))
            if (keys.shape, values.shape) != wanted:
                raise IdentityError(f"identity field 'layers[{index}]' differs: {wanted} against {keys.shape} and "
                                    f"{values.shape} of the model", self.model.folder)  # fmt: skip
            found.append((keys, values))
        return found


def _round_weights(model: Model) -> None:
    import torch

    with torch.no_grad():
        for module in model.network.base_model.modules():
            if isinstance(module, torch.nn.Linear):
                weight = module.weight
                scale = weight.abs().amax(dim=1, keepdim=True).clamp_min(1e-30) / 127
                weight.copy_((weight / scale).round().clamp(-127, 127) * scale)


class Rebuilder:
    """`pltpack.archive.recompute.Rebuild` by a model's folder; predictors are loaded on first use.

    Parameters
    ----------
    folder : path
        Of the transformers model whose weights an archive's sessions name.
    strict : bool
        Whether a cache that differs from what the writer's model made is refused where no stored difference needs it
        to be the same; if not, last bits may differ (other kernels).
    device : str
        Torch device.

    Raises
    ------
    NotFoundError
        If there is no model in the folder.
    """

    def __init__(self, folder: PathLike, strict: bool = True, device: str = "cpu") -> None:
        self.folder, self._strict, self._device = model_folder(Path(folder)), strict, device
        self._predictors: dict[str, Predictor] = {}
        self._last: tuple[str, list[KeyValue]] | None = None
        self._lock = threading.RLock()

    @functools.cached_property
    def weights(self) -> str:
        """Digest of the model's weights."""
        return weights_digest(self.folder)

    def tokens(self, shard: Shard) -> np.ndarray:
        """See `pltpack.archive.recompute.Rebuild`.

        Raises
        ------
        IdentityError
            If the model has other weights than the session names.
        """
        with self._lock:
            # What coded them is the model in float32, however its caches are made.
            self._check(shard)
            data = shard.container.array(recompute.CODED, "U8").tobytes()
            return token_model.decode(self._predictor("float32").model, data, shard.entry.tokens)

    def layers(self, shard: Shard) -> list[KeyValue]:
        """See `pltpack.archive.recompute.Rebuild`.

        Raises
        ------
        IdentityError
            If the model has other weights than the session names.
        PromiseError
            If it makes other values here than it did for the writer.
        """
        with self._lock:
            self._check(shard)
            if self._last is None or self._last[0] != shard.entry.head_sha256:
                assert shard.recipe is not None
                made = self._predictor(shard.recipe.predictor).values(shard.tokens, shard.identity)
                self._compare(shard, made)
                self._last = shard.entry.head_sha256, made
            return self._last[1]

    def _predictor(self, name: str) -> Predictor:
        if name not in self._predictors:
            self._predictors[name] = Predictor(self.folder, name, self._device)
        return self._predictors[name]

    def _check(self, shard: Shard) -> None:
        wanted = shard.recipe.weights if shard.recipe is not None else None
        if wanted != self.weights:
            raise IdentityError(f"identity field 'weights' differs: session {shard.entry.session!r} is made by "
                                f"{wanted}, {self.folder} holds {self.weights}", shard.container.path)  # fmt: skip

    def _compare(self, shard: Shard, made: Sequence[KeyValue]) -> None:
        assert shard.recipe is not None
        differs = np.flatnonzero(recompute.digests(made, shard.recipe.run) != shard.digests)
        if not len(differs) or not (self._strict or len(shard.units)):
            return
        start = int(differs[0]) * shard.recipe.run
        need = "differences from it are stored" if len(shard.units) else "take it with --inexact"
        raise PromiseError(f"the model makes another cache of session {shard.entry.session!r} here than for the writer "
                           f"(tokens {start}:{start + shard.recipe.run}), with other kernels or threads: {need}",
                           shard.container.path)  # fmt: skip


def compress(
    dumps: Sequence[PathLike | Snapshot],
    out: PathLike | Store,
    model: PathLike,
    *,
    quality: str = "recompute",
    with_model: bool = False,
    predictor: str | None = None,
    block: int = 32,
    format: str | None = None,
    tokens: PathLike | None = None,
    options: Mapping[str, str] | None = None,
    identity: Identity | None = None,
    device: str = "cpu",
    encrypt: bool = False,
    progress: Progress | None = None,
) -> dict[str, Any]:
    """Compress dumps into a new archive of a tier that needs the model.

    Parameters
    ----------
    dumps, out, block, format, tokens, options, identity, encrypt, progress
        As of `pltpack.compress`.
    model : path
        Folder of the model that made the caches.
    quality : str
        ``recompute`` or ``lossless+model``.
    with_model : bool
        Code the tokens with the model's own probabilities; to read them takes the model then, and one of its steps a
        token.
    predictor : str, optional
        See `Predictor`; ``float32`` by default for ``recompute``, ``bfloat16`` for ``lossless+model``.
    device : str
        Torch device.

    Returns
    -------
    dict
        See `pltpack.archive.stats.archive_stats`.

    Raises
    ------
    PromiseError
        If the model makes another cache than was captured and what differs is not stored, or is not the same twice.
    """
    store = open_store(out)
    store.check_new()
    settings = Settings("lossless", block=block)
    settings.check()
    snapshots = snapshots_of(dumps, format, tokens, options, identity, False)
    with store.creating() as writing:
        writing.seal = new_seal(store) if encrypt else None
        shared = GenerationWriter(writing, None, settings, quiet).check(snapshots)
        plan, sessions = _prepare(snapshots, shared, Path(model), quality, with_model, predictor, block, device)
        write_generation(writing, None, shared, [*sessions], plan, progress or quiet)
    with Archive(store) as archive:
        return archive.stats()


def append(
    archive: PathLike | Store,
    dumps: Sequence[PathLike | Snapshot],
    model: PathLike,
    *,
    quality: str | None = None,
    with_model: bool = False,
    predictor: str | None = None,
    format: str | None = None,
    tokens: PathLike | None = None,
    options: Mapping[str, str] | None = None,
    identity: Identity | None = None,
    device: str = "cpu",
    progress: Progress | None = None,
) -> dict[str, Any]:
    """Add sessions to such an archive; parameters and errors as of `compress`, the tier being the archive's own."""
    store = open_store(archive)
    with open_for_writing(store) as (current, writing):
        snapshots = snapshots_of(dumps, format, tokens, options, identity, False)
        block = current.manifest.block
        shared = GenerationWriter(writing, current, Settings("lossless", block=block), quiet).check(snapshots)
        plan, sessions = _prepare(snapshots, shared, Path(model), quality or current.manifest.quality, with_model,
                                  predictor, block, device)  # fmt: skip
        write_generation(writing, current, shared, [*sessions], plan, progress or quiet)
    with Archive(store) as updated:
        return updated.stats()


def _prepare(
    snapshots: Sequence[Snapshot], identity: Identity, model: Path, quality: str, with_model: bool,
    predictor: str | None, block: int, device: str,
) -> tuple[Plan, Iterator[Made]]:  # fmt: skip
    if quality not in DEFAULT_PREDICTORS:
        raise NotFoundError(f"no quality tier {quality!r} that needs a model (known: {', '.join(DEFAULT_PREDICTORS)})")
    if identity.keys == "unrotated":
        raise UnsupportedError("the sessions' keys are un-rotated, which models do not make", snapshots[0].origin)
    chosen = Predictor(model, predictor or DEFAULT_PREDICTORS[quality], device)
    weights = weights_digest(chosen.model.folder)
    if identity.weights not in (None, weights):
        raise IdentityError(f"identity field 'weights' differs: {identity.weights} against {weights} of {model}",
                            snapshots[0].origin)  # fmt: skip
    coder = None
    if with_model:
        coder = chosen.model if chosen.name == "float32" else load_model(model, device=device)
    plan = Plan(quality, weights, chosen.name, residual=quality == "lossless+model", block=block)
    return plan, (_made(chosen, coder, snapshot, plan) for snapshot in snapshots)


def _made(predictor: Predictor, coder: Model | None, snapshot: Snapshot, plan: Plan) -> Made:
    def make() -> list[KeyValue]:
        found = predictor.values(snapshot.tokens, snapshot.identity)
        again = predictor.values(snapshot.tokens, snapshot.identity)
        if not np.array_equal(recompute.digests(found, plan.run), recompute.digests(again, plan.run)):
            raise PromiseError(f"the model does not make the same cache of session {snapshot.session!r} twice",
                               predictor.model.folder)  # fmt: skip
        return found

    return Made(snapshot, make, None if coder is None else token_model.encode(coder, snapshot.tokens))
