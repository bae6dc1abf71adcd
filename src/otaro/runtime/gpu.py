"""A decoder for the LLaMA family on a GPU, whose cost is the weights: a token is one launch of a captured graph.

`GpuDecoder.of(model)` serves a nested model, `GpuDecoder(weights)` any weights of that form (`description`). A step takes up
to 16 tokens, of one sequence or of several; each has its own position, and may have its own precision. Longer prompts are read
in chunks, with decoded weights and the device's library. All of it reads and writes the same cache.

    decoder = GpuDecoder.of(model)
    cache = decoder.new_cache()                     # float16; new_cache(Precision("E5M7")) for packed keys and values
    logits = decoder.forward(prompt, cache)         # as `decode.Decoder` has it
    decoder.begin([int(logits.argmax())], cache)    # or: let the GPU choose the likeliest token and go on
    first, second = decoder.advance(), decoder.advance()
    tokens = decoder.chosen(first)                  # waits for the first step only

A step that is given no mantissa bits asks the weights for theirs, so that `otaro.set_precision` takes effect at the next token.
Threads may share a decoder: every call has it for itself, and `lock` keeps it over several. What is launched depends on the
number of tokens, the precisions and the cache, so there is a graph for each combination that occurs twice; `graph_bytes` counts
their memory. The same code runs on the steps in torch (`kernels.steps`), without graphs, on any device.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import wraps
from itertools import groupby
from threading import RLock
from typing import Any, Concatenate, NamedTuple, ParamSpec, TypeVar
from weakref import finalize

import torch

from otaro.errors import OtaroError
from otaro.kernels import ops
from otaro.kernels.cuda_steps import CudaSteps
from otaro.kernels.keyvalues import KeyValues
from otaro.kernels.steps import MAX_TOKENS, RING, Activations, ReferenceSteps, Rotation, State, Steps
from otaro.runtime.architectures import describe, packed_modules, still_describes, unpacked_tensors, why_not
from otaro.runtime.description import MATRICES, Description, Matrix
from otaro.runtime.gpu_buffers import Buffers
from otaro.runtime.gpu_cache import GROWTH, GpuCache
from otaro.runtime.gpu_prompt import CHUNK, read_prompt
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


class Span(NamedTuple):
    """Neighbouring tokens of a step that have the same precisions."""

    some: slice
    bits: bytes
    """Mantissa bits of embedding, matrices and head."""


@dataclass
class _Graph:
    graph: Any
    nbytes: int
    room: Any
    """The cache's memory, which must live as long."""


