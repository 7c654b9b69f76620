"""Each distinct image is encoded once per mini-batch, and every micro-batch's gradient reaches the encoder.

The features of a mini-batch are leaves of the micro-batches' graphs. Their gradients add up in float32; after the last
micro-batch one backward carries the sum through the encoder. That equals encoding the image in every micro-batch, since
the chain rule is linear: d(L1 + L2)/dw = (dL1/df + dL2/df) df/dw. (As in GradCache, arXiv 2101.06983, for contrastive
losses.) Eight responses to one image, in four micro-batches: one encode and one backward instead of eight.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor, nn

from knit_data.batch import MicroBatch
from knit_data.errors import InvalidArgument, InvalidTrajectory, UsageError
from knit_data.features import Call, Era, Features, Kept, Levels, gather, gather_with_gradient
from knit_data.grad_sync import GradSync
from knit_data.media import MediaBatch, Medium
from knit_data.minibatch import MiniBatch
from knit_data.pixels import finish
from knit_data.surroundings import Surroundings, Tower

Encode: TypeAlias = Callable[[Mapping[str, Tensor]], "Tensor | Sequence[Tensor]"]
Inputs: TypeAlias = Callable[[MicroBatch, Levels], dict[str, Any]]


class SharedEncoder:
    """Encodes each distinct medium once per mini-batch.

    ``encode(tensors)`` gets the media's tensors, each concatenated over media on dim 0, and returns their features
    ``[Σ tokens, d]`` in this order, or a tuple of such (deepstack levels). ``module`` is the model whose gradient sync
    the encoder may hold back: an FSDP2 root, or DDP. At most ``max_patches`` are encoded at once, or one medium.

    * ``"recompute"``: features are made without a graph, and the encoder runs once more in ``backward``, chunk by
      chunk, with the random state and autocast of the first time. Memory: features, their float32 gradients, and one
      chunk's activations.
    * ``"retain"``: keeps the graph of all media; a third faster in the encoder, where the memory is there.
    * ``"frozen"``: no gradient. Features are kept over mini-batches, up to ``cache_bytes``, until the weights change;
      but only where ranks need not keep step, that is with ``module`` not under FSDP2, or on one rank.

    ::

        for mini in loader:
            for micro in mini:
                features = encoder(micro)        # or model(**micro.model_inputs(), **encoder.model_inputs(micro))
                ...
                loss.backward()
            encoder.backward()                   # before clipping and the optimizer

    Call it on every micro-batch and every rank, also where there are no media: all ranks then make equally many calls
    of ``encode``, those without media on the mini-batch's smallest with a zero gradient. A mini-batch without any media
    never calls it. An image's features must not depend on what is encoded beside it. Dropout breaks nothing, but the n
    responses of a prompt then see one mask instead of n: the encoder warns once.
    """

    cache_bytes = 1 << 30  # of the device, for a frozen encoder's features

    def __init__(
        self,
        encode: Encode,
        module: nn.Module | None = None,
        mode: Literal["recompute", "retain", "frozen"] = "recompute",
        max_patches: int = 16_384,
    ) -> None:
        if not callable(encode):
            raise InvalidArgument(f"SharedEncoder needs a callable of the media's tensors, found {encode!r}.")
        if module is not None and not isinstance(module, nn.Module):
            raise InvalidArgument(f"module must be an nn.Module or None, found {type(module).__name__}.")
        if mode not in ("recompute", "retain", "frozen"):
            raise InvalidArgument(f"mode must be 'recompute', 'retain' or 'frozen', found {mode!r}.")
        if isinstance(max_patches, bool) or not isinstance(max_patches, int) or max_patches < 1:
            raise InvalidArgument(f"max_patches must be an int of at least 1, found {max_patches!r}.")
        self.mode, self.max_patches, self._encode = mode, max_patches, encode
        self._sync = GradSync(module)
        self._inputs: Inputs | None = None
        self._token_ids = frozenset[int]()
        self._tower: Tower | None = None
        self._mode: tuple[bool, ...] = ()  # of the tower when this mini-batch's features were made
        self._single = True  # encode returns one tensor, not a tuple
        self._empty: Levels = (torch.zeros(0, 0),)  # what features without rows look like
        self._kept = Kept()
        self._mini: object = None
        self._begun = MiniBatch.begun
        self._found: dict[str, Features]
        self._calls: list[Call]
        self._done: set[int]  # micro-batches whose new media are encoded
        self._owed: bool  # a backward
        self._spent: bool  # the backward was called
        self._lost: Tensor | None  # whether placeholders without media were seen
        self._era: Era
        self._forget()

    # -- forward ----------------------------------------------------------------------------------------------------

    def __call__(self, micro: MicroBatch) -> Tensor | Levels:
        """``[media tokens of micro, d]`` in token order, or a tuple of levels; see ``micro.media.slots``."""
        levels = self._features(micro)
        return levels[0] if self._single else levels

    def model_inputs(self, micro: MicroBatch) -> dict[str, Any]:
        """Keyword arguments for the attached model, beside ``micro.model_inputs()``; {} without media."""
        if self._inputs is None:
            raise UsageError(
                "encoder.model_inputs() needs a model: call kd.integrations.huggingface.attach(model, encoder) first, "
                "or use encoder(micro), whose rows belong at micro.media.slots."
            )
        self._look_for_lost(micro)
        levels = self._features(micro)
        return self._inputs(micro, levels) if micro.media.n_tokens else {}

    def adapt(self, inputs: Inputs, token_ids: frozenset[int]) -> None:
        """What ``model_inputs`` makes of features, and the ids at whose places the model wants them."""
        self._inputs, self._token_ids = inputs, token_ids

    def _features(self, micro: MicroBatch) -> Levels:
        media, device = micro.media, micro["input_ids"].device
        self._enter(media)
        training = torch.is_grad_enabled() and self.mode != "frozen" and not self._spent
        if training:
            if self._calls and not self._owed and self._tower is not None and self._tower.mode() != self._mode:
                self._found, self._calls, self._done = {}, [], set()  # an extra pass in eval() made other features
            self._owed = True
            self._sync.hold()
        if media.position not in self._done:
            self._encode_new(media, device)
            self._done.add(media.position)
        media.marks.add("features")
        missing = [d for d in media.digests if d not in self._found]
        if missing:
            raise UsageError(
                f"micro-batch {media.position} uses {len(missing)} media that an earlier one was to encode. Call the "
                "encoder on every micro-batch of the mini-batch, in order and on every rank."
            )
        pieces = [(self._found[media.digests[i]], first, n) for i, first, n in media.pieces]
        if not pieces:
            return tuple(level.to(device) for level in self._empty)
        if not training:
            return tuple(gather(level, pieces) for level in range(len(self._empty)))
        return tuple(gather_with_gradient(level, pieces, self._era, device) for level in range(len(self._empty)))

    def _enter(self, media: MediaBatch) -> None:
        if media.mini is self._mini:
            return
        if self._owed and self._calls:
            raise UsageError(
                "encoder.backward() was not called after the last mini-batch, whose gradients have not reached the "
                "encoder. Call it once per mini-batch, after the last loss.backward() and before clipping and "
                "optimizer.step(); or encoder.abandon() to give that mini-batch up."
            )
        self._forget()
        self._mini, self._begun = media.mini, MiniBatch.begun

    def _forget(self) -> None:
        self._found, self._calls, self._done, self._lost = {}, [], set(), None
        self._owed = self._spent = False
        self._era = Era()

    # -- encoding ---------------------------------------------------------------------------------------------------

    def _encode_new(self, media: MediaBatch, device: torch.device) -> None:
        fresh = list(zip(media.patches[media.rank], media.new, strict=True)) if media.patches else []
        if self.mode == "frozen" and not self._sync.in_step:
            if fresh:
                version = 0 if self._tower is None else self._tower.version()
                self._found |= self._kept.recall(version, [m.digest for _, m in fresh if m is not None])
            fresh = [(cost, m) for cost, m in fresh if m is not None and m.digest not in self._found]
            count = len(chunks([cost for cost, _ in fresh], self.max_patches))
        else:
            count = max((len(chunks(costs, self.max_patches)) for costs in media.patches), default=0)
        mine = [
            [m for _, m in fresh[lo:hi] if m is not None]
            for lo, hi in chunks([cost for cost, _ in fresh], self.max_patches)
        ]
        there = [m for _, m in fresh if m is not None]
        stand_in = min(there, key=lambda m: m.patches, default=media.stand_in)
        for i in range(count):
            if i < len(mine) and mine[i]:
                self._run_first(mine[i], True, device)
            elif stand_in is not None:  # else all is corrupt, and this is the only rank
                self._run_first([stand_in], False, device)

    def _run_first(self, media: Sequence[Medium], real: bool, device: torch.device) -> None:
        surroundings, keep = Surroundings.now(device), self.mode == "retain" and not self._spent
        with ExitStack() as stack:
            stack.enter_context(torch.inference_mode(False))
            stack.enter_context(torch.set_grad_enabled(keep))
            stack.enter_context(surroundings.autocast())
            if self._tower is None:
                self._tower = Tower()
                stack.enter_context(self._tower.watch())
            out = self._checked(self._encode(inputs_of(media, device)), media)
        self._tower.warn(surroundings.moved_on())
        self._mode = self._tower.mode()
        if not keep:
            out = tuple(level.detach() for level in out)
        self._empty = tuple(level.detach()[:0] for level in out)
        call = Call(media, out, surroundings, [None] * len(out))
        if self.mode != "frozen" and not self._spent:
            self._calls.append(call)
        if not real:
            return
        first = 0
        for m in media:
            rows = tuple(level.detach()[first : first + m.tokens] for level in out)
            self._found[m.digest] = Features(rows, call, first)
            first += m.tokens
        if self.mode == "frozen" and not self._sync.in_step:
            fresh = {m.digest: self._found[m.digest] for m in media}
            self._found |= self._kept.keep(self._tower.version(), fresh, self.cache_bytes)

    def _checked(self, returned: Tensor | Sequence[Tensor], media: Sequence[Medium]) -> Levels:
        self._single = isinstance(returned, Tensor)
        levels = tuple(returned) if isinstance(returned, tuple | list) else (returned,)
        rows = sum(m.tokens for m in media)
        if not levels or not all(isinstance(x, Tensor) and x.ndim == 2 and x.is_floating_point() for x in levels):
            found = [f"{x.dtype} {list(x.shape)}" if isinstance(x, Tensor) else type(x).__name__ for x in levels]
            raise InvalidArgument(f"encode must return features [Σ tokens, d] or a tuple of them, found {found}.")
        for level in levels:
            if len(level) != rows:
                raise InvalidArgument(
                    f"encode gave {len(level)} rows for {len(media)} media, which fill {rows} placeholders "
                    f"({[m.tokens for m in media]}). Media.tokens must be what the encoder makes of the medium; if "
                    "there is one more placeholder than features, a placeholder was sampled: count those of the prompt."
                )
        return levels

    # -- backward ---------------------------------------------------------------------------------------------------

    def backward(self) -> None:
        """Carry the summed gradients of this mini-batch through the encoder.

        Once per mini-batch, on every rank, after the last micro-batch's backward and before clipping. Under FSDP2 the
        gradients are reduced in the last chunk's backward; under DDP those of the whole model are summed over ranks
        here, also in a mini-batch without media. A no-op when frozen (DDP then averages, as ever).
        """
        self._report_lost()
        if self.mode == "frozen":
            return
        if self._mini is None or self._spent:
            if MiniBatch.begun > self._begun:  # the stream ended: a mini-batch without micro-batches
                self._begun = MiniBatch.begun
                return
            raise UsageError(
                "encoder.backward() is called once per mini-batch, after encoder(micro) or encoder.model_inputs(micro) "
                "on each of its micro-batches; since the last call there was none."
            )
        if not self._owed:
            raise UsageError(
                "encoder.backward(): all of this mini-batch's micro-batches were encoded under no_grad, so that no "
                "gradient can have come. Run the training pass with gradients, or encoder.abandon() if there is none."
            )
        self._spent = self._era.over = True
        calls, self._calls = self._calls, []
        self._found, self._done = {}, set()
        calls.reverse()
        while calls:  # each gives its features and gradients up when it is done
            self._sync.last(len(calls) == 1)
            self._backward_of(calls.pop())
        self._sync.reduce()

    def _backward_of(self, call: Call) -> None:
        out = call.out
        if self.mode == "recompute":
            with torch.enable_grad(), call.surroundings.again():
                out = self._checked(self._encode(inputs_of(call.media, call.surroundings.device)), call.media)
        roots = [(level, x) for level, x in enumerate(out) if x.requires_grad]
        if roots:
            torch.autograd.backward([x for _, x in roots], [call.gradient(level, x) for level, x in roots])

    def abandon(self) -> None:
        """Give this mini-batch up, as ``mini.abandon()`` does: no backward is owed."""
        self._sync.release()
        self._era.over = True
        self._forget()
        self._spent = True

    # -- images that were lost on the way ---------------------------------------------------------------------------

    def _look_for_lost(self, micro: MicroBatch) -> None:
        """The model's placeholders in prompts of a mini-batch in which no medium came along."""
        if self._token_ids <= micro.media.expected or micro.is_padding:
            return
        here = micro.prompts_have(self._token_ids - micro.media.expected)
        self._lost = here if self._lost is None else self._lost | here
        if here.device.type == "cpu":
            self._report_lost()

    def _report_lost(self) -> None:
        lost, self._lost = self._lost, None
        if lost is not None and bool(lost):
            raise InvalidTrajectory(
                f"a mini-batch without media has placeholders (ids {sorted(self._token_ids)}) in its prompts: the "
                "images were lost between rollout and store. Store them as kd.Media, or take the placeholders out."
            )


