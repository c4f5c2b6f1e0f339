import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from rlhf_jax.sampling._stops import StopFinder, decode_text

# Pieces that split and share characters: the euro sign and the two letters with accents.
PIECES = [b"", b"a", b"b", b"ab", b"\n", b"\n\n", b"a\n", b"\xe2", b"\x82\xac", b"\xe2\x82"]
PIECES += [b"\xac", b"\xc3", b"\xa9", b"\xa8b", b"\xac\xc3"]
STOPS = ["a", "b", "ab", "ba", "\n\n", "\n\n\n", "a\nb", "€", "é", "aé", "€€", "éb", "abab"]


def naive(tokens, stops):
    """The whole byte string, one byte more at a time."""
    data = b"".join(PIECES[token] for token in tokens)
    for end in range(1, len(data) + 1):
        found = [stop.encode() for stop in stops if data[:end].endswith(stop.encode())]
        if found:
            kept = next(n for n in range(len(tokens) + 1) if _length(tokens[:n]) >= end)
            return kept, data[: end - max(map(len, found))]
    return None, data


def _length(tokens):
    return sum(len(PIECES[token]) for token in tokens)


def pieces(*texts):
    return [PIECES.index(text) for text in texts]


@pytest.mark.fault(47)
@settings(max_examples=300)
@given(
    st.lists(st.integers(0, len(PIECES) - 1), max_size=25),
    st.lists(st.sampled_from(STOPS), min_size=1, max_size=4),
    st.integers(1, 7),
)
@example(pieces(b"a\n", b"\n", b"b"), ["\n\n"], 2)  # begins within a token, spans two
@example(pieces(b"\n\n", b"\n\n"), ["\n\n\n"], 1)  # spans two, ends within one
@example(pieces(b"ab", b"ab"), ["abab", "ba"], 1)  # two in one token: the first to be complete
@example(pieces(b"\xe2", b"\x82\xac", b"a"), ["€"], 1)  # a character of two tokens
@example(pieces(b"\xe2\x82", b"\xac\xc3", b"\xa9"), ["€", "é"], 3)
def test_equal_to_a_search_over_all_bytes(tokens, stops, at_once):
    finder = StopFinder(stops, PIECES)
    found = None
    for begin in range(0, len(tokens), at_once):
        count = finder.feed(tokens[begin : begin + at_once])
        if count is not None:
            found = begin + count
            break
    kept, text = naive(tokens, stops)
    assert found == kept
    if kept is not None:
        assert finder.text_end == len(text)
        assert decode_text(tokens[:kept], PIECES, finder.text_end) == text.decode(errors="replace")


@given(st.text(st.sampled_from("a€é🙂"), max_size=12), st.integers(0, 40))
def test_text_is_never_cut_within_a_character(text, length):
    data = text.encode()[:length]
    table = [bytes([byte]) for byte in range(256)]
    whole = decode_text(list(data), table)
    assert text.startswith(whole) and len(data) - len(whole.encode()) < 4


def test_ids_beyond_the_tokenizer_have_no_bytes():
    assert StopFinder(["a"], PIECES).feed([999, 1]) == 2
    assert decode_text([999, 1], PIECES) == "a"
