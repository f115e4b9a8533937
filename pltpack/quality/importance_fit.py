"""Learn to predict a token's importance: a ridge regression and a small network beside it.

The loss is that of steps proportional to I^-½ where I is mispredicted: a token taken for less important than it is
costs distortion with the root of the ratio; one taken for more costs bits with its logarithm.
"""

from __future__ import annotations

import dataclasses

import numpy as np

from pltpack.quality.threads import one_thread

HIDDEN = 48
#: Share of the windows that training does not see, by which the prediction is judged.
HELD_OUT = 0.15
_RIDGE = 50.0
_EPOCHS, _BATCH, _DROPOUT, _RATE, _DECAY = 12, 512, 0.1, 2e-3, 0.1
_CLIP = 6.0


@dataclasses.dataclass(frozen=True)
class Fit:
    """What was learned.

    Attributes
    ----------
    weights : dict of str to ndarray
        As `pltpack.codec.importance.predict` takes them.
    explained : float
        R² of the binary logarithm on windows not trained on.
    gain, possible : float
        Bits per active component that steps by prediction save there, and that steps by the truth would.
    """

    weights: dict[str, np.ndarray]
    explained: float
    gain: float
    possible: float


def ordinary(features: int) -> dict[str, np.ndarray]:
    """Weights by which all tokens are of importance 1."""
    shapes: dict[str, tuple[int, ...]] = {
        "mean": (features,), "scale": (features,), "linear": (features,), "hidden": (1, features), "bias": (1,),
        "out": (1,), "center": (1,),
    }  # fmt: skip
    return {name: np.zeros(shape, np.float32) for name, shape in shapes.items()}


def fit(features: list[np.ndarray], energy: list[np.ndarray], seed: int = 0) -> Fit:
    """Learn from windows.

    Parameters
    ----------
    features : list of ndarray
        `pltpack.codec.importance.features` of each window, ``[T, F]``.
    energy : list of ndarray
        Importance of the same tokens.
    """
    from pltpack.codec.importance import predict

    held = max(1, round(HELD_OUT * len(features))) if len(features) > 1 else 0
    train = len(features) - held
    x, y = np.concatenate(features[:train]), np.log(np.maximum(np.concatenate(energy[:train]), 1e-30))
    mean, scale = x.mean(axis=0, dtype=np.float64), x.std(axis=0, dtype=np.float64)
    z = np.clip((x - mean) / np.maximum(scale, 1e-6), -_CLIP, _CLIP)
    middle = y.mean()
    linear = np.linalg.solve(z.T @ z + _RIDGE * np.eye(z.shape[1]), z.T @ (y - middle))
    weights = {"mean": mean, "scale": scale, **_train(z, y - middle, linear, seed)}
    weights = {name: np.asarray(value, np.float32) for name, value in weights.items()}
    found = np.concatenate([predict(weights, part) for part in features]).mean(dtype=np.float64)
    weights["center"] = (weights["center"] - found * np.log(2)).astype(np.float32)
    predictions = [predict(weights, part).astype(np.float64) for part in features[train:] or features]
    truth = [np.log2(np.maximum(part, 1e-30)) for part in energy[train:] or energy]
    return Fit(weights, *_judge(predictions, truth))


def _train(z: np.ndarray, y: np.ndarray, linear: np.ndarray, seed: int) -> dict[str, np.ndarray]:
    import torch

    state = torch.get_rng_state()
    try:
        # Sums in one order: the same weights on any number of cores.
        with one_thread():
            torch.manual_seed(seed)
            return _trained(torch.tensor(z, dtype=torch.float32), torch.tensor(y, dtype=torch.float32), linear)
    finally:
        torch.set_rng_state(state)


def _trained(x: object, y: object, linear: np.ndarray) -> dict[str, np.ndarray]:
    import torch
    from torch import nn

    assert isinstance(x, torch.Tensor) and isinstance(y, torch.Tensor)
    with torch.enable_grad():
        inner, outer, straight = nn.Linear(x.shape[1], HIDDEN), nn.Linear(HIDDEN, 1), nn.Linear(x.shape[1], 1)
        with torch.no_grad():
            straight.weight.copy_(torch.tensor(linear, dtype=torch.float32)[None])
            straight.bias.zero_()
            outer.weight.mul_(0.1)
            outer.bias.zero_()
        parameters = [p for layer in (inner, outer, straight) for p in layer.parameters()]
        optimizer = torch.optim.AdamW(parameters, lr=_RATE, weight_decay=_DECAY)
        steps = _EPOCHS * -(-len(x) // _BATCH)
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 3 * _RATE, total_steps=steps)
        for _ in range(_EPOCHS):
            for part in torch.randperm(len(x)).split(_BATCH):
                dropped = nn.functional.dropout(x[part], _DROPOUT)
                p = (outer(nn.functional.silu(inner(dropped))) + straight(x[part]))[:, 0]
                loss = (2 * ((y[part] - p) / 2).clamp(max=5).exp() + p).mean()
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                schedule.step()
    return {
        "linear": straight.weight.detach().numpy()[0], "hidden": inner.weight.detach().numpy(),
        "bias": inner.bias.detach().numpy(), "out": outer.weight.detach().numpy()[0],
        "center": (straight.bias + outer.bias).detach().numpy(),
    }  # fmt: skip


def _judge(predictions: list[np.ndarray], truth: list[np.ndarray]) -> tuple[float, float, float]:
    p, t = np.concatenate(predictions), np.concatenate(truth)
    offset = (t - p).mean()
    spread = float(t.var())
    explained = 1 - float(np.square(t - p - offset).mean()) / spread if spread > 0 else 0.0
    gain = [0.5 * (np.log2(np.exp2(b).mean()) - a.mean() - np.log2(np.exp2(b - a).mean()))
            for a, b in zip(predictions, truth, strict=True)]  # fmt: skip
    possible = [0.5 * (np.log2(np.exp2(b).mean()) - b.mean()) for b in truth]
    return explained, float(np.mean(gain)), float(np.mean(possible))
