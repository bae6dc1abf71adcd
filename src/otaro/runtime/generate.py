"""`generate` of a nested model: transformers' own, with the loop of `rows.Batch` in place of its innermost one.

transformers prepares inputs, generation options, logits processors, stopping criteria and streamers, then calls `_sample`
once. `Generates`, mixed into the class of a nested model, answers that call by a decoder where one can serve, and passes it on
where not; `model.generation` then tells which it was, why, and how long it took. Who did not ask for what keeps the decoder
from serving is warned, once for each model and reason.

On both ways the precision may change while tokens are produced:

    model.generate(ids, prefill="E5M8", decode="E5M4")            # read the prompt at E5M8, write at E5M4
    model.generate(ids, schedule={0: "E5M8", 100: "E5M4"})        # from the 100th new token on at E5M4
    model.generate(ids, precision="E5M4")                          # all of it at E5M4
    model.generate(ids, precision=["E5M4", "E5M8"])                # one for each row (decoder only)
    model.generate(ids, kv="E5M7")                                 # packed keys and values (decoder only)

and, without any of these, by `otaro.set_precision` in a streamer or another thread: what counts is the precision when a step
begins; reading the prompt is one step. From its first phase on a generation minds only its own precisions, and it sets none
on the model: threads that generate at different precisions with one model each get what one thread alone would get. (What a
mapping leaves out stays as it was when the phase began.)

Through transformers every module asks when it is called: a switch by another thread takes effect in the midst of a step.
"""

from __future__ import annotations

import copy
import time
import warnings
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from transformers import LogitsProcessor, LogitsProcessorList, MaxLengthCriteria, StoppingCriteriaList
from transformers.generation import GenerateDecoderOnlyOutput

from otaro.errors import OtaroError, OtaroWarning, PositionsWarning, PrecisionError, SlowWarning
from otaro.kernels.ops import OVERRIDE
from otaro.runtime.architectures import packed_modules, positions_of, rope_limit
from otaro.runtime.decode import DecoderCache
from otaro.runtime.modules import SefpEmbedding, own_bits
from otaro.runtime.phases import Phases, described, steps_and_rows
from otaro.runtime.precision import PrecisionLike, attachment
from otaro.runtime.report import Generation
from otaro.runtime.rows import Batch, Rows, Stop, memory_for, padded_on_the_left, unpadded
from otaro.runtime.sample import Sampler
from otaro.runtime.serving import decoder_of, forget, rows_at_once, why_not
from otaro.sefp.precision import Precision


class Obstacle(NamedTuple):
    """What keeps the decoder from serving, in words."""

    reason: str
    advice: str | None = None
    """What to do about it; None where it was asked for, so that nobody is surprised."""


_ADVICE = {
    "it has forward hooks": "remove them",
    "it is in training mode and drops out": "call model.eval()",
}


@dataclass
class _Request:
    """One call of `generate`, as `_sample` finds it."""

    phases: Phases
    kv: Precision | None
    obstacle: Obstacle | None
    """In the arguments."""
    rows: Sequence[PrecisionLike] | None
    """A precision for each row."""
    report: Generation


_request: ContextVar[_Request | None] = ContextVar("request", default=None)
_classes: dict[type, type] = {}


def serve_with_decoder(model: Any) -> None:
    """Give a nested model our `generate`; its class becomes a subclass of the same name."""
    kind = type(model)
    if kind not in _classes:
        about = {"__module__": kind.__module__, "__doc__": kind.__doc__}
        _classes.setdefault(kind, type(kind.__name__, (Generates, kind), about))
    model.__class__ = _classes[kind]


