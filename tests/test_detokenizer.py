"""Text as it comes equals text as a whole, whatever the tokens and however they are dealt out."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from os.path import commonprefix

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deployments import demo_model
from deployments.text import Tokenizer
from engine.detokenizer import Detokenizer
from tests.small_tokenizers import KINDS, save, wrapped

CHARS = ["a", "ab", "é", "天", "🎉", "👩‍👩‍👧", "\ufffd", "\x00", " "]
BYTES = st.one_of(st.binary(min_size=1, max_size=3), st.sampled_from(CHARS).map(str.encode))


@pytest.fixture(scope="session", params=[*KINDS, "demo"])
def tokenizer(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    if request.param == "demo":
        return Tokenizer(demo_model.resolve("demo"))
    return Tokenizer(str(save(request.param, tmp_path_factory.mktemp(request.param))))


@pytest.fixture(scope="session")
def byte_fallback(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return Tokenizer(str(save("byte_fallback", tmp_path_factory.mktemp("tokenizer"))))


def dealt(tokens: Sequence[int], sizes: Sequence[int]) -> list[Sequence[int]]:
    """`tokens` cut into pieces of `sizes`; what is left is the last piece."""
    pieces, start = [], 0
    for size in sizes:
        pieces.append(tokens[start : start + size])
        start += size
    return [*pieces, tokens[start:]]


def stream(
    token_bytes: Callable[[int], bytes],
    pieces: Sequence[Sequence[int]],
    stop: Sequence[str] = (),
    prompt: Sequence[int] = (),
) -> str:
    detokenizer = Detokenizer(token_bytes, stop, prompt)
    return "".join(map(detokenizer.push, pieces)) + detokenizer.finish()


def bytes_of(table: Sequence[bytes]) -> Callable[[int], bytes]:
    return table.__getitem__


# Characters


@given(data=st.data())
def test_deltas_join_to_what_transformers_decodes(tokenizer: Tokenizer, data: st.DataObject) -> None:
    """In the middle of a text, special tokens and ids that no token has included."""
    whole = tokenizer._tokenizer
    byte_tokens = set(range(3, 259)) if whole.convert_ids_to_tokens(3) == "<0x00>" else set()
    token = st.integers(0, len(whole) + 7).filter(lambda token: token not in byte_tokens)
    if byte_tokens:  # such a tokenizer writes characters as runs of bytes (see the next tests)
        character = st.characters(codec="utf-8").map(lambda char: [3 + byte for byte in char.encode()])
        parts = data.draw(st.lists(token.map(lambda token: [token]) | character, max_size=30))
        tokens = [token for part in parts for token in part]
    else:
        tokens = data.draw(st.lists(token, max_size=30))
    pieces = dealt(tokens, data.draw(st.lists(st.integers(0, 4), max_size=30)))
    before = whole.encode("The dog", add_special_tokens=False)
    text = whole.decode(before + tokens, skip_special_tokens=True)
    assert whole.decode(before) + stream(tokenizer.token_bytes, pieces) == text
    assert stream(tokenizer.token_bytes, pieces, prompt=before) == stream(tokenizer.token_bytes, pieces)


@given(text=st.text(st.characters(codec="utf-8"), max_size=20))
def test_what_was_encoded_comes_back(byte_fallback: Tokenizer, text: str) -> None:
    """Bytes of one character after the other, with nothing between: each comes as it is complete."""
    tokens = byte_fallback._encode(text, special=False)
    detokenizer = Detokenizer(byte_fallback.token_bytes)
    come = "".join(detokenizer.push([token]) for token in tokens)
    assert come == (f" {text}" if text else "")  # this kind puts a space before each text
    assert detokenizer.finish() == ""


def test_good_characters_survive_a_broken_one_beside_them(byte_fallback: Tokenizer) -> None:
    """Where transformers gives up on the whole run of bytes, nothing that was sent can be unsaid."""
    run = [3 + byte for byte in "é".encode() + b"\xe2"]
    assert byte_fallback._tokenizer.decode(run) == "\ufffd" * 3
    assert stream(byte_fallback.token_bytes, [run]) == "é\ufffd"


def test_added_tokens_are_shown_unless_special(tokenizer: Tokenizer) -> None:
    special = tokenizer._tokenizer.eos_token_id
    assert tokenizer.token_bytes(special) == b""
    shown = tokenizer._tokenizer.convert_tokens_to_ids("<think>")
    if shown != tokenizer._tokenizer.unk_token_id:
        assert tokenizer.token_bytes(shown).strip() == b"<think>"


@given(table=st.lists(BYTES, max_size=30), sizes=st.lists(st.integers(0, 4), max_size=30))
def test_no_replacement_character_that_the_whole_has_not(table: list[bytes], sizes: list[int]) -> None:
    pieces = dealt(range(len(table)), sizes)
    assert stream(bytes_of(table), pieces) == b"".join(table).decode("utf-8", "replace")


@given(table=st.lists(BYTES, max_size=30))
def test_only_an_unfinished_character_is_withheld(table: list[bytes]) -> None:
    """vllm#48853. What comes is at each token what every continuation has in common."""
    continuations = [b"", b"a", b"\x80\x80\x80", b"\x90\x80\x80", b"\xa0\x80\x80"]
    detokenizer = Detokenizer(bytes_of(table))
    come, data = "", b""
    for token, piece in enumerate(table):
        data += piece
        come += detokenizer.push([token])
        texts = [(data + end).decode("utf-8", "replace") for end in continuations]
        assert come == commonprefix(texts)  # noqa: RUF071 (character by character is meant)