# -- chunks and inputs -------------------------------------------------------------------------------------------------


def chunks(costs: Sequence[int], limit: int) -> list[tuple[int, int]]:
    """Runs ``[lo, hi)`` of at most ``limit`` in sum, or of one: costs 5, 4, 9, 1 under 8 -> (0, 1), (1, 2), (2, 3),
    (3, 4); under 10 -> (0, 2), (2, 4)."""
    out: list[tuple[int, int]] = []
    lo, total = 0, 0
    for i, cost in enumerate(costs):
        if i > lo and total + cost > limit:
            out.append((lo, i))
            lo, total = i, 0
        total += cost
    return [*out, (lo, len(costs))] if costs else []


def inputs_of(media: Sequence[Medium], device: torch.device) -> dict[str, Tensor]:
    """What ``encode`` gets: images of uint8 pixels finished, each tensor concatenated over media on dim 0."""
    finished = [finish(m.tensors, device) for m in media]
    names = finished[0].keys()
    for m, tensors in zip(media, finished, strict=True):
        if tensors.keys() != names:
            raise InvalidArgument(
                f"media of one micro-batch have different tensors: {sorted(names)} ({media[0].kind}) and "
                f"{sorted(tensors)} ({m.kind}); an encode call takes one kind. Keep kinds in different stores."
            )
    return {name: torch.cat([tensors[name] for tensors in finished]) for name in names}
