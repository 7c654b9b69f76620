"""The public face: what it holds, what it says, and that its signatures are those promised."""

from __future__ import annotations

import inspect
import subprocess
import sys
from types import ModuleType
from typing import Any

import pytest
import torch

import knit_data as kd
from knit_data import errors

REQUIRED = inspect.Parameter.empty

SIGNATURES: dict[str, tuple[Any, dict[str, Any]]] = {
    "TrajectoryStore": (kd.TrajectoryStore, {"url": REQUIRED, "reclaim": "commit", "max_bytes": None, "fsync": False}),
    "store.writer": (kd.TrajectoryStore.writer, {"name": REQUIRED}),
    "store.publish": (kd.TrajectoryStore.publish, {"version": REQUIRED}),
    "store.policy_version": (kd.TrajectoryStore.policy_version, {}),
    "store.demand": (kd.TrajectoryStore.demand, {}),
    "store.seal": (kd.TrajectoryStore.seal, {}),
    "store.finish": (kd.TrajectoryStore.finish, {}),
    "store.finished": (kd.TrajectoryStore.finished, {}),
    "store.read": (kd.TrajectoryStore.read, {"info": REQUIRED, "fields": None}),
    "writer.put": (kd.StoreWriter.put, {"trajectory": REQUIRED, "timeout": 1800.0}),
    "writer.put_group": (kd.StoreWriter.put_group, {"trajectories": REQUIRED, "timeout": 1800.0}),
    "Demand": (kd.Demand, {"train_batch": 0, "deficits": dict, "free": 0}),
    "Quotas": (kd.Quotas, {"mapping": None, "support": None, "mini_window": None}),
    "RolloutPacer": (kd.RolloutPacer, {"store": REQUIRED, "capacity": 64, "share": (0, 1)}),
    "pacer.next": (kd.RolloutPacer.next, {"timeout": 1800.0}),
    "pacer.done": (kd.RolloutPacer.done, {"launch": REQUIRED}),
    "Launch": (kd.Launch, {"attributes": REQUIRED, "group": REQUIRED}),
    "simulate": (
        kd.simulate,
        {"scenario": REQUIRED, "admission": "constraint-preserving", "pacing": False, "seed": 0},
    ),
    "Media": (kd.Media, {"tensors": REQUIRED, "tokens": REQUIRED, "kind": "image", "patches": None}),
    "Media.from_pixels": (
        kd.Media.from_pixels,
        {"pixels": REQUIRED, "tokens": REQUIRED, "processor": REQUIRED},
    ),
    "place_media": (
        kd.place_media,
        {"input_ids": REQUIRED, "media": REQUIRED, "token_id": REQUIRED, "prompt_tokens": None},
    ),
    "MediaRef": (kd.MediaRef, {"media": REQUIRED, "spans": REQUIRED}),
    "Trajectory": (
        kd.Trajectory,
        {
            **{"id": REQUIRED, "group": REQUIRED, "policy_version": REQUIRED, "tokens": REQUIRED},
            **{"values": dict, "media": (), "attributes": dict, "mean_policy_version": None},
        },
    ),
    "TrajectoryStream": (kd.TrajectoryStream, {"store": REQUIRED, "follow": True, "consumer": "trainer"}),
    "QuotaSampler": (
        kd.QuotaSampler,
        {
            **{"stream": REQUIRED, "train_batch_size": REQUIRED, "mini_batch_size": REQUIRED, "group_size": REQUIRED},
            **{"quotas": None, "max_staleness": None, "groups": None, "epochs": 1, "seed": 0, "timeout": 1800.0},
        },
    ),
    "Staleness": (
        kd.Staleness,
        {"limit": REQUIRED, "unit": "train_batch", "strategy": "drop", "abandoned": "accept"},
    ),
    "GroupPolicy": (
        kd.GroupPolicy,
        {
            **{"incomplete": "wait", "timeout": None, "invalid": "error", "surplus": "first", "keep": None},
            **{"annotate": None, "max_tokens": None, "oversize": "error"},
        },
    ),
    "group_advantages": (
        kd.group_advantages,
        {"infos": REQUIRED, "reward": "reward", "name": "advantage", "eps": 1e-6},
    ),
    "Padding": (kd.Padding, {"token_id": 0, "total_to": 1, "sequence_to": 1}),
    "TrajectoryLoader": (
        kd.TrajectoryLoader,
        {
            **{"sampler": REQUIRED, "max_tokens_per_micro_batch": REQUIRED, "mesh": None, "dp": None},
            **{"device": "cuda", "layout": "packed", "fields": None, "prefetch": 2, "padding": None},
            **{"on_corrupt": "raise", "reuse_buffers": False},
        },
    ),
    "loader.load_state_dict": (kd.TrajectoryLoader.load_state_dict, {"state": REQUIRED}),
    "mini.micro_batches": (kd.MiniBatch.micro_batches, {"fields": None}),
    "micro.targets": (kd.MicroBatch.targets, {"name": REQUIRED}),
    "micro.to_tokens": (kd.MicroBatch.to_tokens, {"name": REQUIRED}),
    "micro.unpack": (kd.MicroBatch.unpack, {"tokens": REQUIRED}),
    "micro.pack": (kd.MicroBatch.pack, {"rows": REQUIRED}),
    "micro.media.put": (kd.MediaBatch.put, {"embeddings": REQUIRED, "features": REQUIRED, "level": None}),
    "micro.model_inputs": (kd.MicroBatch.model_inputs, {}),
    "SharedEncoder": (
        kd.SharedEncoder,
        {"encode": REQUIRED, "module": None, "mode": "recompute", "max_patches": 16_384},
    ),
    "encoder.__call__": (kd.SharedEncoder.__call__, {"micro": REQUIRED}),
    "encoder.model_inputs": (kd.SharedEncoder.model_inputs, {"micro": REQUIRED}),
    "encoder.backward": (kd.SharedEncoder.backward, {}),
    "sum_gradients": (kd.integrations.fsdp.sum_gradients, {"model": REQUIRED}),
    "image_features": (kd.integrations.huggingface.image_features, {"model": REQUIRED}),
    "attach": (kd.integrations.huggingface.attach, {"model": REQUIRED, "encoder": REQUIRED}),
    "trajectory": (
        kd.integrations.huggingface.trajectory,
        {"id": REQUIRED, "group": REQUIRED, "policy_version": REQUIRED, "processed": REQUIRED}
        | {"response_ids": REQUIRED, "model": REQUIRED, "tokens": None, "values": None, "attributes": None}
        | {"media": None, "loss_mask": None, "mean_policy_version": None},
    ),
}

