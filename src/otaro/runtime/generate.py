"""`generate` of a nested model: transformers' own, with the loop of `rows.Batch` in place of its innermost
one.

transformers prepares inputs, generation options, logits processors, stopping criteria and streamers, then
calls `_sample` once. `Generates`, mixed into the class of a nested model, answers that call by a decoder
where one can serve, and passes it on where not; `model.generation` then tells which it was, why, and how long
it took. Who did not ask for what keeps the decoder from serving is warned, once for each model and reason.

On both ways the precision may change while tokens are produced:

    model.generate(ids, prefill="E5M8", decode="E5M4")            # read the prompt at E5M8, write at E5M4
    model.generate(ids, schedule={0: "E5M8", 100: "E5M4"})        # from the 100th new token on at E5M4
    model.generate(ids, precision="E5M4")                          # all of it at E5M4
    model.generate(ids, precision=["E5M4", "E5M8"])                # one for each row (decoder only)
    model.generate(ids, kv="E5M7")                                 # packed keys and values (decoder only)
    model.generate(ids, precision="E5M8", draft="E5M3")            # E5M8's, drafted by E5M3 (decoder only)

and, without any of these, by `otaro.set_precision` in a streamer or another thread: what counts is the
precision when a step begins; reading the prompt is one step. From its first phase on a generation minds only
its own precisions, and it sets none on the model: threads that generate at different precisions with one
model each get what one thread alone would get. (What a mapping leaves out stays as it was when the phase
began.)

Through transformers every module asks when it is called: a switch by another thread takes effect in the midst
of a step.
"""

from __future__ import annotations

import copy
import time
import warnings
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from contextvars import ContextVar
from typing import Any

import torch
from transformers import LogitsProcessor, LogitsProcessorList, MaxLengthCriteria, StoppingCriteriaList
from transformers.generation import UnbatchedClassifierFreeGuidanceLogitsProcessor

from otaro.errors import OtaroError, PositionsWarning
from otaro.runtime import obstacles
from otaro.runtime.architectures import positions_of
from otaro.runtime.caches import DecoderCache
from otaro.runtime.draft import Draft
from otaro.runtime.modules import bits_of, own_bits
from otaro.runtime.obstacles import Obstacle, tokens_at_most, warn_of_positions, warn_slow
from otaro.runtime.phases import Phases, described, steps_and_rows
from otaro.runtime.precision import PrecisionLike, attachment
from otaro.runtime.report import Generation
from otaro.runtime.rows import Batch, Call
from otaro.runtime.serving import forget
from otaro.sefp.precision import Precision

