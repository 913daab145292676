"""The doors between model files and recurrences: what restarts at a branch, and that no model is left at a loop."""

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType

import mlx.core as mx
import mlx_lm.models
import pytest
import tiny
import tiny_configs
from mlx_lm.models import gated_delta

from segtrain.engine import objectives
from segtrain.engine.backward import FullBackward, SegmentedBackward
from segtrain.engine.layouts import Layout, Stream, padded, pair, shared_prefix
from segtrain.models import branches, recurrences, scans, support
from segtrain.models.branches import by_branches
from segtrain.models.plain import PlainForward
from segtrain.models.recurrences import DOORS, RESTARTS
from segtrain.models.stack import LayerStack
from segtrain.models.stream_ops import stream_ops
from segtrain.recurrence import gated_delta as delta_module
from segtrain.recurrence import rwkv7, selective_scan, ssd
from segtrain.recurrence.short_conv import depthwise
from segtrain.recurrence.sizes import Sizes

CHANNELS = 6


def stream(prefix: int, branches: tuple[int, ...]) -> Stream:
    return Stream(mx.zeros((1, prefix + sum(branches)), mx.int32), prefix, branches)


def decayed(sequences, state):
    """state = state / 2 + x, all of them as outputs."""
    outputs = []
    for t in range(sequences[0].shape[1]):
        state = (0 if state is None else state / 2) + sequences[0][:, t] * sequences[1][:, t]
        outputs.append(state)
    return mx.stack(outputs, axis=1), state


def separately(run: Callable, of: Stream, *rows: mx.array) -> mx.array:
    """`run` over [prompt; branch] for each branch by itself; the prompt's outputs once."""
    outputs, start = [], of.prefix
    for length in of.branches:
        whole = [mx.concatenate([x[:, : of.prefix], x[:, start : start + length]], axis=1) for x in rows]
        y = run(*whole)
        outputs.append(y[:, of.prefix if outputs else 0 :])
        start += length
    return mx.concatenate(outputs, axis=1)


def same_with_gradients(ours: Callable, theirs: Callable, *inputs: mx.array) -> bool:
    mx.random.seed(9)
    cotangent = mx.random.normal(theirs(*inputs).shape)
    both = [mx.vjp(f, list(inputs), [cotangent]) for f in (ours, theirs)]
    return all(mx.allclose(a, b, atol=1e-5) for x, y in zip(*both, strict=True) for a, b in zip(x, y, strict=True))


STREAMS = [stream(5, (3, 4)), stream(1, (3, 2)), stream(2, (1, 1, 4)), stream(0, (4, 3))]


@pytest.mark.parametrize("of", STREAMS, ids=lambda of: f"{of.prefix}+{of.branches}")
def test_branches_continue_from_the_prompts_state(of: Stream):
    x, w = mx.random.normal((2, len(of), CHANNELS)), mx.random.normal((2, len(of), CHANNELS))
    ours = lambda *rows: by_branches(of, decayed, rows)[0]  # noqa: E731
    assert same_with_gradients(ours, lambda *rows: separately(lambda *r: decayed(r, None)[0], of, *rows), x, w)


def test_a_stream_without_branches_gives_back_its_last_state():
    of = stream(0, (7,))
    x = mx.random.normal((1, 7, CHANNELS))
    y, state = by_branches(Stream(of.tokens), decayed, [x, x], mx.ones((1, CHANNELS)))
    assert mx.array_equal(y[:, -1], state)


@pytest.mark.parametrize("of", STREAMS, ids=lambda of: f"{of.prefix}+{of.branches}")
def test_a_convolution_continues_from_the_prompts_last_rows(of: Stream):
    x, taps = mx.random.normal((2, len(of), CHANNELS)), mx.random.normal((CHANNELS, 4, 1))

    def conv(x: mx.array, taps: mx.array) -> mx.array:
        return mx.conv1d(mx.pad(x, [(0, 0), (3, 0), (0, 0)]), taps, groups=CHANNELS)

    def through_the_door(x: mx.array, taps: mx.array) -> mx.array:
        with stream_ops(of, []):
            return conv(x, taps)

    expected = lambda x, taps: separately(lambda x: conv(x, taps), of, x)  # noqa: E731
    assert same_with_gradients(through_the_door, expected, x, taps)