class Generates:
    """Mixed into the class of a nested model."""

    generation: Generation

    def _apply(self, *args: Any, **kwargs: Any) -> Any:
        forget(self)
        return super()._apply(*args, **kwargs)  # type: ignore[misc]

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        """A model of its own, which shares the mapped files."""
        copied = memo[id(self)] = type(self).__new__(type(self))
        copied.__dict__.update(copy.deepcopy(self.__dict__, memo))
        return copied

    def __copy__(self) -> Any:
        """Another model of the same parts."""
        copied = type(self).__new__(type(self))
        copied.__dict__.update(self.__dict__)
        return copied

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise OtaroError(
            "a nested model is not pickled, by torch.save neither: its planes are files; write them again with "
            "model.save_pretrained(DIR), and open them where they are needed with otaro.load(DIR)"
        )

    def resize_token_embeddings(
        self, new_num_tokens: int | None = None, pad_to_multiple_of: int | None = None, *args: Any, **kwargs: Any
    ) -> Any:
        """Refused, unless it changes nothing: a packed embedding has the rows of its file."""
        embedding = self.get_input_embeddings()  # type: ignore[attr-defined]
        if pad_to_multiple_of is None and new_num_tokens in (None, embedding.num_embeddings):
            return embedding
        raise OtaroError(
            "the embedding of a nested model is packed and cannot be resized: resize the checkpoint it was packed from "
            "(resize_token_embeddings, then save_pretrained) and pack that again with otaro pack"
        )

    def generate(
        self,
        *args: Any,
        prefill: PrecisionLike | None = None,
        decode: PrecisionLike | None = None,
        schedule: Mapping[int, PrecisionLike] | None = None,
        precision: PrecisionLike | Sequence[PrecisionLike] | None = None,
        kv: str | Precision | None = None,
        report: Generation | None = None,
        **kwargs: Any,
    ) -> Any:
        """As transformers' `generate`, with precisions by phase or by row; see the head of this module."""
        steps, rows = steps_and_rows(prefill, decode, schedule, precision)
        phases = Phases(attachment(self), steps)
        cache = kwargs.get("past_key_values")
        if kv is not None and cache is not None:
            raise OtaroError("kv chooses the precision of a new cache, and past_key_values brings one: give either")
        request = _Request(phases, None if kv is None else Precision(kv), None, rows, report or Generation())
        if cache is not None and not isinstance(cache, DecoderCache):
            request.obstacle = Obstacle(f"the cache given is a {type(cache).__name__}")
        elif kwargs.get("position_ids") is not None:
            request.obstacle = Obstacle("position_ids were given")
        token, outer = _request.set(request), own_bits.set({})
        try:
            return super().generate(*args, **kwargs)  # type: ignore[misc]
        finally:
            _request.reset(token)
            own_bits.reset(outer)

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
        request = _request.get() or self._no_request(Obstacle("another library called it"))
        options = {"generation_config": generation_config, "synced_gpus": synced_gpus, "streamer": streamer, **model_kwargs}
        # The model's own first: what is advised must help.
        obstacle = request.obstacle or _obstacle_of(self) or _obstacle(self, input_ids, options)
        if obstacle:
            return self._by_transformers("_sample", obstacle, input_ids, logits_processor, stopping_criteria, options)
        cache = model_kwargs.get("past_key_values")
        given = cache if isinstance(cache, DecoderCache) else None
        with (
            given.claimed() if given else nullcontext(),
            torch.inference_mode(False),
            torch.no_grad(),
        ):  # what a decoder keeps must stay writable when the caller's mode ends
            return generate_rows(
                self,
                input_ids,
                logits_processor,
                stopping_criteria,
                generation_config,
                streamer,
                given,
                model_kwargs.get("attention_mask"),
                request,
            )

    def _no_request(self, obstacle: Obstacle | None = None) -> _Request:
        return _Request(Phases(attachment(self), {}), None, obstacle, None, Generation())

    def _beam_search(
        self, input_ids: torch.Tensor, logits_processor: Any, stopping_criteria: Any, generation_config: Any, **options: Any
    ) -> Any:
        options["generation_config"] = generation_config
        obstacle = _obstacle_of(self) or Obstacle("it searches with beams", "leave out num_beams")
        return self._by_transformers("_beam_search", obstacle, input_ids, logits_processor, stopping_criteria, options)

    def _assisted_decoding(self, *args: Any, **kwargs: Any) -> Any:
        request = _request.get() or self._no_request()
        if request.phases or request.kv or request.rows:
            raise OtaroError("prefill, decode, schedule, precision and kv do not go together with assisted generation")
        self.generation = request.report
        request.report.reason = "it is assisted by another model"
        return super()._assisted_decoding(*args, **kwargs)  # type: ignore[misc]

    def _by_transformers(
        self,
        method: str,
        obstacle: Obstacle,
        input_ids: torch.Tensor,
        processors: Any,
        criteria: Any,
        options: dict[str, Any],
    ) -> Any:
        """Pass the call on, watching it from a logits processor: that is called once after every step."""
        request, reason = _request.get() or self._no_request(), obstacle.reason
        if request.kv:
            raise OtaroError(f"kv={request.kv} needs the decoder, which does not serve here: {reason}")
        if request.rows is not None:
            raise OtaroError(f"a precision for each row needs the decoder, which does not serve here: {reason}")
        if isinstance(options.get("past_key_values"), DecoderCache):
            raise OtaroError(f"past_key_values is a decoder's cache, but the decoder does not serve here: {reason}")
        cache = options.get("past_key_values")
        if request.phases:
            if any(map(_compiled, self.modules())):  # type: ignore[attr-defined]
                raise OtaroError("a compiled model runs as it is set: use otaro.set_precision, or generate without compiling")
            options["generation_config"].disable_compile = True
        _warn(self, obstacle)
        report = self.generation = request.report
        report.reason, report.prompt_tokens = reason, input_ids.shape[1]
        report.reused_tokens = 0 if cache is None else int(cache.get_seq_length())
        asked = min((one.max_length for one in criteria if isinstance(one, MaxLengthCriteria)), default=None)
        limit = _tokens_at_most(self)
        if limit is not None and (asked is None or asked > limit):
            if input_ids.shape[1] >= limit:
                raise OtaroError(f"the prompt has {input_ids.shape[1]} tokens, and this model has positions for {limit - 1}")
            criteria = StoppingCriteriaList([*criteria, MaxLengthCriteria(limit)])
            options["generation_config"].max_length = limit
        watch = _Watch(self, request.phases, report)
        result = getattr(super(), method)(input_ids, LogitsProcessorList([*processors, watch]), criteria, **options)
        sequences = result if isinstance(result, torch.Tensor) else result.sequences
        watch.close(sequences)
        if limit is not None and sequences.shape[1] >= limit and asked != limit:
            told = f"stopped after {report.new_tokens} new tokens: this model has positions for {limit - 1} tokens"
            warnings.warn(told, PositionsWarning, stacklevel=2)
        return result


