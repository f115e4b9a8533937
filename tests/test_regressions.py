"""One test per bug that was found and fixed, so that none comes back."""

from __future__ import annotations

import errno
import os
import resource
import signal
import struct
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest
from archives import equal_bits, session
from cli_common import run, start

import pltpack
from pltpack.archive import merge, reader
from pltpack.codec import registry
from pltpack.codec.base import DecodeJob, LayerSample, Unit
from pltpack.codec.group import GroupCodec
from pltpack.codec.levels import CLASSES
from pltpack.errors import ConflictError, DumpError, FormatError, IdentityError, UnsupportedError
from pltpack.format import durable
from pltpack.format import manifest as manifest_format
from pltpack.format.container import ContainerWriter
from pltpack.snapshot import DTYPES, ArraySource, Identity, LayerGeometry, Snapshot

sys.path.append(str(Path(__file__).parents[1] / "spec"))
import reference_group
import reference_numbers


class OneRun:
    """A sample of one run of tokens, the same in every layer."""

    def __init__(self, unit: Unit, keys: np.ndarray, values: np.ndarray) -> None:
        self._runs = [LayerSample(unit, keys, values)]

    def layer(self, index: int) -> list[LayerSample]:
        return self._runs


def small(name: str, rope: object = None, **fields: object) -> Snapshot:
    """A session of two tokens."""
    values = np.zeros((1, 2, 4), np.float32)
    return Snapshot.from_arrays(name, [1, 2], [(values, values)], Identity(rope=rope, **fields))


