"""Conversations: the cache is reused, and survives a change of precision."""

import pytest
import torch

import otaro
from otaro.builtin import MODEL_DIR
from otaro.kernels import cpu
from otaro.runtime.session import ChatSession
from tests.pages import ROOT

GREEDY = {"max_new_tokens": 8, "do_sample": False}
TEMPLATE = (
    "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}{% if add_generation_prompt "
    "%}assistant:{% endif %}"
)

pytestmark = pytest.mark.usefixtures("swift_products")


@pytest.fixture(scope="module")
def packed(tmp_path_factory):
    out = tmp_path_factory.mktemp("session") / "nested"
    otaro.pack(MODEL_DIR, out)
    return out


@pytest.fixture(params=["decoder", "transformers"])
def path(request, monkeypatch):
    if request.param == "transformers":
        monkeypatch.setenv("OTARO_KERNELS", "reference")
    elif cpu.MISSING:
        pytest.skip(cpu.MISSING)
    return request.param


@pytest.fixture(params=["plain text", "chat template"])
def session(packed, path, request):
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(packed)
    tokenizer.chat_template = TEMPLATE if request.param == "chat template" else None
    return ChatSession(otaro.load(packed), tokenizer)


def fresh_answer(session: ChatSession, ids: list[int]) -> list[int]:
    """What the model says to the same tokens without any cache."""
    inputs = torch.tensor([ids])
    return session.model.generate(inputs, attention_mask=torch.ones_like(inputs), **GREEDY)[0].tolist()


def test_a_turn_with_reused_cache_says_what_a_fresh_run_says(session):
    session.reply("def read(self):", **GREEDY)
    kept = session.cached_tokens
    assert kept > 0
    session.reply("return the", **GREEDY)
    assert session.cached_tokens > kept
    prompt_and_answer = session._ids
    for cut in range(len(prompt_and_answer) - 8, len(prompt_and_answer)):
        assert fresh_answer(session, prompt_and_answer[:cut])[cut] == prompt_and_answer[cut]


def test_the_cache_holds_exactly_the_tokens_of_the_conversation(session):
    session.reply("The module", **GREEDY)
    assert session.cached_tokens == len(session._ids) - 1  # the last token was said but not yet read
    assert (session.model.generation.cache_bytes or 1) > 0


def test_switching_precision_keeps_the_cache(session, path):
    session.reply("The following", **GREEDY)
    kept = session.cached_tokens
    keys = session._cache.layers[0].keys.clone() if path == "transformers" else None
    otaro.set_precision(session.model, "E5M3")
    assert session.cached_tokens == kept
    session.reply("functions", **GREEDY)
    assert (session.model.generation.served_by, session.model.generation.reused_tokens) == (
        path,
        session.reused,
    )
    assert session.reused > kept // 2
    if keys is None:
        return
    common = min(kept, session._cache.layers[0].keys.shape[-2])
    same = torch.equal(session._cache.layers[0].keys[..., : common // 2, :], keys[..., : common // 2, :])
    assert same, "keys of earlier tokens were computed anew"


def test_reset_forgets(session):
    first = session.reply("The module", **GREEDY)
    session.reply("and more", **GREEDY)
    session.reset()
    assert session.cached_tokens == 0
    assert session.reply("The module", **GREEDY) == first


def test_an_interrupted_answer_leaves_the_conversation_as_it_was(session):
    session.reply("The module", **GREEDY)
    before = list(session._ids)

    class Interrupt:
        def put(self, value):
            if value.dim() == 1:
                raise KeyboardInterrupt

        def end(self):
            pass

    with pytest.raises(KeyboardInterrupt):
        session.reply("and more", streamer=Interrupt(), **GREEDY)
    assert session._ids == before
    session.reply("and then", **GREEDY)
    cut = len(session._ids) - session.produced
    assert fresh_answer(session, session._ids[:cut]) == session._ids


@pytest.mark.parametrize("path", ["transformers"], indirect=True)
def test_a_cache_that_cannot_be_cut_is_computed_anew(session, monkeypatch):
    from transformers import DynamicCache

    def refuses(cache, count):
        raise RuntimeError("a sliding window has forgotten these tokens")

    monkeypatch.setattr(DynamicCache, "crop", refuses)
    session.reply("The module", **GREEDY)
    if session.uses_template:
        session._messages[0]["content"] = "The class"  # as a template does that rewords earlier turns
    else:
        del session._ids[3:]
    session.reply("and then", **GREEDY)
    cut = len(session._ids) - session.produced
    assert fresh_answer(session, session._ids[:cut]) == session._ids


@pytest.mark.parametrize("path", ["decoder"], indirect=True)
def test_keys_and_values_may_be_packed(session):
    packed = ChatSession(session.model, session.tokenizer, otaro.Precision("E5M7"))
    for one in (session, packed):
        one.reply("The module", **GREEDY)
    assert packed._cache.nbytes < session._cache.nbytes


@pytest.mark.parametrize("path", ["transformers"], indirect=True)
def test_packed_keys_need_the_decoder(session):
    with pytest.raises(otaro.OtaroError, match=r"kv=E5M7 needs the decoder.*OTARO_KERNELS=reference"):
        ChatSession(session.model, session.tokenizer, otaro.Precision("E5M7"))


def test_pages_say_where_it_is_imported_from():
    pages = [page for page in (ROOT / "docs").glob("*.md") if "ChatSession" in page.read_text()]
    assert pages
    for page in pages:
        first = next(part for part in page.read_text().split("\n\n") if "ChatSession" in part)
        assert f"`from {ChatSession.__module__} import ChatSession`" in first, page.name
