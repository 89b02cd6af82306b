"""The GPT-2 family of transformers (``GPT2LMHeadModel``) as layers: embedding, one per block, head.

Each layer wraps modules of the model itself, and the chain equals the model's own forward bit for bit when there is
no padding mask. Attention must be ``sdpa``, which is causal by itself; ``eager`` needs a mask tensor from the model.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import ModelError

ATTENTION = "sdpa"


def matches(model: nn.Module) -> bool:
    """True for GPT2LMHeadModel with its own forward. Does not import transformers: such a model already has."""
    module = sys.modules.get("transformers.models.gpt2.modeling_gpt2")
    return (
        module is not None
        and isinstance(model, module.GPT2LMHeadModel)
        and type(model).forward is module.GPT2LMHeadModel.forward
    )


class Embedding(nn.Module):
    """Token and position embedding: int64 tokens [batch, sequence] → [batch, sequence, width]."""

    def __init__(self, wte: nn.Module, wpe: nn.Module, drop: nn.Module) -> None:
        super().__init__()
        self.wte, self.wpe, self.drop = wte, wpe, drop

    def forward(self, tokens: Tensor) -> Tensor:
        """Add up the two embeddings."""
        positions = torch.arange(tokens.shape[1], device=tokens.device).unsqueeze(0)
        hidden: Tensor = self.drop(self.wte(tokens) + self.wpe(positions))
        return hidden


class Block(nn.Module):
    """One transformer block, [batch, sequence, width] → the same."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block = block

    def forward(self, hidden: Tensor) -> Tensor:
        """Run the block."""
        output = self.block(hidden)
        # transformers 4 returns a tuple, transformers 5 the tensor itself.
        result: Tensor = output[0] if isinstance(output, tuple) else output
        return result


class Head(nn.Module):
    """Final norm and projection to the vocabulary: [batch, sequence, width] → [batch, sequence, vocabulary]."""

    def __init__(self, ln_f: nn.Module, lm_head: nn.Module) -> None:
        super().__init__()
        self.ln_f, self.lm_head = ln_f, lm_head

    def forward(self, hidden: Tensor) -> Tensor:
        """The logits."""
        logits: Tensor = self.lm_head(self.ln_f(hidden))
        return logits


def split(model: Any) -> list[tuple[str, str, nn.Module]]:
    """Name, kind and module of each layer. Raises ModelError for options that a chain of blocks cannot honour."""
    config = model.config
    if config.add_cross_attention:
        raise ModelError(
            "GPT2LMHeadModel: the configuration asks for cross attention (add_cross_attention=True), "
            "whose blocks take two inputs; set it to False"
        )
    if config._attn_implementation != ATTENTION:
        raise ModelError(
            f"GPT2LMHeadModel: attention is {config._attn_implementation!r}, which needs a mask between "
            f"layers; build the model with attn_implementation={ATTENTION!r}"
        )
    if any(getattr(part, "gradient_checkpointing", False) for part in model.modules()):
        raise ModelError(
            "GPT2LMHeadModel: gradient checkpointing is on; switch it off, as schedules recompute by themselves"
        )
    body = model.transformer
    blocks = [(f"h.{index}", "block", Block(block)) for index, block in enumerate(body.h)]
    return [
        ("embedding", "embedding", Embedding(body.wte, body.wpe, body.drop)),
        *blocks,
        ("head", "head", Head(body.ln_f, model.lm_head)),
    ]
