"""The benchmark of transfer at a small size: every figure is there, and what was delivered is what was put."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

FOLDER = str(Path(__file__).parents[2] / "benchmarks")
MODULES = ("bench_transfer", "transfer_data", "transfer_peers", "report")


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The module; its consumers are threads here, which start at once."""
    monkeypatch.syspath_prepend(FOLDER)
    import bench_transfer
    import transfer_peers

    for module in (bench_transfer, transfer_peers):
        monkeypatch.setattr(module, "ProcessPoolExecutor", lambda count, _context: ThreadPoolExecutor(count))
    yield bench_transfer
    for name in MODULES:
        sys.modules.pop(name, None)


def test_every_figure_is_there(bench: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    small = {name: bench.workload(name, 8, patches, 64) for name, patches in (("text", None), ("images", (64, 256)))}
    size = bench.Size(small["text"], small["images"], bench.workload("units", 8, (64, 64), 64), 1, 0.2)
    bench.run(bench.Report("transfer", str(tmp_path / "rows")), ["dataloader"], size, size.soak)
    rows = [json.loads(line) for line in (tmp_path / "rows").read_text().splitlines()]
    found = {(row["case"], row["provider"], row["metric"]): row["p50"] for row in rows}
    for case in ("text", "images"):
        for metric in bench.COLUMNS:
            assert (case, "knit_data", metric) in found
        assert found[case, "knit_data", "64:8 unique"] > 0
    assert found["images", "knit_data", "stored"] < found["images", "dataloader", "stored"] / 4, "one image, not eight"
    assert {name for case, name, _ in found if case == "reads"} >= {"knit_data", "pread, fresh", "memcpy, 1 thread"}
    assert found["soak", "knit_data", "written"] > 0
    out = capsys.readouterr().out.split("it must reach\n")[1].splitlines()
    assert len(out) == len(bench.goals(bench.Found(None))) and all(
        line.endswith(("yes", "no", "not measured")) for line in out
    )


def test_what_was_not_delivered_is_noticed(bench: Any) -> None:
    from transfer_data import MEMBERS, Reading, groups_of

    load = bench.workload("images", 2, (64, 256), 64)
    whole = Reading(seconds=[1.0, 1.0])
    for group in groups_of(load):
        whole.checked(group.ids, [group.pixels] * MEMBERS)
    bench.took(bench.Found(None), load, "a loader", "8:8", whole, 0.0)
    for lost in ("ids", "pixels"):
        part = Reading(seconds=[1.0, 1.0])
        for group in groups_of(load):
            ids, pixels = list(group.ids), [group.pixels] * MEMBERS
            if lost == "ids":
                ids[3] = torch.zeros_like(ids[3])
            else:
                pixels.pop()
            part.checked(ids, pixels)
        with pytest.raises(AssertionError, match="delivered"):
            bench.took(bench.Found(None), load, "a loader", "8:8", part, 0.0)


def test_what_is_not_installed_is_said(bench: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    import transfer_peers

    monkeypatch.setattr(transfer_peers.Driver, "packages", ("torch", "no_such_package"))
    assert bench.missing(transfer_peers.Driver) == ["no_such_package"]


@pytest.mark.parametrize("names", ["ray", "transferqueue,ray"])
def test_unknown_peers_are_refused(bench: Any, names: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        bench.main(["--peers", names])
    assert "no peers ['ray']" in capsys.readouterr().err
