"""Speculative decoding from one file: a draft says what may follow, and its judge checks all of it in one
pass.

The draft is the same weights at a coarser precision, on the same cache, or what followed the same tokens
earlier in the text (`prompt`), or both: the text where it has something, else the weights. The judge is the
precision that was asked for. It reads the last token and all that was drafted together, and chooses after
each as it would choose alone. Up to the first choice that differs, the draft was right; the tokens after it
are forgotten. Reading them, the judge has written its own keys and values over the draft's. As a token's bits
do not depend on the tokens it is read with, nothing shows that there was a draft.

Where tokens are drawn, so are the draft's, from its own distribution q; `Sampler.choose` keeps a token x with
probability min(1, p(x) / q(x)), p being the judge's, or else draws from what p has more than q. So tokens are
drawn from p. (Leviathan, Kalman, Matias 2023, "Fast inference from transformers via speculative decoding".) A
text's continuation has q = 1.

How many tokens are drafted: as many as pay. If a token is right with chance a, k tokens are followed by 1 + a
+ ... + a^k on average, and cost 1 + s + k (c + e) passes of the judge: c is a step of the draft, s and e what
several tokens in a pass take (`decoder.Costs`). The k of the best ratio is taken, 0 if that is it; a is a
running mean of what was right, and what is not tried is slowly believed again. Besides, the weights stop
after a token that they are not sure of (`_SURE`): many of those are wrong, and few of the others. (A GPU that
goes on by itself is not asked.) No clock has a say: what a request says, and how, depends on the request
alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from otaro.errors import OtaroError, PrecisionError
from otaro.runtime.report import Generation
from otaro.runtime.sample import Proposal, argmax, largest_chance
from otaro.sefp.precision import Precision

if TYPE_CHECKING:
    from otaro.runtime.decoder import BaseDecoder, Costs

PROMPT = "prompt"
MOST = {PROMPT: 10, "weights": 6}
"""Tokens that are drafted at a time."""
_BELIEVED = 0.95  # of a draft that was not tried yet
_SURE = 0.7  # the probability of a token after which a draft goes on: chosen on held-out text (docs/log.md)
_MEMORY = 16  # tokens that a running mean goes back
_FORGIVEN = 64  # steps after which a draft that did not pay is believed again
_SAME = (4, 3, 2)  # tokens that must be the same for a text to go on as it did, the longer the better


@dataclass(frozen=True)
class Draft:
    """Who drafts; `Draft.of("prompt+E5M3")` reads it."""

    precision: Precision | None = None
    prompt: bool = False
    tokens: int | None = None
    """So many at a time, as far as there is room; None: as many as pay."""

    @classmethod
    def of(cls, given: str | Precision | Draft | None) -> Draft | None:
        """A precision, "prompt", or both; None where there is none."""
        if given is None or isinstance(given, Draft):
            return given
        names = [part.strip() for part in str(given).split("+")]
        precisions = [name for name in names if name.lower() != PROMPT]
        if len(precisions) > 1 or len(set(names)) < len(names):
            raise OtaroError(f"draft={given!r}: give a precision, prompt, or both: E5M3, prompt, prompt+E5M3")
        try:
            return cls(Precision(precisions[0]) if precisions else None, len(names) > len(precisions))
        except PrecisionError as error:
            raise PrecisionError(
                f"draft={given!r}: give a precision, prompt, or prompt+E5M3; {error}"
            ) from None

    def __str__(self) -> str:
        return "+".join([PROMPT] * self.prompt + [str(one) for one in (self.precision,) if one])


class Drafter:
    """The draft of one sequence."""

    def __init__(self, draft: Draft, judges: Sequence[bytes], report: Generation) -> None:
        """`judges` have the mantissa bits that it is to serve, and `report` is told how it does."""
        self.draft, self._report = draft, report
        if draft.precision is not None and all(self.bits(judge) == judge for judge in judges):
            raise OtaroError(
                f"draft={draft}: a draft is coarser than what it serves; choose a coarser one, "
                "or leave it out"
            )
        report.draft = str(draft)
        self._right = dict.fromkeys(MOST, _BELIEVED)
        self._seen: dict[tuple[int, ...], int] = {}
        self._known = self._position = 0
        self._kind = PROMPT

    def bits(self, judge: bytes) -> bytes:
        """Mantissa bits of the draft: of each matrix no more than the judge takes."""
        most = self.draft.precision.mantissa_bits if self.draft.precision else 0
        return bytes(min(one, most) for one in judge)

    def from_text(self, ids: Sequence[int], room: int, costs: Costs) -> list[int]:
        """What followed when the last tokens were there before."""
        if not self.draft.prompt:
            return []
        start = self._found(ids)
        self._kind = PROMPT
        count = 0 if start is None else self._count(room, 0.0, costs)
        found = list(ids[start : start + count]) if start is not None else []
        while found and len(found) < count:  # it has come to itself: the text goes round
            found.append(found[len(found) - (len(ids) - (start or 0))])
        return found

    def count(self, judge: bytes, room: int, costs: Costs) -> int:
        """How many tokens the weights shall draft."""
        if self.draft.precision is None or (bits := self.bits(judge)) == judge:
            return 0
        self._kind = "weights"
        return self._count(room, costs.draft(bits, judge), costs)

    def _count(self, room: int, cost: float, costs: Costs) -> int:
        if self.draft.tokens is not None:
            return min(self.draft.tokens, room)
        right = self._right[self._kind]

        def worth(count: int) -> float:
            passes = 1 + (costs.several + count * (cost + costs.each) if count else 0.0)
            return sum(right**position for position in range(count + 1)) / passes

        best = max(range(min(room, MOST[self._kind]) + 1), key=worth, default=0)
        if not best:
            self._right[self._kind] += (_BELIEVED - right) / _FORGIVEN
        return best

    def begin(self, count: int) -> None:
        """So many tokens are about to be judged."""
        self._position, report = 0, self._report
        for position in range(count):
            if position == len(report.drafted):
                report.drafted.append(0)
                report.accepted.append(0)
            report.drafted[position] += 1

    def judged(self, right: bool, sure: bool = True) -> None:
        """The next of them was right or not; one that the draft was not sure of says nothing about it."""
        self._report.accepted[self._position] += right
        self._position += 1
        if sure:
            self._right[self._kind] += (right - self._right[self._kind]) / _MEMORY

    def _found(self, ids: Sequence[int]) -> int | None:
        """Where the text went on after the same tokens, the last time."""
        for end in range(max(self._known, 1), len(ids)):  # what ends here goes on at `end`
            for size in _SAME:
                if end >= size:
                    self._seen[tuple(ids[end - size : end])] = end
        self._known = len(ids)
        for size in _SAME:
            if (start := self._seen.get(tuple(ids[-size:]))) is not None and len(ids) >= size:
                return start
        return None


def propose(
    decoder: BaseDecoder, cache: Any, some: list[Any], bits: list[bytes]
) -> dict[Any, list[Proposal]]:
    """What drafts say of each of these, where they say anything; the cache is as before."""
    found: dict[Any, list[Proposal]] = {}
    writing: list[tuple[Any, bytes, int]] = []
    positions = decoder.description.positions or float("inf")
    for one, judge in zip(some, bits, strict=True):
        if one.drafter is None:
            continue
        # The last token of an answer is never read, and there is no memory for it.
        room = int(min(one.limit - one.new - 1, positions - len(one.ids), decoder.max_sequences - 1))
        if tokens := one.drafter.from_text(one.ids, room, decoder.costs):
            found[one] = [Proposal(token) for token in tokens]
        elif count := one.drafter.count(judge, room, decoder.costs):
            writing.append((one, one.drafter.bits(judge), count))
            found[one] = []
    try:
        _write(decoder, cache, writing, found)
    except OtaroError:  # a key that the judge would not have had, say: then there is no draft from here on
        for one, _, _ in writing:
            del found[one]
    for one, _, _ in writing:
        cache.crop(len(one.slot.tokens), one.slot.number)
    return found


def _write(
    decoder: Any, cache: Any, writing: list[tuple[Any, bytes, int]], found: dict[Any, list[Proposal]]
) -> None:
    """By the weights; all sequences that still draft in one step."""
    done = 0
    while some := [one for one in writing if one[2] > done and (not done or found[one[0]][-1].sure)]:
        rows, bits = [one for one, _, _ in some], [of_draft for _, of_draft, _ in some]
        numbers = [one.slot.number for one in rows]
        last = [found[one][-1].token if found[one] else one.ids[-1] for one in rows]
        if decoder.ahead and all(one.sampler.argmax for one in rows):
            until = min(count for _, _, count in some)
            with decoder.lock:  # the device goes on by itself
                begun = decoder.begin(last, cache, numbers, bits)
                steps = [decoder.advance() for _ in range(done, until)]
                chosen = [decoder.chosen(step) for step in steps]
                decoder.end(begun)
                cache.check()
            for tokens in chosen:
                for one, token in zip(rows, tokens, strict=True):
                    found[one].append(Proposal(token))
            done = until
            continue
        logits = decoder.step(last, cache, numbers, bits)
        largest = argmax(logits)
        for number, one in enumerate(rows):
            said = [proposal.token for proposal in found[one]]
            proposal = one.sampler.proposed([*one.ids, *said], logits[number], largest[number])
            if one.drafter.draft.tokens is None and not one.sampler.do_sample:
                proposal = proposal._replace(sure=largest_chance(logits[number], largest[number]) >= _SURE)
            found[one].append(proposal)
        done += 1
