"""Products of sparse coefficients: what they are, and that no bit depends on a token's neighbours."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pltpack.codec import products

RUN = 64


def product(shared: np.ndarray, needs: list[int], basis: np.ndarray) -> np.ndarray:
    """Of tokens in order, with lines of `basis` filled up to whole vectors."""
    tokens, width = len(shared), -(-basis.shape[1] // products.LANES) * products.LANES
    lines = np.zeros((len(basis), width), np.float32)
    lines[:, : basis.shape[1]] = basis
    rows = np.full(-(-tokens // products.TOKENS) * products.TOKENS, tokens, np.int64)
    rows[:tokens] = np.arange(tokens)
    out = np.zeros((tokens + 1, width), np.float32)
    products.add(*products.packets(shared, needs, RUN), lines.reshape(-1), width, rows, out.reshape(-1))
    return out[:tokens, : basis.shape[1]]


@settings(max_examples=25, deadline=None)
@given(
    tokens=st.integers(1, 150),
    components=st.sampled_from([0, 1, 40, 448, 500, 950]),
    width=st.sampled_from([1, 16, 100, 200]),
    density=st.sampled_from([0.0, 0.1, 1.0]),
    seed=st.integers(0, 99),
)
def test_products_are_those_of_matrices(tokens, components, width, density, seed) -> None:
    rng = np.random.default_rng(seed)
    shared = (rng.normal(size=(tokens, components)) * (rng.random((tokens, components)) < density)).astype(np.float32)
    basis = rng.normal(size=(components, width)).astype(np.float32)
    # The first tokens need all components, the others some.
    needs = [components if at == 0 else components * 2 // 3 for at in range(0, tokens, RUN)]
    for at, need in zip(range(0, tokens, RUN), needs, strict=True):
        shared[at : at + RUN, need:] = 0
    found = product(shared, needs, basis)
    exact = shared.astype(np.float64) @ basis
    assert np.allclose(found, exact, atol=1e-4 * max(1.0, np.sqrt(components)))
    # Alone, a token of the first run gives the same bits.
    for token in {0, min(tokens, RUN) - 1}:
        assert np.array_equal(product(shared[token : token + 1], needs[:1], basis)[0], found[token])


@pytest.mark.parametrize(
    ("components", "ends"),
    [(0, []), (448, [448]), (449, [224, 449]), (896, [448, 896]), (1500, [448, 896, 1200, 1500])],
)
def test_blocks_of_a_sum(components, ends) -> None:
    assert products.blocks(components) == ends
