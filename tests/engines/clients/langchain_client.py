#!/usr/bin/env python3
"""LangChain's ChatOpenAI through the gateway, beside the same calls past it. Arguments: see cases.py."""

import asyncio
import os
import sys
from typing import Literal

# Nothing is reported to LangChain's own service.
os.environ["LANGSMITH_TRACING"] = "false"

import openai  # noqa: E402 - after the environment that it is read from
from langchain_core.messages import AIMessage, HumanMessage, ToolMessage  # noqa: E402
from langchain_openai import ChatOpenAI  # noqa: E402
from langchain_openai import OpenAI as Completion  # noqa: E402
from pydantic import BaseModel, Field  # noqa: E402

import cases  # noqa: E402
from cases import LONG, MODEL, Watch, expect, raised  # noqa: E402

given = cases.arguments()
watch = Watch(given.admin, given.engine)
bias = cases.without_blanks(given.alone)

SAID = "Which city lies at a river, and how many live there?"


class City(BaseModel):
    """Describes a city."""

    name: Literal["Ulm", "Bonn", "Kiel"]
    districts: int = Field(ge=0, le=9)
    harbour: bool


def model(address, kind=ChatOpenAI, **options):
    options = {"temperature": 0, "max_tokens": 12, "max_retries": 0, "timeout": cases.PATIENCE, **options}
    return kind(**{"model": MODEL, **options}, base_url=f"{address}/v1", api_key=cases.KEY)


def pair(**options):
    return cases.Pair(model(given.gateway, **options), model(given.alone, **options))


def shown(message):
    """What a message says, without the ids of this answer."""
    calls = [(call["name"], call["args"]) for call in message.tool_calls]
    used = message.usage_metadata
    tokens = used and (used["input_tokens"], used["output_tokens"], used["total_tokens"])
    return message.text, calls, message.response_metadata.get("finish_reason"), tokens


def longer(**options):
    """For answers that a schema ends before so many tokens, without blanks."""
    return pair(max_tokens=200, logit_bias=bias, **options)


def endless(address, **options):
    return model(address, max_tokens=LONG, extra_body={"ignore_eos": True}, **options)


def invoke():
    text, _, finish, tokens = pair().same(lambda model: shown(model.invoke(SAID)))
    expect((finish, tokens[1]), ("length", 12), "the ending")
    expect(len(text) > 0, True, "text")


def stream():
    def call(model):
        whole = None
        for chunk in model.stream(SAID):
            whole = chunk if whole is None else whole + chunk
        return shown(whole)

    streamed = pair(stream_usage=True).same(call)
    expect(streamed, shown(model(given.gateway).invoke(SAID)), "streamed")


def conversation():
    said = [HumanMessage("hello"), AIMessage("good day"), HumanMessage(SAID)]
    pair().same(lambda model: shown(model.invoke(said)))


def completion():
    pair(kind=Completion).same(lambda model: model.invoke(SAID))


def batch():
    pair().same(lambda model: [shown(answer) for answer in model.batch([f"city {number}" for number in range(6)])])


def asynchronous():
    async def ask(model):
        text = "".join([chunk.text async for chunk in model.astream(SAID)])
        return text, shown(await model.ainvoke(SAID))[0]

    # A client of its own for each event loop.
    text, unstreamed = pair().same(lambda model: asyncio.run(ask(model)))
    expect(text, unstreamed, "streamed")


def tools_required():
    both = longer()
    _, calls, _, _ = both.same(lambda model: shown(describing(model, "any").invoke(SAID)))
    called_well(calls)


def tools_named():
    both = longer()
    _, calls, _, _ = both.same(lambda model: shown(describing(model, "City").invoke(SAID)))
    called_well(calls)


def tools_stream():
    def call(model):
        whole = None
        for chunk in describing(model, "City").stream(SAID):
            whole = chunk if whole is None else whole + chunk
        return shown(whole)[1]

    called_well(longer().same(call))


