"""What a run of an encoder depends on beside its inputs: random state, autocast, and the weights that it uses."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.utils.checkpoint import get_device_states, set_device_states


@dataclass(frozen=True, eq=False)
class Surroundings:
    """Random state and autocast of one moment, so that what ran then can run again."""

    device: torch.device
    cpu: Tensor
    devices: list[int]
    states: list[Tensor]
    enabled: bool
    dtype: torch.dtype

    @classmethod
    def now(cls, device: torch.device) -> Surroundings:
        devices, states = get_device_states(torch.empty(0, device=device))
        kind = device.type
        enabled, dtype = torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)
        return cls(device, torch.get_rng_state(), list(devices), list(states), enabled, dtype)

    def autocast(self) -> torch.autocast:
        """The same autocast without its cache of cast weights: casts made without gradients would be used with them."""
        return torch.autocast(self.device.type, self.dtype, self.enabled, cache_enabled=False)

    @contextmanager
    def again(self) -> Iterator[None]:
        """Inside, it is as it was; afterwards the random state is as before."""
        kind = self.device.type
        with ExitStack() as stack:
            stack.enter_context(torch.random.fork_rng(self.devices, device_type="cuda" if kind == "cpu" else kind))
            torch.set_rng_state(self.cpu)
            set_device_states(self.devices, self.states, device_type=kind)
            stack.enter_context(self.autocast())
            yield

    def moved_on(self) -> bool:
        """Whether random numbers were drawn since."""
        _, states = get_device_states(torch.empty(0, device=self.device))
        drawn = [not torch.equal(a, b) for a, b in zip(self.states, states, strict=True)]
        return any(drawn) or not torch.equal(self.cpu, torch.get_rng_state())


@dataclass(frozen=True, eq=False)
class Weights:
    """The tensors of a tower at one moment, and how often each had been written to.

    Writes through ``tensor.data`` are not counted by torch, and so are not seen here.
    """

    tensors: tuple[Tensor, ...]
    written: tuple[int, ...]

    def same(self, other: Weights) -> bool:
        """The same tensors, and none was written to."""
        pairs = zip(self.tensors, other.tensors, strict=False)
        return self.written == other.written and all(a is b for a, b in pairs)

    def written_since(self) -> bool:
        """Whether one of these tensors was written to. Others may stand in their place now: FSDP swaps them."""
        return any(t._version != n for t, n in zip(self.tensors, self.written, strict=True))


class Tower:
    """The modules that run inside ``encode``, learnt from its first run."""

    def __init__(self) -> None:
        self.modules: list[nn.Module] = []
        self._roots: list[nn.Module] = []  # those that are in no other
        self._warned = False

    @property
    def known(self) -> bool:
        return bool(self.modules)

    @contextmanager
    def watch(self) -> Iterator[None]:
        """Inside, modules that run are noted; not at all if it raises."""
        seen: dict[int, nn.Module] = {}
        roots: list[nn.Module] = []
        inside: set[int] = set()

        def note(module: nn.Module, _inputs: Any) -> None:
            if id(module) not in inside:  # an outer module runs before its parts
                roots.append(module)
                inside.update(map(id, module.modules()))
            seen.setdefault(id(module), module)

        handle = register_module_forward_pre_hook(note)
        try:
            yield
        finally:
            handle.remove()
        self.modules, self._roots = list(seen.values()), roots

    def weights(self, buffers: bool = False) -> Weights:
        tensors: dict[int, Tensor] = {id(p): p for m in self._roots for p in m.parameters()}
        if buffers:
            tensors |= {id(b): b for m in self._roots for b in m.buffers()}
        return Weights(tuple(tensors.values()), tuple(t._version for t in tensors.values()))

    def training(self) -> tuple[bool, ...]:
        """Which of them are in training mode."""
        return tuple(m.training for m in self.modules)

    def warn(self, surroundings: Surroundings) -> None:
        """Once, of what makes an image's features depend on more than the image and the weights."""
        if self._warned:
            return
        drawn = surroundings.moved_on()
        norms = [m for m in self.modules if isinstance(m, _BatchNorm) and m.training]
        self._warned = bool(drawn or norms)
        if drawn:
            warnings.warn(
                "the encoder draws random numbers (dropout in its tower?): all responses to an image now share one "
                "mask per mini-batch, where each would have its own if the image were encoded for each. The expected "
                "gradient is the same, its variance is not. Set the tower's dropout to 0, or call eval() on it.",
                stacklevel=6,
            )
        if norms:
            warnings.warn(
                f"{type(norms[0]).__name__} in training mode in the encoder's tower: an image's features depend on "
                "what is encoded beside it, and its running statistics see each image once per run of the encoder, "
                "which is twice with mode='recompute'. Gradients are those of these batches. Call eval() on it.",
                stacklevel=6,
            )


@dataclass(frozen=True, eq=False)
class State:
    """What features depend on beside the image."""

    weights: Weights
    rest: tuple[Any, ...]  # training mode, autocast

    @classmethod
    def now(cls, tower: Tower, device: torch.device) -> State:
        cast = torch.is_autocast_enabled(device.type), torch.get_autocast_dtype(device.type)
        return cls(tower.weights(buffers=True), (tower.training(), cast))

    def same(self, other: State) -> bool:
        return self.rest == other.rest and self.weights.same(other.weights)