ATTRIBUTES: dict[type, str] = {
    kd.MiniBatch: "index train_batch epoch position is_last loss_tokens n_trajectories n_groups stats micro_batches "
    "abandon __iter__",
    kd.MicroBatch: "__getitem__ is_padding targets to_tokens unpack pack model_inputs",
    kd.TrajectoryLoader: "state_dict load_state_dict close stats __iter__ __next__ __enter__ __exit__",
    kd.QuotaSampler: "next reset get_state deficits free_seats explain",
    kd.TrajectoryInfo: "id group policy_version mean_policy_version n_tokens loss_tokens patches values attributes",
    kd.Media: "digest",
}


def test_all_is_sorted_and_complete():
    public = {n for n, v in vars(kd).items() if not n.startswith("_") and not isinstance(v, ModuleType)}
    assert sorted(kd.__all__) == kd.__all__
    assert set(kd.__all__) == (public - {"annotations"}) | {"integrations", "ops"}


@pytest.mark.parametrize("name", kd.__all__)
def test_every_public_name_says_what_it_is(name):
    thing = getattr(kd, name)
    if inspect.isclass(thing):
        assert thing.__doc__ and not thing.__doc__.startswith(f"{name}("), "a docstring that dataclass made"


@pytest.mark.parametrize("name", SIGNATURES)
def test_signatures_are_those_promised(name):
    thing, wanted = SIGNATURES[name]
    found = {}
    for key, parameter in inspect.signature(thing).parameters.items():
        if key != "self" and parameter.kind not in (parameter.VAR_KEYWORD, parameter.VAR_POSITIONAL):
            made = parameter.default
            found[key] = dict if type(made).__name__ == "_HAS_DEFAULT_FACTORY_CLASS" else made
    assert found == wanted and list(found) == list(wanted)


@pytest.mark.parametrize("owner", ATTRIBUTES, ids=lambda owner: owner.__name__)
def test_attributes_are_those_promised(owner):
    missing = [name for name in ATTRIBUTES[owner].split() if not hasattr(owner, name)]
    assert not missing
    if owner is kd.MicroBatch:
        assert {"max_seqlen", "is_last", "media"} <= set(owner.__dataclass_fields__) and hasattr(owner, "infos")


def test_every_error_is_a_knit_error_and_stands_in_the_tree():
    names = [n for n, v in vars(errors).items() if inspect.isclass(v) and issubclass(v, Exception)]
    for name in names:
        assert issubclass(getattr(errors, name), kd.KnitError)
        assert name in (errors.__doc__ or "") and name in kd.__all__


def test_integrations_import_lazily_and_name_what_there_is():
    assert dir(kd.integrations) == sorted(dir(kd.integrations))
    with pytest.raises(AttributeError, match="has no attribute 'nothing'; it has fsdp"):
        kd.integrations.nothing  # noqa: B018  # the look-up is the test
    with pytest.raises(kd.InvalidArgument, match="fully_shard was applied to, found a plain Linear"):
        kd.integrations.fsdp.sum_gradients(torch.nn.Linear(2, 2))


def test_an_import_leaves_out_what_only_some_need():
    """Rollout workers import the package, too: FSDP takes a second, Triton half of one."""
    late = ["torch.distributed.fsdp", "triton", "transformers", "PIL", "matplotlib", "s3fs"]
    code = f"import sys, knit_data; print([name for name in {late} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=300)
    assert done.stdout == "[]\n"
