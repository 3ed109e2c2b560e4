"""The Triton kernels against the dense reference: interpreted on a CPU, compiled on a GPU."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import pairwise
from typing import Any

import pytest
import torch

from engine.attention import LayerCache
from tests.attention_reference import Step, captured_step, random_step, split_step

triton = pytest.importorskip("triton", reason="triton is not installed")
INTERPRETED = triton.knobs.runtime.interpret  # TRITON_INTERPRET, which conftest sets where there is no GPU
if not INTERPRETED and not torch.cuda.is_available():
    pytest.skip("neither a GPU nor TRITON_INTERPRET=1", allow_module_level=True)

from engine.attention import triton_decode, triton_prefill  # noqa: E402
from engine.attention.rotary import Rotary  # noqa: E402
from engine.attention.triton_backend import TritonAttention  # noqa: E402
from engine.attention.triton_decode import Fresh, decode  # noqa: E402
from engine.attention.triton_prefill import prefill  # noqa: E402

needs_compiler = pytest.mark.skipif(INTERPRETED, reason="TRITON_INTERPRET is set")
DEVICE = "cpu" if INTERPRETED else "cuda"
TOLERANCE = {torch.float32: 2e-5, torch.float16: 3e-3, torch.bfloat16: 2e-2}

small_step = partial(random_step, heads=2, kv_heads=1)  # the interpreter takes its time


def backend(step: Step, *, programs: int = 16) -> TritonAttention:
    """Few programs, so that tests cover sequences of many splits, few and one."""
    return TritonAttention(
        max_sequences=step.batch.context_len.shape[0],
        heads=step.query.shape[1],
        kv_heads=step.key.shape[1],
        head_dim=step.query.shape[2],
        device=step.query.device,
        programs=programs,
    )


def run(attention: TritonAttention, step: Step) -> torch.Tensor:
    return attention(
        step.query,
        step.key,
        step.value,
        step.cache,
        step.batch,
        scale=step.scale,
        window=step.window,
        softcap=step.softcap,
    )


def check(step: Step, **kwargs: int) -> None:
    tolerance = TOLERANCE[step.query.dtype]
    step.check(run(backend(step, **kwargs), step), atol=tolerance, rtol=tolerance)


MIXED = [(1, 1), (300, 1), (31, 1), (65, 1), (40, 17), (5, 5), (70, 30)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("strided", [True, False])
def test_mixed_batch(dtype: torch.dtype, strided: bool) -> None:
    check(random_step(MIXED, num_decodes=4, padded=2, dtype=dtype, strided=strided, device=DEVICE))


@pytest.mark.parametrize("block_size", [8, 64, 256])
def test_pages_smaller_and_larger_than_a_tile(block_size: int) -> None:
    check(random_step(MIXED, num_decodes=4, block_size=block_size, device=DEVICE, seed=block_size))


@pytest.mark.parametrize(
    ("heads", "kv_heads"), [(1, 1), (4, 4), (6, 2), (14, 2), (20, 1)], ids=lambda count: str(count)
)
def test_query_heads_per_kv_head(heads: int, kv_heads: int) -> None:
    sequences = [(40, 1), (290, 1), (9, 9), (50, 20)]
    check(random_step(sequences, num_decodes=2, heads=heads, kv_heads=kv_heads, device=DEVICE))


@pytest.mark.parametrize("head_dim", [32, 48, 96])
def test_head_dims(head_dim: int) -> None:
    sequences = [(40, 1), (290, 1), (50, 20)]
    check(random_step(sequences, num_decodes=2, head_dim=head_dim, device=DEVICE))


@pytest.mark.parametrize("window", [1, 37, 1000])
def test_window(window: int) -> None:
    """Whole pages left behind are poison too: no tile may read them."""
    sequences = [(3, 1), (37, 1), (38, 1), (400, 1), (20, 20), (120, 50)]
    check(small_step(sequences, num_decodes=4, padded=1, window=window, device=DEVICE, seed=window))


def test_softcap() -> None:
    check(small_step(MIXED, num_decodes=4, softcap=2.0, scale=1.5, device=DEVICE))


def test_softcap_and_window() -> None:
    check(small_step(MIXED, num_decodes=4, softcap=0.5, window=20, device=DEVICE))


@pytest.mark.parametrize("around", [32, 64, 256, 512])
def test_lengths_around_tiles_and_splits(around: int) -> None:
    lengths = [around - 1, around, around + 1]
    sequences = [(length, 1) for length in lengths] + [(around + 1, 2), (around, 3)]
    check(small_step(sequences, num_decodes=3, device=DEVICE, seed=around))


def test_one_sequence_takes_every_split() -> None:
    check(random_step([(2100, 1)], num_decodes=1, heads=2, kv_heads=1, device=DEVICE), programs=8)


def test_more_splits_than_one_merge_takes() -> None:
    step = random_step([(5000, 1), (1, 1)], num_decodes=2, heads=12, kv_heads=1, device=DEVICE)
    check(step, programs=64)


SHARED = {
    # lengths, multiprocessors (for two programs each), whether any is cut
    "even, one each": ([512] * 8, 4, False),
    "nearly even, one each": ([500 - 16 * i for i in range(8)], 4, False),
    "even, two rounds": ([600] * 16, 4, False),
    "short, five rounds": ([9] * 40, 4, False),
    "more programs than sequences are padded to": ([9] * 33, 40, False),
    "programs without work": ([40, 9, 1], 40, False),
    "one long among short ones": ([40, 4700, 1030, 1999, 420], 4, True),
    "two for one more round": ([800] * 10, 4, True),
    "a share that ends where a sequence does": ([512, 288], 4, True),
}


@pytest.mark.parametrize("kind", SHARED)
@pytest.mark.parametrize("window", [None, 1300])
def test_every_program_takes_its_share(kind: str, window: int | None) -> None:
    """Right, and cut into as many parts as there are borders to cross."""
    lengths, programs, cut = SHARED[kind]
    step = random_step(
        [(n, 1) for n in lengths], num_decodes=len(lengths), heads=1, kv_heads=1, window=window, device=DEVICE
    )
    attention = backend(step, programs=programs)
    for _ in range(2):
        attention.scratch.partial_lse.fill_(torch.nan)
        step.check(run(attention, step), atol=TOLERANCE[torch.float32])
        assert not attention.scratch.arrivals.any()
        parts = int(attention.scratch.partial_lse.isfinite().sum())
        assert parts == expected_parts(lengths, window, 2 * programs)
        assert (parts > 0) == cut


MANY = {  # more than 8 for each of 2 multiprocessors
    "even": ([200] * 17, False),
    "uneven": ([700, *range(20, 200, 10)], True),
    "too few": ([700, *range(20, 160, 10)], True),
}


@pytest.mark.parametrize("kind", MANY)
@pytest.mark.parametrize("head_dim", [64, 128])
def test_many_sequences_have_three_places_on_a_multiprocessor(kind: str, head_dim: int) -> None:
    lengths, cut = MANY[kind]
    step = random_step(
        [(n, 1) for n in lengths],
        num_decodes=len(lengths),
        heads=2,
        kv_heads=1,
        head_dim=head_dim,
        dtype=torch.float16,
        device=DEVICE,
    )
    attention = backend(step, programs=2)
    attention.scratch.partial_lse.fill_(torch.nan)
    step.check(run(attention, step), atol=TOLERANCE[torch.float16])
    parts = int(attention.scratch.partial_lse.isfinite().sum()) // 2
    places = 2 if kind == "too few" else 3
    assert parts == expected_parts(lengths, None, places * 2, tile=8192 // head_dim)
    assert (parts > 0) == cut


def test_a_captured_step_of_many_sequences_may_decode_few() -> None:
    """What is captured for 20 of them takes the third place, whatever they do."""
    step = small_step(MIXED, num_decodes=4, head_dim=64, dtype=torch.float16, device=DEVICE)
    tokens = len(step.query)
    captured = captured_step(step, tokens + 9, 20)
    out = run(backend(captured, programs=2), captured)
    step.check(out[:tokens], atol=TOLERANCE[torch.float16], rtol=TOLERANCE[torch.float16])


@pytest.mark.parametrize(
    ("decodes", "heads", "kv_heads", "head_dim", "rotary", "third"),
    [
        (9, 2, 2, 64, False, True),
        (9, 4, 2, 128, False, True),
        (8, 2, 2, 64, False, False),  # too few of them
        (17, 2, 1, 64, False, True),
        (9, 2, 2, 64, True, False),  # writes keys and values itself
        (9, 2, 2, 96, False, False),  # needs more registers
        (17, 32, 1, 64, False, False),
    ],
)
def test_who_has_a_third_place(
    monkeypatch: pytest.MonkeyPatch,
    decodes: int,
    heads: int,
    kv_heads: int,
    head_dim: int,
    rotary: bool,
    third: bool,
) -> None:
    """On two multiprocessors: with three stages, and few enough registers."""
    launches: list[dict[str, Any]] = []

    class Noting:
        def __getitem__(self, grid: Any) -> Any:
            return lambda *args, **kwargs: launches.append(kwargs)

    monkeypatch.setattr(triton_decode, "_decode_kernel", Noting())
    step = random_step(
        [(20, 1)] * decodes,
        num_decodes=decodes,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        dtype=torch.float16,
        device=DEVICE,
    )
    fresh = None
    if rotary:
        angles = torch.zeros(1, decodes, head_dim, dtype=torch.float16, device=DEVICE)
        fresh = Fresh(step.key, step.value, step.batch.cache_slots, Rotary(angles, angles, None, None, 0.0))
    decode(
        torch.empty_like(step.query),
        step.query,
        step.cache.key,
        step.cache.value,
        step.batch.query_start,
        step.batch.query_len,
        step.batch.context_len,
        step.batch.block_tables,
        backend(step, programs=2).scratch,
        num_decodes=decodes,
        fresh=fresh,
        scale=1.0,
    )
    [made] = launches
    assert (made["num_stages"], made.get("maxnreg")) == ((3, 168) if third else (4, None))
    assert made["PROGRAMS"] == (3 if third else 2) * 2 // kv_heads


def expected_parts(lengths: list[int], window: int | None, most: int, tile: int = 32) -> int:
    """Parts of sequences that are cut, by counting tile by tile."""
    tiles = [-(-n // tile) - max(n - (window or n), 0) // tile for n in lengths]
    row = [i for i, count in enumerate(tiles) for _ in range(count)]
    programs = max(1, min(len(row) * tile // triton_decode.MIN_SHARE, most))
    share, longest = len(row) // programs, max(tiles)
    rounds = min(-(-len(lengths) // most) * longest, share + longest)
    if rounds <= share + share // 16 + triton_decode.CUT_TILES:
        return 0  # each is whole
    borders = [len(row) * i // programs for i in range(programs + 1)]
    parts = Counter(i for a, b in pairwise(borders) for i in set(row[a:b]))
    return sum(times for times in parts.values() if times > 1)


def test_prefill_alone_and_decode_alone() -> None:
    check(small_step([(33, 33), (1, 1), (70, 6)], num_decodes=0, device=DEVICE))
    check(small_step([(33, 1), (1, 1), (70, 1)], num_decodes=3, device=DEVICE))


@pytest.mark.parametrize("window", [None, 37])
@pytest.mark.parametrize(("programs", "splits"), [(40, 7), (100, 19)])
def test_a_chunk_behind_a_context_that_is_split(
    monkeypatch: pytest.MonkeyPatch, window: int | None, programs: int, splits: int
) -> None:
    """Also into more splits than some have tiles, and with rows that see nothing of the last of them."""
    run_kernel, argument = triton_prefill._prefill_kernel, triton_prefill._prefill_kernel.arg_names.index
    sums_argument = argument("partial_sums")
    written: list[int] = []

    class Noting:
        def __getitem__(self, grid: Any) -> Any:
            def launch(*args: Any, **kwargs: Any) -> None:
                args[sums_argument].fill_(torch.nan)
                run_kernel[grid](*args, **kwargs)
                written.append(int(args[sums_argument].isfinite().sum()) // (2 * kwargs["ROWS"]))

            return launch

    monkeypatch.setattr(triton_prefill, "_prefill_kernel", Noting())
    monkeypatch.setattr(triton_prefill, "MIN_SPLIT", 16)
    step = small_step([(290, 1), (600, 40), (9, 9)], num_decodes=1, window=window, device=DEVICE)
    attention = backend(step, programs=programs)
    for _ in range(2):
        step.check(run(attention, step), atol=TOLERANCE[torch.float32])
        assert not attention.scratch.arrivals.any()
    chunks = 5  # of 8 tokens with two heads each
    assert written == [chunks * (splits if window is None else 2)] * 2


DIVISIONS = {
    "mixed": (MIXED, 4),
    "decodes": ([(33, 1), (1, 1), (70, 1)], 3),
    "prompts": ([(33, 33), (70, 6)], 0),
    "a prompt's last token": ([(40, 1), (5, 5), (70, 1)], 1),
    "prompts of one token": ([(1, 1), (30, 1), (9, 4)], 0),
}


@pytest.mark.parametrize("options", [{}, {"window": 20, "softcap": 2.0}], ids=["plain", "window and softcap"])
@pytest.mark.parametrize("division", DIVISIONS)
def test_a_captured_step_is_for_any_division_into_decodes_and_prompts(
    division: str, options: dict[str, Any]
) -> None:
    sequences, num_decodes = DIVISIONS[division]
    step = small_step(sequences, num_decodes=num_decodes, device=DEVICE, **options)
    tokens = len(step.query)
    captured = captured_step(step, tokens + 9, len(sequences) + 3)
    attention = backend(captured)
    out = run(attention, captured)
    step.check(out[:tokens], atol=TOLERANCE[torch.float32])
    assert not attention.scratch.arrivals.any()


def test_a_decode_gives_the_same_as_a_prefill_of_one_token() -> None:
    """The host may plan a sequence's last chunk either way."""
    sequences = [(33, 1), (290, 1)]
    for num_decodes in (0, 1, 2):
        check(small_step(sequences, num_decodes=num_decodes, device=DEVICE))