@given(
    table=st.lists(BYTES, min_size=1, max_size=20),
    num_prompt=st.integers(0, 20),
    sizes=st.lists(st.integers(0, 4), max_size=20),
)
def test_a_prompt_that_ends_inside_a_character(table: list[bytes], num_prompt: int, sizes: list[int]) -> None:
    """The output completes it, and that character alone is shown of it."""
    prompt = range(min(num_prompt, len(table)))
    tokens = range(len(prompt), len(table))
    text = stream(bytes_of(table), dealt(tokens, sizes), prompt=prompt)
    before = b"".join(table[: len(prompt)]).decode("utf-8", "replace")
    whole = b"".join(table).decode("utf-8", "replace")
    if whole.startswith(before):
        assert text == whole[len(before) :]
    else:
        assert before.endswith("\ufffd")
        assert text == whole[len(before) - 1 :]


def test_the_prompt_is_not_shown_with_the_character_it_ends_in() -> None:
    table = [b"Hello world \xf0\x9f", b"\x8c", b"\xb6 hot"]
    detokenizer = Detokenizer(bytes_of(table), prompt=[0])
    assert detokenizer.push([1]) == ""
    assert detokenizer.push([2]) == "🌶 hot"


def test_work_does_not_grow_with_the_text() -> None:
    """Each token is looked at once, and of a prompt only the end."""
    asked: list[int] = []

    def token_bytes(token: int) -> bytes:
        asked.append(token)
        return b"\xe2"  # never a whole character

    detokenizer = Detokenizer(token_bytes, ["x" * 50], prompt=range(1_000_000))
    for token in range(10_000):
        detokenizer.push([token])
    assert len(asked) == 10_003


# Stop strings


def first_stop(text: str, stop: Sequence[str]) -> tuple[int, int] | None:
    """Where the stop string begins and ends that is complete first; of those, the longest."""
    for end in range(1, len(text) + 1):
        starts = [end - len(each) for each in stop if text[:end].endswith(each)]
        if starts:
            return min(starts), end
    return None


def certain_length(text: str, stop: Sequence[str]) -> int:
    """Characters that belong to no stop string, whatever follows."""
    for start in range(len(text) + 1):
        if start == len(text) or any(each.startswith(text[start:]) for each in stop):
            return start
    raise AssertionError


# Few letters, so that stop strings occur, overlap and nearly occur.
FEW = st.sampled_from(["a", "b", "é", "aa", "ab", "ba", "aab", "bé", "🎉", "abaébab"])
STOP = st.lists(st.text("abé", min_size=1, max_size=4), min_size=1, max_size=3)