@pytest.mark.parametrize("T", [1, 2, 9])
@pytest.mark.parametrize("width", [1, 2, 4])
def test_depthwise_is_mlxs_convolution(T: int, width: int):
    x, taps = mx.random.normal((2, T + width - 1, CHANNELS)), mx.random.normal((CHANNELS, width, 1))
    assert same_with_gradients(depthwise, lambda x, taps: mx.conv1d(x, taps, groups=CHANNELS), x, taps)


@tiny.frees_at_once
def test_depthwise_holds_less_than_mlxs_convolution():
    x, taps = mx.random.normal((1, 4099, 256)), mx.random.normal((256, 4, 1))

    def copies(conv: Callable) -> float:
        mx.eval(x, taps)
        mx.clear_cache()
        mx.reset_peak_memory()
        before = mx.get_active_memory()
        mx.eval(mx.grad(lambda x: conv(x, taps).square().sum())(x))
        return (mx.get_peak_memory() - before) / x.nbytes

    assert copies(depthwise) < 5 < copies(lambda x, taps: mx.conv1d(x, taps, groups=256))


def test_other_convolutions_stay_mlxs_or_are_refused():
    x, weight = mx.random.normal((1, 8, 4)), mx.random.normal((5, 3, 4))
    expected = mx.conv1d(x, weight, padding=1)
    with stream_ops(Stream(mx.zeros((1, 8))), []):
        assert mx.array_equal(mx.conv1d(x, weight, padding=1), expected)
    with stream_ops(stream(3, (3, 2)), []), pytest.raises(NotImplementedError, match="8 rows in a stream of 8"):
        mx.conv1d(x, weight, padding=1)


def test_rows_that_are_not_the_streams_are_refused():
    with pytest.raises(NotImplementedError, match=r"\[5\] rows in a stream of 8"):
        by_branches(stream(3, (3, 2)), decayed, [mx.zeros((1, 5, 2))] * 2)


def test_doors_are_put_back_after_an_error():
    conv = mx.conv1d
    inside = []

    def fails() -> None:
        with stream_ops(stream(1, (1,)), []):
            inside.append(mx.conv1d)
            raise KeyError

    with pytest.raises(KeyError):
        fails()
    assert inside[0] is not conv
    assert mx.conv1d is conv


def model_files(pattern: str) -> set[str]:
    """mlx-lm's model files whose source matches."""
    files = Path(mlx_lm.models.__file__ or next(iter(mlx_lm.models.__path__)) + "/x").parent.glob("*.py")
    return {path.stem for path in files if re.search(pattern, path.read_text())}


@pytest.mark.parametrize("function", ["gated_delta_update", "ssm_update"])
def test_every_file_that_uses_a_recurrence_has_a_door(function: str):
    users = model_files(f"import.* {function}")
    assert users - support.REFUSED.keys() == {file for file, name, _ in DOORS if name == function}


def test_every_file_with_a_loop_over_tokens_has_a_door():
    loops = model_files(r"for t in range\((L|T|x\.shape\[1\])\)")
    assert {"mamba", "rwkv7"} < loops
    assert loops - {"gated_delta"} <= {file for file, *_ in DOORS}


def test_training_does_not_run_a_token_at_a_time(monkeypatch: pytest.MonkeyPatch):
    model = tiny_configs.build("qwen3_5")
    lora = tiny.attach(model)

    def loop(*_: object, **__: object) -> None:
        raise AssertionError("a loop over tokens")

    monkeypatch.setattr(gated_delta, "gated_delta_ops", loop)
    SegmentedBackward(LayerStack(model), lora, objectives.sft).step(tiny.row(12, 4))
    with pytest.raises(AssertionError, match="a loop over tokens"):
        model(mx.zeros((1, 3), mx.int32))  # the control: mlx-lm's own pass does


LOOPS = [(file, name) for file, name, _ in scans.DOORS if name != "create_attention_mask" and "Ngram" not in name]


