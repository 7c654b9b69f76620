"""A training step on images: each encoded for every use, once per micro-batch, once per mini-batch.

    OMP_WAIT_POLICY=PASSIVE python benchmarks/bench_encoder.py [--quick] [--json FILE]

The model is Qwen2.5-VL of transformers, randomly initialised, float32, in one process with torch's own number of
threads. A mini-batch is 16 responses to 16 / n images, in 4 packed micro-batches. A step runs from
``next(loader)`` to the last gradient: admission, reading (another loader for each step, from a store on disk that the
page cache holds), forward, loss, backward, the encoder's backward; the optimizer is left out. ``wall`` is what passes
meanwhile, ``processor`` what this process computes, all threads together: the one to read where others compute too.
Without OMP_WAIT_POLICY=PASSIVE, threads spin while they wait for each other: a busy machine takes ten times as long.

One step of each provider in turn; ratios are those of one turn. The first turn is not timed: there gradients are
compared with naive's, images that went through the tower are counted, and ``peak memory`` is taken, the most bytes of
tensors that were alive at once, pixels on the host included, parameters and their gradients not.

* ``naive``: every response has its own copy of the pixels, as in multi_modal_inputs of verl. The copies lie in a store
  like the other one, but a number in each makes their digests differ, so that this loader moves them one by one. Those
  of a micro-batch go into the model in one call, which encodes them in one batch.
* ``per micro-batch``: each image once in each micro-batch that shows it (AReaL#1676). It reads each image once, as ours
  does.
* ``retain``, ``recompute``, ``frozen``: the modes of kd.SharedEncoder, at most 576 patches to a call. Another one for
  each step, so that a frozen one's features are not those of the step before.
* ``naive, frozen``: naive with a tower that needs no gradients; what ``frozen`` is compared with.
* ``features given``: the step without an encoder; all that is not vision.

Where responses have many lengths, an image's are spread over the micro-batches (``shuffled``); where all have one
length, the planner gathers them (``gathered``). ``images`` is how many a micro-batch shows.

The bound: a step is the rest, R, and n times the vision, V, of each image; R is ``features given``, n V + R ``naive``.
Encoding once can give (R + n V) / (R + V) at most, which is 1 / (1 - v (1 - 1/n)) with v = n V / (R + n V), the
``vision share``. ``recompute`` runs one more forward F without a graph, as ``naive, frozen`` does n times, which is
R + n F: its bound is (R + n V) / (R + V + F), that of ``frozen`` (R + n F) / (R + F). ``of bound`` is the ratio reached
over the bound: above 1 where a large image costs less in a smaller batch, below where one of 144 patches goes through
the tower alone (``gathered``, n 16), which costs a quarter more than in naive's batch of four.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from report import Report, quantiles
from torch import Tensor
from torch.nn.functional import cross_entropy
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import knit_data as kd

huggingface = kd.integrations.huggingface

VOCABULARY, IMAGE, VIDEO, START, END = 128, 5, 6, 7, 8  # ids; text uses 10 and up
RESPONSES, MICRO_BATCHES = 16, 4
MAX_PATCHES = 576  # to a call of ours: four small images, as in naive's, or one large one
ALIKE = 1e-4  # of the largest gradient: float32, batches of other sizes
CLOCKS = {"wall": time.perf_counter, "processor": time.process_time}
OURS = ("retain", "recompute", "frozen")


@dataclass(frozen=True)
class Case:
    n: int  # responses to an image
    shuffled: bool = True
    side: int = 12  # of an image, in patches
    depth: int = 8  # layers of the tower
    text: tuple[int, int] = (128, 2)  # width and layers of the backbone
    rounds: int = 2

    @property
    def patches(self) -> int:
        return self.side**2

    def __str__(self) -> str:
        order, (width, layers) = "shuffled" if self.shuffled else "gathered", self.text
        return f"n {self.n}, {order}, {self.patches} patches, tower of {self.depth}, text {width} x {layers}"


FULL = Case(8, side=20, depth=16, rounds=3)
SHARES = (Case(8, depth=4, text=(256, 6)), Case(8, side=8, depth=2, text=(256, 10)))  # of vision, falling
CASES = (FULL, Case(8, shuffled=False), Case(4), Case(16), *SHARES)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--quick", action="store_true", help="two cases with small images, one round")
    parser.add_argument("--json", metavar="FILE", help="append the rows to this file as well")
    options = parser.parse_args()

    cases = [replace(case, rounds=1) for case in (Case(8), SHARES[0])] if options.quick else CASES
    report = Report("encoder", options.json, ("torch", "transformers", "numpy"))
    tables = [measure(report, case) for case in cases]
    print(f"\n{torch.get_num_threads()} threads, {report.where['machine']}, load {os.getloadavg()[0]:.1f}")
    print(*tables, sep="\n")


# -- model and data ----------------------------------------------------------------------------------------------------


def build(case: Case) -> Any:
    from transformers import Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration

    width, layers = case.text
    rope = {"rope_type": "default", "mrope_section": [4, 6, 6]}
    text = {
        "vocab_size": VOCABULARY,
        "hidden_size": width,
        "intermediate_size": 2 * width,
        "num_hidden_layers": layers,
        "num_attention_heads": width // 32,
        "num_key_value_heads": width // 64,
        "max_position_embeddings": 4096,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 0,
        "rope_parameters": {**rope, "rope_theta": 1e4},  # transformers 5 reads this,
        "rope_scaling": {**rope},  # 4.57 this
    }
    tower = {
        "depth": case.depth,
        "hidden_size": 256,
        "intermediate_size": 512,
        "num_heads": 4,
        "out_hidden_size": width,
        "window_size": 112,
        "fullatt_block_indexes": [1, case.depth - 1],
    }
    ids = {"image_token_id": IMAGE, "video_token_id": VIDEO, "vision_start_token_id": START, "vision_end_token_id": END}
    torch.manual_seed(0)
    return Qwen2_5_VLForConditionalGeneration(Qwen2_5_VLConfig(text_config=text, vision_config=tower, **ids)).train()


def fill(url: str, case: Case, config: Any, copies: bool) -> kd.TrajectoryStore:
    """The responses. Of ``copies`` each brings its own image, alike but for a number."""
    generator = torch.Generator().manual_seed(0)
    lengths = torch.randperm(RESPONSES, generator=generator) + 9  # all different: no two rows can change places
    lengths = lengths if case.shuffled else torch.full_like(lengths, 24)
    tokens = case.patches // 4
    store = kd.TrajectoryStore(url)
    with store.writer("rollout-0") as writer:
        for i in range(RESPONSES // case.n):
            pixels = torch.randn(case.patches, 3 * 2 * 14 * 14, generator=generator)
            image = {"pixel_values": pixels, "image_grid_thw": torch.tensor([[1, case.side, case.side]])}
            medium = kd.Media(image, tokens, patches=case.patches)
            prompt = [10, 11, 12, START, *[IMAGE] * tokens, END, 13, 14]
            group = []
            for j in range(case.n):
                if copies:
                    medium = kd.Media({**image, "copy": torch.tensor([j])}, tokens, patches=case.patches)
                response = torch.randint(10, VOCABULARY, (int(lengths[i * case.n + j]),), generator=generator)
                processed = {"input_ids": torch.tensor(prompt)}
                group.append(
                    huggingface.trajectory(f"{i}/{j}", f"{i}", 0, processed, response, model=config, media=[medium])
                )
            writer.put_group(group)
    store.seal()
    return store


def loader_of(store: kd.TrajectoryStore, case: Case, prefetch: int) -> kd.TrajectoryLoader:
    cap = (case.patches // 4 + 7 + 25) * RESPONSES // MICRO_BATCHES
    groups = RESPONSES // case.n
    sampler = kd.QuotaSampler(kd.TrajectoryStream(store), groups, groups, case.n)
    return kd.TrajectoryLoader(sampler, cap, device="cpu", prefetch=prefetch)


# -- providers ---------------------------------------------------------------------------------------------------------

Inputs = Callable[[kd.MicroBatch], dict[str, Any]]


def joined(media: Sequence[Any]) -> dict[str, Tensor]:
    return {name: torch.cat([m.tensors[name] for m in media]) for name in ("pixel_values", "image_grid_thw")}


def naive(micro: kd.MicroBatch) -> dict[str, Any]:
    """Pixels for the model, one copy for each use; new media come in the order of the tokens."""
    media = micro.media.new
    assert len(media) == len(micro.media.pieces)
    return joined(media)


class Given:
    """Features by digest into the model, whoever made them."""

    def __init__(self, model: Any) -> None:
        huggingface.attach(model, self)

    def adapt(self, inputs: Any, _token_ids: frozenset[int]) -> None:
        self._inputs = inputs

    def __call__(self, micro: kd.MicroBatch, features: Mapping[str, Tensor]) -> dict[str, Any]:
        assert micro.media.new is not None  # that they were taken is noted there
        rows = [features[micro.media.digests[i]][first : first + n] for i, first, n in micro.media.pieces]
        return self._inputs(micro, (torch.cat(rows),))  # type: ignore[no-any-return]


class PerMicroBatch(Given):
    """Each image once in a micro-batch."""

    def __init__(self, model: Any, encode: Callable[..., Any]) -> None:
        super().__init__(model)
        self._encode, self._media = encode, dict[str, Any]()

    def model_inputs(self, micro: kd.MicroBatch) -> dict[str, Any]:
        self._media |= {m.digest: m for m in micro.media.new if m is not None}
        media = [self._media[digest] for digest in micro.media.digests]
        features = self._encode(joined(media)).split([m.tokens for m in media])
        return self(micro, dict(zip(micro.media.digests, features, strict=True)))


@dataclass(frozen=True)
class Provider:
    store: kd.TrajectoryStore
    made: Callable[[], tuple[Inputs, Callable[[], None]]]  # anew for each step: inputs, and what to do at its end
    frozen: bool = False


def providers(model: Any, shared: kd.TrajectoryStore, copies: kd.TrajectoryStore, case: Case) -> dict[str, Provider]:
    encode = huggingface.image_features(model)
    with loader_of(shared, case, 0) as loader, torch.no_grad():
        media = [m for micro in next(loader) for m in micro.media.new if m is not None]
        ready = {m.digest: encode(joined([m])) for m in media}

    def nothing() -> None:
        pass

    def shared_encoder(mode: Any) -> tuple[Inputs, Callable[[], None]]:
        encoder = kd.SharedEncoder(encode, module=model, mode=mode, max_patches=MAX_PATCHES)
        huggingface.attach(model, encoder)
        return encoder.model_inputs, encoder.backward

    return {
        "naive": Provider(copies, lambda: (naive, nothing)),
        "per micro-batch": Provider(shared, lambda: (PerMicroBatch(model, encode).model_inputs, nothing)),
        "retain": Provider(shared, partial(shared_encoder, "retain")),
        "recompute": Provider(shared, partial(shared_encoder, "recompute")),
        "naive, frozen": Provider(copies, lambda: (naive, nothing), frozen=True),
        "frozen": Provider(shared, partial(shared_encoder, "frozen"), frozen=True),
        "features given": Provider(shared, lambda: (partial(Given(model), features=ready), nothing), frozen=True),
    }


@dataclass(frozen=True, eq=False)
class Step:
    times: Mapping[str, float]  # seconds by clock
    images: list[int]  # of each micro-batch
    stats: Mapping[str, float]


def step(model: Any, provider: Provider, case: Case, prefetch: int = 2) -> Step:
    model.model.visual.requires_grad_(not provider.frozen)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    inputs, end = provider.made()
    images = []
    with loader_of(provider.store, case, prefetch) as loader:
        began = {name: clock() for name, clock in CLOCKS.items()}
        mini = next(loader)
        for micro in mini:
            logits = model(**micro.model_inputs(), **inputs(micro)).logits
            losses = cross_entropy(logits.flatten(0, -2), micro["labels"], reduction="none", ignore_index=-100)
            (losses.sum() / mini.loss_tokens).backward()
            images.append(len(micro.media))
        end()
        times = {name: clock() - began[name] for name, clock in CLOCKS.items()}
        return Step(times, images, mini.stats)


# -- measuring ---------------------------------------------------------------------------------------------------------


class Live(TorchDispatchMode):
    """The most bytes of tensors that were alive at once, of those made inside."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.most = 0
        self._seen: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(out):
            if isinstance(tensor, Tensor):
                storage = tensor.untyped_storage()
                key, size = storage._cdata, storage.nbytes()
                if key not in self._seen:
                    self._seen.add(key)
                    self.now += size
                    self.most = max(self.most, self.now)
                    weakref.finalize(storage, self._gone, key, size)
        return out

    def _gone(self, key: int, size: int) -> None:
        self._seen.discard(key)
        self.now -= size


