"""What a run dropped beyond its last mini-batch, kept beside the data under the state that it was dropped from.

A state covers consumed mini-batches. A trainer that has consumed all there are, and waits for the next, may meet
nothing but groups that it drops. Their segments may go before that mini-batch comes, so that writers find room for
better ones, if the fate of these rows is known to whoever loads the state: what the next entry would say of them is
kept under the state's mark.

State A, 1000 groups dropped: [["A", entry of 1000]]. After a crash A is loaded and leads to B, 20 more are dropped:
[["A", entry of 1000], ["B", entry of 20]]. From now on A and B both lead to a run without these 1020.
"""

from __future__ import annotations

import json

from knit_data.ledger import Entry, Ledger, Links


def links_of(raw: bytes | None) -> Links:
    return [(str(mark), Entry.from_json(entry)) for mark, entry in json.loads(raw)] if raw else []


def to_bytes(links: Links) -> bytes:
    return json.dumps([[mark, entry.to_json()] for mark, entry in links]).encode()


def catch_up(ledger: Ledger, links: Links) -> None:
    """Apply what was dropped from this very state and from those that it leads to; nothing to another state."""
    marks = [mark for mark, _ in links]
    if marks and (mark := ledger.mark()) in marks:
        for _, entry in links[marks.index(mark) :]:
            ledger.apply(entry)
        ledger.links = links