class _Watch(LogitsProcessor):  # type: ignore[misc]  # transformers is untyped here
    """Changes no score: takes the time of a step that transformers made, and enters the next one's phase."""

    def __init__(self, model: Any, phases: Phases, report: Generation) -> None:
        self.model, self.phases, self.report, self.steps = model, phases, report, 0
        self.positions = None if _tokens_at_most(model) is not None else positions_of(model)
        self.started = self.prefilled = time.perf_counter()
        self._enter()

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        if self.steps == 0:
            self.prefilled = time.perf_counter()
        if self.positions is not None and input_ids.shape[1] > self.positions:
            _warn_of_positions(self.model, self.positions)
        self.steps += 1
        self._enter()
        return scores

    def _enter(self) -> None:
        if self.phases.enter(self.steps) or self.steps == 0:
            own_bits.set(self.phases.own)  # until `generate` returns
            self.report.precisions.append(described(self.phases.bits(list(attachment(self.model).modules.values()))))

    def close(self, sequences: torch.Tensor) -> None:
        self.report.new_tokens = sequences.shape[1] - self.report.prompt_tokens
        self.report.prefill_seconds = self.prefilled - self.started
        self.report.decode_seconds = time.perf_counter() - self.prefilled


def _compiled(module: Any) -> bool:
    return module._compiled_call_impl is not None or hasattr(module.__dict__.get("forward"), "_torchdynamo_orig_callable")


def _tokens_at_most(model: Any) -> int | None:
    """How long a text can become where positions come from a table (GPT-2, OPT, GPT-J): the last token is not read."""
    known = positions_of(model)
    if known is None:
        return None
    words = model.get_input_embeddings()
    embeddings = (one for one in model.modules() if isinstance(one, torch.nn.Embedding | SefpEmbedding) and one is not words)
    tables = [one.num_embeddings for one in embeddings]
    tables += [len(buffer) for name, buffer in model.named_buffers() if name.endswith("embed_positions")]
    return known + 1 if any(known <= rows <= known + 2 for rows in tables) else None  # OPT's has two rows more


def _warn_of_positions(model: Any, positions: int) -> None:
    told = f"this text goes past the {positions} positions that the model was made for; what it says there may be poor"
    _warn_once(model, "positions", told, PositionsWarning)


def _warn_once(model: Any, about: str, message: str, kind: type[OtaroWarning]) -> None:
    """Once for each model and matter; with a lock, as threads may come at once."""
    attached = attachment(model)
    with attached.nested.lock:
        if about in attached.warned:
            return
        attached.warned.add(about)
    warnings.warn(message, kind, stacklevel=3)


def _warn(model: Any, obstacle: Obstacle) -> None:
    """Say why tokens are made more slowly than they could be, to those who did not ask for that."""
    if obstacle.advice is None:
        return
    advice = obstacle.advice and f"; {obstacle.advice}"
    if model.device.type == "cpu" and model.dtype != torch.float32:
        advice += f"; load it with dtype=torch.float32, which is faster here than {str(model.dtype).removeprefix('torch.')}"
    told = f"this {type(model).__name__} generates through transformers, slower than the decoder: {obstacle.reason}{advice}"
    _warn_once(model, obstacle.advice or obstacle.reason, told, SlowWarning)