def tools_result():
    asked = AIMessage("", tool_calls=[{"id": "call-1", "name": "City", "args": {"name": "Ulm"}}])
    said = [HumanMessage(SAID), asked, ToolMessage("a city at a river", tool_call_id="call-1")]
    pair().same(lambda model: shown(model.bind_tools([City], tool_choice="none").invoke(said)))


def describing(model, choice):
    return model.bind_tools([City], tool_choice=choice, strict=True)


def called_well(calls):
    expect(len(calls) > 0, True, "a tool is called")
    for name, arguments in calls:
        expect(name, "City", "the tool's name")
        City(**arguments)


def structured():
    answer = longer().same(lambda model: model.with_structured_output(City).invoke(SAID))
    expect(type(answer), City, "the answer")


def structured_by_a_tool():
    answer = longer().same(
        lambda model: model.with_structured_output(City, method="function_calling", strict=True).invoke(SAID)
    )
    expect(type(answer), City, "the answer")


def responses():
    text, *_ = pair(use_responses_api=True).same(lambda model: shown(model.invoke(SAID)))
    expect(len(text) > 0, True, "text")


def responses_stream():
    both = pair(use_responses_api=True)
    text = both.same(lambda model: "".join(chunk.text for chunk in model.stream(SAID)))
    expect(text, both.gateway.invoke(SAID).text, "streamed")


def error_unknown_model():
    error = pair(model="nope").fails_alike(
        lambda model: model.invoke(SAID), openai.NotFoundError, "status_code", "code", "param", "type"
    )
    expect("The model `nope` does not exist." in error.message, True, error.message)


def error_too_many_tokens():
    pair(max_tokens=100_000).fails_alike(
        lambda model: model.invoke(SAID), openai.BadRequestError, "status_code", "code", "param", "message"
    )


def error_long_prompt():
    pair().fails_alike(
        lambda model: model.invoke("a word " * 4096), openai.BadRequestError, "status_code", "code", "message"
    )


def retries_until_there_is_room():
    """A gateway that is busy says when to come again; LangChain does, and is served."""
    held = endless(given.refusing).stream(SAID)
    next(held)
    error = raised(openai.RateLimitError, lambda: model(given.refusing).invoke(SAID))
    expect((error.code, error.response.headers["retry-after"]), ("overloaded", "1"), "the refusal")
    refusals = []

    def make_room(response):
        if response.status_code == 429:
            refusals.append(response)
            held.close()

    hooked = openai.DefaultHttpxClient(event_hooks={"response": [make_room]})
    patient = model(given.refusing, max_retries=3, http_client=hooked)
    text = patient.invoke(SAID).text
    expect(len(refusals) > 0, True, "refused at first")
    expect(text, model(given.alone).invoke(SAID).text, "after a retry")


def retries_in_vain():
    # Two retries, each a second after the answer before.
    patient = model(given.refusing, model=cases.GONE, max_retries=2)
    error = cases.takes_at_least(2, lambda: raised(openai.InternalServerError, lambda: patient.invoke(SAID)))
    expect((error.status_code, error.code), (503, "prefill_failed"), "the error")


def time_out():
    raised(openai.APITimeoutError, lambda: endless(given.gateway, timeout=cases.IMPATIENCE).invoke(SAID))
    watch.comes_to_rest()


def cancel_a_stream():
    chunks = endless(given.gateway).stream(SAID)
    for _, _chunk in zip(range(5), chunks):
        pass
    watch.is_busy()
    chunks.close()
    watch.comes_to_rest()


def cancel_a_task():
    cases.cancel_early(lambda: endless(given.gateway).ainvoke(SAID))
    watch.comes_to_rest()


if __name__ == "__main__":
    sys.exit(
        cases.run(
            [
                invoke,
                stream,
                conversation,
                completion,
                batch,
                asynchronous,
                tools_required,
                tools_named,
                tools_stream,
                tools_result,
                structured,
                structured_by_a_tool,
                responses,
                responses_stream,
                error_unknown_model,
                error_too_many_tokens,
                error_long_prompt,
                retries_until_there_is_room,
                retries_in_vain,
                time_out,
                cancel_a_stream,
                cancel_a_task,
            ]
        )
    )
