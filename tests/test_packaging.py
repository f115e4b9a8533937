"""What an installed pltpack must have: every package, its command, and a fast start."""

from __future__ import annotations

import io
import os
import subprocess
import sys
import tarfile
import tomllib
from importlib.metadata import entry_points
from pathlib import Path

import pytest
import zstandard

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())


def test_every_package_is_installed() -> None:
    found = {".".join(p.parent.relative_to(ROOT).parts) for p in (ROOT / "pltpack").rglob("__init__.py")}
    assert set(PROJECT["tool"]["setuptools"]["packages"]) == found | {"pltpack_cli"}


def test_version_is_the_projects() -> None:
    import pltpack

    assert pltpack.__version__ == PROJECT["project"]["version"]


def test_command_is_installed() -> None:
    (script,) = entry_points(group="console_scripts", name="pltpack")
    assert callable(script.load())


def test_start_loads_nothing_heavy() -> None:
    code = (
        "import sys, pltpack, pltpack_cli.main; print(*{'torch', 'numba', 'h5py', 'numpy', 'rich'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == []


def test_fixtures_fit_in_a_clone() -> None:
    size = sum(path.stat().st_size for path in (ROOT / "fixtures").rglob("*") if path.is_file())
    assert size <= 14 * 1024 * 1024


def test_packed_fixtures_depend_on_names_and_contents_alone(tmp_path: Path) -> None:
    from benchmarks.capture import pack, unpack

    for order in ("ab", "ba"):
        for name in order:
            (tmp_path / order / "dumps").mkdir(parents=True, exist_ok=True)
            (tmp_path / order / "dumps" / name).write_bytes(name.encode() * 1000)
            os.utime(tmp_path / order / "dumps" / name, (len(order), ord(order[0])))
        pack(tmp_path / order, tmp_path / f"{order}.tar.zst")
    assert (tmp_path / "ab.tar.zst").read_bytes() == (tmp_path / "ba.tar.zst").read_bytes()
    unpack(tmp_path / "ab.tar.zst", tmp_path / "again")
    assert (tmp_path / "again" / "dumps" / "b").read_bytes() == b"b" * 1000


def test_unpacking_cannot_leave_its_folder(tmp_path: Path) -> None:
    from benchmarks.capture import unpack

    raw = io.BytesIO()
    with tarfile.open(fileobj=raw, mode="w") as tar:
        tar.addfile(tarfile.TarInfo("../outside"), io.BytesIO())
    (tmp_path / "hostile.tar.zst").write_bytes(zstandard.compress(raw.getvalue()))
    with pytest.raises(tarfile.OutsideDestinationError):
        unpack(tmp_path / "hostile.tar.zst", tmp_path / "inside")
    assert not (tmp_path / "outside").exists()
