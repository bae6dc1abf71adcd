"""The loop that all tokens come from: sequences, each at its own precision, by one decoder and one cache.

A step reads a chunk of a prompt, then one token of every sequence whose prompt was read; on a CPU, where a
token's bits depend on no other's, all of that in one pass over the weights. So sequences join and leave
between steps, and a long prompt holds nobody up for longer than a chunk. `Scheduler` says who joins, for
`otaro.Engine`; `rows.Batch` is the loop of one call of `generate`, whose rows go on in step. They say what
follows from logits, too.

What a sequence says depends on itself alone, to the last bit: a decoder computes the same for a token
whatever else is in the step, and chunks end at the same positions whoever is there.

Where a sequence has a draft (`draft`), a step may read several tokens of it: those that turn out to be right
stay.

A GPU finds the argmax by itself. Where that is all that is asked for, it begins a step before the host knows
the last one's token (`Ahead`). What was begun counts only if nothing has changed when its turn comes: a
sequence that ends or joins, or another precision, and it is dropped, so going ahead makes no difference to
what is said.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from otaro.kernels.steps import MAX_TOKENS
from otaro.runtime.caches import DecoderCache
from otaro.runtime.decoder import BaseDecoder, Chunk
from otaro.runtime.draft import Drafter, propose
from otaro.runtime.sample import Proposal, Sampler

_OLDEST = 4  # every so many chunks the oldest prompt goes first
_ROOM = 16  # tokens of prompts that a pass with others has room for at least


@dataclass(eq=False)
class Slot:
    """A sequence of the cache, with the tokens that it holds."""

    number: int
    tokens: list[int] = field(default_factory=list)
    how: list[object] = field(default_factory=list)
    """How each of them was read: equal where it left the same bits."""


@dataclass(eq=False, kw_only=True)
class Row:
    """A sequence to go on with."""

    ids: list[int]
    """Of the prompt and what was said so far."""
    prompt: int
    limit: float
    """New tokens at most."""
    argmax: bool
    """Whether the largest logit decides, and nobody wants to see logits."""
    sampler: Sampler
    drafter: Drafter | None = None
    proposal: Proposal | None = None
    """What a draft says of the choice at hand."""
    slot: Slot | None = None
    ran_at: bytes = b""
    """Mantissa bits of its last step."""

    def judge(self, token: int) -> None:
        """Tell its draft what follows in fact."""
        if self.proposal is not None and self.drafter is not None:
            self.drafter.judged(token == self.proposal.token, self.proposal.sure)

    @property
    def new(self) -> int:
        """Tokens said so far."""
        return len(self.ids) - self.prompt

    @property
    def unread(self) -> int:
        """Tokens of its prompt that are still to be read; 0 or less once it was."""
        return self.prompt - (len(self.slot.tokens) if self.slot else 0)


@dataclass(frozen=True)
class Chunks:
    """How prompts are cut. Chunks end at multiples of their length, wherever they begin."""

    length: int
    exact: bool
    """Whether tokens leave the same bits however they are cut."""

    def end(self, start: int, prompt: int) -> int:
        """Where the chunk ends that begins here."""
        return min(prompt, (start // self.length + 1) * self.length)

    def how(self, start: int, end: int, bits: bytes) -> object:
        """How tokens are read that are read together."""
        return bits if self.exact or end - start <= MAX_TOKENS else (bits, start, end)


class Loop(ABC):
    """Goes on with what is in `_running`, step by step; one thread at a time."""

    def __init__(self, decoder: BaseDecoder, cache: Any, chunks: Chunks, together: bool = False) -> None:
        """`together`: prompts are read in the pass of the others' tokens, as far as the decoder can."""
        self.decoder, self.cache, self._chunks, self._together = (
            decoder,
            cache,
            chunks,
            together and decoder.together,
        )
        self._running: list[Any] = []
        self._turns = 0
        self._ahead = Ahead(decoder, cache) if decoder.ahead else None

    def step(self) -> bool:
        """Read prompts, a chunk at most, and a token of each that goes on; False where nothing is left."""
        if self._together and self._read_together():
            return bool(self._running)
        self._read_prompts()
        if ready := [one for one in self._running if one.new]:
            if any(one.drafter for one in ready):
                self._decode_drafted(ready)
            else:
                self._decode(ready)
        return bool(self._running)

    @abstractmethod
    def bits(self, some: list[Any], later: int = 0) -> list[bytes]:
        """Mantissa bits of each in the step that begins now, or in a later one, as far as that is known."""

    @abstractmethod
    def choose(self, some: list[Any], logits: torch.Tensor) -> None:
        """Say what follows these sequences, given logits [sequences, vocabulary]."""

    @abstractmethod
    def take(self, some: list[Any], tokens: list[int]) -> None:
        """These tokens follow these sequences."""

    @abstractmethod
    def failed(self, some: list[Any], error: Exception, alone: bool) -> None:
        """Nothing was read of them; `alone`: it cannot have been another's fault."""

    def _leave(self, one: Any) -> None:
        self._running.remove(one)
        self._drop()

    def _drop(self) -> None:
        if self._ahead is not None:
            self._ahead.drop()

    def _read_together(self) -> bool:
        """Prompts, and a token of each that goes on, in one pass; False if it cannot be: nothing was read."""
        ready = [one for one in self._running if one.new]
        left = min(self._chunks.length, self.decoder.max_sequences - len(ready))
        prompts = [one for one in self._running if one.unread > 0]
        if not prompts or left < min(_ROOM, self._chunks.length) or any(one.drafter for one in ready):
            return False
        parts = [(one, one.ids[-1:]) for one in ready]
        while prompts and left:
            one = self._next(prompts)
            prompts.remove(one)
            start = one.prompt - one.unread
            parts.append((one, one.ids[start : min(one.prompt, start + left)]))
            left -= len(parts[-1][1])
        try:
            bits = dict(zip((one for one, _ in parts), self.bits([one for one, _ in parts]), strict=True))
            parts.sort(key=lambda part: bits[part[0]])  # neighbours of one precision are multiplied together
            chunks = [Chunk(ids, one.slot.number, bits[one], one.unread <= len(ids)) for one, ids in parts]
            logits = self.decoder.read(chunks, self.cache)
        except Exception:  # one's error: each is read by itself
            return False
        for one, ids in parts:
            one.ran_at = bits[one]
            one.slot.tokens += ids
            one.slot.how += [bits[one]] * len(ids)
        if some := [one for one, _ in parts if one.unread <= 0]:
            self.choose(some, logits)
        return True

    def _next(self, prompts: list[Any]) -> Any:
        """Of these prompts the one that is done soonest, or the oldest."""
        self._turns += 1
        return prompts[0] if self._turns % _OLDEST == 0 else min(prompts, key=lambda each: each.unread)

    def _read_prompts(self) -> None:
        """A chunk of the next prompt; short ones share a turn."""
        left, read = self._chunks.length, dict[Any, torch.Tensor]()
        while prompts := [one for one in self._running if one.unread > 0]:
            turns, one = self._turns, self._next(prompts)
            start = one.prompt - one.unread
            end = self._chunks.end(start, one.prompt)
            if end - start > left:
                self._turns = turns
                break
            left -= end - start
            try:
                ids, (bits,) = one.ids[start:end], self.bits([one])
                logits = self.decoder.forward(ids, self.cache, sequence=one.slot.number, bits=bits)
            except Exception as error:
                self.failed([one], error, alone=True)
                continue
            one.ran_at = bits
            one.slot.tokens += ids
            one.slot.how += [self._chunks.how(start, end, bits)] * len(ids)
            if end == one.prompt:
                read[one] = logits
        if some := [one for one in self._running if one in read]:
            self.choose(some, torch.stack([read[one] for one in some]))

    def _decode(self, some: list[Any], ahead: bool = True) -> None:
        """One token of each."""
        ahead = ahead and self._ahead is not None and all(one.argmax for one in some)
        tokens: list[int] = []
        try:
            bits = self.bits(some)
            if ahead and self._ahead is not None:
                tokens = self._ahead.tokens(
                    some, bits, lambda: self._go_on(some) and self.bits(some, 1) == bits
                )
            else:
                self._drop()
                read = [one.ids[-1] for one in some]
                logits = self.decoder.step(read, self.cache, [one.slot.number for one in some], bits)
        except Exception as error:
            self._drop()
            self.failed(some, error, alone=len(some) == 1 and not ahead)
            return
        for one, its_bits in zip(some, bits, strict=True):
            one.ran_at = its_bits
            one.slot.tokens.append(one.ids[-1])
            one.slot.how.append(its_bits)
        if ahead:
            self.take(some, tokens)
        else:
            self.choose(some, logits)

    def _decode_drafted(self, some: list[Any]) -> None:
        """As many tokens of each as its draft was right about, and one."""
        bits = self.bits(some)
        self._drop()
        drafts = propose(self.decoder, self.cache, some, bits)
        if not drafts:
            # what the text may know next time, a step that was begun ahead would hold up
            texts = any(one.drafter is not None and one.drafter.draft.prompt for one in some)
            return self._decode(some, ahead=not texts)
        left = list(zip(some, bits, strict=True))
        while left:
            room, few = self.decoder.max_sequences, list[tuple[Any, bytes]]()
            while left and (count := 1 + len(drafts.get(left[0][0], ()))) <= room:
                few.append(left.pop(0))
                room -= count
            self._judge(few, drafts)

    def _judge(self, some: list[tuple[Any, bytes]], drafts: dict[Any, list[Proposal]]) -> None:
        """Read these with their drafts in one step."""
        read = [
            (one, bits, [one.ids[-1], *(each.token for each in drafts.get(one, ()))]) for one, bits in some
        ]
        numbers = [one.slot.number for one, _, ids in read for _ in ids]
        every = [bits for _, bits, ids in read for _ in ids]
        tokens = [token for _, _, ids in read for token in ids]
        # a GPU is waited for once
        alone = self._ahead is not None and all(one.argmax for one, _ in some)
        try:
            found = (self.decoder.likeliest if alone else self.decoder.step)(
                tokens, self.cache, numbers, every
            )
        except Exception:  # by a token, perhaps, that nobody would have said
            return self._decode([one for one, _ in some], ahead=False)
        start = 0
        for one, bits, ids in read:
            self._accept(one, bits, ids, drafts.get(one, []), found[start : start + len(ids)])
            start += len(ids)

    def _accept(
        self, one: Any, bits: bytes, ids: list[int], draft: list[Proposal], found: torch.Tensor | list[int]
    ) -> None:
        """Say what follows each of these tokens, given logits or what is likeliest, as long as it is the next
        of them.
        """
        one.ran_at = bits
        if draft:
            one.drafter.begin(len(draft))
        for number, token in enumerate(ids):
            one.slot.tokens.append(token)
            one.slot.how.append(bits)
            one.proposal = draft[number] if number < len(draft) else None
            if isinstance(found, torch.Tensor):
                self.choose([one], found[number : number + 1])
            else:
                self.take([one], found[number : number + 1])
            if number == len(draft) or one.ids[-1] != draft[number].token:
                break
            # it has ended, or somebody has switched
            if one not in self._running or self.bits([one]) != [bits]:
                break
        one.proposal = None
        self.cache.crop(len(one.slot.tokens), one.slot.number)

    def _go_on(self, some: list[Any]) -> bool:
        """Whether these, and no others, will go on after the step that begins now."""
        return len(some) == len(self._running) and all(one.new + 1 < one.limit for one in some)


