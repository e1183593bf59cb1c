#!/usr/bin/env python3
"""LiteLLM through the gateway, by its provider for vLLM, beside the same calls past it. Arguments: see cases.py."""

import asyncio
import json
import os
import sys
from typing import Literal

# Its list of models' prices comes with it; otherwise it is fetched at every start.
os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"

import litellm  # noqa: E402 - after the environment that it is read from
from pydantic import BaseModel, Field  # noqa: E402

import cases  # noqa: E402
from cases import LONG, MODEL, Watch, expect, raised  # noqa: E402

# Without it each error is followed by advice on stdout.
litellm.suppress_debug_info = True

given = cases.arguments()
watch = Watch(given.admin, given.engine)
bias = cases.without_blanks(given.alone)


def reach(address, model=MODEL, provider="hosted_vllm", **options):
    """The arguments that lead a call to this address."""
    options = {"timeout": cases.PATIENCE, "max_retries": 0, **options}
    return {**options, "model": f"{provider}/{model}", "api_base": f"{address}/v1", "api_key": cases.KEY}


pair = cases.Pair(reach(given.gateway), reach(given.alone))
# LiteLLM's provider for vLLM takes `strict` out of tools, and a call then has what arguments the model likes.
strict = cases.Pair(reach(given.gateway, provider="openai"), reach(given.alone, provider="openai"))

SAID = [{"role": "user", "content": "Which city lies at a river, and how many live there?"}]
CHAT = {"messages": SAID, "temperature": 0, "max_tokens": 12}
ENDLESS = {**CHAT, "max_tokens": LONG, "ignore_eos": True}
ANSWERED = {"input": "Which city lies at a river?", "temperature": 0, "max_output_tokens": 16}


class City(BaseModel):
    name: Literal["Ulm", "Bonn", "Kiel"]
    districts: int = Field(ge=0, le=9)
    harbour: bool


# max_tokens is beyond what the schema can take without blanks.
STRUCTURED = {**CHAT, "max_tokens": 200, "logit_bias": bias}
DESCRIBE = {"name": "describe", "parameters": City.model_json_schema(), "strict": True}
TOOLS = {**STRUCTURED, "tools": [{"type": "function", "function": DESCRIBE}]}
NAMED = {"type": "function", "function": {"name": "describe"}}


def tokens(answer):
    usage = answer.usage
    return usage.prompt_tokens, usage.completion_tokens, usage.total_tokens


def chat():
    answer = pair.same(lambda to: litellm.completion(**to, **CHAT))
    expect(answer.usage.completion_tokens, CHAT["max_tokens"], "tokens")


def chat_stream():
    def call(to):
        chunks = list(litellm.completion(**to, **CHAT, stream=True, stream_options={"include_usage": True}))
        whole = litellm.stream_chunk_builder(chunks, messages=SAID)
        return whole.choices[0].message.content, whole.choices[0].finish_reason, tokens(whole)

    streamed = pair.same(call)
    whole = litellm.completion(**pair.gateway, **CHAT)
    expect(streamed, (whole.choices[0].message.content, "length", tokens(whole)), "streamed")


def completion():
    asked = {"prompt": "Once upon a time", "temperature": 0, "max_tokens": 8}
    pair.same(lambda to: litellm.text_completion(**to, **asked))


def asynchronous():
    async def call(to):
        answers = [litellm.acompletion(**to, **{**CHAT, "messages": said(number)}) for number in range(6)]
        return [answer.choices for answer in await asyncio.gather(*answers)]

    def said(number):
        return [{"role": "user", "content": f"city {number}"}]

    pair.same(lambda to: asyncio.run(call(to)))


def batch():
    asked = [[{"role": "user", "content": f"city {number}"}] for number in range(4)]
    options = {"temperature": 0, "max_tokens": 8}
    pair.same(
        lambda to: [answer.choices for answer in litellm.batch_completion(**to, **options, messages=asked)]
    )


def tools_required():
    called_well(strict.same(lambda to: litellm.completion(**to, **TOOLS, tool_choice="required")))


def tools_named():
    called_well(strict.same(lambda to: litellm.completion(**to, **TOOLS, tool_choice=NAMED)))


def tools_stream():
    def call(to):
        chunks = list(litellm.completion(**to, **TOOLS, tool_choice=NAMED, stream=True))
        return litellm.stream_chunk_builder(chunks).choices

    (choice,) = strict.same(call)
    calls_are_well(choice.message.tool_calls)


def called_well(answer):
    calls_are_well(answer.choices[0].message.tool_calls)


def calls_are_well(calls):
    expect(len(calls) > 0, True, "a tool is called")
    for call in calls:
        expect(call.function.name, "describe", "the tool's name")
        City.model_validate_json(call.function.arguments)


def structured():
    answer = pair.same(lambda to: litellm.completion(**to, **STRUCTURED, response_format=City))
    City.model_validate_json(answer.choices[0].message.content)


def structured_stream():
    def call(to):
        chunks = litellm.completion(**to, **STRUCTURED, response_format=City, stream=True)
        return "".join(chunk.choices[0].delta.content or "" for chunk in chunks)

    City.model_validate_json(pair.same(call))


