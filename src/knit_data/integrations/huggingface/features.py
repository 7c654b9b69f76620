"""The tower of a Hugging Face model as an encoder, and features in place of pixels.

What differs between versions is where features go in: the argument ``mm_encoder_outputs`` where ``forward`` has it
(5.20 and later), else the return value of ``get_image_features``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, is_dataclass
from functools import partial
from inspect import signature
from types import MappingProxyType
from typing import Any, cast, get_args
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, register_fsdp_forward_method

from knit_data.batch import MicroBatch
from knit_data.encoder import SharedEncoder
from knit_data.errors import InvalidArgument, UsageError
from knit_data.integrations.huggingface.models import GET, flat, inner_of, parts_of, root_of, takes

_NATIVE = "mm_encoder_outputs"
_METHOD = "knit_image_features"  # of a sharded model
_LEVELS = "knit_levels"  # attribute of a marker
_LOST = "'NoneType' object is not subscriptable"  # hidden states that transformers 5 did not record
_WHOLE = frozenset({"internvl"})  # families whose forward takes features as one tensor, not as one per image


def image_features(model: nn.Module) -> Callable[[Mapping[str, Tensor]], Tensor | tuple[Tensor, ...]]:
    """The ``encode`` of ``kd.SharedEncoder`` for this model: tower and projector, in whatever version and family.

    What it returns takes ``{"pixel_values": [Σ patches, 1176], "image_grid_thw": [n, 3]}`` or
    ``{"pixel_values": [n, 3, H, W]}``, floats, and gives features ``[Σ tokens, d]``; with deepstack a tuple of such,
    the features that take the placeholders' places first. Two Qwen2.5-VL images of grids (1, 4, 4) and (1, 4, 6), 40
    patches, give [10, d]: four patches make a token.

    Under FSDP2 the call goes through the root, which must itself be sharded, because a tower that is called alone
    would become a root of its own. Of LLaVA on transformers 5 shard the tower's layers and not the tower: it looks
    for its hidden states by the name of its class, which sharding changes. That, and tensors that the model's
    ``get_image_features`` does not name, or that it needs and are not there, raise ``InvalidArgument``.
    """
    inner = inner_of(model)
    named, needs = takes(inner)

    def encode(tensors: Mapping[str, Tensor]) -> Tensor | tuple[Tensor, ...]:
        missing, extra = [x for x in needs if x not in tensors], [x for x in tensors if x not in named]
        if missing or extra:
            raise InvalidArgument(
                f"{GET} of {type(inner).__name__} takes {named} and needs {needs}, found {sorted(tensors)}; store "
                "media with the tensors that the model's image processor makes."
            )
        levels = _gathered(root_of(model))(**tensors)
        return levels if len(levels) > 1 else levels[0]

    return encode


def attach(model: nn.Module, encoder: SharedEncoder) -> None:
    """Make ``model(**micro.model_inputs(), **encoder.model_inputs(micro))`` see the encoder's features.

    Where the model's ``forward`` has no ``mm_encoder_outputs``, ``get_image_features`` of its inner model is replaced
    on this instance: called with real pixels it does what it did, called with a marker from
    ``encoder.model_inputs(micro)`` it returns the features that the marker carries. A marker belongs to one
    micro-batch, so any number of them can be alive. Attaching again changes nothing; a model may have several encoders
    (policy and reference of the same class), an encoder speaks to the model that it was attached to last.

    Before a kernel runs, ``encoder.model_inputs(micro)`` raises ``UsageError`` where the media stand at other ids than
    the model's ``image_token_id``, where ``position_ids`` have not the axes of the model (three for Qwen-VL), and
    where features have another number of deepstack levels than the tower makes.
    """
    root: Any = root_of(model)
    inner = inner_of(model)
    token = getattr(root.config, "image_token_id", None)
    if token is None:
        raise InvalidArgument(
            f"attach needs a model whose config names its placeholder, image_token_id; {type(root.config).__name__} "
            "has none. Set it to the id that stands where features go."
        )
    native = _NATIVE in signature(type(root).forward).parameters
    routed = inner.__dict__.get(GET)
    if not native and not (isinstance(routed, partial) and routed.func is _route):
        # A partial and no closure: copy.deepcopy of the model copies it with the copied model inside.
        setattr(inner, GET, partial(_route, inner, getattr(inner, GET)))
    encoder.adapt(partial(_inputs, inner, int(token), native), frozenset({int(token)}))


def _inputs(
    inner: nn.Module, token: int, native: bool, micro: MicroBatch, levels: tuple[Tensor, ...]
) -> dict[str, Any]:
    """Keyword arguments that bring ``levels`` into a forward. Everything checked here is known to the host."""
    media = micro.media
    if media.token_ids != {token}:
        raise UsageError(
            f"the media of this micro-batch stand at ids {sorted(media.token_ids)} (-1: a span of several), "
            f"{type(inner).__name__} puts features at image_token_id {token} only; place media with this model's ids, "
            "images only, as kd.integrations.huggingface.trajectory does."
        )
    positions, axes = micro["position_ids"], micro["input_ids"].ndim
    if (positions.ndim > axes) != (mrope := hasattr(inner, "get_rope_index")):
        raise UsageError(
            f"position_ids of this micro-batch are {list(positions.shape)}, {type(inner).__name__} takes "
            + (
                "three axes for images; store [n, 3] with"
                if mrope
                else "one axis; leave the column out, or store it by"
            )
            + " kd.integrations.huggingface.trajectory, and read the field if you name fields."
        )
    tower = getattr(inner.config, "vision_config", None)
    wanted = 1 + len(getattr(tower, "deepstack_visual_indexes", None) or ())
    if len(levels) != wanted:
        raise UsageError(
            f"{type(inner).__name__} takes {wanted} levels of features (the placeholders' own and deepstack), the "
            f"encoder returned {len(levels)}; encode with kd.integrations.huggingface.image_features(model)."
        )
    if native:
        # No dict, so that FSDP2 passes it on untouched: of tensors among inputs it makes views, and then warns of views
        # among outputs, where transformers puts these features again.
        return {_NATIVE: MappingProxyType({"image": _container(inner).fill(levels)})}
    # Integers, because mixed precision of FSDP casts floats, into a tensor without the attribute.
    marker = torch.empty(0, dtype=torch.int64, device=levels[0].device)
    setattr(marker, _LEVELS, levels)
    return {"pixel_values": marker}


def _route(inner: nn.Module, original: Callable[..., Any], pixel_values: Tensor, *args: Any, **kwargs: Any) -> Any:
    """``get_image_features`` of an attached model: features for a marker, the tower's work for pixels."""
    if pixel_values.dtype != torch.int64 or pixel_values.numel():
        return original(pixel_values, *args, **kwargs)
    levels = getattr(pixel_values, _LEVELS, None)
    if levels is None:
        raise UsageError(
            "the marker of encoder.model_inputs(micro) lost its features on the way to the model: something copied "
            f"pixel_values, {list(pixel_values.shape)} {pixel_values.dtype} on {pixel_values.device}. Give the model "
            "the very tensors; on the device of the micro-batch, and checkpoint a whole model with use_reentrant=False."
        )
    return _container(inner).fill(levels)


