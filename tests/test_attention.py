"""Attention: every kind against the dense definition, and the definition against a loop over rows in numpy.

The expected values are `reference`'s, float32; errors are relative in the Euclidean norm of each array.
"""

import math
from dataclasses import replace

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from segtrain.attention import blocks, dispatch
from segtrain.attention.dispatch import BACKENDS, Backend, Call, align, attend, backend, choose, reference, visibility
from segtrain.engine.layouts import Stream

TOLERANCE = 2e-5

# Each takes one kind wherever that kind exists; small tiles, multiples and calls make every loop go round.
FUSED = Backend(
    "fused",
    head_dims=frozenset(range(1, 513)),
    dtypes=(mx.float32, mx.bfloat16, mx.float16),
    query_multiple=8,
    array_mask=True,
    unequal_dims=True,
    fused_rows=48,
)
BLOCKS = Backend("blocks", tile_bytes=1 << 14)
POWER = Backend("blocks, e ** x", tile_bytes=1 << 17, power=True)
FORCED = [FUSED, BLOCKS, POWER]


def arrays(rows, keys, heads=4, groups=2, dim=16, value_dim=None, batch=1, seed=0, dtype=mx.float32):
    """q, k, v, sinks and an output cotangent."""
    value_dim = value_dim or dim
    keys_ = mx.random.split(mx.random.key(seed), 5)
    shapes = [
        (batch, heads, rows, dim),
        (batch, groups, keys, dim),
        (batch, groups, keys, value_dim),
        (heads,),
        (batch, heads, rows, value_dim),
    ]
    return [mx.random.normal(shape, key=key).astype(dtype) for shape, key in zip(shapes, keys_, strict=True)]


def vjp(function, primals, cotangent):
    outputs, cotangents = mx.vjp(function, primals, [cotangent])
    return [*outputs, *cotangents]


def error(got, want):
    """Relative to `want`, or to a hundredth a number where that is (nearly) zero: there, terms of size 1 cancel."""
    got, want = (np.array(x.astype(mx.float32), dtype=np.float64) for x in (got, want))
    return np.linalg.norm(got - want) / max(np.linalg.norm(want), 1e-2 * math.sqrt(want.size))


def errors(rows, shape, *, sinks=False, **rule):
    """Relative errors of output, dq, dk, dv (and dsinks) of `attend` on that backend."""
    q, k, v, s, cotangent = arrays(**shape)
    rule = {"scale": q.shape[-1] ** -0.5, **rule}
    if sinks:
        got = vjp(lambda q, k, v, s: attend(q, k, v, sinks=s, rows=rows, **rule), [q, k, v, s], cotangent)
        want = vjp(lambda q, k, v, s: reference(q, k, v, sinks=s, **rule), [q, k, v, s], cotangent)
    else:
        got = vjp(lambda q, k, v: attend(q, k, v, rows=rows, **rule), [q, k, v], cotangent)
        want = vjp(lambda q, k, v: reference(q, k, v, **rule), [q, k, v], cotangent)
    return [error(a, b) for a, b in zip(got, want, strict=True)]


