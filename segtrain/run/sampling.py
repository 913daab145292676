"""Generations with the adapter as it is now (`eval.prompts`)."""

from collections.abc import Iterator

from mlx_lm import stream_generate
from mlx_lm.sample_utils import make_sampler

from segtrain.data.chat import ChatTemplate
from segtrain.data.tokenizer import Codec
from segtrain.errors import UserError, counted, reason
from segtrain.event import Sampled
from segtrain.models.load import Loaded
from segtrain.models.positions import learnt
from segtrain.recipe.schema import Recipe
from segtrain.run.session import Session


def generate(session: Session, step: int) -> Iterator[Sampled]:
    """The most likely continuation of each prompt, as a chat turn where there is a template."""
    model, tokenizer, recipe = session.loaded.model, session.loaded.tokenizer, session.recipe
    model.eval()
    try:
        with session.lora.dropout_keys.disabled(), session.stack.layer_by_layer():
            for prompt, (tokens, most) in zip(recipe.eval.prompts, prompts(session.loaded, recipe), strict=True):
                pieces = stream_generate(
                    model,
                    tokenizer,
                    tokens,
                    max_tokens=most,
                    sampler=make_sampler(temp=0.0),
                )
                yield Sampled(step, prompt, "".join(piece.text for piece in pieces))
    finally:
        model.train()


def prompts(loaded: Loaded, recipe: Recipe) -> list[tuple[list[int], int]]:
    """Each prompt's tokens, as training shows a question, and how many may follow (a table of learnt positions ends).

    Raises UserError for a prompt that the template refuses, and for one that leaves no room.
    """
    found, table = [], learnt(loaded.config)
    for prompt in recipe.eval.prompts:
        tokens = _tokens(loaded, recipe, prompt)
        most = recipe.eval.max_tokens if table is None else min(recipe.eval.max_tokens, table - len(tokens))
        if most < 1:
            raise UserError(
                f"eval.prompts: {prompt[:60]!r} has {counted(len(tokens), 'token')}, which leaves no room for an "
                f"answer in the {table:,} positions that this model has learnt; shorten it"
            )
        found.append((tokens, most))
    return found


def _tokens(loaded: Loaded, recipe: Recipe, prompt: str) -> list[int]:
    codec = Codec(loaded.tokenizer)
    template = ChatTemplate(codec, recipe.data.chat_template, recipe.data.chat_template_kwargs)
    if not template.exists:
        return loaded.tokenizer.encode(prompt)
    try:
        return codec.ids(template.render([{"role": "user", "content": prompt}], ask=True))
    except Exception as error:  # a template raises what it likes
        why = reason(error)
        raise UserError(f"eval.prompts: the chat template refuses {prompt[:60]!r}: {why}") from error
