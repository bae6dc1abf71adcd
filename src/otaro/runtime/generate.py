"""`generate` of a nested model: transformers' own, with the decoder in place of its innermost loop.

transformers prepares inputs, generation options, logits processors, stopping criteria and streamers, then calls `_sample`
once. `Generates`, mixed into the class of a nested model, answers that call with `decode_loop` where the decoder can serve,
and passes it on where not; `model.generation` then tells which it was, why, and how long it took.

On both ways the precision may change while tokens are produced:

    model.generate(ids, prefill="E5M8", decode="E5M4")            # read the prompt at E5M8, write at E5M4
    model.generate(ids, schedule={0: "E5M8", 100: "E5M4"})        # from the 100th new token on at E5M4
    model.generate(ids, precision="E5M4")                          # all of it at E5M4
    model.generate(ids, precision=["E5M4", "E5M8"])                # one for each row (decoder of a GPU only)
    model.generate(ids, kv="E5M7")                                 # packed keys and values (decoder only)

and so it may by `otaro.set_precision` in a streamer or another thread: what counts is the precision when a step begins. A
model that was given phases runs afterwards as it did before.

On a GPU the likeliest token is chosen there. While no streamer, processor or stopping criterion of the caller's looks on, the
next step begins before the last one's token is known to the host: phases begin where they should all the same, but what
another thread sets takes effect one token later.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import LogitsProcessor, LogitsProcessorList, StoppingCriteriaList
from transformers.generation import GenerateDecoderOnlyOutput

from otaro.errors import OtaroError, PrecisionError
from otaro.runtime.decode import DecoderCache
from otaro.runtime.gpu import GpuDecoder
from otaro.runtime.precision import PrecisionLike, at_precision, attachment, finest_of, keeping_precision, set_precision
from otaro.runtime.rows import Rows, Stop
from otaro.runtime.sample import Sampler
from otaro.runtime.serving import (
    BatchReader,
    RowReader,
    decoder_of,
    forget,
    padded_on_the_left,
    room_for,
    rows_at_once,
    unpadded,
    why_not,
)
from otaro.sefp.precision import Precision


@dataclass
class Generation:
    """How the last `generate` of a model went; kept as `model.generation`."""

    served_by: str = "transformers"
    reason: str = ""
    """Why it was not the decoder."""
    prompt_tokens: int = 0
    """In a row, padding included."""
    reused_tokens: int = 0
    """Tokens of the prompt that a cache already held."""
    new_tokens: int = 0
    """In a row."""
    prefill_seconds: float = 0.0
    decode_seconds: float = 0.0
    precisions: list[str] = field(default_factory=list)
    """Those that steps ran at, in order; rows that differ are set apart by slashes."""
    cache_bytes: int | None = None
    """Memory of keys and values; unknown where transformers keeps them."""

    @property
    def prefill_rate(self) -> float:
        """Prompt tokens read per second, of one row."""
        return (self.prompt_tokens - self.reused_tokens) / max(self.prefill_seconds, 1e-9)

    @property
    def decode_rate(self) -> float:
        """New tokens of a row per second after the first, which comes with the prompt."""
        return max(self.new_tokens - 1, 0) / max(self.decode_seconds, 1e-9)


class Phases:
    """Precisions by the number of new tokens when a step begins: the step that reads the prompt is 0."""

    def __init__(
        self,
        prefill: PrecisionLike | None = None,
        decode: PrecisionLike | None = None,
        schedule: Mapping[int, PrecisionLike] | None = None,
    ) -> None:
        if schedule is not None and (prefill is not None or decode is not None):
            raise PrecisionError("a schedule says all there is to say: give either schedule, or prefill and decode")
        steps = dict(schedule or {})
        if any(not isinstance(step, int) or step < 0 for step in steps):
            raise PrecisionError(f"a schedule maps numbers of new tokens to precisions, not {min(steps, key=str)!r}")
        if prefill is not None:
            steps[0] = prefill
        if decode is not None:
            steps[1] = decode
        self.steps = {step: steps[step] for step in sorted(steps)}

    def enter(self, model: Any, step: int) -> None:
        """Switch if a phase begins with this step."""
        if step in self.steps:
            set_precision(model, self.steps[step])

    @contextmanager
    def around(self, model: Any) -> Iterator[None]:
        """Refuse at once what the directory cannot do; afterwards run as before."""
        if not self.steps:
            yield
            return
        attachment(model).nested.require(max(finest_of(precision) for precision in self.steps.values()))
        with keeping_precision(model):
            yield


@dataclass
class _Request:
    """One call of `generate`, as `_sample` finds it."""

    phases: Phases
    kv: Precision | None
    obstacle: str
    """What in the arguments keeps the decoder from serving, in words."""
    rows: Sequence[PrecisionLike] | None = None
    """A precision for each row."""


_request: ContextVar[_Request | None] = ContextVar("request", default=None)
_classes: dict[type, type] = {}


def serve_with_decoder(model: Any) -> None:
    """Give a nested model our `generate`; its class becomes a subclass of the same name."""
    kind = type(model)
    if kind not in _classes:
        about = {"__module__": kind.__module__, "__doc__": kind.__doc__}
        _classes[kind] = type(kind.__name__, (Generates, kind), about)
    model.__class__ = _classes[kind]


class Generates:
    """Mixed into the class of a nested model."""

    generation: Generation

    def _apply(self, *args: Any, **kwargs: Any) -> Any:
        forget(self)
        return super()._apply(*args, **kwargs)  # type: ignore[misc]

    def generate(
        self,
        *args: Any,
        prefill: PrecisionLike | None = None,
        decode: PrecisionLike | None = None,
        schedule: Mapping[int, PrecisionLike] | None = None,
        precision: PrecisionLike | Sequence[PrecisionLike] | None = None,
        kv: str | Precision | None = None,
        **kwargs: Any,
    ) -> Any:
        """As transformers' `generate`, with precisions by phase or by row; see the head of this module."""
        phases, rows = Phases(prefill, decode, schedule), None
        if precision is not None:
            if phases.steps:
                raise PrecisionError("give either precision, for all of a generation, or prefill, decode and schedule")
            if isinstance(precision, str | Precision | Mapping):
                phases = Phases(schedule={0: precision})
            elif isinstance(precision, Iterable):
                rows = list(precision)
            else:
                raise PrecisionError(f"precision={precision!r}: give one such as E5M4, or a list with one for each row")
        cache = kwargs.get("past_key_values")
        if kv is not None and cache is not None:
            raise OtaroError("kv chooses the precision of a new cache, and past_key_values brings one: give either")
        request = _Request(phases, None if kv is None else Precision(kv), "", rows)
        if cache is not None and not isinstance(cache, DecoderCache):
            request.obstacle = f"the cache given is a {type(cache).__name__}"
        elif kwargs.get("position_ids") is not None:
            request.obstacle = "position_ids were given"
        token = _request.set(request)
        try:
            with phases.around(self):
                return super().generate(*args, **kwargs)  # type: ignore[misc]
        finally:
            _request.reset(token)

    def _sample(
        self,
        input_ids: torch.Tensor,
        logits_processor: Any,
        stopping_criteria: Any,
        generation_config: Any,
        synced_gpus: bool = False,
        streamer: Any = None,
        **model_kwargs: Any,
    ) -> Any:
        request = _request.get() or _Request(Phases(), None, "another library called it")
        options = {"generation_config": generation_config, "synced_gpus": synced_gpus, "streamer": streamer, **model_kwargs}
        reason = request.obstacle or _obstacle(input_ids, options, rows_at_once(self)) or why_not(self)
        if reason:
            return self._by_transformers("_sample", reason, input_ids, logits_processor, stopping_criteria, options)
        cache = model_kwargs.get("past_key_values")
        with (
            torch.inference_mode(False),
            torch.no_grad(),
        ):  # what a decoder keeps must stay writable when the caller's mode ends
            return decode_loop(
                self,
                input_ids,
                logits_processor,
                stopping_criteria,
                generation_config,
                streamer,
                cache if isinstance(cache, DecoderCache) else None,
                model_kwargs.get("attention_mask"),
                request,
            )

    def _beam_search(
        self, input_ids: torch.Tensor, logits_processor: Any, stopping_criteria: Any, generation_config: Any, **options: Any
    ) -> Any:
        options["generation_config"] = generation_config
        return self._by_transformers(
            "_beam_search", "it searches with beams", input_ids, logits_processor, stopping_criteria, options
        )

    def _assisted_decoding(self, *args: Any, **kwargs: Any) -> Any:
        request = _request.get()
        if request and (request.phases.steps or request.kv or request.rows):
            raise OtaroError("prefill, decode, schedule, precision and kv do not go together with assisted generation")
        self.generation = Generation(reason="it is assisted by another model")
        return super()._assisted_decoding(*args, **kwargs)  # type: ignore[misc]

    def _by_transformers(
        self, method: str, reason: str, input_ids: torch.Tensor, processors: Any, criteria: Any, options: dict[str, Any]
    ) -> Any:
        """Pass the call on, watching it from a logits processor: that is called once after every step."""
        request = _request.get() or _Request(Phases(), None, "")
        if request.kv:
            raise OtaroError(f"kv={request.kv} needs the decoder, which does not serve here: {reason}")
        if request.rows is not None:
            raise OtaroError(f"a precision for each row needs the decoder of a GPU, which does not serve here: {reason}")
        if isinstance(options.get("past_key_values"), DecoderCache):
            raise OtaroError(f"past_key_values is a decoder's cache, but the decoder does not serve here: {reason}")
        cache = options.get("past_key_values")
        reused = 0 if cache is None else int(cache.get_seq_length())
        report = Generation(reason=reason, prompt_tokens=input_ids.shape[1], reused_tokens=reused)
        watch = _Watch(self, request.phases, report)
        result = getattr(super(), method)(input_ids, LogitsProcessorList([*processors, watch]), criteria, **options)
        self.generation = watch.close(result if isinstance(result, torch.Tensor) else result.sequences)
        return result


