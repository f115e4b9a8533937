"""Fixtures that several test files share: real snapshots, and the real model."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import settings

ROOT = Path(__file__).parents[1]

# Time limits per example only measure how busy the machine is; pytest-timeout guards against hangs.
settings.register_profile("pltpack", deadline=None, print_blob=True)
settings.load_profile("pltpack")


@pytest.fixture(scope="session")
def real_dumps(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of the eight sessions in fixtures/, one safetensors file each."""
    from benchmarks.capture import unpack

    folder = tmp_path_factory.mktemp("real")
    unpack(ROOT / "fixtures" / "sessions.tar.zst", folder)
    return folder / "dumps"


@pytest.fixture(scope="session")
def model_dir() -> Path:
    """SmolLM2-135M-Instruct on disk, downloaded and converted on first use."""
    from benchmarks.model import ensure

    return ensure(ROOT / ".cache" / "smollm2")


@pytest.fixture(scope="session")
def model(model_dir: Path):
    """The model itself, in float32."""
    from benchmarks.quality import load_model

    return load_model(model_dir)


@pytest.fixture(scope="module")
def dumps(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of three small dumps, two of which share a prefix."""
    from cli_common import write_dumps

    return write_dumps(tmp_path_factory.mktemp("cli") / "dumps")


@pytest.fixture(scope="module")
def archive(dumps: Path) -> Path:
    """A lossless archive of these dumps."""
    from cli_common import done

    path = dumps.parent / "archive"
    done("compress", dumps, "-o", path, "--quality", "lossless")
    return path
