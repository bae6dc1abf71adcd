"""A decoder for GPUs whose cost is the weights: a token is one launch of a captured graph.

`GpuDecoder.of(model)` serves a nested model, `GpuDecoder(weights)` any description. A step takes up to 16
tokens, of one sequence or of several; each has its own position, and may have its own precision. Longer
prompts are read in chunks, with decoded weights and the device's library. Both go through the same layers
(`gpu_layers`), by other steps, and read and write the same cache.

    decoder = GpuDecoder.of(model)
    cache = decoder.new_cache()                     # float16; packed: new_cache(Precision("E5M7"))
    logits = decoder.forward(prompt, cache)         # as `decode.Decoder` has it
    decoder.begin([int(logits.argmax())], cache)    # or: let the GPU choose by argmax and go on
    first, second = decoder.advance(), decoder.advance()
    tokens = decoder.chosen(first)                  # waits for the first step only

Every call has the decoder for itself, and `lock` keeps it over several. What is launched depends on the
number of tokens, the precisions and the cache: there is a graph for each combination that occurs twice;
`graph_bytes` counts their memory. The same code runs on the steps in torch (`kernels.steps`), without graphs,
on any device.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import wraps
from itertools import groupby
from threading import RLock
from typing import Any, Concatenate, ParamSpec, TypeVar
from weakref import finalize

import torch

from otaro.errors import OtaroError
from otaro.kernels import ops
from otaro.kernels.cuda_steps import CudaSteps
from otaro.kernels.kv_cache import KvCache
from otaro.kernels.steps import MAX_TOKENS, RING, ReferenceSteps, State, Steps, Tokens
from otaro.runtime.architectures import packed_modules, unpacked_tensors, why_not
from otaro.runtime.caches import GROWTH, GpuCache
from otaro.runtime.decoder import Arranged, BaseDecoder, Costs
from otaro.runtime.description import Description
from otaro.runtime.gpu_layers import Head, Layers, RopeTables, Span
from otaro.runtime.gpu_prompt import CHUNK, CudaPromptSteps, Parts, PromptSteps
from otaro.sefp.precision import Precision

_GRAPHS = 64  # kept at most
P = ParamSpec("P")
R = TypeVar("R")


def _alone(method: Callable[Concatenate[GpuDecoder, P], R]) -> Callable[Concatenate[GpuDecoder, P], R]:
    """With the decoder's lock, and without gradients."""

    @wraps(method)
    def locked(self: GpuDecoder, /, *args: P.args, **kwargs: P.kwargs) -> R:
        with self.lock, torch.no_grad():
            return method(self, *args, **kwargs)

    return locked


@dataclass
class _Graph:
    graph: Any
    nbytes: int
    kv_cache: Any
    """Which must live as long."""