def test_a_block_table_wider_than_any_sequence() -> None:
    check(small_step(MIXED, num_decodes=4, table_width=50, device=DEVICE))


def test_scratch_is_ready_for_the_next_launch() -> None:
    """Layers, and steps of other shapes, share one scratch."""
    shapes = [
        small_step([(700, 1), (90, 1), (300, 1)], num_decodes=3, device=DEVICE),
        small_step([(600, 1)], num_decodes=1, device=DEVICE, seed=1),
        small_step([(20, 1), (530, 1), (4, 1)], num_decodes=3, device=DEVICE, seed=2),
    ]
    attention = backend(shapes[0])
    for step in [*shapes, shapes[0]]:
        step.check(run(attention, step), atol=TOLERANCE[torch.float32])
        assert not attention.scratch.arrivals.any()


def test_layers_of_fewer_heads_use_the_same_scratch() -> None:
    """They make fewer programs of a sequence, and therefore more splits."""
    step = random_step([(40, 1), (700, 1)], num_decodes=2, heads=4, kv_heads=1, device=DEVICE)
    attention = TritonAttention(max_sequences=2, heads=4, kv_heads=4, head_dim=16, device=DEVICE, programs=16)
    step.check(run(attention, step), atol=TOLERANCE[torch.float32])


def test_only_named_tokens_are_written() -> None:
    """Decode and prefill, each alone, fill their own tokens of a poisoned output and no other."""
    step = random_step(MIXED, num_decodes=4, device=DEVICE)
    attention = backend(step)
    run(attention, step)  # the keys and values are in the cache now
    batch, cache = step.batch, step.cache
    out = torch.full(step.query.shape, torch.nan, device=DEVICE)
    decode(
        out,
        step.query,
        cache.key,
        cache.value,
        batch.query_start,
        batch.query_len,
        batch.context_len,
        batch.block_tables,
        attention.scratch,
        num_decodes=batch.num_decodes,
        scale=step.scale,
    )
    assert out[:4].isfinite().all()
    assert out[4:].isnan().all()
    out.fill_(torch.nan)
    prefill(
        out,
        step.query,
        cache.key,
        cache.value,
        batch.query_start,
        batch.query_len,
        batch.context_len,
        batch.block_tables,
        attention.scratch,
        num_decodes=batch.num_decodes,
        num_prefills=batch.num_prefills,
        scale=step.scale,
    )
    assert out[:4].isnan().all()
    assert out[4:].isfinite().all()