class _Watch(LogitsProcessor):  # type: ignore[misc]  # transformers is untyped here
    """Changes no score: takes the time of a step that transformers made, and enters the next one's phase."""

    def __init__(self, model: Any, phases: Phases, report: Generation) -> None:
        self.model, self.phases, self.report, self.steps = model, phases, report, 0
        self.started = self.prefilled = time.perf_counter()
        self._enter()

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        if self.steps == 0:
            self.prefilled = time.perf_counter()
        self.steps += 1
        self._enter()
        return scores

    def _enter(self) -> None:
        if self.steps in self.phases.steps or self.steps == 0:
            self.phases.enter(self.model, self.steps)
            self.report.precisions.append(
                _described(module.mantissa_bits for module in attachment(self.model).modules.values())
            )

    def close(self, sequences: torch.Tensor) -> Generation:
        self.report.new_tokens = sequences.shape[1] - self.report.prompt_tokens
        self.report.prefill_seconds = self.prefilled - self.started
        self.report.decode_seconds = time.perf_counter() - self.prefilled
        return self.report


def _obstacle(input_ids: torch.Tensor, options: Mapping[str, Any], rows: int) -> str:
    """What in these options a decoder for so many rows does not do, in words."""
    config, known = options["generation_config"], {"generation_config", "streamer", "tokenizer", "use_cache", "logits_to_keep"}
    if len(input_ids) > rows:
        return f"the batch has {len(input_ids)} rows" + (f", and the decoder takes {rows}" if rows > 1 else "")
    if config.return_dict_in_generate and (config.output_attentions or config.output_hidden_states):
        return "attentions or hidden states are wanted"
    if config.use_cache is False:
        return "use_cache is False"
    if config.cache_implementation not in (None, "dynamic"):
        return f"cache_implementation is {config.cache_implementation}"
    if config.is_assistant:
        return "it assists another model"
    mask = options.get("attention_mask")
    if mask is not None and not bool((mask == 1).all()):
        if rows == 1:
            return "the prompt is padded"
        if not (mask.dim() == 2 and padded_on_the_left(mask)):
            return "the prompt is padded, and not on its left"
    known |= {"attention_mask", "position_ids", "cache_position", "past_key_values"}
    unknown = [name for name, value in options.items() if name not in known and value is not None and value is not False]
    return f"{unknown[0]} was given" if unknown else ""


