"""Reading a prompt on a GPU: many tokens at a time, with decoded weights, the library's products and its attention.

Between products numbers are float32 as in a decoder's steps; products and attention are in the model's own type. Weights are
decoded for one product and forgotten.
"""

from __future__ import annotations

import torch
from torch.nn.functional import linear, scaled_dot_product_attention, silu

from otaro.kernels import ops
from otaro.kernels.packed import Packed
from otaro.kernels.steps import Rotation, normed, turned
from otaro.runtime.description import MATRICES, Description, Layer, Matrix
from otaro.runtime.gpu_cache import GpuCache

CHUNK = 2048
"""Tokens read at a time."""


def read_prompt(
    weights: Description, ids: list[int], cache: GpuCache, sequence: int, bits: bytes, rotation: Rotation
) -> torch.Tensor:
    """Put keys and values of a chunk into the cache; what the last layer makes of its tokens, [tokens, hidden], float32."""
    past = cache.lengths[sequence]
    tokens = torch.tensor(ids, device=weights.device)
    rows = weights.embedding.at(bits[0])
    x = ops.embedding(tokens, *rows, torch.float32) if isinstance(rows, Packed) else rows[tokens].float()
    positions = torch.arange(past, past + len(ids), device=weights.device)
    for number, layer in enumerate(weights.layers):
        of_layer = bits[1 + len(MATRICES) * number : 1 + len(MATRICES) * (number + 1)]
        attended = _attended(weights, layer, number, x, cache, sequence, positions, of_layer, rotation)
        x = x + _product(attended, layer.output, of_layer[3], weights.dtype)
        assert layer.mlp_norm is not None
        hidden = layer.mlp_norm * normed(x, weights.eps)
        if layer.up is None:
            gate, up = _product(hidden, layer.gate, of_layer[4], weights.dtype).chunk(2, 1)
        else:
            gate, up = (
                _product(hidden, one, m, weights.dtype) for one, m in ((layer.gate, of_layer[4]), (layer.up, of_layer[5]))
            )
        x = x + _product(silu(gate) * up, layer.down, of_layer[6], weights.dtype)
    return x


def _attended(
    weights: Description,
    layer: Layer,
    number: int,
    x: torch.Tensor,
    cache: GpuCache,
    sequence: int,
    positions: torch.Tensor,
    bits: bytes,
    rotation: Rotation,
) -> torch.Tensor:
    """What the tokens of a chunk attend to, [tokens, heads * head]; their keys and values go into the cache."""
    assert layer.attention_norm is not None
    hidden = layer.attention_norm * normed(x, weights.eps)
    if layer.key is None or layer.value is None:
        sizes = [weights.heads * weights.head_dim, weights.kv_heads * weights.head_dim, weights.kv_heads * weights.head_dim]
        vectors = list(_product(hidden, layer.query, bits[0], weights.dtype).split(sizes, 1))
    else:
        three = zip((layer.query, layer.key, layer.value), bits, strict=False)
        vectors = [_product(hidden, matrix, m, weights.dtype) for matrix, m in three]
    query, key, value = (vector.unflatten(1, (-1, weights.head_dim)) for vector in vectors)
    if layer.query_norm is not None and layer.key_norm is not None:
        query, key = layer.query_norm * normed(query, weights.eps), layer.key_norm * normed(key, weights.eps)
    query, key = turned(query, rotation, positions), turned(key, rotation, positions)
    past, room = cache.lengths[sequence], cache.room
    room.write(0, number, sequence, past, key)
    room.write(1, number, sequence, past, value)
    # Keys are float16, or packed at less: bfloat16 could not hold them.
    kind = torch.float32 if weights.dtype == torch.float32 else torch.float16
    end = past + len(x)
    first = max(0, past + 1 - layer.window) if layer.window else 0
    keys, values = (room.read(one, number, sequence, slice(first, end), kind) for one in (0, 1))
    group = weights.heads // weights.kv_heads
    if group > 1:
        keys, values = keys.repeat_interleave(group, 0), values.repeat_interleave(group, 0)
    mask = None
    if past or layer.window:
        seen = torch.arange(first, end, device=x.device)
        mask = seen <= positions[:, None]
        if layer.window:
            mask &= seen > positions[:, None] - layer.window
    result = scaled_dot_product_attention(
        query.transpose(0, 1).to(kind)[None],
        keys[None],
        values[None],
        attn_mask=mask,
        is_causal=mask is None,
        scale=weights.scale,
    )
    return result[0].transpose(0, 1).flatten(1)


def _product(x: torch.Tensor, matrix: Matrix, bits: int, dtype: torch.dtype) -> torch.Tensor:
    """In the model's type, and back to float32."""
    weight, bias = matrix.at(bits), matrix.bias
    if not isinstance(weight, Packed):
        return linear(x.to(weight.dtype), weight, bias).float()
    result: torch.Tensor = ops.linear(x.to(dtype), *weight, None if bias is None else bias.to(dtype))
    return result.float()