def test_a_cache_that_is_a_view() -> None:
    """Keys and values interleaved in one tensor."""
    step = random_step(MIXED, num_decodes=4, device=DEVICE)
    both = torch.stack((step.cache.key, step.cache.value), dim=1)
    assert not both[:, 0].is_contiguous()
    check(replace(step, cache=LayerCache(both[:, 0], both[:, 1])))


@pytest.mark.parametrize("at", [16, 40, 69])
def test_a_prefix_is_shared_in_the_step_that_computes_it(at: int) -> None:
    """All keys and values of a step are written before any are read, whatever sequence they belong to."""
    check(split_step(random_step([(80, 70)], num_decodes=0, device=DEVICE), at))


def test_bad_input_is_refused() -> None:
    step = random_step([(3, 1)], num_decodes=1, device=DEVICE)
    attention = backend(step)
    arguments = (step.query, step.key, step.value, step.cache, step.batch)
    with pytest.raises(ValueError, match="scale"):
        attention(*arguments, scale=-1.0)
    with pytest.raises(ValueError, match="softcap"):
        attention(*arguments, scale=1.0, softcap=0.0)
    with pytest.raises(ValueError, match="query"):
        attention(step.query.mT.contiguous().mT, *arguments[1:], scale=1.0)
    many = random_step([(3, 1)] * 99, num_decodes=99, device=DEVICE)
    with pytest.raises(ValueError, match="scratch"):
        run(attention, many)