@dataclass(frozen=True)
class _Container:
    """The form of what ``get_image_features`` returns, which is what ``forward`` takes apart again.

    Qwen3-VL on 4.57 returns ``((features of image 0, …), [level, …])``: ``_Container(None, False, True)``.
    """

    output: Callable[..., Any] | None  # the class of a ModelOutput
    whole: bool  # features are one tensor, not one per image
    deep_whole: bool  # so is each deepstack level

    @classmethod
    def of(cls, returned: Any) -> _Container:
        base, deepstack = parts_of(returned)
        output = type(returned) if hasattr(returned, "pooler_output") else None
        return cls(output, isinstance(base, Tensor), all(isinstance(level, Tensor) for level in deepstack))

    @classmethod
    def expected(cls, inner: Any) -> _Container:
        """Before anything was returned: by the annotation and the family."""
        kinds = get_args(signature(getattr(type(inner), GET)).return_annotation)
        output = next((kind for kind in kinds if isinstance(kind, type) and is_dataclass(kind)), None)
        native = _NATIVE in signature(type(inner).forward).parameters  # came with levels split by image
        return cls(output, inner.config.model_type in _WHOLE, not native)

    def fill(self, levels: tuple[Tensor, ...]) -> Any:
        """Levels [tokens, d] as if they were those of one image."""
        base = levels[0] if self.whole else (levels[0],)
        deepstack = [level if self.deep_whole else (level,) for level in levels[1:]]
        if self.output is None:
            return (base, deepstack) if deepstack else base
        return self.output(pooler_output=base, **({"deepstack_features": deepstack} if deepstack else {}))


_CONTAINERS: WeakKeyDictionary[nn.Module, _Container] = WeakKeyDictionary()  # by inner model; learnt by encoding


def _container(inner: nn.Module) -> _Container:
    return _CONTAINERS.get(inner) or _Container.expected(inner)


def _encode(root: nn.Module, **tensors: Tensor) -> tuple[Tensor, ...]:
    """All levels, and the form in which the model returned them is kept for ``attach``."""
    try:
        returned = getattr(root, GET)(**tensors)
    except TypeError as error:
        towers = [
            name
            for name, module in root.named_modules()
            if isinstance(module, FSDPModule) and getattr(module, "main_input_name", None) == "pixel_values"
        ]
        if str(error) != _LOST or not towers:
            raise
        raise InvalidArgument(
            f"{GET} of {type(root).__name__} takes hidden states of {towers[0]!r}, found none: the tower itself is "
            "sharded, and transformers 5 records them by the name of the class, which fully_shard changes, here to "
            f"{type(root.get_submodule(towers[0])).__name__}. Call fully_shard on the layers of {towers[0]!r} and not "
            "on it; the model that is sharded last takes the rest."
        ) from error
    _CONTAINERS[inner_of(root)] = _Container.of(returned)
    base, deepstack = parts_of(returned)
    return (flat(base), *map(flat, deepstack))


def _gathered(root: Any) -> Callable[..., tuple[Tensor, ...]]:
    """``_encode`` of ``root``; under FSDP2 as a method that gathers the root's parameters as its forward does.

    Not ``get_image_features`` itself is registered: it returns views, and FSDP2 warns about those.
    """
    sharded: bool = isinstance(root, FSDPModule)
    if sharded:
        if _METHOD not in root.__dict__:  # once, or parameters are gathered twice
            setattr(root, _METHOD, partial(_encode, root))
            register_fsdp_forward_method(root, _METHOD)
        return cast(Callable[..., tuple[Tensor, ...]], getattr(root, _METHOD))
    units = [name for name, module in root.named_modules() if isinstance(module, FSDPModule)]
    if units:
        raise InvalidArgument(
            f"image_features of {type(root).__name__}: {len(units)} parts are sharded, {units[0]!r} first, and the "
            "model itself is not, so that nothing gathers its own parameters; call fully_shard on it too, last."
        )
    return partial(_encode, root)
