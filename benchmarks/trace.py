"""Scale: the trie, the sharing plan and the matcher over every request of a public trace, each in its own process.

The traces are those of Mooncake (https://github.com/kvcache-ai/Mooncake, folder FAST25-release/traces:
conversation_trace.jsonl, synthetic_trace.jsonl). A line is a request; its `hash_ids` name blocks of 512 tokens. A trace
holds no tokens, so each block's tokens are made from its id; the last block of a request counts whole, too.

What comes out is checked against counts of the ids alone; the exit code is 1 if any differs.

Usage: python -m benchmarks.trace TRACE... [--json FILE] [--plot FILE.svg] [--requests N]
"""

from __future__ import annotations

import argparse
import json
import math
import platform
import resource
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

BLOCK = 512
VOCABULARY = 128_000
#: Tokens of a prompt whose look-up is timed, how many prompts, and how often each.
PROMPT, PROMPTS, ROUNDS = 12_288, 200, 3
STEPS = 24
CHUNK = 256


class Trace(NamedTuple):
    """The hash ids of each request, and what they say by themselves."""

    requests: list[np.ndarray]
    blocks: int
    unique: int
    #: Blocks of each request that an earlier request holds, counted from its front.
    shared: list[int]


def load(path: Path, most: int | None = None) -> Trace:
    """Read a trace; its exact counts come from the ids and nothing else."""
    requests, shared, seen = [], [], set()
    for number, line in enumerate(path.read_text(encoding="ascii").splitlines()[:most], 1):
        record = json.loads(line)
        ids = record["hash_ids"]
        if len(ids) != math.ceil(record["input_length"] / BLOCK):
            raise SystemExit(f"{path}, line {number}: {len(ids)} blocks for {record['input_length']} tokens")
        requests.append(np.array(ids, dtype=np.uint64))
        shared.append(next((i for i, name in enumerate(ids) if name not in seen), len(ids)))
        seen.update(ids)
    return Trace(requests, sum(map(len, requests)), len(seen), shared)


def tokens_of(ids: np.ndarray) -> np.ndarray:
    """Tokens of blocks, int32 ``[len(ids) * BLOCK]``: a function of each block's id."""
    value = ids[:, None] * np.uint64(BLOCK) + np.arange(BLOCK, dtype=np.uint64)
    for multiplier in (0xBF58476D1CE4E5B9, 0x94D049BB133111EB):
        value = (value ^ (value >> np.uint64(30))) * np.uint64(multiplier)
    return ((value >> np.uint64(32)) % np.uint64(VOCABULARY)).astype(np.int32).ravel()


def chunks(requests: Sequence[np.ndarray]) -> Iterator[list[np.ndarray]]:
    """Token arrays of the requests, some at a time."""
    for first in range(0, len(requests), CHUNK):
        yield [tokens_of(ids) for ids in requests[first : first + CHUNK]]


