"""The seats of one train batch: which combinations may still be admitted so that every quota can still be met.

>>> seats = QuotaSeats(Quotas({"source": {"math": 2, "code": (1, 2)}}), 4)
>>> [seats.admissible(("math",)), seats.admissible(("code",))]
[True, True]
>>> seats.admit(("math",)); seats.admit(("math",))
>>> seats.admissible(("math",)), seats.deficits(), seats.free()
(False, {('code',): 1}, 1)

``structure`` finds what decides: attributes that combine freely are blocks of their own, a group fits if it fits in
each. All that is shown (``deficits``, ``completion``, ``lines``) follows from the counts alone, so it is the same after
a resume, and another thread may ask.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from knit_data.errors import InvalidArgument
from knit_data.quotas import Bounds, Combination, Quotas
from knit_data.seats.structure import Block, Part, Term, blocks_of


@dataclass(frozen=True)
class Line:
    """One quota as it stands: its name, its bounds, the groups in, and whether a seat for one more is left."""

    label: str
    where: tuple[int, ...]  # attributes, by their place in a combination
    values: Combination
    bounds: Bounds
    taken: int
    left: bool

    def counts(self, combination: Combination) -> bool:
        """Whether a group of this combination counts in it."""
        return all(combination[i] == value for i, value in zip(self.where, self.values, strict=True))


class QuotaSeats:
    """What is in, what still fits, and what is short. ``mini_batch_size`` matters to ``mini_window`` only.

    ``counts``: what is in already; between mini-batches, if there is a window. ``solver`` names what decides.
    ``greedy``: taking whatever fits never spoils filling a mini-batch from the groups that wait (a matroid).
    """

    def __init__(
        self,
        quotas: Quotas,
        train_batch_size: int,
        counts: Mapping[Combination, int] | None = None,
        mini_batch_size: int | None = None,
    ) -> None:
        self.attributes, self.size = quotas.attributes, train_batch_size
        self._bounds = quotas.resolved(train_batch_size)
        self._cells = quotas.cells(train_batch_size)
        self._blocks = blocks_of(quotas, train_batch_size, mini_batch_size)
        self._keys = [{key: i for i, key in enumerate(block.keys)} for block in self._blocks]
        self._support = quotas.support
        self._known = frozenset(quotas.support or ())
        self._places: dict[Combination, tuple[int, ...]] = {}  # its key in each block; filled as combinations come
        binding = [block for block in self._blocks if not block.vacuous]
        self.solver = " and ".join(dict.fromkeys(block.solver for block in binding)) or "counting"
        self.greedy = not binding or (len(binding) == 1 and "flow" not in self.solver)

        self._same: dict[tuple[int, ...], list[Combination]] = {}  # what no quota tells apart, by place
        for combination in self._support or ():
            self._same.setdefault(self._place(combination), []).append(combination)
        listed = self._support or ()
        if len(self.attributes) == 1 and not listed:
            listed = tuple((value,) for value in self._bounds[self.attributes[0]])
        self.counts: dict[Combination, int] = dict.fromkeys(listed, 0)
        for combination, count in (counts or {}).items():
            if not self.knows(combination):
                raise InvalidArgument(f"counts hold {combination!r}, which the quotas do not know.")
            self.counts[combination] = self.counts.get(combination, 0) + count
        self.left = train_batch_size - sum(self.counts.values())
        self._parts = self._start(self.counts)
        if self.left < 0 or not all(part.feasible for part in self._parts):
            self._refuse()

    def copy(self) -> QuotaSeats:
        twin = object.__new__(QuotaSeats)
        twin.__dict__.update(self.__dict__, counts=dict(self.counts), _parts=[part.copy() for part in self._parts])
        return twin

    def fresh(self) -> QuotaSeats:
        """The same seats, from the counts alone: for another thread, while this one is admitting."""
        twin = object.__new__(QuotaSeats)
        counts = dict(self.counts)
        twin.__dict__.update(self.__dict__, counts=counts, left=self.size - sum(counts.values()))
        twin._parts = twin._start(counts)
        return twin

    def knows(self, combination: Combination) -> bool:
        if self._support is not None:
            return combination in self._known
        if not self.attributes:
            return True
        return len(combination) == len(self.attributes) and all(
            value in values for value, values in zip(combination, self._bounds.values(), strict=True)
        )

    def admissible(self, combination: Combination) -> bool:
        """Whether every quota can still be met after admitting one more group of this combination."""
        if self.left == 0:
            return False
        for part, key in zip(self._parts, self._place(combination), strict=True):
            if not part.fits(key):
                return False
        return True

    def admit(self, combination: Combination) -> None:
        if not self.admissible(combination):
            raise InvalidArgument(f"no seat is left for {'/'.join(combination) or 'a group'}; ask admissible first.")
        for part, key in zip(self._parts, self._place(combination), strict=True):
            part.admit(key)
        self.counts[combination] = self.counts.get(combination, 0) + 1
        self.left -= 1

    def reserve(self, combination: Combination) -> bool:
        """Keep a seat for a group that comes later, if quotas allow it; in a window, one of the latest mini-batch that
        has room, so that the open one stays as it is. Not to be released."""
        parts = [part.copy() for part in self._parts]
        if not self.left or not all(p.reserve(key) for p, key in zip(parts, self._place(combination), strict=True)):
            return False
        self._parts = parts
        self.counts[combination] = self.counts.get(combination, 0) + 1
        self.left -= 1
        return True

    def release(self, combination: Combination) -> None:
        """Undo an admission; with a window, one of the latest mini-batch."""
        places = list(zip(self._parts, self._place(combination), strict=True))
        if self.counts.get(combination, 0) < 1 or not all(part.can_release(key) for part, key in places):
            raise InvalidArgument(f"{'/'.join(combination) or 'a group'} was not admitted last; nothing to release.")
        for part, key in places:
            part.release(key)
        self.counts[combination] -= 1
        if not self.counts[combination] and self._sparse:
            del self.counts[combination]
        self.left += 1

    def deficits(self) -> dict[Combination, int]:
        """Groups that minima still reserve, by combination: the fewest that close all of them and are part of a way to
        fill all seats (a few more in rare cases of crossing attributes, see ``flow``). Where attributes combine freely
        one group serves several; what an attribute needs less of is made up with values that have room."""
        parts = self._start(dict(self.counts))
        short = max((part.short for part in parts), default=0)
        return self._paired([part.fill(short) for part in parts], short)

    def free(self) -> int:
        """Seats that no minimum reserves."""
        return self.left - sum(self.deficits().values())

    def completion(self) -> dict[Combination, int]:
        """One way to fill all seats left that meets every quota: what minima reserve, and the free seats in proportion
        to the room that values have beyond their minima."""
        counts = dict(self.counts)
        left = self.size - sum(counts.values())
        return self._paired([part.fill(left) for part in self._start(counts)], left)

    def lines(self) -> list[Line]:
        """All quotas: values of attributes first, then combinations that the support bounds."""
        counts = dict(self.counts)
        left, parts = self.size - sum(counts.values()), self._start(counts)
        fits = [[left > 0 and part.fits(key) for key in range(len(b.keys))] for part, b in self._both(parts)]
        out = []
        for i, attribute in enumerate(self.attributes):
            for value, bound in self._bounds[attribute].items():
                taken = sum(n for c, n in counts.items() if c[i] == value)
                if self._support is None:
                    able = fits[i][self._keys[i][(value,)]]
                else:
                    able = left > 0 and any(self._fits(fits, c) for c in self._support if c[i] == value)
                out.append(Line(self._name((i,), (value,)), (i,), (value,), bound, taken, able))
        for c, bound in self._cells.items():
            where = tuple(range(len(c)))
            out.append(Line(self._name(where, c), where, c, bound, counts[c], left > 0 and self._fits(fits, c)))
        return out

    # -- inside -----------------------------------------------------------------------------------------------------

    @property
    def _sparse(self) -> bool:
        """Too many combinations to list: only those seen have a count."""
        return self._support is None and len(self.attributes) != 1

    def _start(self, counts: Mapping[Combination, int]) -> list[Part]:
        parts = []
        for b, block in enumerate(self._blocks):
            mine = [0] * len(block.keys)
            for combination, n in counts.items():
                if n:
                    mine[self._place(combination)[b]] += n
            parts.append(block.start(mine))
        return parts

    def _both(self, parts: Sequence[Part]) -> list[tuple[Part, Block]]:
        return list(zip(parts, self._blocks, strict=True))

    def _fits(self, fits: Sequence[Sequence[bool]], combination: Combination) -> bool:
        return all(able[key] for able, key in zip(fits, self._place(combination), strict=True))

    def _place(self, combination: Combination) -> tuple[int, ...]:
        place = self._places.get(combination)
        if place is None:
            if not self.knows(combination):
                raise InvalidArgument(f"the quotas do not know the combination {combination!r}.")
            place = tuple(
                keys[tuple(combination[i] for i in block.where)]
                for block, keys in zip(self._blocks, self._keys, strict=True)
            )
            self._places[combination] = place
        return place

    def _paired(self, fills: Sequence[Sequence[int]], total: int) -> dict[Combination, int]:
        """Combinations with these counts of keys in each block. Each block's keys are spread evenly over the
        combinations of the blocks before, so that no two of them go together more often than they must."""
        rows: list[tuple[int, ...]] = [()] * total
        for fill in fills:
            spread = sorted(((2 * i + 1) / n, key) for key, n in enumerate(fill) for i in range(n))
            rows = sorted((*row, key) for row, (_, key) in zip(rows, spread, strict=True))
        out: dict[Combination, int] = {}
        for at, row in enumerate(rows):
            combination = self._combination(row, at)
            out[combination] = out.get(combination, 0) + 1
        return out

    def _combination(self, row: tuple[int, ...], turn: int) -> Combination:
        """The combination with these keys; several that no quota tells apart take turns."""
        if self._support is not None:
            same = self._same[row]
            return same[turn % len(same)]
        return tuple(block.keys[key][0] for block, key in zip(self._blocks, row, strict=True))

    def _name(self, where: Sequence[int], values: Combination) -> str:
        if len(where) == 1 and len(self.attributes) > 1:
            return f"{self.attributes[where[0]]}={values[0]}"
        return "/".join(values)

    def _refuse(self) -> None:
        """Say which quotas exclude each other; where none do, the counts went too far."""
        size = self.size
        block = next((block for block in self._blocks if not block.start().feasible), None)
        if block is None:
            raise InvalidArgument(
                f"quotas cannot be met any more with {size - self.left} of {size} groups in: "
                f"{', '.join(f'{n} ' + '/'.join(c) for c, n in self.counts.items() if n)}."
            )
        terms = block.blocking()
        listing = ", ".join(self._term(block, term) for term in terms)
        least, most = (sum(block.levels[i].bounds[c][end] for i, c in terms) for end in (0, 1))
        if len({i for i, _ in terms}) == 1 and least > size:
            raise InvalidArgument(
                f"quotas need at least {least} groups ({listing}), train_batch_size is {size}; lower one of them or "
                "raise train_batch_size."
            )
        if len({i for i, _ in terms}) == 1 and most < size and block.exhausts(terms):
            raise InvalidArgument(
                f"quotas allow at most {most} groups ({listing}), train_batch_size is {size}: a batch could never "
                "fill. Raise a bound or lower train_batch_size."
            )
        if block.window is not None:
            raise InvalidArgument(
                f"quotas cannot keep within mini_window={block.window} of an even pace ({listing}): {size} groups make "
                f"{size // block.mini} mini-batches of {block.mini}. Use mini_window=1, which always can be kept, or "
                "counts that divide evenly."
            )
        raise InvalidArgument(
            f"quotas exclude each other ({listing}) in a train batch of {size} groups of the combinations that can "
            "occur; change one of them, the support or train_batch_size."
        )

    def _term(self, block: Block, term: Term) -> str:
        i, values = term
        level = block.levels[i]
        where = [block.where[at] for at in level.where]
        if level.own:
            return f"{'/'.join(values)} {self._cells[values]}"
        return f"{self._name(where, values)} {self._bounds[self.attributes[where[0]]][values[0]]}"
