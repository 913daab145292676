"""Generations with the adapter as it is now (`eval.prompts`)."""

from collections.abc import Iterator

from mlx_lm import stream_generate
from mlx_lm.sample_utils import make_sampler

from segtrain.errors import UserError, reason
from segtrain.events import Sampled
from segtrain.recipe.schema import EvalRecipe
from segtrain.run.session import Session


def generate(session: Session, recipe: EvalRecipe, step: int) -> Iterator[Sampled]:
    """The most likely continuation of each prompt, as a chat turn where the tokenizer has a template."""
    model, tokenizer = session.loaded.model, session.loaded.tokenizer
    model.eval()
    try:
        with session.lora.dropout_keys.disabled(), session.stack.layer_by_layer():
            for prompt in recipe.prompts:
                pieces = stream_generate(
                    model,
                    tokenizer,
                    _tokens(tokenizer, prompt),
                    max_tokens=recipe.max_tokens,
                    sampler=make_sampler(temp=0.0),
                )
                yield Sampled(step, prompt, "".join(piece.text for piece in pieces))
    finally:
        model.train()


def _tokens(tokenizer: object, prompt: str) -> list[int]:
    if getattr(tokenizer, "chat_template", None):
        turn = [{"role": "user", "content": prompt}]
        try:
            return tokenizer.apply_chat_template(turn, add_generation_prompt=True, tokenize=True, return_dict=False)  # type: ignore[attr-defined]
        except Exception as error:  # a template raises what it likes
            why = reason(error)
            raise UserError(f"eval.prompts: the model's chat template refuses {prompt[:60]!r}: {why}") from error
    return tokenizer.encode(prompt)  # type: ignore[attr-defined]
