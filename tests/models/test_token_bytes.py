import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

import rlhf_jax as rl

TEXT = ["Die Äpfel, déjà vu! 你好 🙂🙂 the theme of them", "über \n\n tab\t ünï"]


def byte_level():
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=330,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=["<eos>"],
        show_progress=False,
    )
    backend.train_from_iterator(TEXT, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<eos>")


def sentencepiece():
    pieces = ["<unk>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "a", "▁a", "é"]
    vocabulary = {piece: i for i, piece in enumerate(pieces)}
    backend = Tokenizer(
        models.BPE(vocab=vocabulary, merges=[("▁", "a")], unk_token="<unk>", byte_fallback=True)
    )
    backend.pre_tokenizer = pre_tokenizers.Metaspace(replacement="▁", prepend_scheme="never")
    backend.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    return PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="<unk>", eos_token="</s>")


BYTE_LEVEL, SENTENCEPIECE = byte_level(), sentencepiece()


def spelled(tokenizer, text):
    table = rl.models.token_bytes(tokenizer)
    return b"".join(table[i] for i in tokenizer.encode(text, add_special_tokens=False))


@given(st.text(st.characters(exclude_categories=["Cs"]), max_size=30))
def test_the_bytes_of_a_texts_tokens_are_the_texts(text):
    if "<eos>" not in text:
        assert spelled(BYTE_LEVEL, text) == text.encode()
    if "▁" not in text and not any(name in text for name in ("<unk>", "</s>")):
        assert spelled(SENTENCEPIECE, text) == text.encode()


@pytest.mark.fault(47)
def test_a_token_may_hold_a_part_of_a_character():
    table = rl.models.token_bytes(SENTENCEPIECE)
    ids = SENTENCEPIECE.encode("🙂", add_special_tokens=False)
    assert [table[i] for i in ids] == [bytes([byte]) for byte in "🙂".encode()]


def test_special_tokens_have_no_bytes_and_added_words_have_their_own():
    tokenizer = byte_level()
    tokenizer.add_tokens([AddedToken("«tool»", special=False)])
    table = rl.models.token_bytes(tokenizer)
    assert table[tokenizer.eos_token_id] == b""
    assert table[tokenizer.convert_tokens_to_ids("«tool»")] == "«tool»".encode()
    assert len(table) == len(tokenizer)


def test_an_unknown_kind_of_tokenizer_is_named():
    backend = Tokenizer(models.WordPiece(vocab={"[UNK]": 0}, unk_token="[UNK]"))
    backend.decoder = decoders.WordPiece()
    with pytest.raises(ValueError, match=r"decoder \['WordPiece'\] is not supported"):
        rl.models.token_bytes(PreTrainedTokenizerFast(tokenizer_object=backend))
    with pytest.raises(ValueError, match="no backend_tokenizer"):
        rl.models.token_bytes(object())


@pytest.mark.download
def test_smollm2():
    tokenizer = rl.models.load_tokenizer("smollm2-135m")
    text = "\n\n".join([*TEXT, "12 + 34 = 46\r\n\x00"])
    assert spelled(tokenizer, text) == text.encode()
    assert rl.models.token_bytes(tokenizer)[tokenizer.eos_token_id] == b""
