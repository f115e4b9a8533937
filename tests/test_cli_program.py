"""The command line as a program: failures and exit codes, help, completion, start, progress, figures."""

from __future__ import annotations

import errno
import json
import os
import pty
from pathlib import Path

import numpy as np
import pytest
from cli_common import done, done_json, run, start
from hypothesis import given
from hypothesis import strategies as st

import pltpack
from pltpack.errors import PromiseError
from pltpack_cli.main import program
from pltpack_cli.output import plain, short_size, size

BAD_USES = [
    (["compress"], "Missing argument 'DUMP...'"),
    (["compress", "none", "-o", "out"], "none: no such file or folder"),
    (["compress", ".", "-o", "out", "--quality", "q9"], "q9"),
    (["compress", ".", "-o", "out", "--from", "floppy"], "floppy"),
    (["compress", ".", "-o", "out", "--block", "0"], "--block"),
    (["compress", ".", "-o", "out", "--device", "tpu"], "device 'tpu' is none of"),
    (["append", "none", "."], "none: not an archive"),
    (["decompress", "none", "-o", "out"], "none: not an archive"),
    (["decompress", "none", "-o", "out", "--layers", "2:2"], "'2:2' is empty"),
    (["decompress", "none", "-o", "out", "--tokens", "-3:"], "is not A:B"),
    (["decompress", "none", "-o", "out", "--tokens", "x"], "is not A:B"),
    (["decompress", "none", "-o", "out", "--accept-unknown", "mood"], "mood"),
    (["inspect", "none"], "none: not an archive"),
    (["verify", "none"], "none: not an archive"),
    (["compact", "none"], "none: not an archive"),
    (["gc", "none"], "none: not an archive"),
    (["export-session", "none", "s", "-o", "f"], "none: not an archive"),
    (["import-session", "none", "nofile"], "nofile: No such file or directory"),
    (["completion", "dos"], "dos"),
    (["frobnicate"], "frobnicate"),
    (["gc", "--frobnicate"], "--frobnicate"),
]