@given(words=st.lists(FEW, max_size=20), stop=STOP, sizes=st.lists(st.integers(0, 4), max_size=20))
def test_text_ends_where_a_stop_string_begins(words: list[str], stop: list[str], sizes: list[int]) -> None:
    """vllm#3572, #3574, sglang#6997."""
    text = "".join(words)
    found = first_stop(text, stop)
    detokenizer = Detokenizer(bytes_of([word.encode() for word in words]), stop)
    come = "".join(detokenizer.push(piece) for piece in dealt(range(len(words)), sizes))
    come += detokenizer.finish()
    assert come == (text if found is None else text[: found[0]])
    assert detokenizer.stopped == (found is not None)
    lengths = [len("".join(words[: n + 1])) for n in range(len(words))]
    needed = len(words) if found is None else 1 + sum(length < found[1] for length in lengths)
    assert detokenizer.num_tokens == needed


@given(words=st.lists(FEW, max_size=20), stop=STOP)
def test_no_more_is_withheld_than_may_begin_a_stop_string(words: list[str], stop: list[str]) -> None:
    detokenizer = Detokenizer(bytes_of([word.encode() for word in words]), stop)
    come = text = ""
    for token, word in enumerate(words):
        text += word
        come += detokenizer.push([token])
        if detokenizer.stopped:
            return
        assert come == text[: certain_length(text, stop)]


@given(words=st.lists(FEW, max_size=20), stop=STOP, cut=st.integers(0, 20))
def test_a_new_one_takes_over_from_the_tokens_so_far(words: list[str], stop: list[str], cut: int) -> None:
    """What a resumption does."""
    table = bytes_of([word.encode() for word in words])
    first, second = Detokenizer(table, stop), Detokenizer(table, stop)
    before, after = range(len(words))[:cut], range(len(words))[cut:]
    come = "".join(first.push([token]) for token in before)
    assert second.push(before) == come
    assert second.push(after) + second.finish() == first.push(after) + first.finish()
    assert (second.stopped, second.num_tokens) == (first.stopped, first.num_tokens)


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["Hello", " world", "STOP", "more"], "Hello world"),  # one token
        (["Hello S", "TO", "P more"], "Hello "),  # across three
        (["HelloSTOPmore"], "Hello"),  # inside one
        (["Hello STO", "RM"], "Hello STORM"),  # not one after all
        (["Hello STO"], "Hello STO"),  # the end comes first
        (["SSTOP"], "S"),
        (["STOP"], ""),
    ],
)
def test_examples(words: list[str], text: str) -> None:
    table = bytes_of([word.encode() for word in words])
    assert stream(table, [[token] for token in range(len(words))], ["STOP"]) == text
    assert stream(table, [range(len(words))], ["STOP"]) == text


def test_the_stop_string_that_is_complete_first_counts() -> None:
    """However many characters come at once."""
    for words in (["abc"], ["a", "b", "c"], ["ab", "c"]):
        table = bytes_of([word.encode() for word in words])
        assert stream(table, [[token] for token in range(len(words))], ["abc", "b"]) == "a"


def test_a_stop_string_of_half_a_character_waits_for_the_other_half() -> None:
    detokenizer = Detokenizer(bytes_of([b"a\xc3", b"\xa9b"]), ["é"])
    assert [detokenizer.push([0]), detokenizer.push([1])] == ["a", ""]
    assert detokenizer.stopped


def test_nothing_follows_a_stop_string() -> None:
    detokenizer = Detokenizer(bytes_of([b"a.", b"b"]), ["."])
    assert detokenizer.push([0, 1]) == "a"
    assert (detokenizer.push([1]), detokenizer.finish(), detokenizer.num_tokens) == ("", "", 1)


@pytest.mark.parametrize("stop", [[], ["zz"]])
def test_a_stop_token_counts_but_is_not_shown(stop: list[str]) -> None:
    detokenizer = Detokenizer(bytes_of([b"a", b"<end>"]), stop)
    assert detokenizer.push([0, 1], ended=True) + detokenizer.finish() == "a"
    assert detokenizer.num_tokens == 2


def test_a_stop_token_after_a_stop_string_does_not_count() -> None:
    detokenizer = Detokenizer(bytes_of([b"a.", b"<end>"]), ["."])
    assert detokenizer.push([0, 1], ended=True) == "a"
    assert detokenizer.num_tokens == 1


def test_kinds_differ() -> None:
    """The tests above would prove little if all tokenizers here wrote their tokens alike."""
    text = "The dog 🎊"
    pieces = {kind: tuple(wrapped(kind).tokenize(text)) for kind in KINDS}
    assert len(set(pieces.values())) == len(KINDS)
