#!/usr/bin/env python3
"""OpenAI's SDK for Python through the gateway, beside the same calls past it. Arguments: see cases.py."""

import asyncio
import sys
from typing import Literal

import openai
from pydantic import BaseModel, Field

import cases
from cases import LONG, MODEL, Pair, Watch, expect, raised

given = cases.arguments()
watch = Watch(given.admin, given.engine)
bias = cases.without_blanks(given.alone)


def client(address, kind=openai.OpenAI, **options):
    options = {"max_retries": 0, "timeout": cases.PATIENCE, **options}
    return kind(base_url=f"{address}/v1", api_key=cases.KEY, **options)


pair = Pair(client(given.gateway), client(given.alone))
gateway = pair.gateway

SAID = [{"role": "user", "content": "Which city lies at a river, and how many live there?"}]
EXACT = {"model": MODEL, "temperature": 0}
CHAT = {**EXACT, "messages": SAID, "max_tokens": 12}
ENDLESS = {**EXACT, "messages": SAID, "max_tokens": LONG, "extra_body": {"ignore_eos": True}}
ANSWERED = {**EXACT, "input": "Which city lies at a river?", "max_output_tokens": 12}


class City(BaseModel):
    name: Literal["Ulm", "Bonn", "Kiel"]
    districts: int = Field(ge=0, le=9)
    harbour: bool


# max_tokens is beyond what the schema can take without blanks.
STRUCTURED = {**EXACT, "messages": SAID, "max_tokens": 200, "logit_bias": bias}
TOOLS = {**STRUCTURED, "tools": [openai.pydantic_function_tool(City, name="describe", description="Describes a city")]}
NAMED = {"type": "function", "function": {"name": "describe"}}


def joined(chunks):
    """A streamed chat as one: where a chunk ends is the engine's and the network's affair."""
    choices = [choice for chunk in chunks for choice in chunk.choices]
    return {
        "role": choices[0].delta.role,
        "text": "".join(choice.delta.content or "" for choice in choices),
        "finish": [choice.finish_reason for choice in choices if choice.finish_reason],
        "usage": [cases.bare(chunk.usage) for chunk in chunks if chunk.usage],
    }


def models():
    names = pair.same(lambda client: [model.id for model in client.models.list()])
    expect(names, [MODEL], "the models")
    expect(gateway.models.retrieve(MODEL).id, MODEL, "the model")


def chat():
    answer = pair.same(lambda client: client.chat.completions.create(**CHAT))
    expect(answer.usage.completion_tokens, CHAT["max_tokens"], "tokens")


def chat_over_two_workers():
    answer = gateway.chat.completions.with_raw_response.create(**CHAT)
    for role in ("prefill", "decode"):
        if not answer.headers.get(f"x-pd-router-{role}"):
            raise AssertionError(f"no {role} worker in {dict(answer.headers)}")


def chat_log_probabilities():
    def call(client):
        choice = client.chat.completions.create(**CHAT, logprobs=True, top_logprobs=2).choices[0]
        return [token.token for token in choice.logprobs.content]

    expect(len(pair.same(call)), CHAT["max_tokens"], "tokens")


def chat_stream():
    options = {"include_usage": True}
    streamed = pair.same(
        lambda client: joined(list(client.chat.completions.create(**CHAT, stream=True, stream_options=options)))
    )
    unstreamed = gateway.chat.completions.create(**CHAT)
    expect(streamed["text"], unstreamed.choices[0].message.content, "streamed")
    expect(streamed["usage"], [cases.bare(unstreamed.usage)], "usage")


def completion():
    pair.same(lambda client: client.completions.create(**EXACT, prompt="Once upon a time", max_tokens=8))


def completion_of_token_ids():
    pair.same(lambda client: client.completions.create(**EXACT, prompt=[40, 300, 500, 700, 900], max_tokens=8))


def completion_stream():
    def call(client):
        chunks = client.completions.create(**EXACT, prompt="Once upon a time", max_tokens=8, stream=True)
        return "".join(chunk.choices[0].text for chunk in chunks)

    pair.same(call)


def tools_auto():
    pair.same(
        lambda client: client.chat.completions.create(**{**TOOLS, "max_tokens": 16}, tool_choice="auto")
    )


def tools_required():
    answer = pair.same(lambda client: client.chat.completions.parse(**TOOLS, tool_choice="required"))
    called_well(answer)


def tools_named():
    answer = pair.same(lambda client: client.chat.completions.parse(**TOOLS, tool_choice=NAMED))
    called_well(answer)


def tools_stream():
    def call(client):
        with client.chat.completions.stream(**TOOLS, tool_choice="required") as stream:
            return stream.get_final_completion()

    called_well(pair.same(call))