def test_the_reference_is_the_definition():
    """Against a loop over rows in numpy, float64: window, soft-cap, sinks, grouped heads, fewer rows than keys."""
    q, k, v, sinks, _ = arrays(rows=9, keys=12, value_dim=8)
    got = np.array(reference(q, k, v, scale=0.3, window=4, softcap=2.0, sinks=sinks))
    q, k, v, sinks = (np.array(x, dtype=np.float64) for x in (q, k, v, sinks))
    for head in range(4):
        for row in range(9):
            seen = [j for j in range(12) if 0 <= row + 3 - j < 4]
            scores = 2.0 * np.tanh(k[0, head // 2, seen] @ q[0, head, row] * 0.3 / 2.0)
            weights = np.exp(scores) / (np.exp(scores).sum() + np.exp(sinks[head]))
            np.testing.assert_allclose(got[0, head, row], weights @ v[0, head // 2, seen], rtol=1e-5, atol=1e-6)


def test_visibility_of_branches_and_windows():
    """Prefix of 2, branches of 2 and 2, window 3: written out by hand."""
    expected = [
        [1, 0, 0, 0, 0, 0],
        [1, 1, 0, 0, 0, 0],
        [1, 1, 1, 0, 0, 0],
        [0, 1, 1, 1, 0, 0],
        [1, 1, 0, 0, 1, 0],
        [0, 1, 0, 0, 1, 1],
    ]
    assert visibility(6, 6, window=3, prefix=2, branches=(2, 2)).astype(mx.int32).tolist() == expected


@pytest.mark.parametrize("rows", FORCED, ids=lambda rows: rows.name)
@pytest.mark.parametrize("length", [1, 2, 127, 128, 129, 61])
@pytest.mark.parametrize("window", [None, 1, 7, 1000])
def test_lengths_and_windows(rows, length, window):
    assert max(errors(rows, {"rows": length, "keys": length}, window=window)) <= TOLERANCE


@pytest.mark.parametrize("rows", FORCED, ids=lambda rows: rows.name)
@pytest.mark.parametrize(
    ("shape", "rule"),
    [
        ({"rows": 33, "keys": 70}, {}),
        ({"rows": 33, "keys": 70}, {"window": 20}),
        ({"rows": 1, "keys": 70}, {"window": 20}),
        ({"rows": 65, "keys": 65, "heads": 4, "groups": 4}, {}),
        ({"rows": 65, "keys": 65, "heads": 8, "groups": 2, "batch": 2}, {"window": 16}),
        ({"rows": 40, "keys": 40, "dim": 24, "value_dim": 8}, {}),
        ({"rows": 20, "keys": 20, "dim": 64}, {}),
        ({"rows": 20, "keys": 20, "dim": 256}, {"window": 8}),
        ({"rows": 20, "keys": 20, "dim": 512}, {}),
        ({"rows": 60, "keys": 60}, {"softcap": 2.0}),
        ({"rows": 60, "keys": 77}, {"softcap": 2.0, "window": 9}),
    ],
)
@pytest.mark.parametrize("sinks", [False, True])
def test_shapes_and_rules(rows, shape, rule, sinks):
    assert max(errors(rows, shape, sinks=sinks, **rule)) <= TOLERANCE


@pytest.mark.parametrize("rows", FORCED, ids=lambda rows: rows.name)
@pytest.mark.parametrize("lengths", [(1, 1), (127, 128), (129, 1), (0, 5), (5, 0), (7,), (3, 9, 4)])
@pytest.mark.parametrize("window", [None, 7, 64])
def test_branches(rows, lengths, window):
    shape = {"rows": 40 + sum(lengths), "keys": 40 + sum(lengths)}
    assert max(errors(rows, shape, prefix=40, branches=lengths, window=window)) <= TOLERANCE


@settings(max_examples=60, deadline=None)
@given(
    rows=st.sampled_from(FORCED),
    prefix=st.integers(0, 40),
    lengths=st.lists(st.integers(0, 40), min_size=1, max_size=3),
    window=st.none() | st.integers(1, 60),
    softcap=st.none() | st.just(3.0),
    grouping=st.sampled_from([(1, 1), (2, 1), (4, 2), (4, 1)]),
    value_dim=st.sampled_from([8, 12]),
)
def test_any_stream(rows, prefix, lengths, window, softcap, grouping, value_dim):
    total = prefix + sum(lengths)
    if not total:
        return
    shape = {
        "rows": total,
        "keys": total,
        "heads": grouping[0],
        "groups": grouping[1],
        "dim": 8,
        "value_dim": value_dim,
    }
    rule = {"prefix": prefix, "branches": tuple(lengths), "window": window, "softcap": softcap}
    assert max(errors(rows, shape, **rule)) <= TOLERANCE


def test_a_tile_of_many_heads_is_taken_in_parts():
    """The blocks' loop over heads, which only long rows or small tiles reach."""
    form = blocks.Blocks(0.25, tile_bytes=4 * 2 * 128 * 150)
    q, k, v, *_ = arrays(rows=150, keys=150, heads=8, groups=4)
    assert len(list(form.parts(q, k, v))) == 4
    rows = replace(BLOCKS, tile_bytes=form.tile_bytes)
    shape = {"rows": 150, "keys": 150, "heads": 8, "groups": 4}
    assert max(errors(rows, shape, sinks=True, softcap=2.0, window=90)) <= TOLERANCE


@settings(max_examples=100, deadline=None)
@given(
    rows=st.integers(1, 3000),
    before=st.integers(0, 500),
    heads=st.sampled_from([1, 4]),
    window=st.none() | st.integers(1, 1000),
    tile=st.integers(1, 1 << 22),
)
def test_tiles_cover_every_visible_pair_within_their_size(rows, before, heads, window, tile):
    part = blocks.Part(mx.zeros((1, heads, 1, rows, 1)), mx.zeros((1, heads, rows + before, 1)), None, None)
    tiles = list(blocks.Blocks(1.0, window, tile_bytes=tile).tiles(part))
    assert [s.start for s in tiles] == [0, *(s.stop for s in tiles[:-1])]
    assert tiles[-1].stop == rows
    for s in tiles:
        assert s.last == before + s.stop
        assert s.first == (0 if window is None else max(0, before + s.start - window + 1))
        size = 4 * heads * (s.stop - s.start) * (s.last - s.first)
        assert size <= tile or s.stop - s.start <= blocks.MIN_ROWS


CAUSAL, WINDOW = {}, {"window": 11}
SHARED = {"prefix": 20, "branches": (15, 22)}


@pytest.mark.parametrize("rows", FORCED, ids=lambda rows: rows.name)
@pytest.mark.parametrize("rule", [CAUSAL, WINDOW, SHARED, {"softcap": 2.0}])
def test_adjoint_identity(rows, rule):
    """<A t, w> = <t, A^T w>: A t by central differences of the dense definition, A^T w the vjp under test."""
    q, k, v, _, cotangent = arrays(rows=57, keys=57)
    tangents = arrays(rows=57, keys=57, seed=1)[:3]
    step = 1e-2
    forward = [
        reference(*(x + sign * step * t for x, t in zip((q, k, v), tangents, strict=True)), scale=0.25, **rule)
        for sign in (1, -1)
    ]
    tangent = (forward[0] - forward[1]) / (2 * step)
    _, *cotangents = vjp(lambda q, k, v: attend(q, k, v, scale=0.25, rows=rows, **rule), [q, k, v], cotangent)
    left = (tangent * cotangent).sum().item()
    right = sum((a * b).sum().item() for a, b in zip(tangents, cotangents, strict=True))
    norm = mx.linalg.norm(tangent.flatten()).item() * mx.linalg.norm(cotangent.flatten()).item()
    assert abs(left - right) <= 2e-4 * norm


def test_finite_differences_of_sinks_and_queries():
    """Blocks against central differences of themselves, one coordinate at a time."""
    q, k, v, sinks, cotangent = arrays(rows=12, keys=12, heads=2, groups=1, dim=4)

    def loss(q, sinks):
        return (attend(q, k, v, scale=0.5, softcap=2.0, window=5, sinks=sinks, rows=BLOCKS) * cotangent).sum()

    dq, dsinks = mx.grad(loss, argnums=(0, 1))(q, sinks)
    step = 1e-2
    for head in range(2):
        bump = step * (mx.arange(2) == head)
        slope = (loss(q, sinks + bump) - loss(q, sinks - bump)) / (2 * step)
        assert slope.item() == pytest.approx(dsinks[head].item(), rel=1e-2, abs=1e-3)
    for index in (0, 17, 95):
        bump = step * (mx.arange(q.size) == index).reshape(q.shape)
        slope = (loss(q + bump, sinks) - loss(q - bump, sinks)) / (2 * step)
        assert slope.item() == pytest.approx(dq.flatten()[index].item(), rel=1e-2, abs=1e-3)


@pytest.mark.parametrize("rows", FORCED, ids=lambda rows: rows.name)
@pytest.mark.parametrize("transform", [mx.checkpoint, mx.compile])
def test_inside_other_transforms(rows, transform):
    """The same gradients within `mx.checkpoint` (recomputed) and `mx.compile`, through a product before and after."""
    q, k, v, _, cotangent = arrays(rows=57, keys=57)

    def loss(q, k, v):
        out = attend(2 * q, k, v * v, scale=0.25, window=30, rows=rows)
        return (out * out * cotangent).sum()

    want = mx.grad(loss, argnums=(0, 1, 2))(q, k, v)
    inner = transform(loss)
    got = mx.value_and_grad(lambda *x: inner(*x), argnums=(0, 1, 2))(q, k, v)[1]
    compiled = mx.compile(mx.grad(loss, argnums=(0, 1, 2)))(q, k, v)
    for a, b, c in zip(got, compiled, want, strict=True):
        assert max(error(a, c), error(b, c)) <= TOLERANCE


@pytest.mark.parametrize("dtype", [mx.bfloat16, mx.float16])
@pytest.mark.parametrize("rule", [CAUSAL, WINDOW, SHARED, {"softcap": 5.0}])
def test_half_precision_is_as_near_the_truth_as_the_dense_call(dtype, rule):
    """err_ours <= 1.1 err_reference + 1e-3, the truth being float32 on the same (rounded) inputs."""
    q, k, v, _, cotangent = arrays(rows=57, keys=57, dim=32, dtype=dtype)
    run = {
        "ours": lambda q, k, v: attend(q, k, v, scale=0.2, rows=BLOCKS, **rule),
        "theirs": lambda q, k, v: reference(q, k, v, scale=0.2, **rule),
    }
    truth = vjp(run["theirs"], [x.astype(mx.float32) for x in (q, k, v)], cotangent.astype(mx.float32))
    ours = vjp(run["ours"], [q, k, v], cotangent)
    theirs = vjp(run["theirs"], [q, k, v], cotangent)
    assert all(x.dtype == dtype for x in ours)
    for a, b, c in zip(ours, theirs, truth, strict=True):
        assert error(a, c) <= 1.1 * error(b, c) + 1e-3


def test_large_scores_stay_finite():
    """Scores and a sink of some hundreds: exp must be taken below the row's maximum, forward and backward."""
    q, k, v, sinks, cotangent = arrays(rows=40, keys=40)
    sinks = sinks + mx.array([0.0, 300.0, -300.0, 0.0])
    for rows in (BLOCKS, POWER):
        got = vjp(lambda q, k, v, s, r=rows: attend(q, k, v, scale=40.0, sinks=s, rows=r), [q, k, v, sinks], cotangent)
        want = vjp(lambda q, k, v, s: reference(q, k, v, scale=40.0, sinks=s), [q, k, v, sinks], cotangent)
        assert max(error(a, b) for a, b in zip(got[:2], want[:2], strict=True)) <= 1e-3
        assert all(mx.isfinite(x).all().item() for x in got)


# Controls: what the checks above are there to catch, done on purpose, must be far from equal.


def test_control_window_on_physical_positions_fails():
    """Rows counted as they lie, not by logical position: the second branch then sees too little of the prefix."""
    q, k, v, _, _ = arrays(rows=60, keys=60)
    rule = {"scale": 0.25, "prefix": 20, "branches": (15, 25), "window": 18}
    index = mx.arange(60)
    physical = visibility(60, 60, prefix=20, branches=(15, 25)) & (index[:, None] - index[None] < 18)
    wrong = mx.fast.scaled_dot_product_attention(q, k, v, scale=0.25, mask=physical)
    right = reference(q, k, v, **rule)
    assert error(attend(q, k, v, rows=BLOCKS, **rule), right) <= TOLERANCE
    assert error(wrong, right) > 0.1


def test_control_visible_sibling_branch_fails():
    q, k, v, _, _ = arrays(rows=60, keys=60)
    rule = {"scale": 0.25, "prefix": 20, "branches": (15, 25)}
    assert error(attend(q, k, v, scale=0.25, rows=BLOCKS), reference(q, k, v, **rule)) > 0.1


def test_no_row_learns_from_a_sibling_branch():
    """The second branch's cotangent reaches the prefix and itself, not the first branch."""
    q, k, v, _, cotangent = arrays(rows=60, keys=60)
    cotangent = cotangent * (mx.arange(60) >= 35)[None, None, :, None]
    rule = {"scale": 0.25, "prefix": 20, "branches": (15, 25)}
    for rows in FORCED:
        _, *grads = vjp(lambda q, k, v, r=rows: attend(q, k, v, rows=r, **rule), [q, k, v], cotangent)
        for grad in grads:
            assert mx.abs(grad[:, :, 20:35]).max().item() == 0
        assert mx.abs(grads[1][:, :, :20]).max().item() > 0


def test_control_a_stopped_key_gradient_fails():
    """Cutting the gradient between blocks of rows leaves the outputs equal and dk, dv far off."""
    q, k, v, _, cotangent = arrays(rows=64, keys=64)

    def cut(q, k, v):
        past = [mx.concatenate([mx.stop_gradient(x[:, :, :32]), x[:, :, 32:]], axis=2) for x in (k, v)]
        first = attend(q[:, :, :32], k[:, :, :32], v[:, :, :32], scale=0.25, rows=BLOCKS)
        return mx.concatenate([first, attend(q[:, :, 32:], *past, scale=0.25, rows=BLOCKS)], axis=2)

    got = vjp(cut, [q, k, v], cotangent)
    want = vjp(lambda q, k, v: reference(q, k, v, scale=0.25), [q, k, v], cotangent)
    off = [error(a, b) for a, b in zip(got, want, strict=True)]
    assert max(off[:2]) <= TOLERANCE
    assert min(off[2:]) > 0.1


LONG = Call(heads=32, rows=8192, keys=8192, dim=128, value_dim=128, dtype=mx.bfloat16)


@pytest.mark.parametrize(
    ("name", "change", "kind"),
    [
        ("cuda", {}, "fused"),
        ("cuda", {"dim": 256, "value_dim": 256}, "blocks"),
        ("cuda", {"dim": 100, "value_dim": 100}, "blocks"),
        ("cuda", {"dtype": mx.float32}, "blocks"),
        ("cuda", {"rows": 8200, "keys": 8200}, "fused"),
        ("cuda", {"window": 512}, "band"),
        ("cuda", {"window": 8192}, "fused"),
        ("cuda", {"window": 512, "dim": 256, "value_dim": 256}, "blocks"),
        ("cuda", {"softcap": 50.0}, "blocks"),
        ("cuda", {"sinks": True}, "blocks"),
        ("metal", {}, "fused"),
        ("metal", {"dtype": mx.float32}, "fused"),
        ("metal", {"dim": 256, "value_dim": 256}, "fused"),
        ("metal", {"dim": 512, "value_dim": 512}, "blocks"),
        ("metal", {"dim": 192}, "fused"),
        ("metal", {"value_dim": 192}, "blocks"),
        ("metal", {"window": 512}, "blocks"),
        ("metal", {"softcap": 50.0}, "blocks"),
        ("cpu", {}, "blocks"),
        ("cpu", {"window": 512}, "blocks"),
    ],
)
def test_choice(name, change, kind):
    """The table of DESIGN, "Attention backward"."""
    assert choose(BACKENDS[name], replace(LONG, **change)) == kind


@pytest.mark.parametrize(("heads", "groups"), [(4, 2), (4, 1), (6, 2), (4, 4)])
@pytest.mark.parametrize("limit", [1, 100 * 16, 200 * 16, 300 * 16])
def test_heads_are_split_into_fused_calls_of_bounded_size(monkeypatch, heads, groups, limit):
    """No call is larger than the limit (but for one head), all are as large as it allows, and the sum is exact."""
    sizes = []

    def counted(q, k, v, **rule):
        sizes.append(q.shape[1] * k.shape[2] * k.shape[3])
        return original(q, k, v, **rule)

    original = dispatch._sdpa
    monkeypatch.setattr(dispatch, "_sdpa", counted)
    shape = {"rows": 90, "keys": 100, "heads": heads, "groups": groups}
    assert max(errors(replace(FUSED, fused_elements=limit), shape)) < TOLERANCE
    one_head = 106 * 16  # 90 rows are padded to 96, and their keys with them
    assert max(sizes) <= max(limit, one_head)
    if limit == 1:
        assert len(sizes) == heads * 2  # rows are two calls


def test_the_forced_backends_take_the_kinds_they_are_named_for():
    """Otherwise the parity tests would compare one kind with itself."""
    call = Call(heads=4, rows=60, keys=60, dim=16, value_dim=16, dtype=mx.float32)
    assert choose(FUSED, call) == "fused"
    assert choose(FUSED, replace(call, window=7)) == "band"
    assert choose(BLOCKS, call) == choose(POWER, call) == "blocks"
    assert choose(FUSED, replace(call, sinks=True)) == "blocks"


def test_the_default_backend_is_that_of_the_default_device():
    gpu = "metal" if mx.metal.is_available() else "cuda"
    assert backend().name == ("cpu" if mx.default_device() == mx.Device(mx.cpu) else gpu)
    assert [align(BACKENDS[name]) for name in ("cuda", "metal", "cpu")] == [128, 32, 1]


def test_a_stream_is_what_attend_takes():
    stream = Stream(mx.zeros((1, 30), mx.int32), prefix=10, branches=(8, 12))
    q, k, v, _, _ = arrays(rows=30, keys=30)
    got = attend(q, k, v, scale=0.25, prefix=stream.prefix, branches=stream.branches)
    assert error(got, reference(q, k, v, scale=0.25, prefix=10, branches=(8, 12))) <= TOLERANCE


@pytest.mark.parametrize(
    ("shape", "rule", "message"),
    [
        ({"rows": 9, "keys": 8}, {}, "9 rows over 8 keys"),
        ({"rows": 8, "keys": 8, "heads": 3}, {}, "3 query heads"),
        ({"rows": 8, "keys": 8}, {"window": 0}, "window of 0"),
        ({"rows": 8, "keys": 8}, {"prefix": 2, "branches": (3, 4)}, "do not add up to 8 rows"),
        ({"rows": 7, "keys": 8}, {"prefix": 2, "branches": (3, 2)}, "do not add up to 7 rows and 8 keys"),
    ],
)
def test_lengths_that_do_not_fit(shape, rule, message):
    q, k, v, _, _ = arrays(**shape)
    with pytest.raises(ValueError, match=message):
        attend(q, k, v, scale=1.0, **rule)
