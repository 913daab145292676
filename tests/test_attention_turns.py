"""Parts of one computation that take turns: values by autodiff of plain slices, memory by `mx.get_peak_memory`."""

from collections.abc import Callable

import mlx.core as mx
import pytest
import tiny

from segtrain.attention.turns import Turns, cut

PARTS, ROWS = 16, 1024


def queries(rows: int = ROWS) -> mx.array:
    return mx.random.normal((1, 4, rows, 16), key=mx.random.key(0))


def sliced(x: mx.array, edges: list[int]) -> list[mx.array]:
    return [x[:, :, lo:hi] for lo, hi in zip([0, *edges], [*edges, x.shape[2]], strict=True)]


def peak_of_vjp(function: Callable[..., mx.array], *inputs: mx.array) -> float:
    """Of a vjp, in sizes of the first input, beside inputs and cotangent."""
    cotangent = mx.random.normal(function(*inputs).shape, key=mx.random.key(1))
    mx.eval(inputs, cotangent)
    mx.synchronize()
    mx.clear_cache()
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    mx.eval(mx.vjp(function, list(inputs), [cotangent])[1])
    return (mx.get_peak_memory() - before) / inputs[0].nbytes


@pytest.mark.parametrize("edges", [[], [1], [3, 7, 8]])
def test_cut_is_slicing(edges: list[int]):
    x = queries(11)

    def total(parts: Callable) -> Callable[[mx.array], mx.array]:
        return lambda x: sum(((i + 1) * mx.square(part)).sum() for i, part in enumerate(parts(x)))

    both = (lambda x: cut(x, edges, 2), lambda x: sliced(x, edges))
    ours, plain = (mx.value_and_grad(total(parts))(x) for parts in both)
    assert all(mx.array_equal(a, b) for a, b in zip(ours, plain, strict=True))


def test_cut_does_not_pad_each_parts_cotangent():
    edges = [ROWS // PARTS * i for i in range(1, PARTS)]

    def whole(parts: Callable) -> Callable[[mx.array], mx.array]:
        return lambda x: mx.concatenate([mx.sin(part) for part in parts(x, edges)], axis=2)

    assert peak_of_vjp(whole(lambda x, edges: cut(x, edges, 2)), queries()) < 3.5
    assert peak_of_vjp(whole(sliced), queries()) > 7  # what it is for


def attention(q: mx.array, k: mx.array, v: mx.array) -> mx.array:
    scores = q @ k.swapaxes(-1, -2) / 4
    return mx.softmax(scores, axis=-1) @ v


def in_turns(q: mx.array, k: mx.array, v: mx.array, parts: int = 4) -> mx.array:
    size = q.shape[2] // parts
    turns = Turns(k, v)
    for i, block in enumerate(cut(q, [size * n for n in range(1, parts)], 2)):
        turns.results.append(attention(*turns.next(block, slice(None), (i + 1) * size)))
    return mx.concatenate(turns.results, axis=2)


def at_once(q: mx.array, k: mx.array, v: mx.array, parts: int = 4) -> mx.array:
    size = q.shape[2] // parts
    blocks = (q[:, :, i * size : (i + 1) * size] for i in range(parts))
    done = [attention(b, k[:, :, : (i + 1) * size], v[:, :, : (i + 1) * size]) for i, b in enumerate(blocks)]
    return mx.concatenate(done, axis=2)


def test_calls_that_take_turns_have_the_gradients_of_calls_at_once():
    q, k, v = (queries(32) * scale for scale in (1.0, 0.7, -0.4))
    cotangent = mx.random.normal(q.shape, key=mx.random.key(2))
    (a, ours), (b, plain) = (mx.vjp(f, [q, k, v], [cotangent]) for f in (in_turns, at_once))
    assert mx.allclose(a[0], b[0], rtol=1e-6)
    assert all(mx.allclose(x, y, rtol=1e-5, atol=1e-6) for x, y in zip(ours, plain, strict=True))


def test_gradients_of_keys_are_rounded_once():
    """In half precision, to what float32 gives, closer than sums that are rounded call by call."""
    wide = [queries(256) * scale for scale in (1.0, 0.7, -0.4)]
    half = [x.astype(mx.bfloat16) for x in wide]
    cotangent = mx.random.normal(wide[0].shape, key=mx.random.key(2)).astype(mx.bfloat16)
    exact = [x.astype(mx.float32) for x in half]
    _, truth = mx.vjp(lambda *x: at_once(*x, parts=32), exact, [cotangent.astype(mx.float32)])
    errors = []
    for function in (in_turns, at_once):
        _, grads = mx.vjp(lambda *x, f=function: f(*x, parts=32), half, [cotangent])
        assert [g.dtype for g in grads] == [mx.bfloat16] * 3
        errors.append(mx.linalg.norm(grads[1].astype(mx.float32) - truth[1]).item())
    assert errors[0] < errors[1]


def cheap(q: mx.array, k: mx.array, v: mx.array) -> mx.array:
    """What a fused kernel keeps and makes, without its arithmetic."""

    @mx.custom_function
    def call(q: mx.array, k: mx.array, v: mx.array) -> mx.array:
        return mx.sin(q)

    @call.vjp
    def backward(inputs: tuple, cotangent: mx.array, output: mx.array) -> tuple[mx.array, ...]:
        keys, values = mx.depends(list(inputs[1:]), [cotangent, output])
        return mx.sin(cotangent), mx.sin(keys), mx.sin(values)

    return call(q, k, v)


@tiny.frees_at_once
def test_calls_that_take_turns_need_less(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(globals(), "attention", cheap)
    q, k, v = (queries(), queries() * 2, queries() * 3)
    turns, once = (peak_of_vjp(lambda *x, f=f: f(*x, parts=32), q, k, v) for f in (in_turns, at_once))
    assert turns < 0.8 * once