class GpuDecoder:
    """Runs weights on the device they are on; `why_not` says which models it serves."""

    max_sequences = MAX_TOKENS
    ahead = 1
    """Steps that it pays to have begun before the last one's token is looked at."""

    def __init__(self, weights: Description, steps: Steps | None = None) -> None:
        self.weights = weights
        self.steps: Steps = steps or steps_for(weights.device)
        self.vocabulary = weights.lm_head.rows
        self.precisions = b""
        """Mantissa bits of every matrix at the last step, whoever made it, of its first token."""
        self.lock = RLock()
        """For threads that share a decoder: whoever has it is alone with what `begin` began."""
        self.state = State(weights.device)
        self._buffers = Buffers(weights, self.steps)
        self._rotation = self._angles(1)
        self._graphs: OrderedDict[Any, _Graph] = OrderedDict()
        self._occurred: OrderedDict[Any, None] = OrderedDict()
        self._on_gpu = weights.device.type == "cuda" and isinstance(self.steps, CudaSteps)
        self._events = [torch.cuda.Event() for _ in range(RING)] if self._on_gpu else []
        self._stream: Any = None
        self._step = 0
        self._going: _Going | None = None
        self._places: list[int] = []
        self._spare: list[KeyValues] = []
        self._enter_stream()

    @staticmethod
    def of(model: Any, steps: Steps | None = None) -> GpuDecoder:
        """The decoder of a nested model."""
        if reason := GpuDecoder.why_not(model):
            raise OtaroError(f"the decoder does not serve this model: {reason}")
        return GpuDecoder(describe(model), steps)

    @staticmethod
    def why_not(model: Any) -> str | None:
        """Why this model has to go through transformers, in words; None if the decoder serves it."""
        if reason := why_not(model):
            return reason
        if (kind := model.config.model_type) not in ("llama", "mistral", "qwen2", "qwen3"):
            return f"its architecture is {kind}, which the decoder does on CPUs alone"
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

    def serves(self, model: Any) -> bool:
        """Whether this decoder still has what the model consists of."""
        return still_describes(self.weights, model)

    @_alone
    def new_cache(self, kv: Precision | None = None, sequences: int = 1, capacity: int = 0) -> GpuCache:
        """An empty cache, in float16 or packed at a precision, for up to 16 sequences; room for `capacity` tokens of each."""
        if not 0 < sequences <= MAX_TOKENS:
            raise OtaroError(f"a cache holds 1 to {MAX_TOKENS} sequences, not {sequences}")
        self._enter_stream()
        # The room of a cache that is gone, with the graphs into it, serves the next one of its kind; others are freed.
        kind, found = (sequences, kv.mantissa_bits if kv else 0), None
        while self._spare:
            room = self._spare.pop()
            if found is None and (room.sequences, room.bits) == kind and room.capacity >= capacity:
                found = room
            else:
                self._forget(room)
        cache = GpuCache(self.weights, kv, sequences, capacity, found)
        finalize(cache, self._spare.extend, cache.holder)
        return cache

    @property
    def graph_bytes(self) -> int:
        """Memory of the captured graphs."""
        return sum(one.nbytes for one in self._graphs.values())

    @_alone
    def forward(
        self, ids: Sequence[int], cache: GpuCache, all_logits: bool = False, sequence: int = 0, bits: bytes | None = None
    ) -> torch.Tensor:
        """Read `ids` after what a sequence of the cache holds; float32 logits [vocabulary], or [ids, vocabulary] after each.

        They are on the device. `bits` are the mantissa bits of its matrices, by default those that are set now. If anything is
        refused the cache is as before.
        """
        tokens = self._checked(ids, cache, [sequence], bits)
        now = self.weights.precisions() if bits is None else bits
        self._going, before = None, cache.lengths[sequence]
        self.reserve(cache, before + len(tokens))
        logits = torch.empty(len(tokens) if all_logits else 1, self.vocabulary, device=self.weights.device)
        try:
            start = 0
            while start < len(tokens):
                left = len(tokens) - start
                some = tokens[start : start + (left if left <= MAX_TOKENS else CHUNK)]
                start += len(some)
                wanted = "all" if all_logits else "last" if start == len(tokens) else "none"
                if left > MAX_TOKENS:
                    found = self._read(some, cache, sequence, now, wanted)
                else:
                    self._set(some, range(cache.lengths[sequence], cache.lengths[sequence] + len(some)), [sequence] * len(some))
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
        """Read one token of each of some sequences, by default of all; float32 logits [tokens, vocabulary] on the device.

        `bits` are the mantissa bits of each token's matrices, as `Description.all_at` gives them.
        """
        going = self._arranged(ids, cache, sequences, bits)
        positions = [cache.lengths[sequence] for sequence in going.sequences]
        self._set(going.ids, positions, going.sequences)
        logits = self._run(len(going.ids), going.spans(self.weights), cache, "all")
        cache.check()
        for sequence in going.sequences:
            cache.lengths[sequence] += 1
        return logits[going.places]

    @_alone
    def begin(
        self,
        ids: Sequence[int],
        cache: GpuCache,
        sequences: Sequence[int] | None = None,
        bits: Sequence[bytes] | None = None,
    ) -> object:
        """Go on from these tokens, one for each of some sequences, by the likeliest: see `advance`, and `goes_on`."""
        going = self._arranged(ids, cache, sequences, bits)
        self._set(going.ids, [cache.lengths[sequence] for sequence in going.sequences], going.sequences)
        self._going, self._places = going, going.places
        return going

    def goes_on(self, begun: object) -> bool:
        """Whether `advance` would go on with what `begin` returned: nothing else was read or begun since."""
        return begun is not None and begun is self._going

    @_alone
    def advance(self, bits: bytes | None = None) -> int:
        """Start a step; the number it returns is for `chosen`. At most `steps.RING` may be under way.

        `bits` are the mantissa bits of this step, where tokens were not given theirs; by default those that are set now.
        """
        going = self._going
        if going is None:
            raise OtaroError("nothing was begun that could go on")
        cache = going.cache
        self.reserve(cache, max(cache.lengths[sequence] for sequence in going.sequences) + 1)
        self._run(len(going.ids), going.spans(self.weights, bits), cache, "likeliest")
        for sequence in going.sequences:
            cache.lengths[sequence] += 1
        number, self._step = self._step, self._step + 1
        if self._on_gpu:
            self._events[number % RING].record(self._stream)
        return number

    @_alone
    def chosen(self, number: int) -> list[int]:
        """The tokens that a step chose, in the order in which `begin` was given theirs; waits until it is done."""
        if not max(0, self._step - RING) <= number < self._step:
            raise OtaroError(f"step {number} is not, or no longer, known")
        if self._on_gpu:
            self._events[number % RING].synchronize()
        row = self.state.ring[number % RING].tolist()
        return [row[place] for place in self._places]

    def _arranged(
        self, ids: Sequence[int], cache: GpuCache, sequences: Sequence[int] | None, bits: Sequence[bytes] | None
    ) -> _Going:
        those = list(range(len(cache.lengths))) if sequences is None else list(sequences)
        tokens = self._checked(ids, cache, those, *(bits or ()))
        if len(those) != len(tokens) or len(set(those)) != len(those) or len(tokens) > MAX_TOKENS:
            raise OtaroError(
                f"{len(tokens)} tokens for {len(those)} sequences: a step takes one of each, and {MAX_TOKENS} at most"
            )
        if bits is not None and len(bits) != len(tokens):
            raise OtaroError(f"precisions of {len(bits)} tokens were given for {len(tokens)}")
        # Tokens of one precision are multiplied together, so they must be neighbours.
        order = sorted(range(len(tokens)), key=lambda i: bits[i] if bits else b"")
        places = [order.index(i) for i in range(len(tokens))]
        chosen = None if bits is None else [bits[i] for i in order]
        self.reserve(cache, max(cache.lengths[sequence] for sequence in those) + 1)
        return _Going([tokens[i] for i in order], [those[i] for i in order], places, chosen, cache)

    def _checked(self, ids: Sequence[int], cache: GpuCache, sequences: list[int], *bits: bytes | None) -> list[int]:
        tokens = [int(one) for one in ids] if all(not isinstance(one, list | tuple) for one in ids) else []
        if not tokens:
            raise OtaroError("the decoder reads one token or more, as a flat sequence")
        for token in tokens:
            if not 0 <= token < self.vocabulary:
                raise OtaroError(f"token {token} is not in the vocabulary of {self.vocabulary}")
        if not isinstance(cache, GpuCache) or not cache.fits(self.weights):
            raise OtaroError("this cache was made by the decoder of another model")
        for sequence in sequences:
            if not 0 <= sequence < len(cache.lengths):
                raise OtaroError(f"sequence {sequence} is none of the {len(cache.lengths)} of this cache, counted from 0")
        for one in bits:
            if one is not None and len(one) != (matrices := len(self.weights.precisions())):
                raise OtaroError(
                    f"precisions of {len(one)} matrices were given for {matrices}; `Description.all_at` makes them"
                )
        return tokens

    @_alone
    def reserve(self, cache: GpuCache, length: int) -> None:
        """Make room for so many positions, and know their angles."""
        self._enter_stream()
        old = cache.room
        if cache.reserve(length):
            self._forget(old)
        known = len(self._rotation.cosines)
        if length > known:
            end = -(-max(length, cache.capacity, 2 * known) // GROWTH) * GROWTH
            self._rotation = self._angles(end)
            self._forget(None)

    def _angles(self, end: int) -> Rotation:
        cosines, sines = (table.contiguous() for table in self.weights.ropes[0](0, end))
        return Rotation(cosines, sines, self.weights.scale, self.weights.eps)

    def _forget(self, room: KeyValues | None) -> None:
        """Drop the graphs that point into this room, or all."""
        gone = [key for key, one in self._graphs.items() if room is None or one.room is room]
        if gone and self._on_gpu:
            torch.cuda.synchronize(self.weights.device)
        for key in gone:
            del self._graphs[key]

    def _set(self, ids: Sequence[int], positions: Sequence[int], sequences: Sequence[int]) -> None:
        """Tell the device which tokens come next; whatever was begun before does not go on."""
        self._enter_stream()
        self._going = None
        filled = [[*row, *[0] * (MAX_TOKENS - len(row))] for row in (ids, positions, sequences)]
        steps = [self._step % RING] * MAX_TOKENS
        self.state.all.copy_(torch.tensor([*filled, steps], dtype=torch.int32))

    def _enter_stream(self) -> None:
        """Whatever stream the caller is on, it follows what we did on another one before."""
        if self._on_gpu:
            now = torch.cuda.current_stream(self.weights.device)
            if self._stream is not None and self._stream != now:
                now.wait_stream(self._stream)
            self._stream = now

    def _read(self, ids: list[int], cache: GpuCache, sequence: int, bits: bytes, wanted: str) -> torch.Tensor:
        """A chunk of a prompt; `last` logits come from the step's own product."""
        self._enter_stream()
        x = read_prompt(self.weights, ids, cache, sequence, bits, self._rotation)
        if wanted == "none":
            return x
        if wanted == "last":
            x = x[-1:]
        logits = torch.empty(len(x), self.vocabulary, device=x.device)
        for start in range(0, len(x), MAX_TOKENS):
            some = x[start : start + MAX_TOKENS]
            self._buffers.x[: len(some)] = some
            self._finish(slice(0, len(some)), None, [Span(slice(0, len(some)), bits)])
            logits[start : start + len(some)] = self._buffers.logits[: len(some)]
        return logits

    def _run(self, tokens: int, spans: list[Span], cache: GpuCache, wanted: str) -> torch.Tensor:
        """One step: from its graph if there is one, else launch by launch; the second time a graph is captured."""
        self._enter_stream()
        self.precisions = spans[0].bits
        key = (tokens, tuple((span.some.stop, span.bits) for span in spans), cache.room.number, wanted)
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
        logits = self._buffers.logits[:tokens]
        return logits[-1:] if wanted == "last" else logits

    def _capture(self, key: Any, launch: Callable[[], None], cache: GpuCache) -> _Graph:
        device = self.weights.device
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
        found = self._graphs[key] = _Graph(graph, max(0, before - torch.cuda.mem_get_info(device)[0]), cache.room)
        if len(self._graphs) > _GRAPHS:
            self._graphs.popitem(last=False)
        return found

    def _launch(self, tokens: int, spans: list[Span], cache: GpuCache, wanted: str) -> None:
        steps, weights, buffers, state, room = self.steps, self.weights, self._buffers, self.state, cache.room
        all_of_them = slice(0, tokens)
        x, queries = buffers.x[:tokens], buffers.queries[:tokens]
        hidden, attended, gated = (one.rows(all_of_them) for one in (buffers.hidden, buffers.attended, buffers.gated))
        for some, bits in self._parts_of(spans, [0]):
            steps.embed(state.ids[some], weights.embedding.at(bits[0]), x[some])
        delta = None
        for number, layer in enumerate(weights.layers):
            first = 1 + len(MATRICES) * number
            assert layer.attention_norm is not None
            assert layer.mlp_norm is not None
            steps.normalise(x, delta, layer.attention_norm, weights.eps, hidden)
            self._multiply(hidden, layer.those("query", "key", "value", first=first), buffers.projected, spans)
            vectors = buffers.vectors(tokens)
            steps.place(vectors, (layer.query_norm, layer.key_norm), self._rotation, state, queries, room, number)
            steps.attend(queries, state, room, number, layer.window, attended)
            delta = buffers.delta[:tokens]
            self._multiply(attended, [(layer.output, first + 3)], [buffers.delta], spans)
            steps.normalise(x, delta, layer.mlp_norm, weights.eps, hidden)
            self._multiply(hidden, layer.those("gate", "up", first=first + 4), buffers.gates, spans)
            gate, up = buffers.gate_and_up(tokens)
            steps.quantise(gate, gated, up)
            self._multiply(gated, [(layer.down, first + 6)], [buffers.delta], spans)
        if wanted == "last":
            last = slice(tokens - 1, tokens)
            self._finish(last, buffers.delta[last], [Span(last, spans[-1].bits)])
        else:
            self._finish(all_of_them, delta, spans)
        if wanted == "likeliest":
            steps.choose(buffers.logits[:tokens], state)

    def _finish(self, some: slice, delta: torch.Tensor | None, spans: list[Span]) -> None:
        """The last norm, and logits."""
        weights, buffers = self.weights, self._buffers
        self.steps.normalise(buffers.x[some], delta, weights.norm, weights.eps, buffers.last.rows(some))
        number = 1 + len(MATRICES) * len(weights.layers)
        if buffers.half_logits is None:
            self._multiply(buffers.last, [(weights.lm_head, number)], [buffers.logits], spans)
        else:
            self._multiply(buffers.last, [(weights.lm_head, number)], [buffers.half_logits], spans)
            buffers.logits[some] = buffers.half_logits[some]

    def _multiply(
        self, x: Activations, matrices: list[tuple[Matrix, int]], outs: Sequence[torch.Tensor], spans: list[Span]
    ) -> None:
        """Products of some matrices, each with its number among the precisions, once for each precision."""
        for some, bits in self._parts_of(spans, [number for _, number in matrices]):
            self.steps.multiply(
                x.rows(some),
                [matrix.at(m) for (matrix, _), m in zip(matrices, bits, strict=True)],
                [out[some] for out in outs],
                [matrix.bias for matrix, _ in matrices],
            )

    @staticmethod
    def _parts_of(spans: list[Span], numbers: list[int]) -> list[tuple[slice, bytes]]:
        """Neighbours that agree in the precisions of these matrices."""
        parts = []
        for bits, same in groupby(spans, key=lambda span: bytes(span.bits[number] for number in numbers)):
            few = list(same)
            parts.append((slice(few[0].some.start, few[-1].some.stop), bits))
        return parts


@dataclass
class _Going:
    """Tokens in the order in which they are computed."""

    ids: list[int]
    sequences: list[int]
    places: list[int]
    """Where the caller's tokens are."""
    bits: list[bytes] | None
    cache: GpuCache

    def spans(self, weights: Description, bits: bytes | None = None) -> list[Span]:
        """Neighbours of one precision: their own, or else `bits`, or else as the weights are set."""
        if self.bits is None:
            return [Span(slice(0, len(self.ids)), bits or weights.precisions())]
        spans, start = [], 0
        for bits, same in groupby(self.bits):
            count = len(list(same))
            spans.append(Span(slice(start, start + count), bits))
            start += count
        return spans


def steps_for(device: torch.device) -> Steps:
    """Kernels where there are some, else torch."""
    return CudaSteps(device) if ops.backend(device)[0].startswith("cuda") else ReferenceSteps(device)
