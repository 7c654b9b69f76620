"""The README's code runs as it stands: its rollout side in one process, its training loop under torchrun."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import torch

import knit_data as kd
from knit_data.seats import QuotaSeats

README = (Path(__file__).parents[1] / "README.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"```python\n(.*?)```", README, re.DOTALL)


def respond(prompt: str, i: int, version: int) -> kd.Trajectory:
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
    rollout, training, *_ = BLOCKS
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
    exec(compile(BLOCKS[6], "README.md", "exec"), facts)  # the last group comes after the seal
    trainer.join(60)
    assert not trainer.is_alive()
    whole = len(trained) // 32  # train batches of 4 groups of 8; one that the seal cut short promises no quota
    assert whole >= 2
    assert all(trained[32 * k : 32 * (k + 1)].count("math") == 16 for k in range(whole))


def test_the_readme_reclaims():
    from makers import fill, loader, read_through

    store = fill(kd.TrajectoryStore("memory://"), 24)
    saved: list[dict[str, Any]] = []
    with loader(store, options={"prefetch": 0}) as run:
        exec(compile(BLOCKS[-1], "README.md", "exec"), {"loader": run, "train_on": read_through, "save": saved.append})
    assert len(saved) == 3
    assert [store.floor(w) for w in range(2)] == [12, 12]
    assert not any(store.exists([store.segment_key(f"w{w}", n) for w in range(2) for n in range(12)]))


def test_the_readme_packs():
    sizes = torch.tensor([3, 0, 5])[:, None]
    padded = torch.arange(36.0).view(3, 6, 2).masked_fill((torch.arange(6) >= sizes)[:, :, None], -100)
    facts: dict[str, Any] = {"torch": torch, "kd": kd, "padded": padded, "grad": torch.ones(8, 2)}
    facts |= {"image_a": torch.ones(4, 2), "image_b": torch.full((4, 2), 2.0), "embeddings": torch.zeros(8, 2)}
    exec(compile(BLOCKS[4], "README.md", "exec"), facts)
    assert torch.equal(facts["again"], padded)
    assert torch.equal(facts["features"], facts["embeddings"])
    assert facts["features"][:, 0].tolist() == [0, 1, 1, 1, 1, 0, 2, 2]
    assert [one[:, 0].tolist() for one in facts["gradients"]] == [[1, 1, 1, 1], [0, 0, 1, 1]]


def test_the_readme_has_a_ratio_per_sequence():
    from makers import fill, loader

    for layout in ("packed", "padded"):
        with loader(fill(kd.TrajectoryStore("memory://"), 4), options={"layout": layout}) as run:
            micro = next(iter(next(iter(run))))
        logprobs = torch.randn(micro["labels"].shape, requires_grad=True)
        facts: dict[str, Any] = {"micro": micro, "logprobs": logprobs}
        exec(compile(BLOCKS[5], "README.md", "exec"), facts)
        difference = ((logprobs - micro.targets("logprobs")) * micro.targets("loss_mask")).flatten()
        wanted = [difference[micro.rows == i].sum() for i in range(len(micro.infos))]
        counts = [
            max(int((micro.targets("loss_mask").flatten()[micro.rows == i]).sum()), 1) for i in range(len(wanted))
        ]
        torch.testing.assert_close(facts["ratio"], (torch.stack(wanted) / torch.tensor(counts)).exp())
        facts["ratio"].sum().backward()
        assert logprobs.grad is not None and logprobs.grad.count_nonzero() == sum(counts)


def test_the_readme_mixes():
    facts = {"kd": kd}
    exec(compile(BLOCKS[7], "README.md", "exec"), facts)
    for name in ("shares", "crossing", "tied", "paced"):
        quotas = facts[name] if isinstance(facts[name], kd.Quotas) else kd.Quotas(facts[name])
        assert QuotaSeats(quotas, 16, None, 4).left == 16


def test_the_readme_trains_with_images(tmp_path):
    import numpy as np
    import torch
    from transformers import Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration

    rope = {"rope_type": "default", "mrope_section": [2, 3, 3], "rope_theta": 1e4}
    text = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1}
    text |= {"num_attention_heads": 2, "num_key_value_heads": 1, "rope_parameters": rope, "rope_scaling": rope}
    tower = {"depth": 1, "hidden_size": 32, "intermediate_size": 64, "num_heads": 2, "out_hidden_size": 32}
    config = Qwen2_5_VLConfig(text_config=text, vision_config=tower, image_token_id=5, vision_start_token_id=7)
    model = Qwen2_5_VLForConditionalGeneration(config)

    try:  # on Pillow and NumPy, torchvision or not
        from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil as Images
    except ImportError:
        from transformers import Qwen2VLImageProcessor as Images

    class Processor:
        """A tokenizer of our own around a real image processor."""

        image_processor = Images(min_pixels=56 * 56, max_pixels=56 * 56)

        def __call__(self, images, text, return_tensors):
            made = self.image_processor(images=images, return_tensors=return_tensors)
            n = int(made["image_grid_thw"].prod()) // 4
            return {**made, "input_ids": torch.tensor([[9, 7, *[5] * n, 8, *map(len, text.split())]])}

    pixels = np.random.default_rng(0).integers(0, 256, (56, 56, 3), dtype=np.uint8)
    responses = [([11, 12, 13], [-1.0, -2.0, -1.0], 1.0), ([14, 15], [-1.0, -1.0], 0.0)]
    facts = {"kd": kd, "F": torch.nn.functional, "processor": Processor(), "image": pixels, "pixels": pixels}
    facts |= {
        "prompt": "how many",
        "config": config,
        "name": "q1",
        "version": 0,
        "responses": responses,
        "model": model,
    }
    exec(compile(BLOCKS[2], "README.md", "exec"), facts)
    store = kd.TrajectoryStore(tmp_path)
    with store.writer("w") as writer:
        writer.put_group(facts["group"])
    store.seal()
    facts["optimizer"] = torch.optim.SGD(model.parameters(), lr=1.0)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    sampler = kd.QuotaSampler(kd.TrajectoryStream(store), 1, 1, 2)
    with kd.TrajectoryLoader(sampler, 64, device="cpu") as facts["loader"]:
        exec(compile(BLOCKS[3], "README.md", "exec"), facts)
        assert facts["loader"].stats["loss_tokens"] == 5
    moved = {name for name, p in model.named_parameters() if not torch.equal(p, before[name])}
    assert any("visual" in name for name in moved) and any("layers" in name for name in moved)
