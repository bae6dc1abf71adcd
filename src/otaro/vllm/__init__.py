"""The plug-in for vLLM: `vllm serve DIR --quantization sefp` opens a nested directory as it lies.

vLLM calls `register`, the entry point, in each of its processes. quantization.py tells it what layers do with
packed weights, loader.py brings those in, shares.py is what one process holds of them, and worker.py
switches. Only shares.py can do without vLLM; nothing is imported here before it is asked for.
"""

from __future__ import annotations

from typing import Any

from otaro.errors import OtaroError
from otaro.sefp.precision import Precision


def register() -> None:
    """Make the method "sefp" known to vLLM, in this process."""
    from otaro.vllm import loader, quantization, worker

    quantization.register()
    loader.register()
    worker.register()


def set_precision(llm: Any, precision: str | Precision) -> None:
    """Switch a `vllm.LLM` as a whole, between requests, and forget prefixes that another precision computed.

    A precision that one process cannot reach is refused before any has switched.
    """
    name = str(Precision(precision))
    if llm.llm_engine.has_unfinished_requests():
        raise OtaroError(
            "requests are under way, and the engine switches as a whole: wait until they are answered"
        )
    for step in ("reach_precision", "set_precision"):
        for answer in llm.collective_rpc(step, args=(name,)):
            if answer != name:
                raise OtaroError(answer)
    if not llm.reset_prefix_cache():
        raise OtaroError(
            "vLLM did not reset its prefix cache, which holds what another precision computed: start it anew"
        )