def tools_result():
    """The tool's result goes back with the call that it belongs to."""
    call = called_well(gateway.chat.completions.parse(**TOOLS, tool_choice="required"))
    asked = {
        "role": "assistant",
        "tool_calls": [{"id": call.id, "type": "function", "function": {"name": "describe", "arguments": "{}"}}],
    }
    result = {"role": "tool", "tool_call_id": call.id, "content": "a city at a river"}
    pair.same(lambda client: client.chat.completions.create(**{**CHAT, "messages": [*SAID, asked, result]}))


def called_well(answer):
    calls = answer.choices[0].message.tool_calls
    for call in calls:
        expect(call.function.name, "describe", "the tool's name")
        expect(type(call.function.parsed_arguments), City, "the arguments")
    return calls[0]


def structured():
    answer = pair.same(lambda client: client.chat.completions.parse(**STRUCTURED, response_format=City))
    expect(type(answer.choices[0].message.parsed), City, "the parsed answer")


def structured_stream():
    def call(client):
        with client.chat.completions.stream(**STRUCTURED, response_format=City) as stream:
            return stream.get_final_completion().choices[0].message.parsed

    expect(type(pair.same(call)), City, "the parsed answer")


def structured_json_object():
    form = {"type": "json_object"}
    pair.same(lambda client: client.chat.completions.create(**{**STRUCTURED, "max_tokens": 16}, response_format=form))


def structured_cut_short():
    short = {**STRUCTURED, "max_tokens": 3}
    pair.fails_alike(
        lambda client: client.chat.completions.parse(**short, response_format=City), openai.LengthFinishReasonError
    )


def responses():
    answer = pair.same(lambda client: client.responses.create(**ANSWERED))
    expect(answer.usage.output_tokens, ANSWERED["max_output_tokens"], "tokens")


def responses_stream():
    def call(client):
        events = list(client.responses.create(**ANSWERED, stream=True))
        text = "".join(event.delta for event in events if event.type == "response.output_text.delta")
        # Several deltas count as one: how many tokens each has is the engine's affair.
        types = [event.type for event in events]
        return text, [kind for before, kind in zip([None, *types], types) if kind != before]

    text, types = pair.same(call)
    expect(types[-1], "response.completed", "the last event")
    expect(text, gateway.responses.create(**ANSWERED).output_text, "streamed")


def responses_stream_helper():
    def call(client):
        with client.responses.stream(**ANSWERED) as stream:
            return stream.get_final_response().output_text

    pair.same(call)


def responses_structured():
    # The SDK does not know vLLM's logit_bias here.
    options = {**ANSWERED, "max_output_tokens": 200, "extra_body": {"logit_bias": bias}}
    answer = pair.same(lambda client: client.responses.parse(**options, text_format=City).output_parsed)
    expect(type(answer), City, "the parsed answer")


def responses_tools():
    tool = {"type": "function", "name": "describe", "parameters": City.model_json_schema(), "strict": True}
    options = {**ANSWERED, "max_output_tokens": 200, "extra_body": {"logit_bias": bias}}
    calls = pair.same(
        lambda client: client.responses.create(**options, tools=[tool], tool_choice="required").output
    )
    for call in calls:
        City.model_validate_json(call.arguments)


def error_unknown_model():
    for make in (
        lambda client: client.chat.completions.create(**{**CHAT, "model": "nope"}),
        lambda client: client.chat.completions.create(**{**CHAT, "model": "nope"}, stream=True),
        lambda client: client.responses.create(**{**ANSWERED, "model": "nope"}),
    ):
        error = pair.fails_alike(make, openai.NotFoundError, "code", "param", "type")
        expect("The model `nope` does not exist." in error.message, True, error.message)


def error_no_tokens():
    """The gateway refuses this one itself, in other words and with a code of its own."""
    short = {**CHAT, "max_tokens": -1}
    error = pair.fails_alike(
        lambda client: client.chat.completions.create(**short), openai.BadRequestError, "param", "status_code"
    )
    expect(error.code, "invalid_field", "code")


def error_too_many_tokens():
    for stream in (False, True):
        pair.fails_alike(
            lambda client, stream=stream: client.chat.completions.create(
                **{**CHAT, "max_tokens": 100_000}, stream=stream
            ),
            openai.BadRequestError,
            "code",
            "message",
            "param",
            "type",
        )


def error_long_prompt():
    long = [{"role": "user", "content": "a word " * 4096}]
    pair.fails_alike(
        lambda client: client.chat.completions.create(**{**CHAT, "messages": long}),
        openai.BadRequestError,
        "code",
        "message",
        "param",
    )


