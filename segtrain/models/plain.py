"""A model's forward pass as mlx-lm runs it: the reference that the stack is held to."""

import mlx.core as mx
from mlx_lm.models.cache import make_prompt_cache

from segtrain.engine.layouts import Stream
from segtrain.models.stack import LayerStack


class PlainForward(LayerStack):
    """A stack whose whole forward pass uses mlx-lm's own caches, masks, attention and positions."""

    def __init__(self, stack: LayerStack):
        vars(self).update(vars(stack))

    def whole(self, stream: Stream) -> mx.array:
        """Logits [1, T, V] of a stream without branches."""
        assert not stream.branches
        return self.model(stream.tokens, cache=make_prompt_cache(self.model))