def responses():
    answer = pair.same(lambda to: text_and_end(litellm.responses(**to, **ANSWERED)))
    expect(answer[1:], ("incomplete", 16), "the ending")


def responses_stream():
    def call(to):
        last = list(litellm.responses(**to, **ANSWERED, stream=True))[-1]
        expect(str(last.type.value), "response.completed", "the last event")
        return text_and_end(last.response)

    expect(pair.same(call), text_and_end(litellm.responses(**pair.gateway, **ANSWERED)), "streamed")


def text_and_end(answer):
    # The ids of an answer are LiteLLM's own.
    return answer.output[0].content[0].text, answer.status, answer.usage.output_tokens


def error_unknown_model():
    to = [reach(address, "nope") for address in (given.gateway, given.alone)]
    for options in ({}, {"stream": True}):
        error = cases.Pair(*to).fails_alike(
            lambda to, options=options: litellm.completion(**to, **CHAT, **options),
            litellm.NotFoundError,
            "status_code",
        )
        expect("The model `nope` does not exist." in str(error), True, str(error))
        # LiteLLM keeps the error's fields only within its message.
        expect(said_by_the_worker(error)["param"], "model", "the parameter")


def error_no_tokens():
    """The gateway refuses this one itself, in other words and with a code of its own."""
    error = pair.fails_alike(
        lambda to: litellm.completion(**to, **{**CHAT, "max_tokens": -1}), litellm.BadRequestError, "status_code"
    )
    expect(said_by_the_worker(error)["code"], "invalid_field", "the code")


def error_too_many_tokens():
    pair.fails_alike(
        lambda to: litellm.completion(**to, **{**CHAT, "max_tokens": 100_000}),
        litellm.BadRequestError,
        "status_code",
        "message",
    )


def error_long_prompt():
    long = [{"role": "user", "content": "a word " * 4096}]
    pair.fails_alike(
        lambda to: litellm.completion(**to, **{**CHAT, "messages": long}),
        litellm.ContextWindowExceededError,
        "status_code",
        "message",
    )


def said_by_the_worker(error):
    text = str(error)
    return json.loads(text[text.index("{") : text.rindex("}") + 1])["error"]


def retries_until_there_is_room():
    """A gateway that is busy refuses; LiteLLM tries again, and is served."""

    async def call():
        busy = reach(given.refusing)
        held = await litellm.acompletion(**busy, **ENDLESS, stream=True)
        await anext(held)
        error = raised(litellm.RateLimitError, lambda: litellm.completion(**busy, **CHAT))
        expect(said_by_the_worker(error)["code"], "overloaded", "the code")
        expect(error.litellm_response_headers["retry-after"], "1", "when to come again")
        patient = asyncio.create_task(litellm.acompletion(**busy, **CHAT, num_retries=6))
        await asyncio.sleep(0.5)
        expect(patient.done(), False, "served while another request was")
        await held.completion_stream.aclose()
        return (await patient).choices

    expect(cases.bare(asyncio.run(call())), cases.bare(litellm.completion(**pair.alone, **CHAT).choices), "the answer")


def retries_in_vain():
    gone = reach(given.refusing, cases.GONE)
    error = raised(litellm.ServiceUnavailableError, lambda: litellm.completion(**gone, **CHAT, num_retries=2))
    expect((error.status_code, said_by_the_worker(error)["code"]), (503, "prefill_failed"), "the error")


def router_falls_back():
    """LiteLLM's router goes on with another deployment where one answers 503."""
    deployments = [
        {"model_name": "first", "litellm_params": reach(given.refusing, cases.GONE)},
        {"model_name": "second", "litellm_params": reach(given.gateway)},
    ]
    router = litellm.Router(model_list=deployments, fallbacks=[{"first": ["second"]}], num_retries=0)
    answer = router.completion(model="first", **CHAT)
    expect(cases.bare(answer.choices), cases.bare(litellm.completion(**pair.alone, **CHAT).choices), "the answer")


def time_out():
    impatient = reach(given.gateway, timeout=cases.IMPATIENCE)
    raised(litellm.Timeout, lambda: litellm.completion(**impatient, **ENDLESS))
    watch.comes_to_rest()


def cancel_a_stream():
    chunks = litellm.completion(**pair.gateway, **ENDLESS, stream=True)
    for _, _chunk in zip(range(5), chunks):
        pass
    watch.is_busy()
    close(chunks)
    watch.comes_to_rest()


def close(stream):
    stream.completion_stream.close()


def cancel_a_task():
    cases.cancel_early(lambda: litellm.acompletion(**pair.gateway, **ENDLESS))
    watch.comes_to_rest()


if __name__ == "__main__":
    sys.exit(
        cases.run(
            [
                chat,
                chat_stream,
                completion,
                asynchronous,
                batch,
                tools_required,
                tools_named,
                tools_stream,
                structured,
                structured_stream,
                responses,
                responses_stream,
                error_unknown_model,
                error_no_tokens,
                error_too_many_tokens,
                error_long_prompt,
                retries_until_there_is_room,
                retries_in_vain,
                router_falls_back,
                time_out,
                cancel_a_stream,
                cancel_a_task,
            ]
        )
    )
