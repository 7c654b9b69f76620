"""The command line: tables, files, refusals, and one run from outside."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from stranger import stranger

import knit_data.__main__ as command
from knit_data.simulation import PRESETS, Scenario, Source, simulate

KEYS = (
    "policy staleness staleness_token_mean reduction reduction_token_mean p99 max cycle_ratio trainer_idle violations "
    "dead_ends bound identity_error"
).split()


@pytest.fixture(autouse=True)
def short(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Presets of a few train batches, and one of them that gets stuck."""
    stuck = Scenario({"a": Source(4, 9.0, keep=0.3), "b": Source(4, 9.0)}, 4, 4, launch_ahead=0, batches=3, warmup=1)
    for name, preset in [*PRESETS.items(), ("stuck", stuck)]:
        monkeypatch.setitem(PRESETS, name, replace(preset, batches=3, warmup=1, name=name))  # type: ignore[index]
    yield


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    try:
        code = command.main(arguments)
    except SystemExit as end:
        code = int(str(end.code))
    out, err = capsys.readouterr()
    return code, out, err


def simulated(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    return run(capsys, "simulate", "--seeds", "1", *arguments)


def test_the_table(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = simulated(capsys, "--preset", "mix3", "--slack", "3")
    assert (code, err) == (0, "")
    lines = out.splitlines()
    assert lines[0] == "mix3: train batches of 64 groups of 8 responses in 16 mini-batches,"
    head = next(i for i, line in enumerate(lines) if line.startswith("policy"))
    for name in command.COLUMNS:
        assert name in lines[head]
    table = lines[head : head + 9]
    assert len({len(line) for line in table}) == 1, "aligned"
    assert [line[:30].strip() for line in table[1:4]] == ["train-batch", "train-batch, 1 ahead", "train-batch, slack 3"]
    assert "against the first row: train-batch" in out
    assert "C/B = 0.0625 while no slot is idle, 1/M = 0.0625" in out and "the slots are the bottleneck" in out
    assert lines[-1].startswith("constraint-preserving, paced: 0.") and "times C/B" in lines[-1]
    assert "the estimate" in lines[-1]


def test_json_alone_on_stdout(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = simulated(capsys, "--preset", "mild", "--json", "-")
    rows = json.loads(out)
    assert code == 0 and len(rows) == 7 and all(set(KEYS) <= row.keys() for row in rows)
    assert "policy" in err, "the table"


def test_nan_is_null(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    code, out, _ = simulated(capsys, "--preset", "stuck", "--json", str(tmp_path / "rows.json"))
    text = (tmp_path / "rows.json").read_text()
    rows = {row["policy"]: row for row in json.loads(text, parse_constant=pytest.fail)}
    assert code == 0 and " nan " in out
    assert rows["constraint-preserving"]["staleness"] is None and rows["constraint-preserving"]["dead_ends"] == 1
    assert rows["constraint-preserving, paced"]["staleness"] > 0


def test_a_trace_is_enough_for_a_stranger(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    file = tmp_path / "trace.jsonl"
    code, _, _ = simulated(capsys, "--preset", "mix3", "--slack", "2", "--trace", str(file))
    assert code == 0
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    heads = [i for i, row in enumerate(rows) if row["event"] == "run"]
    assert heads[0] == 0 and [rows[i]["policy"] for i in heads] == ["train-batch", "constraint-preserving, paced"]
    assert {r["event"] for r in rows} == {"run", "launch", "start", "completion", "admission", "step", "publish"}
    runs = rows[: heads[1]], rows[heads[1] :]
    reports = (
        simulate(PRESETS["mix3"], "train-batch"),
        simulate(replace(PRESETS["mix3"], slack=2), "constraint-preserving", True),
    )
    for (facts, *events), report in zip(runs, reports, strict=True):
        found = stranger(facts, events)
        assert found["staleness"] == pytest.approx(report.staleness, abs=1e-9)
        assert found["violations"] == report.violations == 0


@pytest.mark.parametrize(("preset", "suffix"), [("homo", "png"), ("stuck", "svg")])
def test_a_plot(capsys: pytest.CaptureFixture[str], tmp_path: Path, preset: str, suffix: str) -> None:
    pytest.importorskip("matplotlib")
    file = tmp_path / f"plot.{suffix}"
    code, out, _ = simulated(capsys, "--preset", preset, "--plot", str(file))
    assert code == 0 and out.startswith(preset)
    assert file.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n" if suffix == "png" else b"<svg" in file.read_bytes()
    assert len(file.read_bytes()) > 10_000


def test_without_matplotlib(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.backends.backend_agg", None)
    code, out, err = simulated(capsys, "--plot", "plot.png")
    assert (code, out) == (2, "")
    assert err == "python -m knit_data simulate: error: --plot needs matplotlib: pip install matplotlib.\n"


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--preset", "mixed"], "there is no preset 'mixed'; there are homo, mild"),
        (["--slots", "0"], "slots must be an int of at least 1, found 0"),
        (["--slots", "many"], "argument --slots: invalid int value: 'many'"),
        (["--mini-batches", "7"], "64 groups of a train batch cannot be cut into 7 mini-batches"),
        (["--seeds", "0"], "seeds must be an int of at least 1, found 0"),
        (["--slack", "9"], "found 9 with 8 groups of 'd'"),
        (["--json", "{folder}/no/rows.json"], "No such file or directory"),
        (["--trace", "{folder}"], "Is a directory"),
        (["--plot", "{folder}/no/plot.png"], "No such file or directory"),
        (["--plot", "{folder}/plot.doc"], "name it .png, .pdf or .svg"),
        (["--pre", "homo"], "unrecognized arguments: --pre homo"),
    ],
)
def test_refusals(capsys: pytest.CaptureFixture[str], tmp_path: Path, arguments: list[str], text: str) -> None:
    code, out, err = run(capsys, "simulate", *(a.format(folder=tmp_path) for a in arguments))
    assert (code, out) == (2, "")
    assert err.startswith("python -m knit_data") and text in err
    assert err.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("arguments", "code"), [([], 2), (["fly"], 2), (["--help"], 0), (["simulate", "--help"], 0)])
def test_help(capsys: pytest.CaptureFixture[str], arguments: list[str], code: int) -> None:
    found, out, err = run(capsys, *arguments)
    assert found == code
    assert "simulate" in out if code == 0 else err.count("\n") == 1


def test_interrupted(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def stop(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(command, "compare", stop)
    assert simulated(capsys) == (130, "", "")


def test_progress_on_a_terminal(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    code, _, err = simulated(capsys, "--preset", "homo")
    assert code == 0
    assert "\r\x1b[Kconstraint-preserving, paced, seed 1 of 1" in err and err.endswith("\r\x1b[K")


OUTSIDE = [sys.executable, "-W", "error", "-m", "knit_data"]


def test_a_reader_that_goes_away() -> None:
    with subprocess.Popen([*OUTSIDE, "--help"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None and process.stderr is not None
        process.stdout.close()
        assert process.stderr.read() == ""
        assert process.wait() == 0


def test_from_outside() -> None:
    """The real preset in a process of its own."""
    arguments = [*OUTSIDE, "simulate", "--preset", "homo", "--slots", "8", "--seeds", "1", "--json", "-"]
    done = subprocess.run(arguments, capture_output=True, text=True, check=True)
    rows = json.loads(done.stdout)
    assert rows[-1]["policy"] == "constraint-preserving, paced" and rows[-1]["reduction"] > 0.9
    assert rows[-1]["identity_error"] < 1e-9
