"""The README's code runs as it stands: its rollout side in one process, its training loop under torchrun."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import threading
from pathlib import Path

import knit_data as kd
from knit_data.seats import QuotaSeats

README = (Path(__file__).parents[1] / "README.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"```python\n(.*?)```", README, re.DOTALL)


def respond(prompt: str, i: int, version: int) -> kd.Trajectory:
    import torch

    n = 4 + (len(prompt) * 7 + i * 3) % 20
    source = "math" if int(prompt[1:]) % 2 else "code"
    tokens = {
        "input_ids": torch.arange(n) % 60 + 1,
        "logprobs": torch.full((n,), -4.0),
        "loss_mask": torch.arange(n) > 2,
    }
    return kd.Trajectory(
        f"{prompt}/{i}", prompt, version, tokens, {"reward": float(i % 3)}, attributes={"source": source}
    )


def test_the_readme_trains(tmp_path, monkeypatch):
    rollout, training, _, _ = BLOCKS
    monkeypatch.chdir(tmp_path)
    exec(compile(rollout, "README.md", "exec"), {"prompts": [f"p{g}" for g in range(16)], "respond": respond})
    store = kd.TrajectoryStore("out/run")
    store.seal()
    (tmp_path / "train.py").write_text(training, encoding="utf-8")
    command = [sys.executable, "-W", "error::UserWarning:knit_data", "-m", "torch.distributed.run"]
    command += ["--standalone", "--nproc-per-node", "2", "train.py"]
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    assert store.finished() and store.policy_version() == 8


def test_the_readme_launches(tmp_path, monkeypatch):
    """Until the prompts run out: then the store is sealed, and the trainer's iteration ends by itself."""
    monkeypatch.chdir(tmp_path)
    store = kd.TrajectoryStore("out/run")
    sampler = kd.QuotaSampler(
        kd.TrajectoryStream(kd.TrajectoryStore("out/run")), 4, 2, 8, quotas={"source": {"math": 2, "code": 2}}
    )
    trained: list[str] = []

    def train():
        while True:
            try:
                trained.extend(info.attributes["source"] for info in sampler.next().infos)
            except StopIteration:
                return

    prompts = {"math": [f"p{g}" for g in range(1, 60, 2)], "code": [f"p{g}" for g in range(0, 60, 2)]}
    asked = []

    def next_prompt(launch):
        asked.append(launch.attributes["source"])
        if len(asked) == 12:
            store.seal()
        return prompts[launch.attributes["source"]].pop()

    trainer = threading.Thread(target=train)
    trainer.start()
    facts = {"kd": kd, "store": store, "respond": respond, "next_prompt": next_prompt}
    exec(compile(BLOCKS[2], "README.md", "exec"), facts)  # the last group comes after the seal
    trainer.join(60)
    assert not trainer.is_alive()
    assert len(trained) >= 8 * 8 and trained.count("math") == trained.count("code")


def test_the_readme_mixes():
    facts = {"kd": kd}
    exec(compile(BLOCKS[3], "README.md", "exec"), facts)
    for name in ("shares", "crossing", "tied", "paced"):
        quotas = facts[name] if isinstance(facts[name], kd.Quotas) else kd.Quotas(facts[name])
        assert QuotaSeats(quotas, 16, None, 4).left == 16