class Ahead:
    """Steps that a device has begun before their turn."""

    def __init__(self, decoder: Any, cache: DecoderCache) -> None:
        self._decoder, self._cache = decoder, cache
        self._some: list[Any] = []
        self._bits: list[bytes] = []
        self._begun: object = None
        self._under_way: deque[int] = deque()

    def tokens(self, some: list[Any], bits: list[bytes], further: Callable[[], bool]) -> list[int]:
        """What follows these sequences at these mantissa bits; `further`: whether they go on in the next."""
        decoder, under_way = self._decoder, self._under_way
        with decoder.lock:  # others may read between two steps, but not within one
            if some != self._some or bits != self._bits or (under_way and not decoder.knows(under_way[0])):
                self.drop()
            if not under_way:
                if self._begun is None or not decoder.goes_on(self._begun):
                    numbers = [one.slot.number for one in some]
                    self._begun = decoder.begin([one.ids[-1] for one in some], self._cache, numbers, bits)
                    self._some, self._bits = list(some), bits
                under_way.append(decoder.advance())
            if len(under_way) <= decoder.ahead and decoder.goes_on(self._begun) and further():
                under_way.append(decoder.advance())
            tokens: list[int] = decoder.chosen(under_way[0])
            self._cache.check(wait=False)
            under_way.popleft()
        return tokens

    def drop(self) -> None:
        """Forget what was begun."""
        for one in self._some if self._under_way else ():
            self._cache.crop(-len(self._under_way), one.slot.number)
        self._under_way.clear()
        if self._begun is not None:
            self._decoder.end(self._begun)
        self._some, self._begun = [], None
