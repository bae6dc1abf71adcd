"""The official client gets what the engine says, at the precision it asked for."""

import asyncio
import sys
from itertools import pairwise

import openai
import pytest

import otaro

MESSAGES = [{"role": "user", "content": "The statement"}]
PROMPT = "user: The statement\nassistant:"
GREEDY = {"temperature": 0, "max_tokens": 12}


@pytest.fixture(scope="module")
def said(model):
    """said("E5M4") is what the engine says alone to the prompt."""
    with otaro.Engine(model, max_sequences=1) as engine:
        yield lambda precision, prompt=PROMPT, **options: engine.submit(
            prompt, precision=precision, **{"max_new_tokens": 12, **options}
        ).result()


def test_models_are_the_model_and_the_model_at_each_precision(tiny):
    names = [model.id for model in tiny.client.models.list()]
    assert names == ["tiny", "tiny:auto", *(f"tiny:{precision}" for precision in otaro.PRECISIONS)]
    assert tiny.client.models.retrieve("tiny:E5M4").id == "tiny:E5M4"
    with pytest.raises(openai.NotFoundError, match="no model 'tiny:E5M9'"):
        tiny.client.models.retrieve("tiny:E5M9")


@pytest.mark.parametrize(
    ("name", "precision", "expected", "told"),
    [
        ("tiny", None, "E5M8", "E5M8"),
        ("tiny:E5M3", None, "E5M3", "E5M3"),
        ("tiny:e5m4", None, "E5M4", "E5M4"),
        ("tiny", "E5M4", "E5M4", "E5M4"),
        ("tiny:E5M4", "E5M4", "E5M4", "E5M4"),
        ("tiny", "auto", "E5M8", "E5M8"),
        ("tiny:auto", None, "E5M8", "E5M8"),
        ("tiny", {"prefill": "E5M8", "decode": "E5M3"}, {0: "E5M8", 1: "E5M3"}, "E5M8, then E5M3"),
        ("tiny", {"0": "E5M8", "5": "E5M3"}, {0: "E5M8", 5: "E5M3"}, "E5M8, then E5M3"),
    ],
)
def test_the_precision_is_that_of_the_name_or_of_the_field(tiny, said, name, precision, expected, told):
    extra = {} if precision is None else {"precision": precision}
    raw = tiny.client.chat.completions.with_raw_response.create(
        model=name, messages=MESSAGES, extra_body=extra, **GREEDY
    )
    answer, alone = raw.parse(), said(expected)
    assert answer.choices[0].message.content == alone.text
    assert answer.precision == raw.headers["x-otaro-precision"] == told
    assert answer.model == name
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (alone.figures.prompt_tokens, 12)
    assert answer.choices[0].finish_reason == "length"


def test_precisions_differ_in_what_they_say(said):
    assert said("E5M8").text != said("E5M3").text


def test_a_stream_is_the_whole_answer_in_pieces(tiny, said):
    options = {"model": "tiny:E5M4", "messages": MESSAGES, "stream": True, **GREEDY}
    with tiny.client.chat.completions.create(**options, stream_options={"include_usage": True}) as stream:
        chunks = list(stream)
    assert chunks[0].choices[0].delta.role == "assistant"
    assert (
        "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
        == said("E5M4").text
    )
    assert [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices][-1] == "length"
    assert chunks[-1].usage.completion_tokens == 12
    assert not chunks[-1].choices
    assert {chunk.precision for chunk in chunks} == {"E5M4"}
    assert len({chunk.id for chunk in chunks}) == 1
    with tiny.client.chat.completions.create(**options) as stream:
        assert all(chunk.usage is None for chunk in stream)
    with tiny.client.chat.completions.create(
        **options, stream_options={"continuous_usage_stats": True}
    ) as stream:
        usages = [chunk.usage for chunk in stream]
    counts = [usage.completion_tokens for usage in usages]
    assert (counts, counts[-1]) == (sorted(counts), 12)
    # Not the tokens that were found in the cache: the answer before may still be leaving it.
    assert usages[-1].prompt_tokens == chunks[-1].usage.prompt_tokens
    assert usages[-1].total_tokens == chunks[-1].usage.total_tokens


