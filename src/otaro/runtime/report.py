"""How a generation went."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass
class Generation:
    """How a `generate` went. `model.generation` is that of the last one to begin, in any thread.

    Who shares a model with other threads passes one of his own, to be filled in: `generate(...,
    report=Generation())`.
    """

    served_by: str = "transformers"
    reason: str = ""
    """Why it was not the decoder."""
    prompt_tokens: int = 0
    """In a row, padding included."""
    reused_tokens: int = 0
    """Tokens of the prompt that a cache already held."""
    new_tokens: int = 0
    """In a row."""
    queue_seconds: float = 0.0
    """Until the engine began with it."""
    prefill_seconds: float = 0.0
    decode_seconds: float = 0.0
    precisions: list[str] = field(default_factory=list)
    """Those that steps ran at, in order; rows that differ are set apart by slashes."""
    draft: str = ""
    """Who drafted, if anybody was asked to."""
    drafted: list[int] = field(default_factory=list)
    """How often a draft had a first token, a second, and so on,"""
    accepted: list[int] = field(default_factory=list)
    """and how often it was right up to there."""
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