class GpuDecoder(BaseDecoder):
    """Runs weights on the device they are on; `why_not` says which models it serves."""

    max_sequences = MAX_TOKENS
    costs = Costs(several=0.2, each=0.045, fixed=0.3)
    ahead = 1
    pooled = False
    exact_prompts = False  # more than 16 tokens are read by the library's products
    together = False

    def __init__(self, description: Description, steps: Steps | None = None) -> None:
        super().__init__(description)
        self.steps: Steps = steps or steps_for(description.device)
        self.precisions = b""
        """Mantissa bits of every matrix at the last step, whoever made it, of its first token."""
        self.lock = RLock()
        """For threads that share a decoder: whoever has it is alone with what `begin` began."""
        self.state = State(description.device)
        self._layers, self._head = Layers(description, self.steps), Head(description, self.steps)
        self._ropes = RopeTables(description, 1)
        self._graphs: OrderedDict[Any, _Graph] = OrderedDict()
        self._occurred: OrderedDict[Any, None] = OrderedDict()
        self._on_gpu = description.device.type == "cuda" and isinstance(self.steps, CudaSteps)
        self._parts = Parts(description)
        self._routed = any(layer.experts is not None for layer in description.layers)
        self._events = [torch.cuda.Event() for _ in range(RING)] if self._on_gpu else []
        self._stream: Any = None
        # What decodes weights beside it has to leave the GPU to it, and no stream's priority is below the
        # usual one.
        self._prompts = torch.cuda.Stream(description.device, priority=-1) if self._on_gpu else None
        self._step = 0
        self._going: Arranged | None = None
        self._order: list[list[int]] = [[]] * RING  # of the tokens of the last steps, as callers gave them
        self._spare: list[KvCache] = []
        self._enter_stream()

    @staticmethod
    def why_not(model: Any) -> str | None:
        """Why this model has to go through transformers, in words; None if the decoder serves it."""
        if reason := why_not(model):
            return reason
        modules, tensors = packed_modules(model), unpacked_tensors(model)
        devices = {str(one.device) for one in (*tensors, *(module.packed.base for module in modules))}
        if len(devices) > 1:
            return f"it is spread over {', '.join(sorted(devices))}"
        if any(module.packed.shape[-1] % 4 for module in modules):
            return "the width of a layer is no multiple of 4"
        device = modules[0].packed.base.device
        if device.type == "cuda":
            name, reason = ops.backend(device)
            return reason if name == "reference" else None
        return None if device.type == "cpu" else f"it is on {device.type}"

    @_alone
    def new_cache(self, kv: Precision | None = None, sequences: int = 1, capacity: int = 0) -> GpuCache:
        """An empty cache, in float16 or packed, for up to 16 sequences of `capacity` tokens each."""
        if not 0 < sequences <= MAX_TOKENS:
            raise OtaroError(f"a cache holds 1 to {MAX_TOKENS} sequences, not {sequences}")
        self._enter_stream()
        # The memory of a cache that is gone serves the next of its kind, with its graphs; others are freed.
        kind, found = (sequences, kv.mantissa_bits if kv else 0), None
        while self._spare:
            spare = self._spare.pop()
            if found is None and (spare.sequences, spare.bits) == kind and spare.capacity >= capacity:
                found = spare
            else:
                self._forget(spare)
        cache = GpuCache(self.description, kv, sequences, capacity, found)
        finalize(cache, self._spare.extend, cache.holder)
        return cache

    @property
    def graph_bytes(self) -> int:
        """Memory of the captured graphs."""
        return sum(one.nbytes for one in self._graphs.values())

    @_alone
    def forward(
        self,
        ids: Sequence[int],
        cache: GpuCache,
        all_logits: bool = False,
        sequence: int = 0,
        bits: bytes | None = None,
    ) -> torch.Tensor:
        """Up to 16 tokens as one step, more in chunks by the library's products."""
        now = self.description.precisions() if bits is None else bits
        tokens = self._checked(ids, cache, [sequence], [now])
        self._going, before = None, cache.lengths[sequence]
        self.reserve(cache, before + len(tokens))
        logits = torch.empty(
            len(tokens) if all_logits else 1, self.vocabulary, device=self.description.device
        )
        try:
            start = 0
            while start < len(tokens):
                left = len(tokens) - start
                some = tokens[start : start + (left if left <= MAX_TOKENS else CHUNK)]
                start += len(some)
                wanted = "all" if all_logits else "last" if start == len(tokens) else "none"
                if left > MAX_TOKENS:
                    with torch.cuda.stream(self._prompts):
                        found = self._read(some, cache, sequence, now, wanted)
                    self._enter_stream()
                else:
                    self._set(
                        some,
                        range(cache.lengths[sequence], cache.lengths[sequence] + len(some)),
                        [sequence] * len(some),
                    )
                    found = self._run(len(some), [Span(slice(0, len(some)), now)], cache, wanted)
                cache.lengths[sequence] += len(some)
                self.precisions = now
                if wanted != "none":
                    logits[start - len(some) : start] = found if all_logits else found[-1:]
            cache.check()
        except BaseException:
            cache.lengths[sequence] = before
            raise
        return logits if all_logits else logits[0]

    @_alone
    def step(
        self,
        ids: Sequence[int],
        cache: GpuCache,
        sequences: Sequence[int] | None = None,
        bits: Sequence[bytes] | None = None,
    ) -> torch.Tensor:
        """As one launch."""
        logits, going = self._stepped(ids, cache, sequences, bits)
        cache.check()
        for sequence in going.sequences:
            cache.lengths[sequence] += 1
        # indices would be waited for
        return logits.clone() if going.at == list(range(len(going.at))) else logits[going.at]

    @_alone
    def likeliest(
        self, ids: Sequence[int], cache: GpuCache, sequences: Sequence[int], bits: Sequence[bytes]
    ) -> list[int]:
        """The host waits once."""
        logits, going = self._stepped(ids, cache, sequences, bits)
        *found, refused = torch.cat([logits.argmax(-1), cache.kv_cache.refused]).tolist()
        if refused:
            cache.check()
        for sequence in going.sequences:
            cache.lengths[sequence] += 1
        return [found[index] for index in going.at]

    def _stepped(
        self,
        ids: Sequence[int],
        cache: GpuCache,
        sequences: Sequence[int] | None,
        bits: Sequence[bytes] | None,
    ) -> tuple[torch.Tensor, Arranged]:
        """Logits after each token, as they were arranged; the cache does not count them yet."""
        going = self._arranged(ids, cache, sequences, bits)
        positions = [
            cache.lengths[sequence] + at for sequence, count in going.counts.items() for at in range(count)
        ]
        self._set(going.ids, positions, going.sequences)
        return self._run(len(going.ids), _spans(going, self.description), cache, "all"), going

    @_alone
    def begin(
        self,
        ids: Sequence[int],
        cache: GpuCache,
        sequences: Sequence[int] | None = None,
        bits: Sequence[bytes] | None = None,
    ) -> object:
        """Go on from these tokens, one for each of some sequences, by argmax: see `advance`, `goes_on`."""
        going = self._arranged(ids, cache, sequences, bits)
        if len(going.counts) != len(going.ids):
            raise OtaroError("what goes on by itself goes on from one token of each sequence")
        self._set(going.ids, [cache.lengths[sequence] for sequence in going.sequences], going.sequences)
        self._going = going
        return going

    def goes_on(self, begun: object) -> bool:
        """Whether `advance` would go on with what `begin` returned: nothing else was read or begun since."""
        return begun is not None and begun is self._going

    @_alone
    def end(self, begun: object) -> None:
        """Let go of the cache of what `begin` returned, if nobody else has begun anything since."""
        if self.goes_on(begun):
            self._going = None

    def knows(self, number: int) -> bool:
        """Whether `chosen` can still tell of this step: others may have made many since."""
        return max(0, self._step - RING) <= number < self._step

    @_alone
    def advance(self) -> int:
        """Start a step; the number it returns is for `chosen`. At most `steps.RING` may be under way.

        Where tokens were not given mantissa bits it runs at those that are set now.
        """
        going = self._going
        if going is None:
            raise OtaroError("nothing was begun that could go on")
        cache = going.cache
        self.reserve(cache, max(cache.lengths[sequence] for sequence in going.sequences) + 1)
        self._run(len(going.ids), _spans(going, self.description), cache, "argmax")
        for sequence in going.sequences:
            cache.lengths[sequence] += 1
        number, self._step = self._step, self._step + 1
        self._order[number % RING] = going.at
        if self._on_gpu:
            self._events[number % RING].record(self._stream)
        return number

    @_alone
    def chosen(self, number: int) -> list[int]:
        """The tokens that a step chose, in the order in which `begin` had theirs; waits until it is done."""
        if not self.knows(number):
            raise OtaroError(f"step {number} is not, or no longer, known")
        if self._on_gpu:
            self._events[number % RING].synchronize()
        row = self.state.ring[number % RING].tolist()
        return [row[index] for index in self._order[number % RING]]

    def _arranged(
        self,
        ids: Sequence[int],
        cache: GpuCache,
        sequences: Sequence[int] | None,
        bits: Sequence[bytes] | None,
    ) -> Arranged:
        some = super()._arranged(ids, cache, sequences, bits)
        self.reserve(cache, max(cache.lengths[sequence] + count for sequence, count in some.counts.items()))
        return some

    def _checked(
        self, ids: Sequence[int], cache: GpuCache, sequences: list[int], bits: Sequence[bytes]
    ) -> list[int]:
        if not isinstance(cache, GpuCache) or not cache.fits(self.description):
            raise OtaroError("this cache was made by the decoder of another model")
        return super()._checked(ids, cache, sequences, bits)

    @_alone
    def reserve(self, cache: GpuCache, length: int) -> None:
        """Have memory and angles for so many positions; refused where the ropes do not hold so far."""
        self.description.check_positions(length)
        self._enter_stream()
        old = cache.kv_cache
        if cache.reserve(length):
            self._forget(old)
        known = self._ropes.positions
        if length > known:
            end = -(-max(length, cache.capacity, 2 * known) // GROWTH) * GROWTH
            self._ropes = RopeTables(self.description, min(end, self.description.positions or end))
            self._forget(None)

    def _forget(self, kv_cache: KvCache | None) -> None:
        """Drop the graphs that point into this memory, or all."""
        gone = [key for key, one in self._graphs.items() if kv_cache is None or one.kv_cache is kv_cache]
        if gone and self._on_gpu:
            torch.cuda.synchronize(self.description.device)
        for key in gone:
            del self._graphs[key]

    def _set(self, ids: Sequence[int], positions: Sequence[int], sequences: Sequence[int]) -> None:
        """Tell the device which tokens come next; whatever was begun before does not go on."""
        self._enter_stream()
        self._going = None
        filled = [[*row, *[0] * (MAX_TOKENS - len(row))] for row in (ids, positions, sequences)]
        steps = [self._step % RING] * MAX_TOKENS
        # CUDA has so few bytes copied before it returns: nobody needs to wait for the rest.
        self.state.all.copy_(torch.tensor([*filled, steps], dtype=torch.int32), non_blocking=True)

    def _enter_stream(self) -> None:
        """Whatever stream the caller is on, it follows what we did on another one before."""
        if self._on_gpu:
            now = torch.cuda.current_stream(self.description.device)
            if self._stream is not None and self._stream != now:
                now.wait_stream(self._stream)
            self._stream = now

    def _read(self, ids: list[int], cache: GpuCache, sequence: int, bits: bytes, wanted: str) -> torch.Tensor:
        """A chunk of a prompt; logits come from the step's own product."""
        self._enter_stream()
        device, past, count = self.description.device, cache.lengths[sequence], len(ids)
        positions = torch.arange(past, past + count, dtype=torch.int32, device=device)
        ids_there = torch.tensor(ids, dtype=torch.int32, device=device)
        tokens = Tokens(ids_there, positions, torch.full_like(positions, sequence))
        dtype = self.description.dtype
        steps: Steps = PromptSteps(device, dtype, sequence, past)
        if self._on_gpu and dtype != torch.float32 and not self._routed:
            steps = CudaPromptSteps(device, dtype, sequence, past, self._parts.of(bits, count))
        layers = Layers(self.description, steps, count)
        layers.run(count, tokens, [Span(slice(0, count), bits)], self._ropes, cache.kv_cache)
        if wanted == "none":
            return layers.x
        start = count - 1 if wanted == "last" else 0
        logits = torch.empty(count - start, self.vocabulary, device=device)
        for at in range(start, count, MAX_TOKENS):
            few = slice(0, min(MAX_TOKENS, count - at))
            for ours, theirs in ((self._layers.x, layers.x), (self._layers.delta, layers.delta)):
                ours[few] = theirs[at : at + MAX_TOKENS]
            self._head.run(few, self._layers.x[few], self._layers.last_delta(few), [Span(few, bits)])
            logits[at - start :][few] = self._head.logits[few]
        return logits

    def _run(self, tokens: int, spans: list[Span], cache: GpuCache, wanted: str) -> torch.Tensor:
        """One step: from its graph if there is one, else launch by launch; the second time it is captured."""
        self._enter_stream()
        self.precisions = spans[0].bits
        key = (tokens, tuple((span.some.stop, span.bits) for span in spans), cache.kv_cache.number, wanted)
        found = self._graphs.get(key)
        if found is None and self._on_gpu and key in self._occurred:
            found = self._capture(key, lambda: self._launch(tokens, spans, cache, wanted), cache)
        if found is None:
            self._launch(tokens, spans, cache, wanted)
            self._occurred[key] = None
            if len(self._occurred) > 4 * _GRAPHS:
                self._occurred.popitem(last=False)
        else:
            self._graphs.move_to_end(key)
            found.graph.replay()
        logits = self._head.logits[:tokens]
        return logits[-1:] if wanted == "last" else logits

    def _capture(self, key: Any, launch: Callable[[], None], cache: GpuCache) -> _Graph:
        device = self.description.device
        torch.cuda.synchronize(device)
        before = torch.cuda.mem_get_info(device)[0]
        graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream(device)
        stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(stream):
            graph.capture_begin(capture_error_mode="thread_local")
            try:
                launch()
            finally:
                graph.capture_end()
        torch.cuda.synchronize(device)
        found = self._graphs[key] = _Graph(
            graph, max(0, before - torch.cuda.mem_get_info(device)[0]), cache.kv_cache
        )
        if len(self._graphs) > _GRAPHS:
            self._graphs.popitem(last=False)
        return found

    def _launch(self, tokens: int, spans: list[Span], cache: GpuCache, wanted: str) -> None:
        layers = self._layers
        layers.run(tokens, self.state, spans, self._ropes, cache.kv_cache)
        some = slice(0, tokens)
        if wanted == "last":
            some = slice(tokens - 1, tokens)
            spans = [Span(some, spans[-1].bits)]
        self._head.run(some, layers.x[some], layers.last_delta(some), spans)
        if wanted == "argmax":
            self.steps.argmax(self._head.logits[:tokens], self.state)


def _spans(some: Arranged, description: Description) -> list[Span]:
    """Neighbours of one precision: their own, or else as the model is set."""
    if some.bits is None:
        return [Span(slice(0, len(some.ids)), description.precisions())]
    spans, start = [], 0
    for bits, same in groupby(some.bits):
        count = len(list(same))
        spans.append(Span(slice(start, start + count), bits))
        start += count
    return spans


def steps_for(device: torch.device) -> Steps:
    """Kernels where there are some, else torch."""
    return CudaSteps(device) if ops.backend(device)[0].startswith("cuda") else ReferenceSteps(device)