def decode_loop(
    model: Any,
    input_ids: torch.Tensor,
    processors: LogitsProcessorList,
    criteria: StoppingCriteriaList,
    config: Any,
    streamer: Any,
    given: DecoderCache | None,
    mask: torch.Tensor | None,
    request: _Request,
) -> Any:
    """What `_sample` does, by a decoder: rows of tokens, continued until a criterion holds."""
    wants_scores = config.return_dict_in_generate and config.output_scores
    wants_logits = config.return_dict_in_generate and config.output_logits
    sampler = Sampler(processors, bool(config.do_sample), exact_scores=wants_scores)
    stop = Stop(criteria, len(input_ids), config._pad_token_tensor)
    reader = _reader(model, input_ids, mask, given, request, stop.limit - input_ids.shape[1])
    report = model.generation = Generation(
        "decoder", prompt_tokens=input_ids.shape[1], reused_tokens=0 if given is None else given.length
    )
    by_gpu = reader if isinstance(reader, BatchReader) and _device_chooses(sampler, stop, config) else None
    scores: list[torch.Tensor] = []
    raw: list[torch.Tensor] = []
    tokens = Rows(input_ids)
    chosen: list[int] | None = None
    bits: Sequence[bytes] = ()
    clock = time.perf_counter()
    # Nobody but us looks on while the GPU runs ahead, so nobody waits for the decoder in vain.
    with by_gpu.refusing() if by_gpu and streamer is None else nullcontext():
        while True:
            if by_gpu and chosen is not None:
                ahead = int(streamer is None and tokens.length + 1 < stop.limit)
                chosen = by_gpu.likeliest(chosen, tokens.new, ahead, lambda step: request.phases.enter(model, step))
            else:
                request.phases.enter(model, tokens.new)
                logits = reader.read(chosen)
                if tokens.new == 0:
                    now = time.perf_counter()
                    report.prefill_seconds, clock = now - clock, now
                chosen = sampler.choose(tokens.ids, logits)
                if wants_scores:
                    scores.append(sampler.scores)
                if wants_logits:
                    raw.append(logits)
            if reader.ran_at != bits:  # a phase, or somebody else, has switched
                bits = reader.ran_at
                report.precisions.append(" / ".join(_described(row) for row in bits))
            tokens.append(stop.padded(chosen))
            if streamer is not None:
                streamer.put(torch.tensor(tokens.last))
            if stop(tokens, tuple(scores) if wants_scores else None):
                break
    report.decode_seconds = time.perf_counter() - clock
    if isinstance(reader, BatchReader):
        reader.finish(stop.lasted(tokens.new))
    report.new_tokens, report.cache_bytes = tokens.new, reader.cache.nbytes
    if streamer is not None:
        streamer.end()
    if not config.return_dict_in_generate:
        return tokens.ids.clone()
    return GenerateDecoderOnlyOutput(
        sequences=tokens.ids.clone(),
        scores=tuple(scores) if wants_scores else None,
        logits=tuple(raw) if wants_logits else None,
        past_key_values=reader.cache,
    )