@dataclass(frozen=True, eq=False)
class Checked:
    """What the first turn found."""

    step: Step
    encoded: int  # images through the tower
    peak: int  # bytes
    gradients: list[Tensor]


def check(model: Any, provider: Provider, case: Case) -> Checked:
    encoded = 0

    def count(_module: Any, _args: Any, kwargs: Mapping[str, Any]) -> None:
        nonlocal encoded
        encoded += len(kwargs["grid_thw"])

    handle = model.model.visual.register_forward_pre_hook(count, with_kwargs=True)
    with Live() as live:
        done = step(model, provider, case, prefetch=0)
    handle.remove()
    zeros = sum(p.nbytes for p in model.parameters())  # of the gradients, made inside
    return Checked(done, encoded, live.most - zeros, [p.grad.clone() for p in model.parameters()])


def measure(report: Report, case: Case) -> str:
    model = build(case)
    with tempfile.TemporaryDirectory() as folder:
        shared = fill(str(Path(folder, "shared")), case, model.config, copies=False)
        copies = fill(str(Path(folder, "copies")), case, model.config, copies=True)
        made = providers(model, shared, copies, case)
        found = {name: check(model, provider, case) for name, provider in made.items()}
        for name, one in found.items():
            same_as = found["naive, frozen" if made[name].frozen else "naive"].gradients
            largest = max(float(g.abs().max()) for g in same_as)
            apart = max(float((a - b).abs().max()) for a, b in zip(one.gradients, same_as, strict=True))
            assert apart < ALIKE * largest, f"{case}, {name}: gradients are {apart / largest:.1e} apart"
        turns = [{name: step(model, one, case).times for name, one in made.items()} for _ in range(case.rounds)]
    return tell(report, case, found, turns)


