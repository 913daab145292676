"""A model's forward pass as mlx-lm runs it: the reference that the stack is held to."""

import sys
from contextlib import AbstractContextManager, nullcontext

import mlx.core as mx
from mlx_lm.models.cache import make_prompt_cache

from segtrain.engine.layouts import Stream
from segtrain.models.exceptions import replaced
from segtrain.models.stack import LayerStack
from segtrain.recurrence import rwkv7


class PlainForward(LayerStack):
    """A stack whose whole forward pass uses mlx-lm's own caches, masks, attention and positions."""

    def __init__(self, stack: LayerStack):
        vars(self).update(vars(stack))

    def whole(self, stream: Stream) -> mx.array:
        """Logits [1, T, V] of a stream without branches."""
        assert not stream.branches
        with _differentiable_rwkv7():
            return self.model(stream.tokens, cache=make_prompt_cache(self.model))


def _differentiable_rwkv7() -> AbstractContextManager[None]:
    """On Metal mlx-lm runs RWKV-7 by a kernel without a gradient: the rule a token at a time takes its place."""
    module = sys.modules.get("mlx_lm.models.rwkv7")
    return nullcontext() if module is None else replaced(module, "wkv7_kernel", lambda kernel: rwkv7.reference)