def test_whole_model_compilation_takes_it_as_one_opaque_op() -> None:
    step = small_step(MIXED, num_decodes=4, device=DEVICE)
    attention = backend(step)

    def layer(step: Step) -> torch.Tensor:
        return run(attention, step) * 2

    compiled: Callable[[Step], torch.Tensor] = torch.compile(layer, fullgraph=True, backend="aot_eager")
    step.check(compiled(step) / 2, atol=TOLERANCE[torch.float32])


@pytest.mark.gpu
@needs_compiler
@pytest.mark.parametrize("head_dim", [64, 96, 128, 256])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize(("window", "softcap"), [(None, None), (700, None), (None, 30.0), (129, 5.0)])
def test_compiled_kernels(
    head_dim: int, dtype: torch.dtype, window: int | None, softcap: float | None
) -> None:
    sequences = [(1, 1), (4097, 1), (129, 1), (20_000, 1), (1024, 1024), (3000, 515), (7, 7), (2049, 1)]
    step = random_step(
        sequences,
        num_decodes=4,
        padded=3,
        heads=8,
        kv_heads=2,
        head_dim=head_dim,
        window=window,
        softcap=softcap,
        dtype=dtype,
        device="cuda",
        seed=head_dim,
    )
    check(step, programs=528)


@pytest.mark.gpu
@needs_compiler
@pytest.mark.parametrize("block_size", [8, 16, 32, 64, 128, 256])
@pytest.mark.parametrize(("heads", "kv_heads"), [(32, 8), (14, 2), (71, 1), (16, 16)])
def test_compiled_layouts(block_size: int, heads: int, kv_heads: int) -> None:
    step = random_step(
        [(5000, 1), (130, 1), (513, 513), (900, 300)],
        num_decodes=2,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=64,
        block_size=block_size,
        dtype=torch.bfloat16,
        device="cuda",
        seed=heads,
    )
    check(step, programs=528)