def test_a_stop_ends_the_answer_and_is_not_in_it(tiny, said):
    text = said("E5M8").text
    stop = text.split()[2]
    answer = tiny.client.chat.completions.create(
        model="tiny", messages=MESSAGES, stop=[stop, "never"], **GREEDY
    )
    assert answer.choices[0].message.content == text[: text.index(stop)]
    assert answer.choices[0].finish_reason == "stop"


def test_a_seed_says_the_same_again_and_choices_differ(tiny):
    def ask(**more):
        return tiny.client.chat.completions.create(
            model="tiny", messages=MESSAGES, max_completion_tokens=8, **more
        )

    first, again = (ask(seed=7, n=3, temperature=1.2, top_p=0.95) for _ in range(2))
    texts = [choice.message.content for choice in first.choices]
    assert texts == [choice.message.content for choice in again.choices]
    assert [choice.index for choice in first.choices] == [0, 1, 2]
    assert len(set(texts)) == 3
    assert first.usage.completion_tokens == 24
    # each has the next seed
    assert ask(seed=9, temperature=1.2, top_p=0.95).choices[0].message.content == texts[2]
    assert ask(seed=-1).choices[0].message.content == ask(seed=-1).choices[0].message.content


def test_choices_are_streamed_side_by_side(tiny):
    options = {"model": "tiny", "messages": MESSAGES, "max_tokens": 8, "n": 3, "seed": 7, "temperature": 1.2}
    whole = tiny.client.chat.completions.create(**options)
    texts, ends = ["", "", ""], []
    for chunk in tiny.client.chat.completions.create(stream=True, **options):
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
            ends += [choice.index] if choice.finish_reason else []
    assert texts == [choice.message.content for choice in whole.choices]
    assert sorted(ends) == [0, 1, 2]


def test_logprobs_of_a_chat(tiny, said):
    answer = tiny.client.chat.completions.create(
        model="tiny", messages=MESSAGES, logprobs=True, top_logprobs=3, **GREEDY
    )
    content = answer.choices[0].logprobs.content
    assert "".join(one.token for one in content) == answer.choices[0].message.content
    assert all(len(one.top_logprobs) == 3 for one in content)
    assert all(one.logprob == one.top_logprobs[0].logprob for one in content)  # the likeliest was taken
    assert bytes(content[0].bytes) == content[0].token.encode()
    alone = tiny.client.chat.completions.create(model="tiny", messages=MESSAGES, logprobs=True, **GREEDY)
    assert [one.logprob for one in alone.choices[0].logprobs.content] == [one.logprob for one in content]
    assert alone.choices[0].logprobs.content[0].top_logprobs == []
    streamed = []
    for chunk in tiny.client.chat.completions.create(
        model="tiny", messages=MESSAGES, logprobs=True, top_logprobs=3, stream=True, **GREEDY
    ):
        streamed += chunk.choices[0].logprobs.content if chunk.choices[0].logprobs else []
    assert streamed == content


def test_completions_of_texts_and_of_tokens(tiny, said, model):
    tokenizer = tiny.service.tokenizer
    prompts = ["The statement", "A list"]
    answer = tiny.client.completions.create(model="tiny", prompt=prompts, logprobs=2, **GREEDY)
    assert [choice.text for choice in answer.choices] == [said("E5M8", prompt).text for prompt in prompts]
    for choice in answer.choices:
        logged = choice.logprobs
        assert "".join(logged.tokens) == choice.text
        assert [choice.text[at] for at in logged.text_offset] == [token[0] for token in logged.tokens]
        assert all(
            max(top.values()) == value
            for top, value in zip(logged.top_logprobs, logged.token_logprobs, strict=True)
        )
    tokens = [tokenizer(prompt)["input_ids"] for prompt in prompts]
    by_tokens = tiny.client.completions.create(model="tiny", prompt=tokens, **GREEDY)
    assert [choice.text for choice in by_tokens.choices] == [choice.text for choice in answer.choices]
    one = tiny.client.completions.create(model="tiny", prompt=tokens[0], temperature=0)
    assert one.usage.completion_tokens == 16  # as the legacy endpoint has it
    assert answer.choices[0].text == one.choices[0].text[: len(answer.choices[0].text)]


def test_completions_in_a_stream(tiny, said):
    stream = tiny.client.completions.create(model="tiny:E5M3", prompt="The statement", stream=True, **GREEDY)
    chunks = list(stream)
    assert "".join(chunk.choices[0].text for chunk in chunks) == said("E5M3", "The statement").text
    assert chunks[-1].choices[0].finish_reason == "length"


