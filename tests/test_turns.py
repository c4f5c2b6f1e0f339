"""Conversations that go on by ids: what comes between two replies, for templates of three kinds."""

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

import rlhf_jax as rl

SPECIAL = ["<s>", "</s>", "<|im_start|>", "<|im_end|>", "<|head|>", "<|eot|>"]
CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
HEADERS = (
    "{{ '<s>' }}{% for m in messages %}{{ '<|head|>' + m['role'] + '<|head|>\n\n' }}"
    "{{ m['content'] | trim + '<|eot|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|head|>assistant<|head|>\n\n' }}{% endif %}"
)
BRACKETS = (
    "{{ '<s>' }}{% for m in messages %}"
    "{% if m['role'] == 'assistant' %}{{ m['content'] + ' </s>' }}"
    "{% else %}{{ '[INST]' + m['content'] + '[/INST]' }}{% endif %}{% endfor %}"
)
# template, BOS, and the token that ends a reply
TEMPLATES = [
    (CHATML, "<|im_start|>", "<|im_end|>"),
    (HEADERS, "<s>", "<|eot|>"),
    (BRACKETS, "<s>", "</s>"),
]
ASKED = [{"role": "user", "content": "Was ist das?"}]
NEXT = [{"role": "tool", "content": "42 €"}, {"role": "user", "content": "And <then>?"}]


def chat(template, bos="<s>", eos="</s>"):
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(letters)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(SPECIAL)
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, bos_token=bos, eos_token=eos, chat_template=template
    )


@pytest.mark.fault(45, 46)
@pytest.mark.parametrize(("template", "bos", "stop"), TEMPLATES)
@pytest.mark.parametrize("ended", [True, False])
def test_prompt_reply_and_turn_are_the_whole_conversation(template, bos, stop, ended):
    tokenizer = chat(template, bos)
    stop_id = tokenizer.convert_tokens_to_ids(stop)
    question = rl.data.render_chat(tokenizer, ASKED[0]["content"])
    prompt = tokenizer.encode(question, add_special_tokens=False)
    words = tokenizer.encode("Gut so", add_special_tokens=False)
    reply = [*words, stop_id] if ended else words
    turn = rl.data.turn_ids(tokenizer, NEXT, stop_id=stop_id if ended else None)
    messages = [*ASKED, {"role": "assistant", "content": "Gut so"}, *NEXT]
    whole = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    if ended:
        whole = whole.replace(f"Gut so {stop}", f"Gut so{stop}")  # the model wrote no space there
    assert prompt + reply + turn == tokenizer.encode(whole, add_special_tokens=False)
    if template is not CHATML:  # there BOS begins every turn
        assert (prompt + reply + turn).count(tokenizer.bos_token_id) == 1


def test_a_stop_id_within_the_next_message_is_left_alone():
    tokenizer = chat("{% for m in messages %}{{ m['content'] + '|' }}{% endfor %}")
    said = [{"role": "user", "content": "a</s>b"}]
    ids = rl.data.turn_ids(tokenizer, said, stop_id=tokenizer.eos_token_id)
    assert ids == tokenizer.encode("|a</s>b|", add_special_tokens=False)


@pytest.mark.parametrize(
    ("template", "messages", "says"),
    [
        (None, NEXT, "no chat template"),
        (CHATML, [], "messages is empty"),
        ("{% for m in messages %}{{ m['content'] | upper }}{% endfor %}", NEXT, "changes or rep"),
        ("{{ messages[-1]['content'] }}", NEXT, "changes or repeats"),
    ],
)
def test_what_cannot_be_continued_is_named(template, messages, says):
    with pytest.raises(ValueError, match=says):
        rl.data.turn_ids(chat(template), messages, stop_id=None)