def bounds(n: int, times: Mapping[str, float]) -> dict[str, float]:
    """The most that each of ours can gain, by the times of one turn."""
    rest, whole, frozen = times["features given"], times["naive"], times["naive, frozen"]
    vision, forward = (whole - rest) / n, (frozen - rest) / n
    return {
        "retain": whole / (rest + vision),
        "recompute": whole / (rest + vision + forward),
        "frozen": frozen / (rest + forward),
    }


Turn = Mapping[str, Mapping[str, float]]  # seconds by provider and clock


def tell(report: Report, case: Case, found: Mapping[str, Checked], turns: Sequence[Turn]) -> str:
    """Rows for the report, and the table of this case."""
    half = f"{'s':>9}{'x naive':>9}{'bound':>7}{'of it':>7}"
    lines = [
        f"\n{case}",
        f"{'':16}" + "".join(f"{name:>32}" for name in CLOCKS),
        f"{'':16}{half * len(CLOCKS)}{'peak MB':>9}{'encoded':>9}{'read MB':>9}{'images':>8}",
    ]
    for name, one in found.items():
        add = partial(added, report, str(case), name)
        line = f"{name:16}"
        for clock in CLOCKS:
            times = [{who: seconds[clock] for who, seconds in turn.items()} for turn in turns]
            base = "naive, frozen" if name == "frozen" else "naive"
            gain = [t[base] / t[name] for t in times] if name in (*OURS, "per micro-batch") else []
            most = [bounds(case.n, t)[name] for t in times] if name in OURS else []
            line += f"{add(f'{clock} time', 's', [t[name] for t in times]):>9}"
            line += f"{add(f'{clock} ratio', '1', gain):>9}{add(f'{clock} bound', '1', most):>7}"
            line += f"{add(f'{clock} of bound', '1', [a / b for a, b in zip(gain, most, strict=False)]):>7}"
            if name == "naive":
                share = add(f"{clock} vision share", "1", [1 - t["features given"] / t["naive"] for t in times])
                lines[0] += f", vision share {share} ({clock})"
        line += f"{add('peak memory', 'MB', [one.peak / 1e6]):>9}{add('images encoded', '1', [one.encoded]):>9}"
        line += f"{add('read', 'MB', [one.step.stats['bytes_read'] / 1e6]):>9}"
        lines.append(line + f"{add('images', '1', [sum(one.step.images) / len(one.step.images)]):>8}")
    return "\n".join(lines)


def added(report: Report, case: str, provider: str, metric: str, unit: str, samples: Sequence[float]) -> str:
    """A row of the report, unless there are no samples; its median for the table."""
    if not samples:
        return ""
    report.add(case=case, provider=provider, metric=metric, unit=unit, samples=samples)
    return f"{quantiles(samples)[1]:.3g}"


if __name__ == "__main__":
    main()
