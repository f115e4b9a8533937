"""The live panels in a real process on a real terminal: what they show, when they do not, and what they leave."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import pty
import signal
import struct
import subprocess
import sys
import termios
from collections.abc import Callable
from pathlib import Path

import archives
import pyte
import pytest
from cli_common import done_json

import pltpack
from pltpack.archive.tally import Watcher, Written
from pltpack_cli.live import StepsPanel, WritingPanel, _clock

ROWS, COLUMNS = 24, 90
#: The command line, slowed down after each session so that its panel is drawn; the work itself is real.
SLOW = """
import signal, sys, time
signal.signal(signal.SIGINT, signal.default_int_handler)
from pltpack_cli.live import WritingPanel
plain = WritingPanel.written
def slowed(self, found):
    plain(self, found)
    time.sleep(0.3)
WritingPanel.written = slowed
from pltpack_cli.main import main
main()
"""


class Terminal:
    """A process on a pseudo-terminal, and the screens that it drew there."""

    def __init__(self, code: str, *args: object, stdout: int | None = None, **environment: str) -> None:
        leader, follower = pty.openpty()
        fcntl.ioctl(follower, termios.TIOCSWINSZ, struct.pack("HHHH", ROWS, COLUMNS, 0, 0))
        known = {key: value for key, value in os.environ.items() if key not in ("CI", "COLUMNS", "LINES", "NO_COLOR")}
        self.process = subprocess.Popen(
            [sys.executable, "-c", code, *map(str, args)], stdin=follower, stderr=follower,
            stdout=follower if stdout is None else stdout, env={**known, "TERM": "xterm-256color", **environment},
        )  # fmt: skip
        os.close(follower)
        self._leader = leader
        self.screen = pyte.Screen(COLUMNS, ROWS)
        self._stream = pyte.ByteStream(self.screen)
        self.raw = b""
        self.screens: list[str] = []

    def text(self) -> str:
        return "\n".join(line.rstrip() for line in self.screen.display).strip()

    def watch(self, until: Callable[[str], bool] = lambda _: False) -> bool:
        """Read until a screen is as wanted, or the process is done."""
        try:
            while chunk := os.read(self._leader, 4096):
                self.raw += chunk
                self._stream.feed(chunk)
                self.screens.append(self.text())
                if until(self.screens[-1]):
                    return True
        except OSError as error:
            assert error.errno == errno.EIO
        self.process.wait(timeout=60)
        os.close(self._leader)
        return False


@pytest.fixture(scope="module")
def snapshots() -> list[pltpack.Snapshot]:
    return [archives.session(f"s{i}", [*range(64), *[200 + i] * (100 + i)]) for i in range(4)]


@pytest.fixture(scope="module")
def given(snapshots: list[pltpack.Snapshot], tmp_path_factory: pytest.TempPathFactory) -> Path:
    from pltpack.dumps import write_dump

    folder = tmp_path_factory.mktemp("live") / "dumps"
    write_dump(iter(snapshots), folder, "safetensors")
    return folder


def test_compress_shows_what_it_is_at(given: Path, tmp_path: Path) -> None:
    terminal = Terminal(SLOW, "compress", given, "-o", tmp_path / "a", "--quality", "lossless")
    terminal.watch()
    assert terminal.process.returncode == 0
    stats = done_json("inspect", tmp_path / "a")["stats"]
    drawn = [screen for screen in terminal.screens if "4 of 4 written" in screen]
    assert drawn
    assert "pltpack compress →" in drawn[-1]
    assert f"{100 * stats['dedup_hit_rate']:.1f} % of 662 tokens" in drawn[-1]
    for fact in ("stages", "encode", "rate", "ratio so far"):
        assert fact in drawn[-1]
    assert any("1 of 4 written" in screen for screen in terminal.screens)
    # The panel is gone, the figures stay.
    assert "╭" not in terminal.screens[-1]
    assert "ratio  " in terminal.screens[-1]
    assert not terminal.screen.cursor.hidden


def test_an_interrupt_leaves_the_terminal_clean(given: Path, tmp_path: Path) -> None:
    terminal = Terminal(SLOW, "compress", given, "-o", tmp_path / "a", "--quality", "lossless")
    assert terminal.watch(lambda screen: "of 4 written" in screen)
    terminal.process.send_signal(signal.SIGINT)
    terminal.watch()
    assert terminal.process.returncode == 130
    assert terminal.screens[-1] == "pltpack: interrupted"
    assert not terminal.screen.cursor.hidden
    assert not (tmp_path / "a").exists()


def test_even_killed_it_leaves_the_cursor(given: Path, tmp_path: Path) -> None:
    terminal = Terminal(SLOW, "compress", given, "-o", tmp_path / "a", "--quality", "lossless")
    assert terminal.watch(lambda screen: "of 4 written" in screen)
    terminal.process.kill()
    terminal.watch()
    assert not terminal.screen.cursor.hidden
    assert b"\x1b[?25l" not in terminal.raw


@pytest.mark.parametrize(
    ("options", "environment"), [(["--quiet"], {}), (["--json"], {}), ([], {"CI": "true"})]
)
def test_nothing_is_drawn_where_nobody_watches(
    options: list[str], environment: dict[str, str], given: Path, tmp_path: Path
) -> None:
    code = "from pltpack_cli.main import main; main()"
    terminal = Terminal(code, "compress", given, "-o", tmp_path / "a", *options, **environment)
    terminal.watch()
    assert terminal.process.returncode == 0
    assert b"\x1b" not in terminal.raw
    if options == ["--json"]:
        assert json.loads(terminal.raw)["sessions"] == 4


def test_a_file_gets_the_figures_alone(given: Path, tmp_path: Path) -> None:
    with open(tmp_path / "out", "wb") as out:
        terminal = Terminal(SLOW, "compress", given, "-o", tmp_path / "a", stdout=out.fileno())
        terminal.watch()
    assert any("4 of 4 written" in screen for screen in terminal.screens)
    assert terminal.screens[-1] == ""
    assert (tmp_path / "out").read_bytes().startswith(b"archive ")


def test_bench_shows_its_steps(given: Path, tmp_path: Path) -> None:
    pltpack.compress([given], tmp_path / "a", quality="lossless")
    terminal = Terminal("from pltpack_cli.main import main; main()", "bench", "trie", tmp_path / "a")
    terminal.watch()
    assert terminal.process.returncode == 0
    drawn = [screen for screen in terminal.screens if "now" in screen]
    assert any("lossless, 4 sessions, ratio" in screen and "build, look up, match" in screen for screen in drawn)
    assert "╭" not in terminal.screens[-1]
    assert "exact prefixes" in terminal.screens[-1]


def test_what_is_told_is_what_is_written(snapshots: list[pltpack.Snapshot], tmp_path: Path) -> None:
    told: list[Written] = []

    class Panel(WritingPanel):
        def written(self, found: Written) -> None:
            told.append(found)

    assert isinstance(Panel(""), Watcher)
    stats = pltpack.compress(snapshots, tmp_path / "a", quality="lossless", progress=Panel("x"))
    assert [one.sessions for one in told] == sorted(one.sessions for one in told)
    first, last = told[0], told[-1]
    assert (first.sessions, first.of, first.raw_bytes) == (0, 4, 0)
    assert (last.sessions, last.raw_bytes, last.tokens) == (4, stats["raw_bytes"], stats["tokens"])
    assert last.shared_tokens == stats["shared_tokens"] > 0
    manifest = (tmp_path / "a" / "MANIFEST.json").stat().st_size
    assert last.stored_bytes == stats["archive_bytes"] - manifest


def test_hostile_names_do_not_reach_the_terminal() -> None:
    from rich.console import Console

    panel = StepsPanel("\x1b[2Jtitle[red]")
    panel.fact("\x1b]0;x\x07", "[bold]\x1b[1m")
    panel.step("\x1b[31m[/]")
    panel.step("last")
    console = Console(width=80, no_color=True, force_terminal=False)
    with console.capture() as captured:
        console.print(panel.render())
    assert "\x1b" not in captured.get()
    assert "title[red]" in captured.get()
    assert "[bold]" in captured.get()


@pytest.mark.parametrize(("seconds", "shown"), [(0, "0:00"), (61, "1:01"), (3725, "1:02:05"), (float("inf"), "–")])
def test_clock(seconds: float, shown: str) -> None:
    assert _clock(seconds) == shown
