"""``pltpack score``: what the model feels of an archive, beside other tiers and what others do."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from pltpack_cli.options import FORMAT, PATH, PLACE, json_option, key_option, no_dedup_option
from pltpack_cli.output import count, plain, print_json
from pltpack_cli.progress import progress_bars

if TYPE_CHECKING:
    from pltpack.quality.model import Model
    from pltpack.quality.probes import Probe
    from pltpack.quality.rebuilt import Rebuilt
    from pltpack.quality.scoring import Score
    from pltpack.snapshot import Snapshot

#: What ``--baselines`` adds of pltpack's own.
BASELINE_TIERS = ("lossless", "q4", "q3", "q2", "q1", "turboquant-4", "turboquant-3", "turboquant-2")


@click.command(short_help="Ask a model what it feels of an archive.")
@click.option("--model", "folder", type=PATH, required=True, metavar="DIR", help="Transformers model of the caches.")
@click.option("--original", "originals", multiple=True, required=True, type=PATH, metavar="DUMP",
              help="The caches as they were, a file or a folder; more DUMPs may follow.")  # fmt: skip
@click.argument("more", metavar="", type=PATH, nargs=-1)
@click.option("--archive", "archives", multiple=True, type=PLACE, metavar="ARCHIVE",
              help="An archive of them; may be repeated.")  # fmt: skip
@key_option
@click.option("--tiers", metavar="TIER,...", help="Also compress the originals with these tiers, and score that.")
@click.option("--profile", type=PATH, metavar="FILE",
              help="Profile for those of --tiers that take one, and of archives that refer to it.")  # fmt: skip
@no_dedup_option
@click.option("--baselines", is_flag=True,
              help="Also score zstd, fp8, KIVI, TurboQuant and the q tiers; with --text, PCA too.")  # fmt: skip
@click.option("--text", "texts", multiple=True, type=PATH, metavar="FILE",
              help="Text to calibrate the PCA baseline on; may be repeated.")  # fmt: skip
@click.option("--continuations", type=PATH, metavar="FILE",
              help="Safetensors file of the token ids that follow each session.")  # fmt: skip
@click.option("--tail", type=click.IntRange(min=2), metavar="N",
              help="Instead: cut each cache's last N tokens off, and continue with them.")  # fmt: skip
@click.option("--cut-at", metavar="PLACE,...",
              help="Also cut there and go on with the true text: fractions of a session, or 'branches'.")  # fmt: skip
@click.option("--session", "sessions", multiple=True, metavar="ID", help="Only this session; may be repeated.")
@click.option("--plot", "plots", multiple=True, type=PATH, metavar="OUT",
              help="Write a rate-distortion plot, .png or .svg; may be repeated.")  # fmt: skip
@click.option("--from", "format_", type=FORMAT, help="Format of the dumps. [default: told by their content]")
@click.option("--tokens", type=PATH, metavar="FILE", help="JSON file of token ids, for dumps that hold none.")
@json_option
def score(
    folder: Path, originals: tuple[Path, ...], more: tuple[Path, ...], archives: tuple[Path, ...], tiers: str | None,
    profile: Path | None, no_dedup: bool, baselines: bool, texts: tuple[Path, ...], continuations: Path | None,
    tail: int | None, cut_at: str | None, sessions: tuple[str, ...], plots: tuple[Path, ...], format_: str | None,
    tokens: Path | None, as_json: bool,
) -> None:  # fmt: skip
    """Continue from rebuilt caches with a model and compare its predictions with those over the original caches.

    Each session's true text is fed to the model over both caches. Shown are the KL divergence in nats per token, the
    change in perplexity, how often both prefer the same token, and bits per element with everything in the archive
    counted. Needs the extra "eval"; --plot needs "plot".
    """
    chosen_tiers = [*(tiers.split(",") if tiers else ()), *(BASELINE_TIERS if baselines else ())]
    _check_usage(archives, chosen_tiers, baselines, texts, continuations, tail)
    from pltpack.dumps import open_dumps
    from pltpack.quality.agreement import require_model
    from pltpack.quality.model import load_model, need_eval
    from pltpack.quality.plot import check_plot, plot
    from pltpack.quality.scoring import score as run

    need_eval()
    for path in plots:
        check_plot(path)
    given = list(open_dumps([*originals, *more], format=format_, tokens=tokens))
    snapshots, probes = _probes(given, sessions, continuations, tail, cut_at)
    model = load_model(folder)
    require_model(model, snapshots)
    with progress_bars() as progress, contextlib.ExitStack() as stack:
        settings = {"dedup": not no_dedup, "profile": profile, "progress": progress}
        candidates = _candidates(stack, snapshots, archives, chosen_tiers, settings)
        if baselines:
            candidates += _baselines(model, texts)
        scores = run(model.network, snapshots, probes, candidates, progress)
    for path in plots:
        plot(scores, path, f"{count(len(snapshots), 'session')}, {count(sum(map(len, snapshots)), 'token')}")
    if as_json:
        print_json({
            "model": folder, "sessions": [s.session for s in snapshots], "tail": tail, "plots": list(plots),
            "scores": [one.to_json() for one in scores],
        })  # fmt: skip
    else:
        print_scores(scores)


def _check_usage(archives: Sequence[Path], tiers: Sequence[str], baselines: bool, texts: Sequence[Path],
                 continuations: Path | None, tail: int | None) -> None:  # fmt: skip
    if (continuations is None) == (tail is None):
        raise click.UsageError("give either --continuations FILE or --tail N")
    if not archives and not tiers:
        raise click.UsageError("nothing to score: give --archive, --tiers or --baselines")
    if texts and not baselines:
        raise click.UsageError("--text calibrates a baseline: give --baselines too")


def _probes(given: Sequence[Snapshot], sessions: Sequence[str], continuations: Path | None, tail: int | None,
            cut_at: str | None) -> tuple[list[Snapshot], list[Probe]]:  # fmt: skip
    """The sessions to score, up to their ends, and where to cut them: one probe at each end, then the others."""
    from pltpack.errors import NotFoundError
    from pltpack.quality.probes import BRANCHES, at_branches, at_ends, at_fractions, held_back, read_continuations

    known = {snapshot.session: snapshot for snapshot in given}
    following = {} if continuations is None else read_continuations(continuations)
    # A continuation is there because its session shall be scored; a dump may be there because its folder is.
    wanted = sessions or (following if tail is None else known)
    for session in wanted:
        if session not in known:
            raise NotFoundError(f"no dump of session {session!r}", continuations if session in following else None)
    chosen = [known[session] for session in dict.fromkeys(wanted)]
    if not chosen:
        raise NotFoundError("no session to score", continuations)
    probes = at_ends(chosen, following) if tail is None else held_back(chosen, tail)
    places = cut_at.split(",") if cut_at else []
    ends, texts = _ends(chosen, probes), {probe.session: probe.text for probe in probes}
    probes += at_fractions(ends, [place for place in places if place != BRANCHES], texts)
    if BRANCHES in places:
        probes += at_branches(ends, texts)
    return ends, probes


def _ends(snapshots: Sequence[Snapshot], probes: Sequence[Probe]) -> list[Snapshot]:
    from pltpack.quality.probes import END
    from pltpack.quality.rebuilt import prefix

    ends = {probe.session: probe.cut for probe in probes if probe.place == END}
    return [prefix(snapshot, ends[snapshot.session]) for snapshot in snapshots]


def _candidates(stack: contextlib.ExitStack, originals: Sequence[Snapshot], archives: Sequence[Path],
                tiers: Sequence[str], settings: Mapping[str, Any]) -> list[Rebuilt]:  # fmt: skip
    from pltpack.quality.rebuilt import of_archives, of_tiers

    found: list[Rebuilt] = [*stack.enter_context(of_archives(archives, settings["profile"]))]
    return [*found, *stack.enter_context(of_tiers(originals, tiers, **settings))]


def _baselines(model: Model, texts: Sequence[Path]) -> list[Rebuilt]:
    from pltpack.quality.baselines import plain as without_calibration
    from pltpack.quality.pca import STEPS, Basis, Pca, captured

    found: list[Rebuilt] = [*without_calibration()]
    if texts:
        basis = Basis(captured(model, texts))
        found += [Pca(basis, step) for step in STEPS]
    return found


def print_scores(scores: Sequence[Score]) -> None:
    """Print a table for people: a row for each way to store the caches, and one for each place they were cut at."""
    from rich import box
    from rich.console import Console
    from rich.table import Table

    profiles = any(score.rate and score.rate.profile_bytes for score in scores)
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("stored as", no_wrap=True)
    columns = ["bits/element", *(["without profile"] if profiles else []), "ratio", "KL, nats", "perplexity", "change",
               "worst session", "top-1"]  # fmt: skip
    for column in columns:
        table.add_column(column, justify="right", no_wrap=True)
    for score in scores:
        total, rate = score.total(), score.rate
        bits = [f"{rate.bits:.3f}" if rate else "", *([f"{rate.session_bits:.3f}" if rate else ""] if profiles else [])]
        ratio = f"{rate.ratio:.2f}×" if rate else ""
        table.add_row(plain(score.name), *bits, ratio, *_figures(total))
        for place in score.rows:
            if place != "end" and score.rows[place]:
                table.add_row(f"  cut at {plain(place)}", *([""] * (len(bits) + 1)), *_figures(score.total(place)))
    # A pipe has no width of its own, and a wrapped table is hard to read.
    console = Console(width=max(Console().width, 120))
    console.print(table)
    first = scores[0].total()
    console.print(f"{count(first['sessions'], 'session')}; perplexity over the original caches {first['ppl']:.3f}",
                  highlight=False)  # fmt: skip


def _figures(total: Mapping[str, Any]) -> tuple[str, ...]:
    return (
        f"{total['kl']:.5f}", f"{total['ppl_rebuilt']:.3f}", f"{total['ppl_change_pct']:+.2f} %",
        f"{total['worst_ppl_change_pct']:+.2f} %", f"{total['top1_pct']:.2f} %",
    )  # fmt: skip
