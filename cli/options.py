"""Options and parameter types that several commands share."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click
from click.core import ParameterSource
from click.shell_completion import CompletionItem

if TYPE_CHECKING:
    from pltpack.archive.recompute import Rebuild

Decorated = TypeVar("Decorated", bound=Callable[..., Any])

PATH = click.Path(path_type=Path)


class Place(click.Path):
    """An archive's place: a path, or a URL as it stands."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """A `Path`, or a `pltpack.store.Url`."""
        if isinstance(value, str) and "://" in value:
            from pltpack.store.location import located

            return located(value)
        return super().convert(value, param, ctx)


PLACE = Place(path_type=Path)

#: Identity fields that a loader may take unknown; the order of ``pltpack.snapshot.Identity``.
IDENTITY_FIELDS = ("model", "weights", "tokenizer", "quantized", "rope", "keys", "layers", "tp_rank", "tp_size",
                   "salt")  # fmt: skip


class Span(click.ParamType):
    """``A:B`` as a slice: from A up to and without B; either side may be left out."""

    name = "A:B"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> slice:
        """Parse one span; an empty or backward one is a mistake, not an empty selection."""
        if isinstance(value, slice):
            return value
        found = re.fullmatch(r"([0-9]{0,18}):([0-9]{0,18})", value, re.ASCII)
        if not found:
            self.fail(f"{value!r} is not A:B with whole numbers, A included and B not", param, ctx)
        start, stop = (int(side) if side else None for side in found.groups())
        if stop is not None and (start or 0) >= stop:
            self.fail(f"{value!r} is empty: A must be less than B", param, ctx)
        return slice(start, stop)