def _reader(
    model: Any, ids: torch.Tensor, mask: torch.Tensor | None, given: DecoderCache | None, request: _Request, most: float
) -> RowReader | BatchReader:
    """What reads these rows, which go on for `most` tokens at most."""
    decoder, prompts = decoder_of(model), unpadded(ids, mask)
    if given is not None:
        for prompt, length in zip(prompts, getattr(given, "lengths", [given.length]), strict=False):
            if length >= len(prompt):
                raise OtaroError(
                    f"the cache holds {length} tokens and the prompt {len(prompt)}: pass all tokens, those in the cache "
                    "included, and one more at least"
                )
    if not isinstance(decoder, GpuDecoder):
        if request.rows is not None:
            raise OtaroError("a precision for each row needs the decoder of a GPU: give one precision for all")
        return RowReader(decoder, given or decoder.new_cache(request.kv), prompts[0])
    bits = None
    if request.rows is not None and len(request.rows) != len(prompts):
        raise PrecisionError(f"{len(request.rows)} precisions were given for {len(prompts)} rows")
    with decoder.lock:  # other threads' steps ask the model for its precision
        if request.rows is not None:
            bits = []
            for precision in request.rows:
                with at_precision(model, precision):  # which refuses what the directory cannot do
                    bits.append(decoder.weights.precisions())
        cache = given or decoder.new_cache(request.kv, len(prompts), room_for(prompts, most))
        return BatchReader(decoder, cache, prompts, bits, most)


def _device_chooses(sampler: Sampler, stop: Stop, config: Any) -> bool:
    """Whether nobody asks for more than the likeliest tokens."""
    wants = config.return_dict_in_generate and (config.output_scores or config.output_logits)
    return sampler.known and not sampler.do_sample and not stop.others and not sampler.processors and not wants


def _described(bits: Any) -> str:
    """The precision of a step: one, or the range where modules differ."""
    found = set(bits)
    names = [f"E5M{m}" for m in (min(found), max(found))]
    return names[0] if len(found) == 1 else " to ".join(names)
