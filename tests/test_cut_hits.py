"""Hits that end inside a lossy session: the tokens before the cut are left to the model."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import pltpack
from pltpack.errors import UnsupportedError
from pltpack.serve.engine_file import warm_file
from pltpack.serve.prefixes import PrefixIndex
from tests.loader_common import same
from tests.profiles_common import save_profile, session

IDS = np.random.default_rng(5).integers(10, 900, 300)
OTHER = np.arange(1000, 1100)


@pytest.fixture(scope="module")
def archives(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("cuts")
    profile = save_profile(folder / "p.safetensors")
    for quality, more in (("balanced", {"profile": profile}), ("lossless", {}), ("q4", {})):
        pltpack.compress([session("s", IDS)], folder / quality, quality=quality, **more)
    return folder


@pytest.mark.parametrize(("cut", "tokens"), [(200, 128), (192, 128), (160, 96), (268, 192), (96, 32), (95, 0), (40, 0)])
def test_a_cut_leaves_64_tokens_and_whole_blocks(archives: Path, cut: int, tokens: int) -> None:
    with pltpack.open(archives / "balanced") as archive, archive.loader() as loader:
        for prompt in (IDS[:cut], np.append(IDS[:cut], OTHER)):
            hit = loader.lookup(prompt)
            assert (hit.tokens, hit.tokens + hit.recompute) == (tokens, cut // 32 * 32)
            assert bool(hit) == bool(tokens) == bool(hit.session)
            if hit:
                assert same(loader.load(hit), archive.read("s"), tokens)


@pytest.mark.parametrize(("cut", "tokens"), [(300, 288), (299, 288), (288, 288), (287, 256), (269, 256)])
def test_less_than_a_block_before_its_end_is_no_cut(archives: Path, cut: int, tokens: int) -> None:
    with pltpack.open(archives / "balanced") as archive, archive.loader() as loader:
        for prompt in (IDS[:cut], np.append(IDS[:cut], OTHER)):
            hit = loader.lookup(prompt)
            assert (hit.session, hit.tokens, hit.recompute) == ("s", tokens, 0)


@pytest.mark.parametrize("quality", ["lossless", "q4"])
def test_tiers_whose_tokens_are_all_alike_need_none(archives: Path, quality: str) -> None:
    with pltpack.open(archives / quality) as archive, archive.loader() as loader:
        hit = loader.lookup(np.append(IDS[:200], OTHER))
        assert (hit.tokens, hit.recompute) == (192, 0)


def test_the_number_can_be_given(archives: Path) -> None:
    prompt = np.append(IDS[:200], OTHER)
    for quality in ("balanced", "lossless"):
        with pltpack.open(archives / quality) as archive:
            found = [archive.loader(recompute_at_cut=n).lookup(prompt).tokens for n in (0, 8, 9, 100, 1000)]
            assert found == [192, 192, 160, 96, 0]
            with pytest.raises(UnsupportedError, match="recompute_at_cut"):
                archive.loader(recompute_at_cut=-1)


def test_files_of_prompts_leave_them_too(archives: Path, tmp_path: Path) -> None:
    prompt = np.append(IDS[:200], OTHER)
    for more, tokens in (({}, 128), ({"recompute_at_cut": 0}, 192)):
        found = warm_file(archives / "balanced", "safetensors", tmp_path / "w.safetensors", prompt=prompt, **more)
        assert found["tokens"] == tokens


def test_a_session_that_ends_there_is_preferred(archives: Path, tmp_path: Path) -> None:
    longer = session("long", np.append(IDS, OTHER))
    sessions = [longer, session("s", IDS)]
    pltpack.compress(sessions, tmp_path / "a", profile=archives / "p.safetensors", dedup=False)
    with pltpack.open(tmp_path / "a") as archive, archive.loader() as loader:
        hit = loader.lookup(np.append(IDS, OTHER + 5000))
        assert (hit.session, hit.tokens) == ("s", 288)
        assert same(loader.load(hit), archive.read("s"), 288)
        assert loader.lookup(np.append(IDS, OTHER[:60])).tokens == 288


def test_branches_of_the_library_are_ends(archives: Path, tmp_path: Path) -> None:
    sessions = [session(f"s{n}", np.append(IDS[:200], OTHER + 100 * n)) for n in range(2)]
    pltpack.compress(sessions, tmp_path / "a", profile=archives / "p.safetensors")
    with pltpack.open(tmp_path / "a") as archive, archive.loader() as loader:
        hit = loader.lookup(np.append(IDS[:200], OTHER + 5000))
        assert (hit.tokens, hit.recompute) == (192, 0)
        assert same(loader.load(hit), archive.read("s0"), 192)
        assert loader.lookup(np.append(IDS[:160], OTHER + 5000)).tokens == 96


class Text:
    def __init__(self, tokens: list[int]) -> None:
        self.tokens = np.array(tokens, np.int32)


texts = st.lists(st.integers(0, 1), max_size=14)


@settings(max_examples=60, deadline=None)
@given(st.lists(texts, max_size=5), texts, st.integers(0, 5))
def test_look_up_leaves_so_many_tokens_or_ends_with_a_session(stored, prompt, left) -> None:
    index = PrefixIndex({str(i): Text(text) for i, text in enumerate(stored)}, 2, 1, left)

    def common(text: list[int]) -> int:
        shorter = min(len(text), len(prompt))
        return next((at for at in range(shorter) if text[at] != prompt[at]), shorter)

    best = max(map(common, stored), default=0)
    hit = index.lookup(prompt)
    assert hit.tokens + hit.recompute == best - best % 2
    if hit:
        text = stored[int(hit.session)]
        assert text[: hit.tokens] == prompt[: hit.tokens]
        assert hit.tokens == max(0, best - left) // 2 * 2 or len(text) - best < 2
    if left == 0:
        assert hit.recompute == 0