_call: ContextVar[Call | None] = ContextVar("call", default=None)
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
            "a nested model is not pickled, by torch.save neither: its planes are files; write them again "
            "with "
            "model.save_pretrained(DIR), and open them where they are needed with otaro.load(DIR)"
        )

    def resize_token_embeddings(
        self,
        new_num_tokens: int | None = None,
        pad_to_multiple_of: int | None = None,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        """Refused, unless it changes nothing: a packed embedding has the rows of its file."""
        embedding = self.get_input_embeddings()  # type: ignore[attr-defined]
        if pad_to_multiple_of is None and new_num_tokens in (None, embedding.num_embeddings):
            return embedding
        raise OtaroError(
            "the embedding of a nested model is packed and cannot be resized: resize the checkpoint it was "
            "packed from "
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
        draft: str | Precision | Draft | None = None,
        report: Generation | None = None,
        **kwargs: Any,
    ) -> Any:
        """As transformers' `generate`, with precisions by phase or by row; see the head of this module."""
        ids = args[0] if args else kwargs.get("inputs", kwargs.get("input_ids"))
        if isinstance(ids, torch.Tensor) and (not ids.numel() or ids.is_floating_point()):
            what = f"{str(ids.dtype).removeprefix('torch.')} {list(ids.shape)}"
            raise OtaroError(f"tokens are whole numbers, [rows, tokens], one of each at least, not {what}")
        steps, rows = steps_and_rows(prefill, decode, schedule, precision)
        phases = Phases(attachment(self), steps)
        cache = kwargs.get("past_key_values")
        if kv is not None and cache is not None:
            raise OtaroError(
                "kv chooses the precision of a new cache, and past_key_values brings one: give either"
            )
        call = Call(
            phases, None if kv is None else Precision(kv), rows, report or Generation(), Draft.of(draft)
        )
        if cache is not None and not isinstance(cache, DecoderCache):
            call.obstacle = Obstacle(f"the cache given is a {type(cache).__name__}")
        elif kwargs.get("position_ids") is not None:
            call.obstacle = Obstacle("position_ids were given")
        token, outer = _call.set(call), own_bits.set({})
        try:
            return super().generate(*args, **kwargs)  # type: ignore[misc]
        finally:
            _call.reset(token)
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
        call = _call.get() or self._no_call(Obstacle("another library called it"))
        options = {
            "generation_config": generation_config,
            "synced_gpus": synced_gpus,
            "streamer": streamer,
            **model_kwargs,
        }
        # The model's own first: what is advised must help.
        obstacle = call.obstacle or obstacles.of_model(self) or obstacles.of_call(self, input_ids, options)
        if obstacle:
            return self._by_transformers(
                "_sample", obstacle, input_ids, logits_processor, stopping_criteria, options
            )
        cache = model_kwargs.get("past_key_values")
        given = cache if isinstance(cache, DecoderCache) else None
        mask = model_kwargs.get("attention_mask")
        if any(type(one) is UnbatchedClassifierFreeGuidanceLogitsProcessor for one in logits_processor):
            warn_slow(
                self,
                Obstacle("for guidance_scale it reads every token twice", "leave guidance_scale out"),
            )
        # What a decoder keeps must stay writable when the caller's mode ends.
        with given.claimed() if given else nullcontext(), torch.inference_mode(False), torch.no_grad():
            batch = Batch(
                self,
                input_ids,
                mask,
                logits_processor,
                stopping_criteria,
                generation_config,
                streamer,
                given,
                call,
            )
            return batch.run()

    def _no_call(self, obstacle: Obstacle | None = None) -> Call:
        return Call(Phases(attachment(self), {}), None, None, Generation(), None, obstacle)

    def _beam_search(
        self,
        input_ids: torch.Tensor,
        logits_processor: Any,
        stopping_criteria: Any,
        generation_config: Any,
        **options: Any,
    ) -> Any:
        options["generation_config"] = generation_config
        obstacle = obstacles.of_model(self) or Obstacle("it searches with beams", "leave out num_beams")
        return self._by_transformers(
            "_beam_search", obstacle, input_ids, logits_processor, stopping_criteria, options
        )

    def _assisted_decoding(
        self,
        input_ids: torch.Tensor,
        logits_processor: Any,
        stopping_criteria: Any,
        generation_config: Any,
        **kwargs: Any,
    ) -> Any:
        call = _call.get() or self._no_call()
        if call.phases or call.kv or call.rows or call.draft:
            told = "prefill, decode, schedule, precision, kv and draft"
            raise OtaroError(f"{told} do not go together with assisted generation")
        report = self.generation = call.report
        report.reason, report.prompt_tokens = "it is assisted by another model", input_ids.shape[1]
        if generation_config.prompt_lookup_num_tokens is not None:
            report.reason = "prompt_lookup_num_tokens was given"
            warn_slow(self, Obstacle(report.reason, 'draft="prompt" is what the decoder has for that'))
        watch = _Watch(self, call.phases, report)
        result = super()._assisted_decoding(  # type: ignore[misc]
            input_ids, logits_processor, stopping_criteria, generation_config, **kwargs
        )
        watch.close(result if isinstance(result, torch.Tensor) else result.sequences)
        return result

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
        call, reason = _call.get() or self._no_call(), obstacle.reason
        if call.kv:
            raise OtaroError(f"kv={call.kv} needs the decoder, which does not serve here: {reason}")
        if call.draft is not None:
            raise OtaroError(f"draft={call.draft} needs the decoder, which does not serve here: {reason}")
        if call.rows is not None:
            raise OtaroError(
                f"a precision for each row needs the decoder, which does not serve here: {reason}"
            )
        if isinstance(options.get("past_key_values"), DecoderCache):
            raise OtaroError(
                f"past_key_values is a decoder's cache, but the decoder does not serve here: {reason}"
            )
        cache = options.get("past_key_values")
        if call.phases:
            if any(map(_compiled, self.modules())):  # type: ignore[attr-defined]
                raise OtaroError(
                    "a compiled model runs as it is set: use otaro.set_precision, or generate "
                    "without compiling"
                )
            options["generation_config"].disable_compile = True
        warn_slow(self, obstacle)
        report = self.generation = call.report
        report.reason, report.prompt_tokens = reason, input_ids.shape[1]
        report.reused_tokens = 0 if cache is None else int(cache.get_seq_length())
        asked = min((one.max_length for one in criteria if isinstance(one, MaxLengthCriteria)), default=None)
        limit = tokens_at_most(self)
        if limit is not None and (asked is None or asked > limit):
            if input_ids.shape[1] >= limit:
                raise OtaroError(
                    f"the prompt has {input_ids.shape[1]} tokens, and this model has positions "
                    f"for {limit - 1}"
                )
            criteria = StoppingCriteriaList([*criteria, MaxLengthCriteria(limit)])
            options["generation_config"].max_length = limit
        watch = _Watch(self, call.phases, report)
        result = getattr(super(), method)(
            input_ids, LogitsProcessorList([*processors, watch]), criteria, **options
        )
        sequences = result if isinstance(result, torch.Tensor) else result.sequences
        watch.close(sequences)
        if limit is not None and sequences.shape[1] >= limit and asked != limit:
            told = (
                f"stopped after {report.new_tokens} new tokens: this model has positions for {limit - 1} "
                "tokens"
            )
            warnings.warn(told, PositionsWarning, stacklevel=2)
        return result


class _Watch(LogitsProcessor):  # type: ignore[misc]  # transformers is untyped here
    """Changes no score: takes the time of a step that transformers made, and enters the next one's phase."""

    def __init__(self, model: Any, phases: Phases, report: Generation) -> None:
        self.model, self.phases, self.report, self.steps = model, phases, report, 0
        self.positions = None if tokens_at_most(model) is not None else positions_of(model)
        self.started = self.prefilled = time.perf_counter()
        self._enter()

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        if self.steps == 0:
            self.prefilled = time.perf_counter()
        if self.positions is not None and input_ids.shape[1] > self.positions:
            warn_of_positions(self.model, self.positions)
        self.steps += 1
        self._enter()
        return scores

    def _enter(self) -> None:
        if self.steps in self.phases or self.steps == 0:
            bits = self.phases.bits(self.steps) or bits_of(self.phases.modules, attachment(self.model).nested)
            own_bits.set(self.phases.own)  # until `generate` returns
            self.report.precisions.append(described(bits))

    def close(self, sequences: torch.Tensor) -> None:
        self.report.new_tokens = sequences.shape[1] - self.report.prompt_tokens
        self.report.prefill_seconds = self.prefilled - self.started
        self.report.decode_seconds = time.perf_counter() - self.prefilled


def _compiled(module: Any) -> bool:
    return module._compiled_call_impl is not None or hasattr(
        module.__dict__.get("forward"), "_torchdynamo_orig_callable"
    )
