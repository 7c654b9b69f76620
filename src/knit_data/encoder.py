"""Each distinct image is encoded once per mini-batch, and every micro-batch's gradient reaches the encoder.

The features of a mini-batch are leaves of the micro-batches' graphs. Their gradients add up in float32; after the last
micro-batch one backward carries the sum through the encoder. That equals encoding the image in every micro-batch, since
the chain rule is linear: d(L1 + L2)/dw = (dL1/df + dL2/df) df/dw. (As in GradCache, arXiv 2101.06983, for contrastive
losses.) Eight responses to one image, in four micro-batches: one encode and one backward instead of eight.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from typing import Any, Literal, TypeAlias
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from knit_data.batch import MicroBatch
from knit_data.errors import InvalidArgument, InvalidTrajectory, UsageError
from knit_data.features import Call, Features, Levels, Visit, gather, gather_with_gradient
from knit_data.grad_sync import GradSync
from knit_data.media import MediaBatch, Medium, inputs_of
from knit_data.minibatch import MiniBatch
from knit_data.recent import Recent
from knit_data.surroundings import State, Surroundings, Tower

Encode: TypeAlias = Callable[[Mapping[str, Tensor]], "Tensor | Sequence[Tensor]"]
Inputs: TypeAlias = Callable[[MicroBatch, Levels], dict[str, Any]]


class SharedEncoder:
    """Encodes each distinct medium once per mini-batch.

    ``encode(tensors)`` gets the media's tensors (of uint8 pixels: what they become), each concatenated over media on
    dim 0, and returns their features ``[Σ tokens, d]`` in this order, or a tuple of such (deepstack levels).
    ``module`` is the model whose gradient sync the encoder may hold back: an FSDP2 root, or DDP. Under FSDP2 ``encode``
    calls the tower through the root, by its forward or one that ``register_fsdp_forward_method`` names. At most
    ``max_patches`` are encoded at once, or one medium.

    * ``"recompute"``: features are made without a graph, and the encoder runs once more in ``backward``, chunk by
      chunk, with the random state and autocast of the first time. Memory: features, their float32 gradients, and one
      chunk's activations.
    * ``"retain"``: keeps the graph of all media; no second run, where the memory is there.
    * ``"frozen"``: no gradient; set ``requires_grad_(False)`` on the tower. Features are kept over passes and
      mini-batches, up to ``cache_bytes``, until the weights, buffers, training mode or autocast of the modules that run
      inside ``encode`` change; over mini-batches only where ranks need not keep step, that is with ``module`` not under
      FSDP2, or on one rank. DDP averages the backbone's gradients then, unless ``integrations.fsdp.sum_gradients`` was
      called.

    In the other modes features belong to one pass: an extra pass (reference, old log-probabilities) encodes for itself,
    since weights may have been exchanged for it.

    ::

        for mini in loader:
            for micro in mini:
                features = encoder(micro)        # or model(**micro.model_inputs(), **encoder.model_inputs(micro))
                ...
                loss.backward()
            encoder.backward()                   # before clipping and the optimizer

    Call it on every micro-batch and every rank, also where there are no media: all ranks then make equally many calls
    of ``encode``, those without media on the mini-batch's smallest with a zero gradient. An image that several ranks
    use is encoded by each of them. A mini-batch without any media never calls ``encode``. An image's features must not
    depend on what is encoded beside it. Dropout breaks nothing, but the n responses of a prompt then see one mask
    instead of n: the encoder warns once.
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
        self._tower = Tower()
        self._levels: Levels | None = None  # what features without rows look like, once known
        self._single = True  # encode returns one tensor, not a tuple
        self._kept = Recent[Features](lambda features: features.nbytes)  # of earlier mini-batches, when frozen
        self._kept_for: State | None = None
        self._empties = MiniBatch.empty
        self._mini: object = None
        self._calls: deque[Call]
        self._visits: WeakKeyDictionary[object, dict[bool, Visit]]  # by pass, and by whether with gradients
        self._open: list[Visit]  # those with gradients, until the backward
        self._shared: Visit  # of all passes with the same state, when frozen
        self._owed: bool  # a backward
        self._lost: Tensor | None  # whether placeholders without media were seen
        self._start()

    # -- forward ----------------------------------------------------------------------------------------------------

    def __call__(self, micro: MicroBatch) -> Tensor | Levels:
        """``[media tokens of micro, d]`` in token order, or a tuple of levels; for ``micro.media.put``.

        Without gradients where they are disabled. ``[0, d]`` without media; before any image was encoded one
        ``[0, 1]``, since how wide and how many levels are is not known.
        """
        levels = self._features(micro)
        return levels[0] if self._single else levels

    def model_inputs(self, micro: MicroBatch) -> dict[str, Any]:
        """Keyword arguments for the attached model, beside ``micro.model_inputs()``; {} without media."""
        if self._inputs is None:
            raise UsageError(
                "encoder.model_inputs() needs a model: call kd.integrations.huggingface.attach(model, encoder) first, "
                "or use micro.media.put(embeddings, encoder(micro))."
            )
        levels = self._features(micro)
        self._look_for_lost(micro)
        return self._inputs(micro, levels) if micro.media.n_tokens else {}

    def adapt(self, inputs: Inputs, token_ids: frozenset[int]) -> None:
        """For ``attach``: what ``model_inputs`` makes of features, and the ids at whose places the model wants them."""
        self._inputs, self._token_ids = inputs, token_ids

    def _features(self, micro: MicroBatch) -> Levels:
        if not isinstance(micro, MicroBatch):
            raise InvalidArgument(f"the encoder takes a micro-batch of a TrajectoryLoader, found {micro!r}.")
        media, device = micro.media, micro["input_ids"].device
        if media.mini is not self._mini:
            self._must_be_settled()
            self._start()
            self._mini = media.mini
        training = torch.is_grad_enabled() and self.mode != "frozen"
        visit = self._visit(media.visit or self, training, device)
        if training:
            self._owed = True
            self._sync.hold()
        if media.position not in visit.done:
            self._encode_new(media, device, visit, training)
            visit.done.add(media.position)
        media.marks.add("features")
        missing = [d for d in media.digests if d not in visit.found]
        if missing:
            raise UsageError(
                f"micro-batch {media.position} uses {len(missing)} media that an earlier one was to encode. Call the "
                "encoder on every micro-batch of a pass, in order and on every rank."
            )
        pieces = [(visit.found[media.digests[i]], first, n) for i, first, n in media.pieces]
        empty = self._levels or (torch.zeros(0, 1),)
        if not pieces:
            return tuple(level.to(device) for level in empty)
        if not training:
            return gather(pieces)
        return gather_with_gradient(pieces, visit, device)

    def _visit(self, key: object, training: bool, device: torch.device) -> Visit:
        """Features belong to one pass, since weights, mode and autocast may change between two; unless frozen."""
        visits = self._visits.setdefault(key, {})
        if training not in visits:
            if self.mode == "frozen":
                state = State.now(self._tower, device)
                if self._kept_for is not None and not state.same(self._kept_for):
                    self.forget()
                visits[training] = self._shared
            else:
                visits[training] = Visit()
                self._open += [visits[training]] if training else []
        if visits[training].over:
            raise UsageError(
                "encoder.backward() was called before the last micro-batch of this pass; call it once, after all."
            )
        return visits[training]

    def _must_be_settled(self) -> None:
        if self._owed and (self._calls or self._sync.held):
            raise UsageError(
                "encoder.backward() was not called after the last mini-batch, whose gradients have not reached the "
                "encoder, or not the other ranks. Call it once per mini-batch, with images or without, after the last "
                "loss.backward() and before clipping and optimizer.step(); or encoder.abandon() to give that "
                "mini-batch up."
            )

    def _start(self) -> None:
        self._calls, self._open = deque(), []
        self._visits, self._shared = WeakKeyDictionary(), Visit()
        self._owed, self._lost = False, None

    # -- encoding ---------------------------------------------------------------------------------------------------

    def _encode_new(self, media: MediaBatch, device: torch.device, visit: Visit, training: bool) -> None:
        fresh = list(zip(media.patches[media.rank], media.new, strict=True)) if media.patches else []
        if self._alone:
            visit.found |= self._kept.found([m.digest for _, m in fresh if m is not None])
            fresh = [(cost, m) for cost, m in fresh if m is not None and m.digest not in visit.found]
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
                self._run_first(mine[i], device, visit, training)
            elif stand_in is not None:  # else all is corrupt, on all ranks
                self._run_first([stand_in], device, None, training)

    @property
    def _alone(self) -> bool:
        """Which media are encoded concerns no other rank."""
        return self.mode == "frozen" and not self._sync.in_step

    def _run_first(self, media: Sequence[Medium], device: torch.device, visit: Visit | None, training: bool) -> None:
        """``visit``: where the features belong; None only keeps step with other ranks."""
        surroundings, keep = Surroundings.now(device), self.mode == "retain" and training
        with ExitStack() as stack:
            stack.enter_context(torch.inference_mode(False))
            stack.enter_context(torch.set_grad_enabled(keep))
            stack.enter_context(surroundings.autocast())
            if not self._tower.known:
                stack.enter_context(self._tower.watch())
            out = self._checked(self._encode(inputs_of(media, device)), media)
        self._tower.warn(surroundings)
        rows = tuple(level.detach().contiguous() for level in out)
        self._levels = tuple(level[:0] for level in rows)
        call = None
        if training:
            graph, weights, modes = out if keep else (), self._tower.weights(), self._tower.training()
            call = Call(media, rows, graph, surroundings, weights, modes, [None] * len(rows))
            self._calls.append(call)
        if self.mode == "frozen":
            self._kept_for = State.now(self._tower, device)
        if visit is None:
            return
        first, counts = 0, [m.tokens for m in media]
        for m, levels in zip(media, zip(*(level.split(counts) for level in rows), strict=True), strict=True):
            features = Features(levels, call, first)
            if self._alone:
                features = features.copy()
                self._kept.put(m.digest, features, self.cache_bytes)
            visit.found[m.digest] = features
            first += m.tokens

    def _checked(self, returned: Tensor | Sequence[Tensor], media: Sequence[Medium]) -> Levels:
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
        widths = [x.shape[1] for x in levels]
        if self._levels is not None and widths != [x.shape[1] for x in self._levels]:
            raise InvalidArgument(
                f"encode returned levels of width {widths}, before it was {[x.shape[1] for x in self._levels]}; one "
                "encoder makes one kind of features."
            )
        self._single = isinstance(returned, Tensor)
        return levels

    # -- backward ---------------------------------------------------------------------------------------------------

    def backward(self) -> None:
        """Carry the summed gradients of this mini-batch through the encoder.

        Once per mini-batch, on every rank, with images or without, after the last micro-batch's backward and before
        clipping. Under FSDP2 the tower's gradients are reduced in the last chunk's backward; the backbone's are in that
        of the last micro-batch, for which the loop sets ``set_requires_gradient_sync(True)``. Under DDP all that this
        mini-batch left in ``.grad`` is summed over ranks here, and added to what was there before. A no-op when frozen.
        If it raises, calling it again goes on where it stopped.
        """
        self._report_lost()
        if self.mode == "frozen":
            return
        if not self._owed:
            if MiniBatch.empty > self._empties:  # the stream ended: a mini-batch without micro-batches
                self._empties = MiniBatch.empty
                return
            if self._visits:
                raise UsageError(
                    "encoder.backward(): since the last call there was no micro-batch encoded with gradients. It is "
                    "called once per mini-batch, after a training pass that is not under no_grad; encoder.abandon() "
                    "gives a mini-batch up."
                )
            raise UsageError(
                "encoder.backward() is called once per mini-batch, after encoder(micro) or encoder.model_inputs(micro) "
                "on each of its micro-batches; since the last call there was none."
            )
        for call in self._calls:
            if call.weights.written_since() or call.training != self._tower.training():
                raise UsageError(
                    "the encoder's weights, or its train() and eval() mode, changed between its forward and "
                    "encoder.backward(): the gradient would be of another function. Call backward() before "
                    "optimizer.step(); or encoder.abandon()."
                )
        self._close_visits()
        while self._calls:  # each gives its features and gradients up when it is done
            self._sync.last(len(self._calls) == 1)
            self._backward_of(self._calls[0])
            self._calls.popleft()
        self._sync.reduce()
        self._owed = False

    def _backward_of(self, call: Call) -> None:
        out = call.graph
        with torch.inference_mode(False), torch.enable_grad():
            if self.mode == "recompute":
                with call.surroundings.again():
                    out = self._checked(self._encode(inputs_of(call.media, call.surroundings.device)), call.media)
            roots = [(level, x) for level, x in enumerate(out) if x.requires_grad]
            if roots:
                torch.autograd.backward([x for _, x in roots], [call.gradient(level, x) for level, x in roots])

    def _close_visits(self) -> None:
        for visit in self._open:
            visit.over = True
            visit.found.clear()
        self._open.clear()

    def abandon(self) -> None:
        """Give this mini-batch up, as ``mini.abandon()`` does: no backward is owed. Call it on every rank."""
        self._close_visits()
        self._sync.release()
        self._calls.clear()
        self._owed = False

    def forget(self) -> None:
        """Encode anew what a frozen encoder keeps. Needed only after writes to weights that torch does not count, such
        as ``p.data.copy_()``."""
        self._kept.clear()
        self._kept_for, self._shared = None, Visit()

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


# -- chunks ------------------------------------------------------------------------------------------------------------


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
