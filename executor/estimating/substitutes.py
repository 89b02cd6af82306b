"""What CUDA devices run in one operator, and other devices in pieces: dropout, and attention where it is fused."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.overrides import TorchFunctionMode

aten = torch.ops.aten
_HALVES = (torch.float16, torch.bfloat16)


class CudaFunctions(TorchFunctionMode):
    """While this mode is active, calls of torch choose the operators that they choose on CUDA. ``fused_attention``:
    whether the device has kernels for attention as a whole."""

    def __init__(self, *, fused_attention: bool) -> None:
        super().__init__()
        self._fused_attention = fused_attention

    def __torch_function__(
        self, func: Any, types: Iterable[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Call the function, or what stands for it."""
        kwargs = kwargs or {}
        if func is functional.dropout:
            return _dropout(*args, **kwargs)
        if func is functional.scaled_dot_product_attention and self._fused_attention:
            return _attention(*args, **kwargs)
        return func(*args, **kwargs)


def _dropout(input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
    if inplace or not training or p == 0:
        return functional.dropout(input, p, training, inplace)
    dropped: Tensor = aten.native_dropout(input, p, True)[0]
    return dropped


def _attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Flash attention of half precision without a mask; else the memory-efficient one, whose heads are all there."""
    if query.dtype in _HALVES and attn_mask is None:
        flash: Tensor = aten._scaled_dot_product_flash_attention(
            query, key, value, dropout_p, is_causal, False, scale=scale
        )[0]
        return flash
    if enable_gqa:
        key, value = (each.repeat_interleave(query.shape[-3] // each.shape[-3], -3) for each in (key, value))
    if attn_mask is not None:
        if attn_mask.dtype is torch.bool:
            attn_mask = torch.zeros_like(attn_mask, dtype=query.dtype).masked_fill(~attn_mask, float("-inf"))
        attn_mask = attn_mask.expand(*query.shape[:-1], key.shape[-2])
    recorded = torch.is_grad_enabled() and query.requires_grad
    efficient: Tensor = aten._scaled_dot_product_efficient_attention(
        query, key, value, attn_mask, recorded, dropout_p, is_causal, scale=scale
    )[0]
    return efficient