def error_temperature():
    pair.fails_alike(
        lambda client: client.chat.completions.create(**{**CHAT, "temperature": -1}),
        openai.BadRequestError,
        "code",
        "message",
        "param",
    )


def error_message_without_a_role():
    pair.fails_alike(
        lambda client: client.chat.completions.create(**{**CHAT, "messages": [{"content": "hello"}]}),
        openai.BadRequestError,
        "code",
        "message",
        "param",
    )


def error_several_choices():
    """What cannot be handed over is refused by name."""
    error = raised(openai.BadRequestError, lambda: gateway.chat.completions.create(**CHAT, n=2))
    expect((error.code, error.param), ("invalid_field", "n"), "the error")


def retries_until_there_is_room():
    """A gateway that is busy says when to come again; the SDK does, and is served."""
    held = client(given.refusing).chat.completions.create(**ENDLESS, stream=True)
    next(iter(held))
    error = raised(openai.RateLimitError, lambda: client(given.refusing).chat.completions.create(**CHAT))
    expect((error.code, error.response.headers["retry-after"]), ("overloaded", "1"), "the refusal")

    def make_room(response):
        if response.status_code == 429:
            held.close()

    patient = client(
        given.refusing, max_retries=3, http_client=openai.DefaultHttpxClient(event_hooks={"response": [make_room]})
    )
    answer = patient.chat.completions.with_raw_response.create(**CHAT)
    if answer.retries_taken == 0:
        raise AssertionError("served at once, while another request was")
    expect(cases.bare(answer.parse()), cases.bare(pair.alone.chat.completions.create(**CHAT)), "after a retry")


def retries_in_vain():
    # Two retries, each a second after the answer before; by itself the SDK would not wait so long.
    patient = client(given.refusing, max_retries=2)
    gone = {**CHAT, "model": cases.GONE}
    error = cases.takes_at_least(
        2, lambda: raised(openai.InternalServerError, lambda: patient.chat.completions.create(**gone))
    )
    expect((error.status_code, error.code), (503, "prefill_failed"), "the error")


def time_out():
    impatient = client(given.gateway, timeout=cases.IMPATIENCE)
    raised(openai.APITimeoutError, lambda: impatient.chat.completions.create(**ENDLESS))
    watch.comes_to_rest()


def cancel_a_stream():
    with gateway.chat.completions.create(**ENDLESS, stream=True) as stream:
        for _, _chunk in zip(range(5), stream):
            pass
        watch.is_busy()
    watch.comes_to_rest()


def cancel_responses():
    endless = {**ANSWERED, "max_output_tokens": LONG, "extra_body": {"ignore_eos": True}}
    with gateway.responses.create(**endless, stream=True) as stream:
        for _, _event in zip(range(8), stream):
            pass
        watch.is_busy()
    watch.comes_to_rest()


def cancel_before_the_first_token():
    async def leave_early():
        async with client(given.gateway, openai.AsyncOpenAI) as early:
            # The prompt is long enough that prefill takes longer than the wait.
            long = [{"role": "user", "content": "river " * 1500}]
            asked = asyncio.create_task(early.chat.completions.create(**{**CHAT, "messages": long}))
            await asyncio.sleep(0.1)
            asked.cancel()
            await asyncio.gather(asked, return_exceptions=True)

    asyncio.run(leave_early())
    watch.comes_to_rest()


def many_at_once():
    async def ask(address):
        async with client(address, openai.AsyncOpenAI) as many:
            asked = [
                many.chat.completions.create(**{**CHAT, "messages": [{"role": "user", "content": f"city {number}"}]})
                for number in range(6)
            ]
            return [answer.choices for answer in await asyncio.gather(*asked)]

    through, alone = asyncio.run(ask(given.gateway)), asyncio.run(ask(given.alone))
    expect(cases.bare(through), cases.bare(alone), "through the gateway")


if __name__ == "__main__":
    sys.exit(
        cases.run(
            [
                models,
                chat,
                chat_over_two_workers,
                chat_log_probabilities,
                chat_stream,
                completion,
                completion_of_token_ids,
                completion_stream,
                tools_auto,
                tools_required,
                tools_named,
                tools_stream,
                tools_result,
                structured,
                structured_stream,
                structured_json_object,
                structured_cut_short,
                responses,
                responses_stream,
                responses_stream_helper,
                responses_structured,
                responses_tools,
                error_unknown_model,
                error_no_tokens,
                error_too_many_tokens,
                error_long_prompt,
                error_temperature,
                error_message_without_a_role,
                error_several_choices,
                retries_until_there_is_room,
                retries_in_vain,
                time_out,
                cancel_a_stream,
                cancel_responses,
                cancel_before_the_first_token,
                many_at_once,
            ]
        )
    )
