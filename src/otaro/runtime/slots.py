"""The cache of the scheduler: a slot for each sequence, and how much memory they have.

A slot that nobody uses keeps its tokens. They serve a prompt that begins with them, but only those that were
read as that prompt would read them: at the same mantissa bits, and where a decoder's products depend on how
many tokens they are made for, in the same chunk. So an answer never depends on who was there before.

Where sequences share memory (a pooled cache), there are as many slots as it has room for: what has ended
stays until the memory is wanted, the oldest goes first. A prompt that goes on where a slot ends takes that
slot; of one that only begins as it does, running or ended, it gets a copy. Elsewhere each sequence that may
run has its slot, and none is copied.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from numbers import Integral

from otaro.errors import OtaroError
from otaro.runtime.caches import DecoderCache
from otaro.runtime.decoder import BaseDecoder
from otaro.runtime.loop import Chunks, Slot
from otaro.sefp.precision import Precision

_CONTEXT = 2048  # tokens of each sequence that there is memory for, unless told otherwise
_POOLED, _FIXED = 64, 256  # tokens of a block: of a pooled cache, and of one that is not


class Slots:
    """All slots of one cache."""

    def __init__(
        self, decoder: BaseDecoder, kv: Precision | None, count: int, nbytes: int | None, chunks: Chunks
    ) -> None:
        """The cache takes `nbytes` at most."""
        if nbytes is not None and (not isinstance(nbytes, Integral) or nbytes < 1):
            raise OtaroError(f"cache_bytes={nbytes!r}: give a whole number of bytes, such as {64 << 20}")
        probe: DecoderCache = decoder.new_cache(kv, 1, _FIXED)
        decoder.forward([0], probe)
        self._pooled, self._chunks = probe.pooled, chunks
        self._block, block_bytes = _POOLED if self._pooled else _FIXED, probe.nbytes
        self.token_bytes = block_bytes / self._block
        self.nbytes = count * self._blocks(_CONTEXT) * block_bytes if nbytes is None else nbytes
        self._all = self.nbytes // block_bytes if self._pooled else self.nbytes // block_bytes // count
        if not self._all:
            least = block_bytes if self._pooled else block_bytes * count
            raise OtaroError(
                f"cache_bytes={nbytes}: keys and values of {count} sequences take {least} at least"
            )
        self.most = self._all * self._block
        """Tokens that one sequence can have."""
        self._count = count
        self._new: Callable[[], DecoderCache] = lambda: decoder.new_cache(kv)
        self.cache: DecoderCache = decoder.new_cache(kv, count, 0 if self._pooled else self.most)
        self._idle = [Slot(number) for number in range(count)]  # the oldest first
        self._taken: list[Slot] = []

    def has_memory(self, needed: int, reserved: Sequence[int]) -> bool:
        """Whether a sequence that may come to need so many tokens can begin beside those that run."""
        return len(self._taken) < self._count and self._suffices([*reserved, needed])

    def take(self, prompt: list[int], bits: bytes, needed: int, reserved: Sequence[int]) -> Slot:
        """A slot, if there is memory, for a prompt that is to be read at these mantissa bits.

        It has the tokens that the prompt can use. Other idle slots give their memory, the oldest first.
        """
        if self._pooled:
            slot = self._pooled_slot(prompt, bits, [*reserved, needed])
        else:
            slot = max(self._idle, key=lambda one: self.common(one, prompt, bits))
            common = self.common(slot, prompt, bits)
            if 2 * common < len(prompt):  # whoever left these tokens may come back for them
                slot, common = self._idle[0], 0
            self._idle.remove(slot)
            self._crop(slot, common)
        self._taken.append(slot)
        return slot

    def _pooled_slot(self, prompt: list[int], bits: bytes, reserved: list[int]) -> Slot:
        like = max([*self._taken, *self._idle], key=lambda one: self.common(one, prompt, bits))
        common = self.common(like, prompt, bits)
        mine = common > 0 and like in self._idle
        if mine:
            self._idle.remove(like)
        kept = [len(like.tokens)] if mine and common < len(like.tokens) else []  # where it is copied it stays
        for other in self._idle:
            if self._suffices([*reserved, *kept, *(len(one.tokens) for one in self._idle)]):
                break
            self._crop(other, 0)
        if mine and not (kept and self._suffices([*reserved, *kept])):
            self._crop(like, common)
            return like
        slot = next((one for one in self._idle if not one.tokens), None)
        if slot is None:
            slot = Slot(self.cache.add(self._new()))
        else:
            self._idle.remove(slot)
        if common:
            self.cache.copy(common, like.number, slot.number)
            slot.tokens, slot.how = like.tokens[:common], like.how[:common]
        if mine:  # used last
            self._idle.append(like)
        return slot

    def leave(self, slot: Slot) -> None:
        """Nobody uses it any more; its tokens stay, those of slots that it goes on from are not needed."""
        self._taken.remove(slot)
        if self._pooled:
            for other in self._idle:
                length = len(other.tokens)
                if length and (other.tokens, other.how) == (slot.tokens[:length], slot.how[:length]):
                    self._crop(other, 0)
        self._idle.append(slot)

    def common(self, slot: Slot, prompt: list[int], bits: bytes) -> int:
        """How many tokens of a slot this prompt would read again; its last is read in any case."""
        most, common, start, end = min(len(slot.tokens), len(prompt) - 1), 0, 0, 0
        how: object = bits
        while common < most and slot.tokens[common] == prompt[common]:
            if common == end:
                start, end = common, self._chunks.end(common, len(prompt))
                how = self._chunks.how(start, end, bits)
            if slot.how[common] != how:
                break
            common += 1
        return common if common == end or how is bits else start

    def _crop(self, slot: Slot, length: int) -> None:
        self.cache.crop(length, slot.number)
        del slot.tokens[length:], slot.how[length:]

    def _suffices(self, lengths: Sequence[int]) -> bool:
        """Whether there is memory for sequences of these lengths together."""
        blocks = [self._blocks(length) for length in lengths]
        return (sum(blocks) if self._pooled else max(blocks)) <= self._all

    def _blocks(self, length: int) -> int:
        return -(-length // self._block)
