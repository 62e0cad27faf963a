"""Running a plan on token numbers: all ranks in one process, without tensors or a group.

What a plan says about messages, tiles and returned gradients is carried out literally, so that
tests can count which pairs are computed and what arrives where, thousands of plans a minute.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ..plan import BatchPlan, RankPlan, Rows, Transfer


@dataclass(frozen=True)
class Simulated:
    """What all ranks (with ulysses: all teams) of a plan did in one forward and backward.

    T = windows x padded length: token t of window w is ``w * padded_length + t``.
    """

    pairs: np.ndarray
    """int64 (T, T): how often each (query, key) pair was computed."""
    gradients: np.ndarray
    """int64 (T,): of each key, the sum of ``weights`` over the queries that used it, at its owner
    after backward."""
    received: np.ndarray
    """int64 (P,): key rows that reached each rank in forward, anchors included."""
    sent: np.ndarray
    """int64 (P,): key rows that left each rank."""


def simulate(plan: BatchPlan, weights: np.ndarray) -> Simulated:
    """Carry out the plan of every rank.

    Args:
        plan: of any exchange.
        weights: int64 (T,), a number of every query: its contribution to the gradient of each key
            that it sees.

    Raises:
        AssertionError: a message is empty, or what one rank sends is not what the other expects.
    """
    return _Simulation(plan, weights).run()


class _Simulation:
    def __init__(self, plan: BatchPlan, weights: np.ndarray) -> None:
        self.weights = weights
        self.ranks = [plan.rank(team * plan.ulysses) for team in range(plan.num_teams)]
        self.tokens = [_tokens_of_rows(plan, team) for team in range(plan.num_teams)]
        self.said = [plan.key_tokens(team * plan.ulysses) for team in range(plan.num_teams)]
        self.anchors = np.array(
            [w * plan.padded_length for w, window in enumerate(plan.windows) if window.mode.anchor],
            dtype=np.int64,
        )
        length = plan.batch_size * plan.padded_length
        self.pairs = np.zeros((length, length), dtype=np.int64)
        self.home = [np.zeros(len(tokens), dtype=np.int64) for tokens in self.tokens]
        self.received = np.zeros(len(self.ranks), dtype=np.int64)
        self.sent = np.zeros(len(self.ranks), dtype=np.int64)

    def run(self) -> Simulated:
        held = list(self.tokens)
        for own, said in zip(held, self.said, strict=True):
            assert np.array_equal(own, said[0]), "step 0 holds a rank's own rows"
        for step in range(max(len(rank.steps) for rank in self.ranks)):
            if step:
                held = self._travel(step, held)
            partial = [self._compute(rank, step, held) for rank in range(len(self.ranks))]
            self._return(step, partial)
        self._anchors()
        gradients = np.zeros(len(self.weights), dtype=np.int64)
        for tokens, home in zip(self.tokens, self.home, strict=True):
            gradients[tokens] = home
        return Simulated(self.pairs, gradients, self.received, self.sent)

    def _travel(self, step: int, held: list[np.ndarray]) -> list[np.ndarray]:
        """Fill the buffers of a step from those of the step before."""
        transfers = [_incoming(rank, step) for rank in self.ranks]
        mail = self._deliver(transfers, held)
        buffers = []
        for number, rank in enumerate(self.ranks):
            if step >= len(rank.steps):
                buffers.append(held[number][:0])
                continue
            buffer = np.full(rank.steps[step].num_rows, -1)
            kept = rank.steps[step].kept
            if kept is not None:
                buffer[_flat(kept[1])] = self.tokens[number][_flat(kept[0])]
            for message in transfers[number].receives:
                buffer[_flat(message.rows)] = mail[message.peer, number]
                self.received[number] += message.rows.num_rows
            self.sent[number] += transfers[number].rows_sent
            assert (buffer >= 0).all(), "every row of a buffer is filled"
            assert np.array_equal(buffer, self.said[number][step]), "the plan knows what it holds"
            buffers.append(buffer)
        return buffers

    def _compute(self, number: int, step: int, held: list[np.ndarray]) -> np.ndarray:
        """Count a step's pairs; returns the gradients of its buffer's rows."""
        rank, keys, queries = self.ranks[number], held[number], self.tokens[number]
        gradients = np.zeros(len(keys), dtype=np.int64)
        if step >= len(rank.steps):
            return gradients
        for q_start, q_stop, k_start, k_stop, causal in rank.steps[step].tiles.array.tolist():
            q, k = queries[q_start:q_stop], keys[k_start:k_stop]
            seen = np.ones((len(q), len(k)), dtype=np.int64)
            if causal:
                seen = np.tril(seen, len(k) - len(q))
            self.pairs[np.ix_(q, k)] += seen
            gradients[k_start:k_stop] += self.weights[q] @ seen
        return gradients

    def _return(self, step: int, partial: list[np.ndarray]) -> None:
        """Bring the gradients of a step home: own rows at once, foreign ones in messages."""
        if step == 0:
            for home, gradients in zip(self.home, partial, strict=True):
                home += gradients
            return
        transfers = [
            rank.steps[step].returns if step < len(rank.steps) else Transfer()
            for rank in self.ranks
        ]
        mail = self._deliver(transfers, partial)
        for number, rank in enumerate(self.ranks):
            kept = rank.steps[step].kept if step < len(rank.steps) else None
            if kept is not None:
                self.home[number][_flat(kept[0])] += partial[number][_flat(kept[1])]
            for message in transfers[number].receives:
                self.home[number][_flat(message.rows)] += mail[message.peer, number]

    def _anchors(self) -> None:
        """Send the anchors' rows out, count their pairs, and bring their gradients back."""
        plans = [rank.anchors for rank in self.ranks]
        mail = self._deliver([plan.broadcast for plan in plans], self.tokens)
        partial = [np.zeros(plan.num_anchors, dtype=np.int64) for plan in plans]
        for number, plan in enumerate(plans):
            known = np.full(plan.num_anchors, -1)
            known[plan.own[:, 0]] = self.tokens[number][plan.own[:, 1]]
            for message in plan.broadcast.receives:
                known[_flat(message.rows)] = mail[message.peer, number]
                self.received[number] += message.rows.num_rows
            self.sent[number] += plan.broadcast.rows_sent
            for anchor, start, stop in plan.queries.tolist():
                assert known[anchor] == self.anchors[anchor], "a query's anchor has arrived"
                queries = self.tokens[number][start:stop]
                self.pairs[queries, known[anchor]] += 1
                partial[number][anchor] += self.weights[queries].sum()
            self.home[number][plan.own[:, 1]] += partial[number][plan.own[:, 0]]
        back = [Transfer(plan.broadcast.receives, plan.broadcast.sends) for plan in plans]
        mail = self._deliver(back, partial)
        for number, transfer in enumerate(back):
            for message in transfer.receives:
                self.home[number][_flat(message.rows)] += mail[message.peer, number]

    def _deliver(
        self, transfers: list[Transfer], sources: list[np.ndarray]
    ) -> dict[tuple[int, int], np.ndarray]:
        """(sender, receiver) -> the rows sent; both ends agree on who and how many."""
        mail = {}
        for sender, transfer in enumerate(transfers):
            for message in transfer.sends:
                assert message.rows.num_rows > 0, "no message is empty"
                assert message.peer != sender, "no rank writes to itself"
                assert (sender, message.peer) not in mail, "one message a peer"
                mail[sender, message.peer] = sources[sender][_flat(message.rows)]
        expected = {
            (message.peer, receiver): message.rows.num_rows
            for receiver, transfer in enumerate(transfers)
            for message in transfer.receives
        }
        assert {ends: len(rows) for ends, rows in mail.items()} == expected, "sent = expected"
        return mail


def _tokens_of_rows(plan: BatchPlan, team: int) -> np.ndarray:
    """The token of each row of a team: window by window, its members' parts in turn."""
    members = range(team * plan.ulysses, (team + 1) * plan.ulysses)
    return np.concatenate(
        [
            plan.local_indices(member, window) + window * plan.padded_length
            for window in range(plan.batch_size)
            for member in members
        ]
    )


def _incoming(rank: RankPlan, step: int) -> Transfer:
    return rank.steps[step].incoming if step < len(rank.steps) else Transfer()


def _flat(rows: Rows) -> np.ndarray:
    """The row numbers of a selection, int64 (m,)."""
    parts = [np.arange(start, stop) for start, stop in rows.intervals.tolist()]
    return np.concatenate(parts) if parts else np.zeros(0, dtype=np.int64)