@pytest.mark.gpu
@needs_compiler
def test_splits_race_and_agree() -> None:
    """Many launches back to back on one scratch: whichever split comes last merges the same sum."""
    step = random_step(
        [(length, 1) for length in (9000, 1, 33, 4000, 700, 2500)],
        num_decodes=6,
        heads=32,
        kv_heads=8,
        head_dim=128,
        dtype=torch.bfloat16,
        device="cuda",
    )
    attention = backend(step, programs=528)
    first = run(attention, step)
    tolerance = TOLERANCE[torch.bfloat16]
    step.check(first, atol=tolerance, rtol=tolerance)
    outputs = [run(attention, step) for _ in range(500)]
    assert all(torch.equal(out, first) for out in outputs)
    assert not attention.scratch.arrivals.any()


@pytest.mark.gpu
@needs_compiler
@pytest.mark.parametrize("window", [None, 600])
def test_a_captured_graph_stays_right_as_lengths_grow(window: int | None) -> None:
    """Captured on short contexts, replayed on long ones: the splits are counted by the device."""
    tolerance = TOLERANCE[torch.bfloat16]
    lengths = (
        [(1, 1), (2, 1), (17, 1), (40, 1)],
        [(300, 1), (1, 1), (8000, 1), (41, 1)],
        [(5000, 1)] * 4,
    )

    def make(index: int) -> Step:
        return random_step(
            lengths[index],
            num_decodes=4,
            table_width=512,
            heads=32,
            kv_heads=8,
            head_dim=128,
            window=window,
            dtype=torch.bfloat16,
            device="cuda",
            seed=index,
        )

    static = make(2)  # whose cache is the largest: the others' pages are copied into it
    attention = backend(static, programs=528)
    inputs = ("query", "key", "value")
    tables = ("cache_slots", "context_len", "block_tables", "query_start", "query_len")

    def load(step: Step) -> None:
        for name in inputs:
            getattr(static, name).copy_(getattr(step, name))
        for name in tables:
            getattr(static.batch, name).copy_(getattr(step.batch, name))
        for mine, other in ((static.cache.key, step.cache.key), (static.cache.value, step.cache.value)):
            mine.fill_(torch.nan)
            mine[: len(other)] = other

    load(make(0))
    run(attention, static)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = run(attention, static)
    for index in (1, 2, 0, 1):
        step = make(index)
        load(step)
        out.fill_(torch.nan)
        graph.replay()
        real = ~step.expected.isnan()
        torch.testing.assert_close(out.double()[real], step.expected[real], atol=tolerance, rtol=tolerance)
        assert not attention.scratch.arrivals.any()