def test_a_response(tiny, said):
    response = tiny.client.responses.create(
        model="tiny:E5M4",
        input="The statement",
        temperature=0,
        max_output_tokens=12,
        extra_body={"precision": "E5M4"},
    )
    assert response.output_text == said("E5M4").text
    assert (response.status, response.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    assert (response.usage.output_tokens, response.precision) == (12, "E5M4")


def test_a_response_in_a_stream_and_a_conversation(tiny, said):
    messages = [
        {"role": "system", "content": "Short."},
        {"role": "user", "content": [{"type": "text", "text": "A list"}]},
    ]
    stop = "\n"
    chat = tiny.client.chat.completions.create(model="tiny", messages=messages, stop=stop, **GREEDY)
    input_items = [{"role": "user", "content": [{"type": "input_text", "text": "A list"}]}]
    with tiny.client.responses.stream(
        model="tiny",
        input=input_items,
        instructions="Short.",
        temperature=0,
        max_output_tokens=12,
        extra_body={"stop": stop},
    ) as stream:
        text = "".join(event.delta for event in stream if event.type == "response.output_text.delta")
        final = stream.get_final_response()
    assert text == final.output_text == chat.choices[0].message.content
    assert (final.status, final.instructions) == ("completed", "Short.")
    following = [*input_items, *(one.model_dump(exclude_none=True) for one in final.output), input_items[0]]
    assert (
        tiny.client.responses.create(model="tiny", input=following, max_output_tokens=3).output[0].role
        == "assistant"
    )


def test_what_was_asked_before_is_not_read_again(tiny):
    tokens = tiny.service.tokenizer("What a request says depends on the request alone, whoever came before.")[
        "input_ids"
    ]
    options = {"model": "tiny:E5M5", "prompt": tokens, "temperature": 0}
    first = tiny.client.completions.create(**options)
    again = tiny.client.completions.create(**options)
    assert again.usage.prompt_tokens_details.cached_tokens == len(tokens) - 1
    assert first.choices[0].text == again.choices[0].text


def test_an_answer_changes_its_precision_on_the_way(tiny):
    with tiny.held():  # after its first token
        stream = tiny.client.completions.create(
            model="tiny:E5M8", prompt="A", max_tokens=20, stream=True, extra_body={"ignore_eos": True}
        )
        chunks = iter(stream)
        first = next(chunks)
        switched = tiny.post(f"/v1/answers/{first.id}/precision", {"precision": "E5M3"})
        assert switched.json() == {"precision": "E5M3"}
    assert [chunk.precision for chunk in chunks][-1] == "E5M8, then E5M3"
    path, coarse = f"/v1/answers/{first.id}/precision", {"precision": "E5M3"}
    tiny.eventually(lambda: tiny.post(path, coarse).status_code == 404)


def test_it_tells_what_is_in_memory_and_what_a_token_reads(tiny):
    tiny.client.completions.create(model="tiny:E5M8", prompt="A", max_tokens=2)
    told = tiny.http.get("/v1/resident").json()
    assert (told["model"], told["chat"], told["max_model_len"], told["precision"]) == (
        "tiny",
        True,
        512,
        "E5M8",
    )
    # layers, keys and values, two heads of 32, float16
    assert told["cache_bytes_per_token"] == 6 * 2 * 64 * 2
    assert told["cache_bytes"] >= 2 * told["cache_bytes_per_token"]
    rows = told["precisions"]
    assert [row["precision"] for row in rows] == ["E5M3", "E5M4", "E5M5", "E5M6", "E5M7", "E5M8"]
    reads = [row["weight_bytes_per_token"] for row in rows]
    plane = (6 * (2 * 128 * 128 + 2 * 64 * 128 + 3 * 384 * 128) + 1536 * 128) // 8  # a bit of every weight
    assert [later - earlier for earlier, later in pairwise(reads)] == [plane] * 5
    assert [row["plane_bytes"] for row in rows[1:]] == [plane] * 5
    if sys.platform == "linux":
        assert all(row["resident_bytes"] >= row["plane_bytes"] // 2 for row in rows)


def test_many_clients_at_once_each_get_what_they_would_get_alone(tiny):
    """Different prompts, precisions, seeds, streams and not, some of whom leave early."""
    client = openai.AsyncOpenAI(base_url=f"{tiny.url}/v1", api_key="none", max_retries=0)
    cases = [
        {
            "model": f"tiny:{otaro.PRECISIONS[number % 6]}",
            "prompt": "The statement of " * (1 + number % 5) + str(number),
            "max_tokens": 10 + number % 7,
            "seed": number,
            "temperature": [0, 0.9][number % 2],
        }
        for number in range(24)
    ]

    async def text(case, stream):
        if not stream:
            return (await client.completions.create(**case)).choices[0].text
        return "".join(
            [chunk.choices[0].text async for chunk in await client.completions.create(stream=True, **case)]
        )

    async def leave(case):
        stream = await client.completions.create(stream=True, **{**case, "max_tokens": 300})
        async for _ in stream:
            break
        await stream.close()

    async def all_of_them():
        alone = [await text(case, False) for case in cases]
        crowd = await asyncio.gather(
            *(text(case, number % 2 == 0) for number, case in enumerate(cases)),
            *(leave(case) for case in cases[:6]),
        )
        return alone, crowd[: len(cases)]

    alone, crowd = asyncio.run(all_of_them())
    assert alone == crowd
    tiny.eventually(lambda: tiny.service.engine.running == 0)


# What is refused, in OpenAI's shape and by the field's name


@pytest.mark.parametrize(
    ("field", "value", "words"),
    [
        ("tools", [{"type": "function"}], "does not support"),
        ("draft", "E5M9", "give a precision, prompt, or prompt+E5M3"),
        ("draft", 3, "give a text"),
        (
            "precision",
            {"prefill": "E5M8", "decode": "E5M4", "lm_head": "E5M8"},
            "precision.lm_head: there is no",
        ),
        ("precision", {"decode": "E5M8"}, "precision.prefill: it is missing"),
        ("logit_bias", {"5": 1}, "does not support"),
        ("presence_penalty", 1, "leave it out, or give 0"),
        ("nonsense", 1, "no such field"),
        ("temperature", 3, "from 0 to 2, not 3"),
        ("temperature", True, "not true"),
        ("top_p", 0, "more than 0"),
        ("n", 0, "from 1 to 32"),
        ("stop", [""], "empty"),
        ("stop", ["a"] * 17, "16 at most"),
        ("seed", 1.5, "whole number"),
        ("max_completion_tokens", 0, "from 1"),
        ("max_completion_tokens", 600, "room for"),
        ("messages", [], "one at least"),
        ("messages", [{"role": "tool", "content": "a"}], "messages[0].role"),
        ("messages", [{"role": "user", "content": [{"type": "image_url"}]}], "messages[0].content[0].type"),
        ("messages", [{"role": "user", "content": "\ud800"}], "messages[0].content"),
        ("messages", [{"role": "user", "content": "word " * 2000}], "too many"),
        ("response_format", {"type": "json_object"}, "does not support"),
        ("stream_options", {"include_usage": True}, "needs stream"),
        ("top_logprobs", 3, "needs logprobs"),
        ("precision", "E5M9", "E5M8, E5M7"),
        ("precision", {"5": "E5M8"}, "reads the prompt"),
        ("precision", {"0": "E5M8", "00": "E5M3"}, "twice"),
        ("precision", {"prefill": "E5M8"}, "precision.decode"),
        ("precision", 4, "E5M8, E5M7"),
        ("store", True, "does not support"),
    ],
)
def test_a_wrong_field_is_named(tiny, field, value, words):
    body = {"model": "tiny", "messages": MESSAGES, field: value}
    response = tiny.post("/v1/chat/completions", body)
    error = response.json()["error"]
    assert response.status_code == 400
    assert error["type"] == "invalid_request_error"
    assert error["param"].startswith(field)
    assert words in error["message"]


@pytest.mark.parametrize(
    "value", [{}, {"-1": "E5M8"}, {"*": "E5M3", "lm_head": "E5M8"}, {"draft": "E5M3"}], ids=str
)
def test_a_precision_of_no_form_is_told_the_forms_there_are(tiny, value):
    error = tiny.post("/v1/completions", {"prompt": "The", "precision": value}).json()["error"]
    assert error["param"] == "precision"
    assert error["message"] == (
        'precision: give "E5M4", "auto", {"prefill": "E5M8", "decode": "E5M4"}, or a schedule by numbers of '
        'new tokens, {"0": "E5M8", "100": "E5M4"}; a mapping of modules is not served'
    )


def test_the_client_raises_what_it_should(tiny):
    with pytest.raises(openai.BadRequestError) as caught:
        tiny.client.chat.completions.create(
            model="tiny", messages=MESSAGES, tools=[{"type": "function", "function": {}}]
        )
    assert (caught.value.param, caught.value.code) == ("tools", "unsupported_parameter")
    with pytest.raises(openai.NotFoundError, match="there are tiny, tiny:auto, tiny:E5M8"):
        tiny.client.chat.completions.create(model="gpt-4", messages=MESSAGES)
    with pytest.raises(openai.BadRequestError, match="says E5M4 already"):
        tiny.client.chat.completions.create(
            model="tiny:E5M4", messages=MESSAGES, extra_body={"precision": "E5M3"}
        )
    with pytest.raises(openai.BadRequestError, match="previous_response_id"):
        tiny.client.responses.create(model="tiny", input="A", previous_response_id="resp_1")


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (b"", "not JSON"),
        (b"[]", "not a JSON object"),
        (b'{"prompt": NaN}', "NaN"),
        (b"\xff", "not JSON"),
        (b"[" * 100_000, "nested too deeply"),
        (b'{"prompt": "a", "max_tokens": 1e400}', "max_tokens"),
        (b'{"prompt": []}', "not an empty one"),
        (b'{"prompt": [[]]}', "prompt[0]: give a text, or a list of tokens, and not an empty one"),
        (b'{"prompt": [1.5]}', "prompt[0]: give a text, or tokens as whole numbers, not 1.5"),
        (b'{"prompt": [1, 1.5]}', "prompt[1]: give a token, a whole number as beside it, not 1.5"),
        (b'{"prompt": ["a", null]}', "prompt[1]: give a text, or tokens as whole numbers, not null"),
        (b'{"prompt": ["a", [5, true]]}', "prompt[1][1]: give a token, a whole number, not true"),
        (b'{"prompt": ["\\ud800"]}', "prompt[0]: it holds half of a surrogate pair"),
        (b'{"prompt": [99999999]}', "vocabulary"),
        (b'{"prompt": [-1]}', "vocabulary"),
        (b'{"prompt": ""}', "no token"),
        (b'{"model": "tiny"}', "prompt: it is missing"),
    ],
)
def test_a_wrong_body_is_refused(tiny, body, words):
    response = tiny.http.post("/v1/completions", content=body, headers={"content-type": "application/json"})
    assert response.status_code == 400
    assert words in response.json()["error"]["message"]