class TestFailures:
    @pytest.mark.parametrize(("args", "fact"), BAD_USES, ids=lambda value: " ".join(value)[:50])
    def test_bad_use_is_one_clear_line_and_one_object(
        self, args: list[str], fact: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.chdir(tmp_path)
        (tmp_path / "x.safetensors").write_bytes(b"")
        result = run(*args)
        assert result.exit_code == 2
        assert result.stdout == ""
        lines = [line for line in result.stderr.splitlines() if line.startswith("pltpack: error: ")]
        assert len(lines) == 1
        assert fact in lines[0]
        assert "Traceback" not in result.stderr
        again = run(*args, "--json")
        error = json.loads(again.stdout)["error"]
        assert (again.exit_code, error["exit_code"]) == (2, 2)
        assert fact in error["message"]
        assert sorted(path.name for path in tmp_path.iterdir()) == ["x.safetensors"]

    def test_existing_output_stays(self, dumps: Path, archive: Path) -> None:
        manifest = (archive / "MANIFEST.json").read_bytes()
        result = run("compress", dumps, "-o", archive)
        assert result.exit_code == 2
        assert f"{archive}: an archive is there already" in result.stderr
        assert (archive / "MANIFEST.json").read_bytes() == manifest

    @pytest.mark.parametrize(
        ("error", "code", "text"),
        [
            (OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "shard"), 2, "error: shard: No space left on device\n"),
            (PermissionError(errno.EACCES, os.strerror(errno.EACCES), "a"), 2, "error: a: Permission denied\n"),
            (OSError(errno.EXDEV, "Invalid cross-device link", "a", None, "b"), 2, "a -> b: Invalid cross-device"),
            (OSError("only\nwords"), 2, "error: only words\n"),
            (MemoryError(), 2, "error: out of memory\n"),
            (PromiseError("KL is above 0.01", "a"), 3, "error: a: KL is above 0.01\n"),
            (KeyboardInterrupt(), 130, "pltpack: interrupted\n"),
            (EOFError("short"), 70, "unforeseen EOFError: short"),
            (KeyError("k"), 70, "unforeseen KeyError: 'k'"),
        ],
        ids=lambda value: type(value).__name__,
    )
    def test_exit_codes(self, error: BaseException, code: int, text: str, monkeypatch: pytest.MonkeyPatch) -> None:
        def fail(archive: Path) -> list[str]:
            raise error

        monkeypatch.setattr(pltpack, "gc", fail)
        result = run("gc", "archive")
        assert result.exit_code == code
        assert text in result.stderr
        assert ("Traceback" in result.stderr) == (code == 70)
        assert json.loads(run("gc", "archive", "--json").stdout)["error"]["exit_code"] == code
        assert "Traceback" in run("--debug", "gc", "archive").stderr

    def test_after_two_dashes_nothing_is_a_flag(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.chdir(tmp_path)
        result = run("gc", "--", "--json")
        assert result.exit_code == 2
        assert result.stdout == ""

    def test_real_interrupt(self) -> None:
        code = (
            "import os, signal, sys, time, pltpack\n"
            # A shell's background jobs ignore interrupts.
            "signal.signal(signal.SIGINT, signal.default_int_handler)\n"
            "pltpack.gc = lambda archive: (os.kill(os.getpid(), signal.SIGINT), time.sleep(30))\n"
            "from pltpack_cli.main import main\nmain()"
        )
        process = start("gc", "archive", code=code)
        _, stderr = process.communicate(timeout=60)
        assert process.returncode == 130
        assert stderr == b"pltpack: interrupted\n"

    def test_closed_pipe_is_quiet(self, archive: Path) -> None:
        for args in (["inspect", archive], ["inspect", archive, "--json"], ["--help"]):
            reader, writer = os.pipe()
            os.close(reader)
            process = start(*args, stdout=writer)
            os.close(writer)
            _, stderr = process.communicate(timeout=60)
            assert process.returncode == 141
            assert stderr == b""

    @pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
    def test_full_output_is_an_error(self, archive: Path) -> None:
        for args in (["inspect", archive, "--json"], ["gc", "none", "--json"]):
            with open("/dev/full", "wb") as full:
                process = start(*args, stdout=full)
                _, stderr = process.communicate(timeout=60)
            assert process.returncode == 2
            assert len(stderr.splitlines()) == 1
            assert stderr.startswith(b"pltpack: error: ")


class TestProgram:
    def test_version(self) -> None:
        assert done("--version") == f"pltpack {pltpack.__version__}\n"

    def test_help_documents_exit_codes(self) -> None:
        text = done("--help")
        for code in (0, 1, 2, 3, 70, 130, 141):
            assert any(line.split()[:1] == [str(code)] for line in text.splitlines())

    def test_every_command_has_help_and_json(self) -> None:
        for name in program.commands:
            text = done(name, "--help")
            assert "--json" in text
            assert name in done("--help")

    def test_no_arguments_show_help(self) -> None:
        result = run()
        assert result.exit_code == 2
        assert "Commands:" in result.output

    @pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
    def test_completion_script(self, shell: str) -> None:
        script = done("completion", shell)
        assert "_PLTPACK_COMPLETE" in script
        assert done_json("completion", shell)["script"] == script.removesuffix("\n")

    @pytest.mark.parametrize(
        ("words", "found"),
        [("pltpack comp", {"compress", "completion", "compact"}),
         ("pltpack compress --quality q", {"q1", "q2", "q3", "q4"}),
         ("pltpack decompress --to h", {"hdf5"})],
    )  # fmt: skip
    def test_shell_completes_names(self, words: str, found: set[str]) -> None:
        environment = {**os.environ, "_PLTPACK_COMPLETE": "bash_complete", "COMP_WORDS": words,
                       "COMP_CWORD": str(len(words.split()) - 1)}  # fmt: skip
        stdout, _ = start(env=environment).communicate(timeout=60)
        assert {line.partition(",")[2] for line in stdout.decode().split()} == found

    def test_help_imports_nothing_heavy(self) -> None:
        code = (
            "import sys\nfrom pltpack_cli.main import main\n"
            "try:\n    main()\nexcept SystemExit:\n"
            "    print(*sys.modules, sep='\\n', file=sys.stderr)"
        )
        for args in (["--help"], ["compress", "--help"], ["--version"]):
            process = start(*args, code=code)
            stdout, stderr = process.communicate(timeout=60)
            assert b"pltpack" in stdout
            loaded = set(stderr.decode().split())
            assert "click" in loaded
            assert not loaded & {"torch", "numba", "h5py", "numpy", "rich", "safetensors", "transformers"}

    def test_installed_program_runs_the_corridor(self, dumps: Path, tmp_path: Path) -> None:
        process = start("compress", dumps, "-o", tmp_path / "a", "--quality", "lossless", "--json")
        stdout, stderr = process.communicate(timeout=120)
        assert process.returncode == 0, stderr.decode()
        assert stderr == b""
        assert json.loads(stdout)["sessions"] == 3

    def test_progress_on_a_terminal(self, archive: Path) -> None:
        terminal, stderr = pty.openpty()
        environment = {**os.environ, "TERM": "xterm", "COLUMNS": "120", "CI": ""}
        process = start("verify", archive, "--json", stderr=stderr, env=environment)
        os.close(stderr)
        shown = b""
        try:
            while chunk := os.read(terminal, 4096):
                shown += chunk
        except OSError as error:
            assert error.errno == errno.EIO
        stdout, _ = process.communicate(timeout=120)
        os.close(terminal)
        assert process.returncode == 0
        assert json.loads(stdout)["sessions"] == 3
        assert b"verify" in shown
        assert b"eta" in shown
        assert b"KiB" in shown


class TestOutput:
    @pytest.mark.parametrize(
        ("count", "text"),
        [(0, "0 bytes"), (1023, "1,023 bytes"), (1024, "1,024 bytes (1.0 KiB)"),
         (1048575, "1,048,575 bytes (1.0 MiB)"), (5 << 30, "5,368,709,120 bytes (5.0 GiB)")],
    )  # fmt: skip
    def test_sizes(self, count: int, text: str) -> None:
        assert size(count) == text

    @given(st.integers(0, 1 << 50))
    def test_short_sizes_are_near(self, count: int) -> None:
        figure, unit = short_size(count).split()
        scale = 1024 ** ("bytes", "KiB", "MiB", "GiB", "TiB", "PiB").index(unit)
        assert float(figure.replace(",", "")) * scale == pytest.approx(count, rel=0.05)
        assert float(figure.replace(",", "")) < 1024

    @given(st.text())
    def test_plain_text_prints_on_one_line(self, text: str) -> None:
        assert plain(text).isprintable()
        assert plain(plain(text)) == plain(text)

    def test_numbers_unknown_to_json_become_null(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(pltpack, "gc", lambda archive: [float("nan"), float("inf"), np.float32(1), np.arange(2)])
        assert done_json("gc", "archive") == {"removed": [None, None, 1.0, [0, 1]]}