def files(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*")}


@pytest.fixture
def archive(tmp_path):
    """Four sessions that share a prefix, in blocks of 4."""
    path = tmp_path / "archive"
    sessions = [session(f"s{i}", [*range(12), i, i + 1]) for i in range(4)]
    pltpack.compress(sessions, path, quality="lossless", block=4)
    return path, sessions


def test_an_archive_of_more_files_than_a_process_may_open(tmp_path, monkeypatch):
    monkeypatch.setattr(reader, "MAX_OPEN", 8)
    sessions = [session(f"s{i}", [1, 2, 3, 4, i]) for i in range(150)]
    pltpack.compress(sessions, tmp_path / "a", quality="lossless", block=4)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    used = len(os.listdir("/proc/self/fd"))
    resource.setrlimit(resource.RLIMIT_NOFILE, (used + 60, hard))
    try:
        pltpack.verify(tmp_path / "a")
        pltpack.append(tmp_path / "a", [session("more", [1, 2, 3, 4, 9])])
        pltpack.compact(tmp_path / "a")
        pltpack.decompress(tmp_path / "a", tmp_path / "out")
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert not pltpack.verify(tmp_path / "a", against=sessions)["differences"]


@pytest.mark.parametrize("most", [0, 128], ids=["released", "open"])
def test_a_reader_goes_on_when_its_files_are_compacted_away(archive, monkeypatch, most):
    monkeypatch.setattr(reader, "MAX_OPEN", most)
    path, sessions = archive
    with pltpack.open(path) as opened:
        before = opened.snapshot("s0")
        pltpack.append(path, [session("new", [*range(12), 99])])
        pltpack.compact(path)
        assert equal_bits(before, sessions[0])
        for original in sessions:
            assert equal_bits(opened.read(original.session), original)


def test_readers_beside_a_writer_that_compacts_all_the_time(archive):
    path, sessions = archive
    failures: list[BaseException] = []

    def read() -> None:
        try:
            for turn in range(40):
                with pltpack.open(path) as opened:
                    assert equal_bits(opened.read(sessions[turn % 4].session), sessions[turn % 4])
        except BaseException as error:
            failures.append(error)

    thread = threading.Thread(target=read)
    thread.start()
    while thread.is_alive():
        pltpack.compact(path)
    assert not failures


@pytest.mark.parametrize("most", [0, 2, 128])
def test_verify_goes_on_in_the_generation_that_took_its_files_away(archive, monkeypatch, most):
    monkeypatch.setattr(reader, "MAX_OPEN", most)
    path, sessions = archive
    pltpack.append(path, [session("new", [*range(12), 99])])
    compacted = []

    def compact_once(stage: str, done: int, total: int) -> None:
        if stage == "verify" and not compacted:
            compacted.append(pltpack.compact(path))

    report = pltpack.verify(path, against=sessions, progress=compact_once)
    assert compacted and not report["differences"]
    # Who had all files open still reads, and reports, the generation that it opened.
    assert report["generation"] == (2 if most == 128 else 3)
    assert report["sessions"] == 5


def test_verify_of_many_segments_beside_a_compact_in_another_process(tmp_path):
    path = tmp_path / "a"
    pltpack.compress([session("s0", [1, 2, 3, 4, 0])], path, quality="lossless", block=4)
    pltpack.append(path, [session(f"s{i}", [1, 2, 3, 4, i]) for i in range(1, reader.MAX_OPEN + 12)])
    started = threading.Event()
    compacts: list[subprocess.Popen[bytes]] = []

    def compact_beside(stage: str, done: int, total: int) -> None:
        if not started.is_set():
            started.set()
            compacts.append(start("compact", path))
        elif len(compacts) == 1:
            compacts[0].wait()
            compacts.append(compacts[0])

    report = pltpack.verify(path, progress=compact_beside)
    assert compacts[0].wait() == 0
    assert report["generation"] == 3 and report["sessions"] == reader.MAX_OPEN + 12


def test_verify_gives_up_where_every_generation_is_taken_away(archive, monkeypatch):
    monkeypatch.setattr(reader, "MAX_OPEN", 0)
    path, _ = archive
    with pytest.raises(ConflictError, match="faster than"):
        pltpack.verify(path, progress=lambda stage, done, total: pltpack.compact(path) and None)


def test_verify_still_reports_a_file_that_no_generation_has(archive, monkeypatch):
    monkeypatch.setattr(reader, "MAX_OPEN", 0)
    path, _ = archive

    def lose(stage: str, done: int, total: int) -> None:
        (path / "shards" / "s3.pltshard").unlink(missing_ok=True)

    with pytest.raises(FormatError, match=r"s3\.pltshard.*missing"):
        pltpack.verify(path, progress=lose)


@pytest.mark.parametrize("most", [0, 128])
def test_export_goes_on_in_the_generation_that_took_its_files_away(archive, tmp_path, monkeypatch, most):
    monkeypatch.setattr(reader, "MAX_OPEN", most)
    path, sessions = archive
    write, compacted = merge.Merger.write_library, []

    def compact_first(*args: object) -> object:
        if not compacted:
            compacted.append(True)
            pltpack.compact(path)
        return write(*args)

    monkeypatch.setattr(merge.Merger, "write_library", compact_first)
    pltpack.export_session(path, "s2", tmp_path / "s2.file")
    pltpack.import_session(tmp_path / "b", tmp_path / "s2.file")
    with pltpack.open(tmp_path / "b") as opened:
        assert equal_bits(opened.read("s2"), sessions[2])


def test_a_file_that_is_really_missing_is_an_error(archive):
    path, _ = archive
    (path / "shards" / "s1.pltshard").unlink()
    with pltpack.open(path) as opened, pytest.raises(FormatError, match=r"s1\.pltshard.*missing"):
        opened.read("s1")


def test_a_reader_refuses_an_archive_that_took_the_place_of_its_own(archive, tmp_path, monkeypatch):
    monkeypatch.setattr(reader, "MAX_OPEN", 0)
    path, _ = archive
    with pltpack.open(path) as opened:
        snapshot = opened.snapshot("s0")
        path.rename(tmp_path / "former")
        pltpack.compress([session("s0", range(30))], path, quality="lossless")
        pltpack.append(path, [session("s9", range(30))])
        with pytest.raises(FormatError, match="replaced"):
            snapshot.layer(0)


def test_output_through_symbolic_links(archive, tmp_path):
    path, sessions = archive
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to("real")
    (tmp_path / "dangling").symlink_to("new")
    pltpack.compress(sessions, tmp_path / "link")
    pltpack.decompress(path, tmp_path / "dangling")
    assert (tmp_path / "link").is_symlink() and (tmp_path / "real" / "MANIFEST.json").exists()
    assert len(list(pltpack.open_dumps(tmp_path / "new"))) == 4


def test_the_current_folder_is_no_output(archive, tmp_path, monkeypatch):
    path, sessions = archive
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    with pytest.raises(ConflictError, match="current folder"):
        pltpack.compress(sessions, ".")
    with pytest.raises(ConflictError, match="current folder"):
        pltpack.decompress(path, ".")


def test_a_file_does_not_replace_an_empty_folder(archive, tmp_path):
    (tmp_path / "out").mkdir()
    with pytest.raises(ConflictError, match="folder"):
        pltpack.decompress(archive[0], tmp_path / "out", to="hdf5")
    assert files(tmp_path / "out") == set() and not list(tmp_path.glob(".tmp-*"))


def test_an_output_that_appears_while_the_archive_is_made(tmp_path):
    def meddle(stage: str, done: int, total: int) -> None:
        (tmp_path / "a").mkdir(exist_ok=True)
        (tmp_path / "a" / "mine").touch()

    with pytest.raises(ConflictError, match="cannot take its place"):
        pltpack.compress([small("s")], tmp_path / "a", progress=meddle)
    assert files(tmp_path) == {"a", "a/mine"}


def test_two_runs_towards_one_target(tmp_path):
    results: list[str] = []

    def make(target: Path) -> None:
        try:
            pltpack.compress([small("s")], target)
            results.append("made")
        except Exception as error:
            results.append(type(error).__name__)

    for turn in range(10):
        threads = [threading.Thread(target=make, args=(tmp_path / f"a{turn}",)) for _ in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert results.count("made") == 10 and set(results) <= {"made", "ConflictError"}
    assert {path.name for path in tmp_path.iterdir()} == {f"a{turn}" for turn in range(10)}


def test_folders_that_only_look_like_leftovers_stay(tmp_path):
    (tmp_path / ".a.tmp-notes").mkdir()
    (tmp_path / f".a.tmp-{'0' * 16}").mkdir()
    pltpack.compress([small("s")], tmp_path / "a")
    assert {path.name for path in tmp_path.iterdir()} == {"a", ".a.tmp-notes"}


KILLED = """
import os, signal, sys
import pltpack
job, source, out, to = sys.argv[1:]
die = lambda *args: os.kill(os.getpid(), signal.SIGKILL)
if job == "export":
    from pltpack.archive import transfer
    transfer._add = die
    pltpack.export_session(source, "s0", out)
pltpack.decompress(source, out, to=to, progress=die)
"""


@pytest.mark.parametrize("job", ["safetensors", "hdf5", "export"])
def test_what_a_killed_run_left_beside_its_output_goes_with_the_next_run(archive, tmp_path, job):
    folder = tmp_path / "outputs"
    path, out = archive[0], folder / "out"

    for name in ("out", "other"):
        process = start("export" if job == "export" else "dump", path, folder / name, job, code=KILLED)
        assert process.wait() == -signal.SIGKILL
    killed = files(folder)
    assert {name.split(".tmp-")[0] for name in killed} == {".out", ".other"}
    (folder / f".out.tmp-{'0' * 16}.new").mkdir()
    os.utime(folder / f".out.tmp-{'0' * 16}.new", (0, 0))
    (folder / f".out.tmp-{'1' * 16}.new").mkdir()
    if job == "export":
        pltpack.export_session(path, "s0", out)
    else:
        pltpack.decompress(path, out, to=job)
    left = {name for name in os.listdir(folder) if not name.startswith(".other.")}
    assert left == {"out", f".out.tmp-{'1' * 16}.new"}


def test_what_a_running_decompress_writes_stays(archive, tmp_path):
    folder, seen = tmp_path / "outputs", []

    def beside(stage: str, done: int, total: int) -> None:
        if not seen:
            seen.append(files(folder))
            with pytest.raises(ConflictError, match="no"):
                pltpack.decompress(archive[0], folder / "out", progress=fail)
            seen.append(files(folder))

    def fail(stage: str, done: int, total: int) -> None:
        raise ConflictError("no")

    pltpack.decompress(archive[0], folder / "out", progress=beside)
    assert seen[0] == seen[1] and len(seen[0]) > 2
    assert os.listdir(folder) == ["out"] and len(list(pltpack.open_dumps(folder / "out"))) == 4


def test_long_names_of_archives(tmp_path):
    pltpack.compress([small("s")], tmp_path / ("é" * 120))


def test_a_full_disk_leaves_no_temporary_file(tmp_path):
    writer = ContainerWriter(tmp_path / "x", 64)
    assert writer._file is not None
    writer._file.close()
    writer._file = open("/dev/full", "wb")  # noqa: SIM115
    writer.append(b"some bytes that stay in the buffer")
    writer.abort()
    assert files(tmp_path) == set()


FULL = """
import os, resource, sys
import pltpack
job, source, file, out = sys.argv[1:]
work = {
    "compress": lambda: pltpack.compress(list(pltpack.open_dumps(file)), out),
    "append": lambda: pltpack.append(source, list(pltpack.open_dumps(file))),
    "compact": lambda: pltpack.compact(source),
    "export": lambda: pltpack.export_session(source, "s0", out),
    "import": lambda: pltpack.import_session(source, file),
}.get(job, lambda: pltpack.decompress(source, out, to=job))
def present():
    folders = (os.path.dirname(out), source, os.path.join(source, "shards"))
    return [sorted(set(os.listdir(folder)) - {".lock"}) for folder in folders]
before = present()
most, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
for limit in (0, 500, 2_000, 5_000, 20_000, 60_000, 120_000):
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, hard))
    try:
        work()
    except (OSError, pltpack.PltpackError) as error:
        resource.setrlimit(resource.RLIMIT_FSIZE, (most, hard))
        assert present() == before
        print(getattr(error, "path", None) or error.filename, error)
    else:
        break
else:
    raise AssertionError("never enough")
"""


@pytest.mark.parametrize(
    "job", ["hdf5", "safetensors", "transformers", "compress", "append", "compact", "export", "import"]
)
def test_a_disk_that_is_full_at_any_moment(tmp_path, job):
    # The limit on the size of a file stands for the disk's end: it refuses the same calls, by another number.
    sessions = [session(f"s{i}", [*range(12), *range(i, i + 70)]) for i in range(2)]
    archive, file, outputs = tmp_path / "archive", tmp_path / "file", tmp_path / "outputs"
    outputs.mkdir()
    pltpack.compress(sessions, archive, quality="lossless", block=4)
    if job == "import":
        pltpack.compress([session("new", range(90))], tmp_path / "b", quality="lossless", block=4)
        pltpack.export_session(tmp_path / "b", "new", file)
    else:
        pltpack.write_dump([session("new", range(90))], file)
    process = start(job, archive, file, outputs / "out", code=FULL)
    printed, complaints = process.communicate()
    assert process.returncode == 0 and complaints == b"", complaints.decode()
    lines = printed.decode().splitlines()
    meant = archive if job in ("append", "compact", "import") else outputs / "out"
    assert len(lines) >= 2
    for line in lines:
        assert line.startswith(f"{meant} " if job == "export" else str(meant)), line
        assert "File too large" in line and ".tmp-" not in line, line
    if job in ("safetensors", "hdf5", "transformers"):
        assert all(map(equal_bits, sessions, pltpack.open_dumps(outputs / "out")))
    assert not pltpack.verify(archive, against=sessions)["differences"]


def test_a_full_disk_while_hdf5_is_written_from_the_command_line(archive, tmp_path):
    code = (
        "import resource, sys, pltpack_cli.main as m; resource.setrlimit(resource.RLIMIT_FSIZE, (5000, 5000));"
        "m.program(sys.argv[1:], prog_name='pltpack')"
    )
    process = start("decompress", archive[0], "-o", tmp_path / "out.h5", "--to", "hdf5", code=code)
    printed, complaints = process.communicate()
    assert process.returncode == 2 and printed == b""
    assert complaints.decode() == f"pltpack: error: {tmp_path / 'out.h5'}: cannot be written (File too large)\n"


@pytest.mark.parametrize("job", ["append", "compact", "import"])
def test_a_failed_generation_leaves_no_files(archive, tmp_path, monkeypatch, job):
    path, sessions = archive
    pltpack.export_session(path, "s0", tmp_path / "s0.file")
    pltpack.compress([session("other", [*range(12), 77])], tmp_path / "b", quality="lossless", block=4)
    target = path if job == "compact" else tmp_path / "b"
    before = files(target)

    def full(file: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(durable, "write_file", lambda path, data: full(path))
    work = {
        "append": lambda: pltpack.append(target, [sessions[1]]),
        "compact": lambda: pltpack.compact(target),
        "import": lambda: pltpack.import_session(target, tmp_path / "s0.file"),
    }
    with pytest.raises(OSError, match="No space left"):
        work[job]()
    monkeypatch.undo()
    assert files(target) == before | {".lock"}
    pltpack.verify(target)


def test_a_failure_after_the_commit_keeps_the_new_generation(archive, monkeypatch):
    path, sessions = archive
    write = durable.write_file

    def commit_then_fail(path: Path, data: bytes) -> None:
        write(path, data)
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(durable, "write_file", commit_then_fail)
    with pytest.raises(OSError, match="Input/output"):
        pltpack.append(path, [session("late", [*range(12), 5, 6, 7, 8])])
    monkeypatch.undo()
    assert pltpack.verify(path)["sessions"] == len(sessions) + 1


def test_errors_of_full_disks_name_the_file(tmp_path, monkeypatch):
    def full(file: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(durable, "sync_file", full)
    with pytest.raises(OSError, match="No space left") as caught:
        pltpack.compress([small("s")], tmp_path / "a")
    assert "library-000001" in str(caught.value.filename)


def test_a_manifest_that_could_not_be_read_back_is_not_committed(archive, monkeypatch):
    path, sessions = archive
    monkeypatch.setattr(manifest_format, "MAX_BYTES", (path / "MANIFEST.json").stat().st_size + 50)
    with pytest.raises(UnsupportedError, match="larger than allowed"):
        pltpack.append(path, [session("one-too-many", [1])])
    assert pltpack.verify(path)["sessions"] == len(sessions)


@pytest.mark.parametrize("fields", [
    {"rope": {"theta": float("nan")}}, {"rope": {"theta": float("inf")}}, {"rope": {"theta": {1}}}, {"model": 5},
    {"keys": "other"}, {"rope": {"theta": np.float32(1)}},
])  # fmt: skip
def test_identities_that_no_file_can_hold(tmp_path, fields):
    with pytest.raises(UnsupportedError, match="identity"):
        pltpack.compress([small("s", **fields)], tmp_path / "a")
    assert files(tmp_path) == set()


def test_identities_are_what_a_file_gives_back(tmp_path):
    rope = {"type": "x", "factors": (1, 2), 3: "three"}
    pltpack.compress([small("s", rope)], tmp_path / "a", quality="lossless")
    pltpack.append(tmp_path / "a", [small("t", rope)])
    assert not pltpack.verify(tmp_path / "a", against=[small("s", rope)])["differences"]


def test_import_of_an_identity_that_is_equal_but_written_in_another_way(tmp_path):
    pltpack.compress([small("s", {"type": "x", "theta": 10000})], tmp_path / "a")
    pltpack.compress([small("t", {"type": "x", "theta": 10000.0})], tmp_path / "b")
    pltpack.export_session(tmp_path / "b", "t", tmp_path / "t.file")
    with pytest.raises(IdentityError, match="another way"):
        pltpack.import_session(tmp_path / "a", tmp_path / "t.file")
    assert pltpack.verify(tmp_path / "a")["sessions"] == 1


def test_a_pipe_in_the_manifest_s_place_does_not_hang(archive):
    path, _ = archive
    (path / "MANIFEST.json").unlink()
    os.mkfifo(path / "MANIFEST.json")
    with pytest.raises(FormatError, match="regular file"):
        pltpack.open(path)


def test_a_session_asked_for_twice_is_written_once(archive, tmp_path):
    written = pltpack.decompress(archive[0], tmp_path / "out", sessions=["s1", "s1"])
    assert written == [tmp_path / "out" / "s1.safetensors"]


def test_a_token_range_that_does_not_fit_names_the_session(archive, tmp_path):
    with pytest.raises(UnsupportedError, match=r"s0\.pltshard.*0:14"):
        pltpack.decompress(archive[0], tmp_path / "out", tokens=slice(0, 15))


def test_a_session_given_twice_is_not_called_present(tmp_path):
    with pytest.raises(ConflictError, match="given twice"):
        pltpack.compress([small("s"), small("s")], tmp_path / "a")


@pytest.mark.parametrize(
    "tokens", [[-1, 2], [1 << 31, 2], np.array([1 << 40, 2]), [1.5, 2.0], [True, False], [[1, 2]], "ab"]
)
def test_tokens_that_are_no_token_ids(tmp_path, tokens):
    values = np.zeros((1, 2, 4), np.float32)
    with pytest.raises(UnsupportedError, match="token"):
        Snapshot.from_arrays("s", tokens, [(values, values)])
    by_hand = Snapshot("s", np.asarray(tokens), small("s").identity, small("s").source)
    with pytest.raises(UnsupportedError, match="token"):
        pltpack.compress([by_hand], tmp_path / "a")


@pytest.mark.parametrize("tier", ["lossless", "q4", "turboquant-4"])
@pytest.mark.parametrize("wrong", ["dtype", "shape", "tokens"])
def test_values_of_another_shape_than_the_identity_says(archive, tier, wrong):
    path, sessions = archive
    base = session("new", range(20))
    arrays = base.source.arrays
    if wrong == "dtype":
        arrays = [(k.astype(np.float16), v.astype(np.float16)) for k, v in arrays]
    elif wrong == "shape":
        arrays = [(k[:, :, :8], v) for k, v in arrays]
    else:
        arrays = [(k[:, :10], v[:, :10]) for k, v in arrays]
    liar = Snapshot("new", base.tokens, base.identity, ArraySource(tuple(arrays)))
    with pytest.raises(DumpError, match="not as the identity says"):
        pltpack.append(path, [liar], quality=tier)
    assert pltpack.verify(path)["sessions"] == len(sessions)


def test_lossless_does_not_learn_from_values_of_another_size():
    values = np.zeros((1, 3, 4), np.float32)
    geometry = LayerGeometry(1, 4, 4, "F16")

    lies = OneRun(Unit(0, geometry, 0, 3), values, values)
    with pytest.raises(ValueError, match="shape"):
        registry.tier("lossless").learn(lies, Identity(layers=(geometry,)))


def test_a_session_name_that_is_no_text(tmp_path):
    with pytest.raises(UnsupportedError, match="session name 5"):
        pltpack.compress([small(5)], tmp_path / "a")


def test_pipes_as_session_files_do_not_hang(archive, tmp_path):
    os.mkfifo(tmp_path / "pipe.json")
    with pytest.raises(FormatError, match="regular file"):
        pltpack.import_session(archive[0], tmp_path / "pipe.json")
    result = run("decompress", archive[0], "-o", tmp_path / "out", "--identity", tmp_path / "pipe.json")
    assert result.exit_code == 2 and "regular file" in result.stderr


@pytest.mark.parametrize("shifted", [False, True], ids=["plain", "shifted"])
@pytest.mark.parametrize(("dtype", "dims"), [("BF16", (32, 32)), ("BF16", (64, 20)), ("F32", (24, 17))])
def test_tables_with_more_low_bits_than_a_byte_holds(dtype, dims, shifted):
    geometry = LayerGeometry(2, *dims, dtype)
    identity = Identity(layers=(geometry,), rope={"type": "default", "theta": 10000.0}, keys="rotated")
    rng = np.random.default_rng(1)
    usual, wide, other = (
        tuple((scale * rng.normal(size=(2, 96, dim))).astype(DTYPES[dtype]) for dim in dims) for scale in (1, 1e4, 1e3)
    )
    wide[1][:, 60] = 0.1 * usual[1][:, 60].astype(np.float32)
    unit = Unit(0, geometry, 100, 96, near=shifted)
    codec = GroupCodec(4)
    state = codec.learn(OneRun(unit, *usual), identity)
    codec.start(state, identity)
    reference = other if shifted else None
    payload = codec.encode(unit, *wide, reference)
    out = [tuple(np.zeros_like(x) for x in wide) for _ in range(2)]
    codec.decode(memoryview(payload), unit, *out[0], reference)
    codec.decode_many([DecodeJob(memoryview(payload), unit, *out[1], reference)])
    # Steps suit the last tokens, and the short one ten classes more: beyond where the widest table begins.
    runs = np.frombuffer(payload, np.uint8, struct.unpack_from("<I", payload, 4)[0], 16 + 12)
    assert (runs >> 4).max() == 10 and int(np.frombuffer(payload, np.uint8, 4, 16 + 8).max()) + 10 >= CLASSES - 1
    spec = reference_group.Group({"bits": 4}, state, identity.to_json())
    mine = reference_numbers.Unit(0, 2, *dims, dtype, unit.tokens, unit.position)
    word = None if reference is None else tuple(np.ascontiguousarray(a).view(mine.word) for a in reference)
    wanted = spec.decode(payload, mine, word)
    for found in out:
        for a, b, original in zip(found, wanted, wide, strict=True):
            assert np.array_equal(np.ascontiguousarray(a).view(mine.word), b)
            error = np.abs(a.astype(np.float64) - original.astype(np.float64))
            assert error.max() < 0.05 * np.abs(original.astype(np.float64)).max()


def test_no_folder_for_compiled_loops(tmp_path, monkeypatch):
    # Numba refused to start for service users without a home, with a traceback.
    from pltpack import compiled_cache

    # Known to monkeypatch even where it is not set, so that it is as before in the end.
    monkeypatch.setenv(compiled_cache.VARIABLE, "")
    blocked = tmp_path / "file"
    blocked.write_text("not a folder")
    monkeypatch.setattr(compiled_cache, "_candidates", lambda: [blocked / "a", blocked / "b"])
    removed = []
    monkeypatch.setattr(compiled_cache.atexit, "register", lambda function, folder, **_: removed.append(folder))
    compiled_cache.settle()
    folder = Path(os.environ[compiled_cache.VARIABLE])
    assert removed == [str(folder)] and folder.stat().st_mode & 0o077 == 0
    folder.rmdir()
    os.environ[compiled_cache.VARIABLE] = ""
    monkeypatch.setattr(compiled_cache, "_candidates", lambda: [blocked / "a", tmp_path / "new" / "numba"])
    compiled_cache.settle()
    assert os.environ[compiled_cache.VARIABLE] == ""


def test_a_wait_for_compiled_loops_is_announced(tmp_path, monkeypatch, capsys):
    # The first run was silent for 20 seconds.
    from pltpack import compiled_cache
    from pltpack_cli.terminal import say_if_compiling

    own, shared = tmp_path / "codec" / "__pycache__", tmp_path / "numba"
    monkeypatch.setattr(compiled_cache, "_candidates", lambda: [own, shared])
    for given, kept in (("", own), ("", shared / "codec_0"), (str(tmp_path / "given"), tmp_path / "given/codec_0")):
        monkeypatch.setenv(compiled_cache.VARIABLE, given)
        say_if_compiling()
        assert "compiling its loops takes some 20 seconds" in capsys.readouterr().err
        kept.mkdir(parents=True)
        loop = kept / "rans.encode-1.py311.nbi"
        loop.touch()
        say_if_compiling()
        assert capsys.readouterr().err == ""
        loop.unlink()


def test_values_that_are_not_finite_cause_no_warnings(tmp_path, recwarn):
    # Comparing sessions that share a prefix printed numpy's warnings.
    rng = np.random.default_rng(0)
    keys = rng.normal(size=(2, 64, 8)).astype(np.float32)
    keys[0, 5, 3], keys[1, 9, 0] = np.nan, np.inf
    layers = (LayerGeometry(2, 8, 8, "F32"),)
    given = [
        Snapshot.from_arrays(name, np.arange(64, dtype=np.int32), [(keys, keys)], Identity(layers=layers))
        for name in ("a", "b")
    ]
    pltpack.compress(given, tmp_path / "archive", quality="q4")
    pltpack.write_dump(given, tmp_path / "dumps")
    pltpack.verify(tmp_path / "archive", against=[tmp_path / "dumps"])
    assert [str(warning.message) for warning in recwarn if warning.category is RuntimeWarning] == []


def test_a_drawing_that_cannot_be_written_is_named(tmp_path):
    # The error named no file, and an empty one stayed.
    place = tmp_path / "missing" / "trie.svg"
    given = Snapshot.from_arrays("a", np.arange(8, dtype=np.int32), [(np.ones((1, 8, 4), np.float32),) * 2],
                                 Identity(layers=(LayerGeometry(1, 4, 4, "F32"),)))  # fmt: skip
    pltpack.compress([given], tmp_path / "archive", quality="lossless")
    done = run("inspect", str(tmp_path / "archive"), "--trie", "--svg", str(place))
    assert done.exit_code == 2 and str(place) in done.stderr