def test_a_model_without_a_chat_template_says_where_to_ask(tiny, monkeypatch):
    monkeypatch.setattr(tiny.service.tokenizer, "chat_template", None)
    response = tiny.post("/v1/chat/completions", {"messages": MESSAGES})
    assert response.status_code == 400
    assert "/v1/completions" in response.json()["error"]["message"]


# Drafts


def test_a_draft_changes_no_answer_and_usage_tells_of_it(start):
    body = {"prompt": "The assert statement. The assert statement. The", "max_tokens": 30, "temperature": 0}
    one = start(draft="prompt+E5M3")
    answers = [
        one.post("/v1/completions", {"model": f"tiny:{precision}", **body, **more}).json()
        for precision in ("E5M8", "E5M3")
        for more in ({"draft": "off"}, {}, {"draft": "prompt"})
    ]
    refused = one.post("/v1/completions", {"model": "tiny:E5M3", **body, "draft": "E5M3"})
    texts = [answer["choices"][0]["text"] for answer in answers]
    assert len(set(texts[:3])) == len(set(texts[3:])) == 1
    told = [answer["usage"]["completion_tokens_details"] for answer in answers]
    assert told[0] == {"accepted_prediction_tokens": 0, "rejected_prediction_tokens": 0}
    # the server's own yields to E5M3
    assert all(sum(each.values()) > 0 for each in (told[1], told[2], told[4], told[5]))
    assert refused.status_code == 400
    assert "a draft is coarser than what it serves" in refused.json()["error"]["message"]