@pytest.mark.parametrize(("file", "name"), LOOPS)
def test_training_uses_the_door_and_mlx_lms_own_pass_what_is_behind(
    file: str, name: str, monkeypatch: pytest.MonkeyPatch
):
    model = tiny_configs.build(file)
    lora = tiny.attach(model)
    stack = LayerStack(model)

    def behind(*_: object, **__: object) -> None:
        raise AssertionError("behind the door")

    monkeypatch.setattr(f"mlx_lm.models.{file}.{name}", behind)
    SegmentedBackward(stack, lora, objectives.sft).step(tiny.row(12, 4))
    with pytest.raises(AssertionError, match="behind the door"):
        mx.eval(model(mx.zeros((1, 12), mx.int32)))


def test_the_plain_pass_has_a_gradient_where_mlx_lm_has_a_kernel_without_one(monkeypatch: pytest.MonkeyPatch):
    """As on Metal, where RWKV-7's own pass goes through `wkv7_kernel`."""
    model = tiny_configs.build("rwkv7")
    lora, stack = tiny.attach(model), LayerStack(model)
    expected = FullBackward(PlainForward(stack), lora, objectives.sft).step(tiny.row(9, 4))

    def kernel(*_: object) -> None:
        raise AssertionError("no gradient")

    monkeypatch.setattr("mlx_lm.models.rwkv7.wkv7_kernel", kernel)
    monkeypatch.setattr(mx, "default_device", lambda: mx.gpu)
    monkeypatch.setattr(mx.metal, "is_available", lambda: True)
    with pytest.raises(AssertionError, match="no gradient"):
        model(mx.zeros((1, 3), mx.int32))  # the control
    step = FullBackward(PlainForward(stack), lora, objectives.sft).step(tiny.row(9, 4))
    assert tiny.relative(expected.grads, step.grads) < 1e-5 * tiny.ROUNDING


OPTIONS = [{}, {"lower_bound": -5.0}, {"allow_neg_eigval": True}]


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("channels", [False, True])
def test_the_door_computes_mlx_lms_update(channels: bool, options: dict, masked: bool):
    """With every option that a model file gives it; a masked token changes no state, and its output is nobody's."""
    mx.random.seed(5)
    q, k, v = (mx.random.normal((2, 21, heads, 8)) * 8**-0.5 for heads in (2, 2, 4))
    shape = (4, 8) if channels else (4,)
    a, b = mx.random.normal((2, 21, *shape)), mx.random.normal((2, 21, 4))
    A_log, dt_bias = mx.random.normal((4, 1) if channels else (4,)), mx.random.normal(shape)
    args = [q, k, v, a, b, A_log, dt_bias, mx.random.normal((2, 4, 8, 8))]
    mask = mx.arange(21)[None] < mx.array([[21], [13]]) if masked else None
    update = recurrences.delta_rule(Stream(mx.zeros((2, 21), mx.int32)), None, gated_delta.gated_delta_update)

    def of(f: Callable) -> Callable:
        def seen(*args: mx.array) -> list[mx.array]:
            y, state = f(*args, mask, **options)
            return [y if mask is None else mx.where(mask[..., None, None], y, 0), state]

        return seen

    cotangents = [mx.random.normal(v.shape), mx.random.normal((2, 4, 8, 8))]
    ours, theirs = (mx.vjp(of(f), args, cotangents) for f in (update, gated_delta.gated_delta_update))
    for mine, expected in zip([*ours[0], *ours[1]], [*theirs[0], *theirs[1]], strict=True):
        assert mx.linalg.norm((mine - expected).flatten()).item() < 1e-5 * mx.linalg.norm(expected.flatten()).item()


@contextmanager
def one_after_the_other(module: ModuleType, name: str) -> Iterator[None]:
    """The rejected response goes on from the chosen one, in recurrences or in convolutions."""

    def run_on(of: Stream, run: Callable, sequences: list, state: mx.array | None = None) -> tuple:
        return run(sequences, state)

    def padded(of: Stream, x: mx.array, tail: int) -> list[mx.array]:
        return [x]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, name, {"by_branches": run_on, "padded_runs": padded}[name])
        yield