@pytest.mark.gpu
@needs_compiler
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_configurations_fit_the_device(dtype: torch.dtype) -> None:
    """Every tile configuration launches, padded head dimensions included."""
    for head_dim in (16, 32, 64, 80, 96, 128, 192, 256):
        step = random_step(
            [(300, 1), (200, 200)],
            num_decodes=1,
            heads=16,
            kv_heads=1,
            head_dim=head_dim,
            dtype=dtype,
            device="cuda",
        )
        check(step)


@pytest.mark.gpu
@needs_compiler
@pytest.mark.parametrize("head_dim", [64, 96, 128])
@pytest.mark.parametrize(("window", "softcap"), [(None, None), (129, 5.0)])
def test_many_sequences(head_dim: int, window: int | None, softcap: float | None) -> None:
    """One long among short ones, and in a batch with prompts."""
    decodes = [(1 + 37 * i % 900, 1) for i in range(199)] + [(9000, 1)]
    for more in ([], [(300, 80), (64, 64)]):
        step = random_step(
            decodes + more,
            num_decodes=len(decodes),
            heads=32,
            kv_heads=8,
            head_dim=head_dim,
            window=window,
            softcap=softcap,
            dtype=torch.bfloat16,
            device="cuda",
        )
        check(step, programs=132)


@pytest.mark.gpu
@needs_compiler
@pytest.mark.parametrize("window", [None, 600])
def test_a_captured_graph_stays_right_whatever_its_sequences_do(window: int | None) -> None:
    """Captured on nothing at all, replayed on decodes and chunks in any division, short and long."""
    tolerance = TOLERANCE[torch.bfloat16]
    divisions: list[tuple[list[tuple[int, int]], int]] = [
        ([(6000, 60), (9, 9)], 0),
        ([(300, 1), (1, 1), (8000, 1), (41, 1)], 4),
        ([(8000, 1), (41, 1), (7000, 64), (80, 80), (20, 1)], 2),
        ([(200, 200)], 0),
    ]

    def make(index: int) -> Step:
        sequences, num_decodes = divisions[index]
        step = random_step(
            sequences,
            num_decodes=num_decodes,
            table_width=512,
            heads=32,
            kv_heads=8,
            head_dim=128,
            window=window,
            dtype=torch.bfloat16,
            device="cuda",
            seed=index,
        )
        return captured_step(step, 256, 16)

    static = make(2)  # whose cache is the largest: the others' pages are copied into it
    attention = backend(static, programs=132)
    tables = ("cache_slots", "context_len", "block_tables", "query_start", "query_len")

    def load(step: Step) -> None:
        for name in ("query", "key", "value"):
            getattr(static, name).copy_(getattr(step, name))
        for name in tables:
            getattr(static.batch, name).copy_(getattr(step.batch, name))
        for mine, other in ((static.cache.key, step.cache.key), (static.cache.value, step.cache.value)):
            mine.fill_(torch.nan)
            mine[: len(other)] = other

    for name in tables:
        getattr(static.batch, name).zero_()
    run(attention, static)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = run(attention, static)
    for index in (0, 1, 2, 3, 1, 0):
        step = make(index)
        load(step)
        out.fill_(torch.nan)
        graph.replay()
        got = out[: len(step.expected)].double()
        torch.testing.assert_close(got, step.expected, atol=tolerance, rtol=tolerance)
        assert not attention.scratch.arrivals.any()