def peak() -> int:
    """Most memory this process has held, bytes."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def trie_phase(trace: Trace) -> dict[str, Any]:
    """Insert every request after looking it up; times are of the trie's work only."""
    from pltpack.trie.radix import RadixTrie

    warm = RadixTrie.build([[1, 2, 3], [1, 2, 4]])
    warm.lookup([1, 2, 3])
    trie, before = RadixTrie(), peak()
    hits = session = 0
    seconds = cpu = 0.0
    growth = []
    marks = iter(np.linspace(0, len(trace.requests), STEPS + 1)[1:].astype(int).tolist())
    mark = next(marks)
    total = 0
    for arrays in chunks(trace.requests):
        for tokens in arrays:
            hits += trie.lookup(tokens)[0] // BLOCK
            start, cpu_start = time.perf_counter(), time.process_time()
            trie.insert(tokens, session)
            seconds += time.perf_counter() - start
            cpu += time.process_time() - cpu_start
            session, total = session + 1, total + len(tokens)
            if session == mark:
                growth.append({"tokens": total, "build_seconds": seconds, "build_cpu_seconds": cpu, "nodes": len(trie),
                               **lookups(trie, trace.requests[:session])})  # fmt: skip
                mark = next(marks, 0)
    # Edges end where requests part, which may be a few tokens into a block; a block belongs to where its end lies.
    end = trie.depth + trie.length
    unique = int((end // BLOCK - trie.depth // BLOCK).sum())
    return {"tokens": total, "stored_tokens": len(trie.tokens), "nodes": len(trie), "build_seconds": seconds,
            "build_cpu_seconds": cpu, "unique_blocks": unique, "dedup_ratio": trace.blocks / unique,
            "hit_blocks": hits, "hit_rate": hits / trace.blocks, "peak_bytes": peak(), "start_bytes": before,
            "growth": growth}  # fmt: skip


def lookups(trie: Any, requests: Sequence[np.ndarray]) -> dict[str, float]:
    """Milliseconds to look up prompts of 12,288 tokens: whole ones that are stored, and ones that part on the way."""
    long = [ids for ids in requests if len(ids) >= PROMPT // BLOCK]
    if not long:
        return {}
    rng = np.random.default_rng(1)
    stored = [tokens_of(long[i][: PROMPT // BLOCK]) for i in rng.integers(0, len(long), PROMPTS)]
    places = rng.integers(0, PROMPT, PROMPTS)
    parting = [prompt.copy() for prompt in stored]
    for prompt, place in zip(parting, places, strict=True):
        prompt[place] = VOCABULARY
    out = {}
    for name, prompts, ends in (("stored", stored, np.full(PROMPTS, PROMPT)), ("parting", parting, places)):
        times = np.full(PROMPTS, np.inf)
        # All prompts in turn, so that each finds the caches full of others; the best round is free of interruptions.
        for _ in range(ROUNDS):
            for i, prompt in enumerate(prompts):
                start = time.perf_counter()
                matched = trie.lookup(prompt)[0]
                times[i] = min(times[i], 1000 * (time.perf_counter() - start))
                if matched != ends[i]:
                    raise SystemExit(f"a prompt of which {ends[i]} tokens are stored matches for {matched}")
        out |= {f"{name}_median_ms": float(np.median(times)), f"{name}_max_ms": float(times.max())}
    return out


def timed(work: Callable[[], Any]) -> tuple[Any, dict[str, float]]:
    """A result with the wall-clock and CPU seconds it took."""
    start, cpu = time.perf_counter(), time.process_time()
    result = work()
    return result, {"seconds": time.perf_counter() - start, "cpu_seconds": time.process_time() - cpu}


def plan_phase(trace: Trace, block: int = 32) -> dict[str, Any]:
    """Plan the sharing of all requests in blocks of 32 tokens, as an archive does."""
    from pltpack.trie.plan import plan

    plan([[1, 2], [1, 2]], [0, 0], 1)
    arrays = [array for part in chunks(trace.requests) for array in part]
    result, took = timed(lambda: plan(arrays, [0] * len(arrays), block))
    # A node is stored once for all its sessions; what a session does not share lies behind its path.
    stored = sum(len(tokens) - result.shared(i) for i, tokens in enumerate(arrays))
    stored += sum(node.stop - node.start for node in result.nodes)
    return {"block": block, "nodes": len(result.nodes), "stored_tokens": stored, **took, "peak_bytes": peak()}


def match_phase(trace: Trace, shuffled: bool) -> dict[str, Any]:
    """Match all requests; shuffled, each has its blocks in an order of its own, so that hardly a prefix is shared."""
    from pltpack.trie.matching import find_matches

    find_matches([[1] * 64, [1] * 64], [0, 0], [0, 1], [0, 0])
    requests, own = trace.requests, [BLOCK * shared for shared in trace.shared]
    if shuffled:
        requests = [np.random.default_rng(i).permutation(ids) for i, ids in enumerate(requests)]
        own = [0] * len(requests)
    arrays = [array for part in chunks(requests) for array in part]
    targets = range(len(arrays))
    found, took = timed(lambda: find_matches(arrays, [0] * len(arrays), targets, own))
    covered = sum(m.length for matches in found for m in matches)
    return {"new_tokens": sum(map(len, arrays)) - sum(own), "matches": sum(map(len, found)), "covered_tokens": covered,
            **took, "peak_bytes": peak()}  # fmt: skip


PHASES: dict[str, Callable[[Trace], dict[str, Any]]] = {
    "trie": trie_phase,
    "plan": plan_phase,
    "match": lambda trace: match_phase(trace, shuffled=False),
    "match shuffled": lambda trace: match_phase(trace, shuffled=True),
}


def failures(trace: Trace, results: dict[str, Any]) -> list[str]:
    """Each figure that is not the exact one."""
    repeated = trace.blocks - trace.unique
    # Blocks of other ids share leading tokens by chance: under one token in 100 blocks, never half an anchor's worth.
    slack = trace.unique
    expected = {
        "blocks whose end is stored": (results["trie"]["unique_blocks"], trace.unique, 0),
        "blocks found stored": (results["trie"]["hit_blocks"], sum(trace.shared), 0),
        "tokens stored by the trie": (results["trie"]["stored_tokens"], trace.unique * BLOCK, slack),
        "tokens stored by the plan": (results["plan"]["stored_tokens"], trace.unique * BLOCK, 0),
        "tokens covered behind exact prefixes": (
            results["match"]["covered_tokens"], (repeated - sum(trace.shared)) * BLOCK, slack),
        "tokens covered in shuffled requests": (results["match shuffled"]["covered_tokens"], repeated * BLOCK, slack),
    }  # fmt: skip
    return [f"{name}: {got:,}, not {exact:,}" for name, (got, exact, off) in expected.items() if abs(got - exact) > off]


def measure(path: Path, requests: int | None) -> dict[str, Any]:
    """All phases of one trace, each in a fresh process, so that each peak of memory is its own."""
    trace = load(path, requests)
    results: dict[str, Any] = {"trace": path.name, "requests": len(trace.requests), "blocks": trace.blocks,
                               "unique_blocks": trace.unique}  # fmt: skip
    for phase in PHASES:
        command = [sys.executable, "-m", "benchmarks.trace", str(path), "--phase", phase]
        command += ["--requests", str(requests)] if requests else []
        results[phase] = json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout)
        print(f"{path.name}: {phase} done", file=sys.stderr)
    results["failures"] = failures(trace, results)
    return results


def show(result: dict[str, Any]) -> None:
    """Print one trace's figures."""
    trie, last = result["trie"], result["trie"]["growth"][-1]
    print(f"{result['trace']}: {result['requests']:,} requests, {trie['tokens']:,} tokens, "
          f"{result['blocks']:,} blocks, {result['unique_blocks']:,} unique")  # fmt: skip
    print(f"  trie    {trie['build_seconds']:.1f} s, {trie['peak_bytes'] / 1e9:.2f} GB, {trie['nodes']:,} nodes, "
          f"dedup {trie['dedup_ratio']:.4f}x, hit rate {100 * trie['hit_rate']:.2f} %")  # fmt: skip
    if "stored_median_ms" in last:
        print(f"  look-up of {PROMPT:,} tokens: median {last['stored_median_ms']:.3f} ms, "
              f"worst {last['stored_max_ms']:.3f} ms")  # fmt: skip
    for phase in ("plan", "match", "match shuffled"):
        took = result[phase]
        what = f"{took['covered_tokens']:,} tokens covered" if "matches" in took else f"{took['nodes']:,} nodes"
        print(f"  {phase}: {took['seconds']:.1f} s, {took['peak_bytes'] / 1e9:.2f} GB, {what}")
    for failure in result["failures"]:
        print(f"  WRONG  {failure}")


def plot(results: Sequence[dict[str, Any]], path: Path) -> None:
    """Build time over tokens (a straight line is linear growth) and look-up time over the logarithm of tokens."""
    import matplotlib
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 3.8), layout="constrained")
    build, lookup = figure.subplots(1, 2)
    for number, result in enumerate(results):
        growth, label = result["trie"]["growth"], result["trace"].removesuffix(".jsonl")
        tokens = np.array([step["tokens"] for step in growth]) / 1e6
        seconds = [s["build_cpu_seconds"] for s in growth]
        build.plot(tokens, seconds, "o-", ms=3, color=f"C{number}", label=label)
        build.plot([0, tokens[-1]], [0, seconds[-1]], "--", lw=1, alpha=0.5, color=f"C{number}")
        timed_steps = [(t, s) for t, s in zip(tokens, growth, strict=True) if "stored_median_ms" in s]
        for key, style in (("stored", "o-"), ("parting", "o:")):
            points = [(t, 1000 * s[f"{key}_median_ms"]) for t, s in timed_steps]
            lookup.plot(*np.reshape(points, (-1, 2)).T, style, ms=3, color=f"C{number}", label=f"{label}, {key}")
    build.set(xlabel="tokens inserted, millions", ylabel="build time, CPU seconds", xlim=0, ylim=0)
    lookup.set(
        xlabel="tokens inserted, millions", ylabel=f"median look-up of {PROMPT:,} tokens, µs", xscale="log", ylim=0
    )
    for axes in (build, lookup):
        axes.grid(alpha=0.3)
        axes.legend(fontsize=8)
    with matplotlib.rc_context({"svg.hashsalt": "pltpack", "svg.fonttype": "none"}):
        figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)


def main() -> int:
    """Command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("traces", nargs="+", type=Path)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--plot", type=Path)
    parser.add_argument("--requests", type=int, help="only the first N requests")
    parser.add_argument("--phase", choices=PHASES, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.phase:
        print(json.dumps(PHASES[args.phase](load(args.traces[0], args.requests))))
        return 0
    results = [measure(path, args.requests) for path in args.traces]
    for result in results:
        show(result)
    if args.json:
        machine = {"machine": platform.processor() or platform.machine(), "python": platform.python_version()}
        args.json.write_text(json.dumps({**machine, "traces": results}, indent=1) + "\n", encoding="utf-8")
    if args.plot:
        plot(results, args.plot)
    return 1 if any(result["failures"] for result in results) else 0


if __name__ == "__main__":
    raise SystemExit(main())