@pytest.mark.parametrize(
    ("model_file", "module", "name"),
    [
        ("qwen3_5", recurrences, "by_branches"),
        ("qwen3_5", branches, "padded_runs"),
        ("mamba", scans, "by_branches"),
        ("mamba2", scans, "by_branches"),
        ("rwkv7", scans, "by_branches"),
        ("rwkv7", scans, "padded_runs"),
        ("recurrent_gemma", scans, "by_branches"),
        ("baichuan_m1", scans, "padded_runs"),
        ("longcat_flash_ngram", scans, "padded_runs"),
    ],
)
def test_a_response_that_goes_on_from_the_other_is_seen(model_file: str, module: ModuleType, name: str):
    model = tiny_configs.build(model_file)
    lora, stack = tiny.attach(model), LayerStack(model)
    rows = tiny.tokens(9, 1), tiny.tokens(7, 2), tiny.tokens(8, 3)
    expected = FullBackward(PlainForward(stack), lora, objectives.orpo()).step(pair(*rows))
    shared = SegmentedBackward(stack, lora, objectives.orpo())
    assert tiny.relative(expected.grads, shared.step(shared_prefix(*rows)).grads) < 1e-5 * tiny.ROUNDING
    with one_after_the_other(module, name):
        assert tiny.relative(expected.grads, shared.step(shared_prefix(*rows)).grads) > 1e-3


def check_against_mlx_lm(name: str) -> None:
    """Gradients of a row, and of a shared prompt against two streams, by mlx-lm's own loop over tokens."""
    model = tiny_configs.build(name)
    lora = tiny.attach(model)
    stack = LayerStack(model)
    _, expected = tiny.mlx_lm_gradients(model, lora, tiny.tokens(18), 6)
    sft = SegmentedBackward(stack, lora, objectives.sft).step(tiny.row(18, 6))
    assert tiny.relative(expected, sft.grads) < 1e-5 * tiny.ROUNDING
    rows = tiny.tokens(9, 1), tiny.tokens(7, 2), tiny.tokens(8, 3)
    expected = FullBackward(PlainForward(stack), lora, objectives.orpo()).step(pair(*rows)).grads
    shared = SegmentedBackward(stack, lora, objectives.orpo()).step(shared_prefix(*rows))
    assert tiny.relative(expected, shared.grads) < 1e-5 * tiny.ROUNDING


@pytest.mark.parametrize("name", ["mamba", "mamba2", "rwkv7", "bailing_moe_linear"])
def test_scans_of_many_groups(name: str, monkeypatch: pytest.MonkeyPatch):
    """Groups of four tokens, where the families' rows are shorter than one group."""
    monkeypatch.setattr(selective_scan, "GROUP", 4)
    for module in (ssd, rwkv7):
        monkeypatch.setattr(module, "CHUNK", 2)
        monkeypatch.setattr(module, "CHUNKS", 2)
    check_against_mlx_lm(name)


@pytest.mark.parametrize("name", ["qwen3_5", "kimi_linear"])
def test_rows_of_many_groups(name: str, monkeypatch: pytest.MonkeyPatch):
    """mlx-lm's own loss and its loop over tokens, and two streams of it, against groups of two tokens."""
    for backend in delta_module.SIZES:
        monkeypatch.setitem(delta_module.SIZES, backend, Sizes(2, 1))
    check_against_mlx_lm(name)


def test_attention_layers_of_a_hybrid_are_compiled_and_recurrent_ones_compile_their_groups():
    """A linear and a full attention layer in turns; rows of one length add no further function."""
    model = tiny_configs.build("qwen3_5")
    tiny.attach(model)
    stack, keys = LayerStack(model), set()
    for seed in (0, 1):
        tape = stack.begin(tiny.row(12, 4, seed).streams[0])
        keys |= {stack.pure(tape, i, i + 1, shared=True).key for i in range(4)}
    assert stack.recurrent == [True, False] * 2
    assert len(keys - {None}) == 1


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("layout", [tiny.row(13, 4), shared_prefix(tiny.tokens(5), [1, 2], [3, 4, 5])])
def test_rows_that_fill_a_bucket_change_nothing(layout: Layout, compiled: bool):
    model = tiny_configs.build("qwen3_5")
    lora, stack = tiny.attach(model), LayerStack(model)
    loss = objectives.sft if len(layout.spans) == 1 else objectives.orpo()
    expected = SegmentedBackward(stack, lora, loss).step(layout)
    filled = SegmentedBackward(stack, lora, loss, compiled=compiled).step(padded(layout, 16))
    assert tiny.relative(expected.grads, filled.grads) < 1e-5 * tiny.ROUNDING


def test_files_that_restart_share_a_prompt_in_the_table():
    assert all(support.shares_prefix(file) for file in RESTARTS)
