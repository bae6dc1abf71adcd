"""What /metrics tells, by precision where that makes a difference."""

from __future__ import annotations

from collections.abc import Callable

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    PlatformCollector,
    ProcessCollector,
)

_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)
_PER_TOKEN = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5)


class Metrics:
    """A registry of its own: two servers in one process do not add up."""

    def __init__(self) -> None:
        self.registry = registry = CollectorRegistry()
        ProcessCollector(registry=registry)
        PlatformCollector(registry=registry)
        self.requests = Counter(
            "otaro_requests", "Requests, by status.", ["endpoint", "status"], registry=registry
        )
        self.prompt_tokens = Counter(
            "otaro_prompt_tokens", "Tokens of prompts.", ["precision"], registry=registry
        )
        self.reused_tokens = Counter(
            "otaro_reused_tokens",
            "Of those, tokens that the cache held already.",
            ["precision"],
            registry=registry,
        )
        self.new_tokens = Counter("otaro_new_tokens", "Tokens of answers.", ["precision"], registry=registry)
        self.first_token = Histogram(
            "otaro_first_token_seconds", "Until the first token, waiting included.", ["precision"],
            buckets=_SECONDS, registry=registry,
        )  # fmt: skip
        self.per_token = Histogram(
            "otaro_time_per_token_seconds", "Between tokens of an answer, its mean.", ["precision"],
            buckets=_PER_TOKEN, registry=registry,
        )  # fmt: skip
        self.seconds = Histogram(
            "otaro_request_seconds",
            "Until the end of a request.",
            ["endpoint"],
            buckets=_SECONDS,
            registry=registry,
        )
        self.endings = Counter("otaro_answers", "Answers, by how they ended.", ["reason"], registry=registry)
        self.switches = Counter(
            "otaro_precision_switches", "Changes of precision in the middle of an answer.", registry=registry
        )
        self.decisions = Counter(
            "otaro_decisions",
            "Decisions, by the precision that they were made at.",
            ["precision"],
            registry=registry,
        )
        self.escalated = Counter(
            "otaro_escalated_decisions", "Decisions asked again at the finest.", registry=registry
        )
        self.released = Counter(
            "otaro_released_bytes", "Bytes of planes given back to the system.", registry=registry
        )

    def gauge(self, name: str, what: str, value: Callable[[], float]) -> None:
        """A number that is asked for when it is wanted."""
        Gauge(name, what, registry=self.registry).set_function(value)
