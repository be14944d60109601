"""Reading server logs."""

from __future__ import annotations

from pathlib import Path

from lab.serving import log

LINES = """\
\x1b[0;36m(APIServer pid=7)\x1b[0;0m INFO 11-29 21:00:00 [utils.py:1] non-default args: {}
(EngineCore pid=9) INFO 11-29 21:00:01 [gpu_model_runner.py:5] Starting to load model /x...
(EngineCore pid=9) WARNING 11-29 21:00:01 [cpu.py:5] Triton is not installed.
Loading safetensors: 100%
(EngineCore pid=9) ERROR 11-29 21:00:02 [core.py:1] Traceback (most recent call last):
(EngineCore pid=9) ERROR 11-29 21:00:02 [core.py:1] ValueError: No common block size for 16
(APIServer pid=7) Traceback (most recent call last):
(APIServer pid=7) RuntimeError: Engine core initialization failed. See root cause above. Failed core proc(s): {}

"""


def test_headline_is_the_last_thing_that_was_done(tmp_path: Path) -> None:
    path = tmp_path / "a.log"
    path.write_text(LINES)
    assert log.headline(path) == "Starting to load model /x..."
    path.write_text(LINES + "(APIServer pid=2) INFO 11-30 09:50:41 [api_utils.py:347]   █▄█▀ █     █     █     █  model   /x/smollm2\n")
    assert log.headline(path) == "Starting to load model /x..."


def test_cause_is_the_first_hand_error(tmp_path: Path) -> None:
    path = tmp_path / "a.log"
    path.write_text(LINES)
    assert log.cause(path) == "ValueError: No common block size for 16"
    path.write_text("RuntimeError: Engine core initialization failed. See\n")
    assert log.cause(path).startswith("RuntimeError: Engine core")
    path.write_text("all is well\n")
    assert log.cause(path) == ""


def test_tail_of_a_long_log_starts_at_a_whole_line(tmp_path: Path) -> None:
    path = tmp_path / "a.log"
    path.write_text("".join(f"line {number} äöü\n" for number in range(10_000)))
    assert log.tail(path, 3, size=100) == [f"line {number} äöü" for number in (9997, 9998, 9999)]
    assert log.tail(tmp_path / "none.log") == []
