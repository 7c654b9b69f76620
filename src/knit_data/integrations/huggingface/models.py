"""The parts of a Hugging Face model that features and trajectories ask about."""

from __future__ import annotations

import copy
import importlib
from inspect import Parameter, signature
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from knit_data.errors import InvalidArgument

GET = "get_image_features"


def root_of(model: nn.Module) -> nn.Module:
    return model.module if isinstance(model, DistributedDataParallel) else model


def inner_of(model: nn.Module) -> nn.Module:
    """The model below the head, whose ``forward`` puts features and text together."""
    root: nn.Module = root_of(model)
    inner: Any = root
    while hasattr(below := getattr(inner, "model", None), GET):
        inner = below
    if inner is root:
        lacks = GET if not hasattr(root, GET) else f"model.{GET}"
        raise InvalidArgument(
            f"needs a vision-language model of transformers with {GET} on itself and on its .model, found "
            f"{type(root).__name__} without {lacks}; load it with AutoModelForImageTextToText."
        )
    return cast(nn.Module, inner)


def takes(inner: nn.Module) -> tuple[list[str], list[str]]:
    """Names that ``get_image_features`` takes, and those without a default."""
    parameters = list(signature(getattr(type(inner), GET)).parameters.values())[1:]
    named = [p for p in parameters if p.kind in (Parameter.POSITIONAL_OR_KEYWORD, Parameter.KEYWORD_ONLY)]
    return [p.name for p in named], [p.name for p in named if p.default is Parameter.empty]


def parts_of(returned: Any) -> tuple[Any, Any]:
    """Features and deepstack levels, each a tensor or a sequence of tensors."""
    if hasattr(returned, "pooler_output"):
        return returned.pooler_output, getattr(returned, "deepstack_features", None) or ()
    if isinstance(returned, tuple) and len(returned) == 2 and isinstance(returned[1], list | tuple):
        return returned
    return returned, ()


def flat(features: Any) -> Tensor:
    """[…, d] or a sequence of such -> [Σ tokens, d], a tensor of its own and no view."""
    return torch.cat([one.flatten(0, -2) for one in ([features] if isinstance(features, Tensor) else features)])


_SKELETONS: dict[int, tuple[Any, nn.Module]] = {}  # by id of the config, which is kept so that the id stays its own
_MOST_SKELETONS = 8  # the configs of a few models and of their parts; who makes a config per call pays, in time alone


def skeleton(config: Any) -> nn.Module:
    """The model of a config on the meta device: its code without its memory. The last few are kept."""
    known = _SKELETONS.get(id(config))
    if known:
        return known[1]
    try:
        auto = importlib.import_module("transformers").AutoModelForImageTextToText
    except ImportError as error:
        raise InvalidArgument(
            "kd.integrations.huggingface needs transformers to read a config, and it is not installed; "
            "pip install 'knit_data[hf]'."
        ) from error
    with torch.device("meta"):  # eager: what a config names for a GPU need not be installed here
        built: nn.Module = auto.from_config(copy.deepcopy(config), attn_implementation="eager")
    _SKELETONS[id(config)] = config, built
    for oldest in list(_SKELETONS)[:-_MOST_SKELETONS]:
        _SKELETONS.pop(oldest, None)  # another thread may have been here
    return built