class Name(click.ParamType):
    """A name that the library checks; known ones complete in the shell."""

    def __init__(self, name: str, known: Callable[[], list[str]]) -> None:
        self.name = name
        self._known = known

    def shell_complete(self, ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
        """Known names that start with what was typed."""
        return [CompletionItem(name) for name in self._known() if name.startswith(incomplete)]


def _tiers() -> list[str]:
    from pltpack.codec.registry import MODEL_TIERS, TIERS

    return [*TIERS, *MODEL_TIERS]


def _formats() -> list[str]:
    from pltpack.dumps.registry import format_names

    return format_names()


TIER = Name("TIER", _tiers)
FORMAT = Name("FORMAT", _formats)

def _use_key(context: click.Context, _parameter: click.Parameter, file: Path | None) -> None:
    if file is not None and not context.resilient_parsing:
        from pltpack.format.sealing import using_key

        context.with_resource(using_key(file))


key_option = click.option("--key-file", type=PATH, metavar="FILE", expose_value=False, callback=_use_key,
                          help="Key of an encrypted archive: 32 bytes, hexadecimal or base64 too. "
                          "[default: PLTPACK_KEY, or the file that PLTPACK_KEY_FILE names]")  # fmt: skip


def refuse_idle_key(archive: Any) -> None:
    """Refuse ``--key-file`` where an opened archive, about to be added to, would not be encrypted with it."""
    given = click.get_current_context().get_parameter_source("key_file")
    if given is ParameterSource.COMMANDLINE and archive.manifest.seal is None:
        from pltpack.errors import EncryptionError

        raise EncryptionError("the archive is not encrypted, nor would be what is added to it: leave out --key-file",
                              archive.path)  # fmt: skip


def archive_argument(command: Decorated) -> Decorated:
    """The argument ARCHIVE, and ``--key-file`` for one that is encrypted."""
    return click.argument("archive", type=PLACE)(key_option(command))


dumps_argument = click.argument("dumps", metavar="DUMP...", type=PATH, nargs=-1, required=True)
json_option = click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead of text.")
device_option = click.option(
    "--device", default="cpu", show_default=True, metavar="cpu|cuda[:N]|auto",
    help="Where units are encoded and decoded; auto: on a CUDA device if there is one.",
)  # fmt: skip


def worker_options(command: Decorated) -> Decorated:
    """Who does the work: ``--engine`` and ``--address``."""
    command = click.option("--address", metavar="ADDRESS", help="With --engine ray, the running cluster. "
                           "[default: RAY_ADDRESS, else workers on this machine]")(command)  # fmt: skip
    return click.option("--engine", type=click.Choice(["local", "ray"]), default="local", show_default=True,
                        help="Who encodes: this process, or workers of a Ray cluster that see the same files. The "
                        "result is the same.")(command)  # fmt: skip


quiet_option = click.option("--quiet", is_flag=True, help="Show nothing while it runs.")
profile_option = click.option(
    "--profile", type=PATH, metavar="FILE", help="The profile of an archive that refers to one outside it."
)
no_dedup_option = click.option(
    "--no-dedup", is_flag=True, help="Store every session alone, even where sessions share a prefix."
)


def model_options(command: Decorated) -> Decorated:
    """How the tiers that need the model are written: ``--with-model`` and ``--predictor``."""
    command = click.option("--predictor", type=click.Choice(["float32", "bfloat16", "float16", "int8"]),
                           help="How the model is run, to write and to read. [default: float32 for recompute, bfloat16 "
                           "for lossless+model]")(command)  # fmt: skip
    return click.option("--with-model", is_flag=True,
                        help="With recompute and lossless+model, code token ids with the model's own probabilities."
                        )(command)  # fmt: skip


inexact_option = click.option(
    "--inexact", is_flag=True, help="With --model, take what it makes even where last bits are not the writer's."
)


def rebuilder(archive: Path, model: Path | None, inexact: bool) -> Rebuild | None:
    """What ``--model`` and ``--inexact`` ask for, of an archive with sessions that a model makes again."""
    if model is None:
        if inexact:
            raise click.UsageError("--inexact speaks of what --model makes")
        return None
    import pltpack

    with pltpack.open(archive) as opened:
        if all(opened.shard(name).recipe is None for name in opened.sessions):
            return None
    from pltpack.quality.recompute import Rebuilder

    return Rebuilder(model, strict=not inexact)


def near_options(command: Decorated) -> Decorated:
    """How sessions are predicted from equal tokens at other places: ``--no-near``, ``--window`` and ``--tau``."""
    command = click.option("--tau", type=click.FloatRange(0.1, 0.3), default=0.2, show_default=True, metavar="BITS",
                           help="Distance up to which windows of other tokens are tried.")(command)  # fmt: skip
    command = click.option("--window", type=click.IntRange(32, 128), default=64, show_default=True, metavar="TOKENS",
                           help="Unit of matching: repeats of half of it are found.")(command)  # fmt: skip
    return click.option("--no-near", is_flag=True,
                        help="Share equal prefixes only, nothing at other places.")(command)  # fmt: skip


def budget_option(help_text: str) -> Callable[[Decorated], Decorated]:
    """``--library-budget``, which says something else to each command."""
    return click.option("--library-budget", type=click.IntRange(min=0), metavar="BYTES", help=help_text)

# Where the value of --layout waits for --from-option.
_LAYOUT = "pltpack.layout"


class Setting(click.ParamType):
    """``NAME=VALUE`` as a pair."""

    name = "NAME=VALUE"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[str, str]:
        """Parse one setting."""
        if isinstance(value, tuple):
            return value
        name, equals, setting = value.partition("=")
        if not name or not equals:
            self.fail(f"{value!r} is not NAME=VALUE", param, ctx)
        return name, setting


def _settings(context: click.Context, parameter: click.Parameter, pairs: tuple[tuple[str, str], ...]) -> dict[str, str]:
    found: dict[str, str] = {}
    for name, value in pairs:
        if found.setdefault(name, value) != value:
            raise click.BadParameter(f"{name!r} is given twice", context, parameter)
    layout = context.meta.get(_LAYOUT) if parameter.name == "from_options" else None
    if layout is not None and found.setdefault("layout", layout) != layout:
        raise click.BadParameter("'layout' is given twice", context, parameter)
    return found


def _layout(context: click.Context, _parameter: click.Parameter, value: str | None) -> None:
    context.meta[_LAYOUT] = value


def write_options(command: Decorated) -> Decorated:
    """How dumps are written: ``--to-option`` and ``--for``."""
    command = click.option("--for", "target", type=PATH, metavar="MODEL",
                           help="Model that is to load them, a folder with a config.json or a GGUF file: refused "
                           "unless its layers, heads and RoPE parameters agree.")(command)  # fmt: skip
    return click.option("--to-option", "to_options", type=Setting(), multiple=True, callback=_settings,
                        help="A setting of the format to write; may be repeated.")(command)  # fmt: skip


def dump_options(command: Decorated) -> Decorated:
    """How dumps are read: ``--from``, ``--layout``, ``--from-option``, ``--tokens``, ``--model`` and ``--identity``."""
    command = click.option("--identity", "known", type=PATH, metavar="FILE",
                           help="The same out of a dump, or a JSON file with an identity.")(command)  # fmt: skip
    command = click.option("--model", "model", type=PATH, metavar="MODEL",
                           help="Model that the dumps come from, a folder with a config.json or a GGUF file: fills in "
                           "what they do not record, and must agree with what they do.")(command)  # fmt: skip
    command = click.option("--from-option", "from_options", type=Setting(), multiple=True, callback=_settings,
                           help="A setting of the dumps' format; may be repeated.")(command)  # fmt: skip
    command = click.option("--layout", expose_value=False, is_eager=True, callback=_layout, metavar="NAME",
                           help="Layout of the dumps, where they do not record it: --from-option layout=NAME.")(command)
    command = click.option("--tokens", type=PATH, metavar="FILE",
                           help="JSON file of token ids, for dumps that hold none.")(command)  # fmt: skip
    return click.option("--from", "format_", type=FORMAT,
                        help="Format of the dumps. [default: told by their content]")(command)  # fmt: skip


def target_options(command: Decorated) -> Decorated:
    """What to aim at instead of a tier's promise: ``--target-kl``, ``--target-bits`` and ``--target-bytes``."""
    positive = click.FloatRange(min=0, min_open=True)
    command = click.option("--target-bytes", type=click.IntRange(min=1), metavar="BYTES",
                           help="Instead: bytes for all of them, the profile not counted.")(command)  # fmt: skip
    command = click.option("--target-bits", type=positive, metavar="BITS",
                           help="Instead: bits per element, each session.")(command)  # fmt: skip
    return click.option("--target-kl", type=positive, metavar="NATS",
                        help="Instead of a tier's promise, with a profile: this KL divergence as the profile predicts "
                        "it, each session.")(command)  # fmt: skip