def _obstacle_of(model: Any) -> Obstacle | None:
    """What about this model no decoder does."""
    reason = why_not(model)
    if reason is None:
        return None
    return Obstacle(reason, None if reason.startswith(OVERRIDE) else _ADVICE.get(reason, ""))


def _obstacle(model: Any, input_ids: torch.Tensor, options: Mapping[str, Any]) -> Obstacle | None:
    """What in these options the model's decoder does not do."""
    rows, limit = rows_at_once(model), rope_limit(model)
    config, known = options["generation_config"], {"generation_config", "streamer", "tokenizer", "use_cache", "logits_to_keep"}
    if len(input_ids) > rows:
        told = f"the batch has {len(input_ids)} rows, and the decoder takes {rows}"
        return Obstacle(told, f"generate {rows} at a time")
    if limit is not None and config.max_length > limit + 1:  # the last token is not read
        told = f"up to {config.max_length} tokens are wanted, and the decoder knows this model's rotary positions up to {limit}"
        return Obstacle(told, "ask for fewer new tokens")
    if config.return_dict_in_generate and (config.output_attentions or config.output_hidden_states):
        return Obstacle("attentions or hidden states are wanted")
    if config.use_cache is False:
        return Obstacle("use_cache is False")
    if config.cache_implementation not in (None, "dynamic"):
        return Obstacle(f"cache_implementation is {config.cache_implementation}")
    if config.is_assistant:
        return Obstacle("it assists another model")
    mask = options.get("attention_mask")
    if mask is not None and not bool((mask == 1).all()) and not (mask.dim() == 2 and padded_on_the_left(mask)):
        return Obstacle("the prompt is padded, and not on its left", "set the tokenizer's padding_side to 'left'")
    known |= {"attention_mask", "position_ids", "cache_position", "past_key_values"}
    unknown = [name for name, value in options.items() if name not in known and value is not None and value is not False]
    return Obstacle(f"{unknown[0]} was given", f"leave {unknown[0]} out") if unknown else None


def generate_rows(
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
    """What `_sample` does, by a decoder."""
    decoder, prompts, phases, modules = decoder_of(model), unpadded(input_ids, mask), request.phases, packed_modules(model)
    for prompt, length in zip(prompts, given.lengths if given else (), strict=False):
        if length >= len(prompt):
            raise OtaroError(
                f"the cache holds {length} tokens and the prompt {len(prompt)}: pass all tokens, those in the cache "
                "included, and one more at least"
            )
    row_bits = None
    if request.rows is not None:
        if len(request.rows) != len(prompts):
            raise PrecisionError(f"{len(request.rows)} precisions were given for {len(prompts)} rows")
        each = [Phases(attachment(model), {0: precision}) for precision in request.rows]
        row_bits = [one.bits(modules) for one in each if one.enter(0)]

    def bits(step: int) -> bytes:
        phases.enter(step)
        return phases.bits(modules)

    def told(tokens: Rows) -> None:
        if known is not None and tokens.length - 1 > known:  # the last was not read
            _warn_of_positions(model, known)
        if streamer is not None:
            streamer.put(torch.tensor(tokens.last))

    known, whole = positions_of(model), bool(config.return_dict_in_generate)
    keep_scores, keep_logits = whole and bool(config.output_scores), whole and bool(config.output_logits)
    sampler = Sampler(processors, bool(config.do_sample), exact_scores=keep_scores)
    stop, tokens = Stop(criteria, len(prompts), config._pad_token_tensor), Rows(input_ids)
    cache = given or decoder.new_cache(request.kv, len(prompts), memory_for(prompts, stop.limit - tokens.length))
    report = request.report
    batch = Batch(
        decoder,
        cache,
        prompts,
        bits,
        row_bits,
        sampler,
        stop,
        tokens,
        report,
        keep_scores=keep_scores,
        keep_logits=keep_logits,
        told=told,
    )
    model.generation = report
    report.served_by, report.prompt_tokens = "decoder", input_ids.shape[1]
    report.reused_tokens = cache.length
    batch.run()
    if streamer is not None:
        streamer.end()
    if not whole:
        return tokens.ids.clone()
    return GenerateDecoderOnlyOutput(
        sequences=tokens.ids.clone(),
        scores=None if batch.scores is None else tuple(batch.scores),
        logits=None if batch.logits is None else tuple(batch.logits),
        past_key_values=cache,
    )
