// OpenAI's SDK for node through the gateway, beside the same calls past it. Arguments: see cases.py. The packages are in the
// folder that NODE_PATH names.

import { createRequire } from "node:module";
import * as cases from "./cases.mjs";
import { KEY, LONG, MODEL, Pair, Watch, bare, expect, thrown } from "./cases.mjs";

// An import would look for packages only in the folders above this file.
const require = createRequire(import.meta.url);
const OpenAI = require("openai");
const { LengthFinishReasonError } = require("openai/error");
const { zodFunction, zodResponseFormat, zodTextFormat } = require("openai/helpers/zod");
const { z } = require("zod");

const given = cases.readArguments();
const watch = new Watch(given.admin, given.engine);
const bias = await cases.withoutBlanks(given.alone);

function client(address, options = {}) {
  return new OpenAI({ baseURL: `${address}/v1`, apiKey: KEY, maxRetries: 0, timeout: cases.PATIENCE, ...options });
}

const pair = new Pair(client(given.gateway), client(given.alone));
const { gateway } = pair;

const SAID = [{ role: "user", content: "Which city lies at a river, and how many live there?" }];
const EXACT = { model: MODEL, temperature: 0 };
const CHAT = { ...EXACT, messages: SAID, max_tokens: 12 };
const ENDLESS = { ...EXACT, messages: SAID, max_tokens: LONG, ignore_eos: true };
const ANSWERED = { ...EXACT, input: "Which city lies at a river?", max_output_tokens: 12 };

const City = z.object({
  name: z.enum(["Ulm", "Bonn", "Kiel"]),
  districts: z.number().int().min(0).max(9),
  harbour: z.boolean(),
});

// max_tokens is beyond what the schema can take without blanks.
const STRUCTURED = { ...EXACT, messages: SAID, max_tokens: 200, logit_bias: bias };
const TOOLS = { ...STRUCTURED, tools: [zodFunction({ name: "describe", parameters: City })] };
const NAMED = { type: "function", function: { name: "describe" } };

async function collected(stream) {
  const items = [];
  for await (const item of stream) items.push(item);
  return items;
}

function calledWell(answer) {
  const calls = answer.choices[0].message.tool_calls;
  if (calls.length === 0) throw new Error("no tool is called");
  for (const call of calls) {
    expect(call.function.name, "describe", "the tool's name");
    City.parse(call.function.parsed_arguments);
  }
}

function figures({ prompt_tokens, completion_tokens, total_tokens }) {
  return { prompt_tokens, completion_tokens, total_tokens };
}

async function models() {
  const names = await pair.same(async (client) => (await client.models.list()).data.map((model) => model.id));
  expect(names, [MODEL], "the models");
}

async function chat() {
  const answer = await pair.same((client) => client.chat.completions.create(CHAT));
  expect(answer.usage.completion_tokens, CHAT.max_tokens, "tokens");
}

async function chat_over_two_workers() {
  const { response } = await gateway.chat.completions.create(CHAT).withResponse();
  for (const role of ["prefill", "decode"]) {
    if (!response.headers.get(`x-pd-router-${role}`)) throw new Error(`no ${role} worker is named`);
  }
}

async function chat_stream() {
  const options = { stream: true, stream_options: { include_usage: true } };
  const streamed = await pair.same(async (client) => {
    const chunks = await collected(await client.chat.completions.create({ ...CHAT, ...options }));
    const choices = chunks.flatMap((chunk) => chunk.choices);
    return {
      text: choices.map((choice) => choice.delta.content ?? "").join(""),
      finish: choices.map((choice) => choice.finish_reason).filter(Boolean),
      usage: chunks.map((chunk) => chunk.usage).filter(Boolean),
    };
  });
  const unstreamed = await gateway.chat.completions.create(CHAT);
  expect(streamed.text, unstreamed.choices[0].message.content, "streamed");
  expect(streamed.usage.map(figures), [figures(unstreamed.usage)], "usage");
}

async function completion() {
  await pair.same((client) => client.completions.create({ ...EXACT, prompt: "Once upon a time", max_tokens: 8 }));
}

async function tools_required() {
  calledWell(await pair.same((client) => client.chat.completions.parse({ ...TOOLS, tool_choice: "required" })));
}

async function tools_named() {
  calledWell(await pair.same((client) => client.chat.completions.parse({ ...TOOLS, tool_choice: NAMED })));
}

async function tools_stream() {
  const call = (client) => client.chat.completions.stream({ ...TOOLS, tool_choice: NAMED }).finalChatCompletion();
  calledWell(await pair.same(call));
}

// The SDK itself calls the function with what the model chose.
async function tools_run() {
  await pair.same(async (client) => {
    const called = [];
    const describe = zodFunction({ name: "describe", parameters: City, function: (city) => called.push(city) });
    await client.chat.completions.runTools({ ...STRUCTURED, tools: [describe], tool_choice: NAMED }).done();
    City.parse(called[0]);
    return called;
  });
}

async function structured() {
  const format = zodResponseFormat(City, "city");
  const answer = await pair.same((client) =>
    client.chat.completions.parse({ ...STRUCTURED, response_format: format }),
  );
  City.parse(answer.choices[0].message.parsed);
}

async function structured_stream() {
  const format = zodResponseFormat(City, "city");
  const answer = await pair.same((client) =>
    client.chat.completions.stream({ ...STRUCTURED, response_format: format }).finalChatCompletion(),
  );
  City.parse(answer.choices[0].message.parsed);
}

async function structured_cut_short() {
  const short = { ...STRUCTURED, max_tokens: 3, response_format: zodResponseFormat(City, "city") };
  await pair.failsAlike((client) => client.chat.completions.parse(short), LengthFinishReasonError);
}

async function responses() {
  const answer = await pair.same((client) => client.responses.create(ANSWERED));
  expect(answer.usage.output_tokens, ANSWERED.max_output_tokens, "tokens");
}

async function responses_stream() {
  const text = await pair.same(async (client) => {
    const events = await collected(await client.responses.create({ ...ANSWERED, stream: true }));
    expect(events.at(-1).type, "response.completed", "the last event");
    return events.map((event) => (event.type === "response.output_text.delta" ? event.delta : "")).join("");
  });
  expect(text, (await gateway.responses.create(ANSWERED)).output_text, "streamed");
}

async function responses_structured() {
  const asked = { ...ANSWERED, max_output_tokens: 200, logit_bias: bias, text: { format: zodTextFormat(City, "city") } };
  const parsed = await pair.same(async (client) => (await client.responses.parse(asked)).output_parsed);
  City.parse(parsed);
}

async function error_unknown_model() {
  for (const options of [{}, { stream: true }]) {
    const error = await pair.failsAlike(
      (client) => client.chat.completions.create({ ...CHAT, ...options, model: "nope" }),
      OpenAI.NotFoundError,
      "status",
      "code",
      "param",
      "type",
    );
    expect(error.message.includes("The model `nope` does not exist."), true, error.message);
  }
}

// The gateway refuses this one itself, in other words and with a code of its own.
async function error_no_tokens() {
  const error = await pair.failsAlike(
    (client) => client.chat.completions.create({ ...CHAT, max_tokens: -1 }),
    OpenAI.BadRequestError,
    "status",
    "param",
  );
  expect(error.code, "invalid_field", "code");
}

async function error_too_many_tokens() {
  for (const stream of [false, true]) {
    await pair.failsAlike(
      (client) => client.chat.completions.create({ ...CHAT, max_tokens: 100_000, stream }),
      OpenAI.BadRequestError,
      "status",
      "code",
      "message",
      "param",
      "type",
    );
  }
}

// A gateway that is busy says when to come again; the SDK does, and is served.
async function retries_until_there_is_room() {
  const held = await client(given.refusing).chat.completions.create({ ...ENDLESS, stream: true });
  await held[Symbol.asyncIterator]().next();
  const error = await thrown(OpenAI.RateLimitError, () => client(given.refusing).chat.completions.create(CHAT));
  expect([error.code, error.headers.get("retry-after")], ["overloaded", "1"], "the refusal");

  let refused = 0;
  const makeRoom = async (...request) => {
    const response = await fetch(...request);
    if (response.status === 429) {
      refused += 1;
      held.controller.abort();
    }
    return response;
  };
  const patient = client(given.refusing, { maxRetries: 3, fetch: makeRoom });
  const answer = await patient.chat.completions.create(CHAT);
  if (refused === 0) throw new Error("served at once, while another request was");
  expect(bare(answer), bare(await pair.alone.chat.completions.create(CHAT)), "after a retry");
}

async function retries_in_vain() {
  // Two retries, each a second after the answer before; by itself the SDK would not wait so long.
  const patient = client(given.refusing, { maxRetries: 2 });
  const gone = { ...CHAT, model: cases.GONE };
  const error = await cases.takesAtLeast(2000, () =>
    thrown(OpenAI.InternalServerError, () => patient.chat.completions.create(gone)),
  );
  expect([error.status, error.code], [503, "prefill_failed"], "the error");
}

async function time_out() {
  const impatient = client(given.gateway, { timeout: cases.IMPATIENCE });
  await thrown(OpenAI.APIConnectionTimeoutError, () => impatient.chat.completions.create(ENDLESS));
  await watch.comesToRest();
}

async function cancel_a_stream() {
  let chunks = 0;
  for await (const _chunk of await gateway.chat.completions.create({ ...ENDLESS, stream: true })) {
    chunks += 1;
    // Leaving the loop ends the request.
    if (chunks === 5) {
      await watch.isBusy();
      break;
    }
  }
  await watch.comesToRest();
}

async function cancel_by_a_signal() {
  const leaving = new AbortController();
  const asked = gateway.chat.completions.create(ENDLESS, { signal: leaving.signal });
  setTimeout(() => leaving.abort(), 500);
  await thrown(OpenAI.APIUserAbortError, () => asked);
  await watch.comesToRest();
}

async function many_at_once() {
  await pair.same((client) => {
    const asked = Array.from({ length: 6 }, (_, number) => [{ role: "user", content: `city ${number}` }]);
    return Promise.all(asked.map((messages) => client.chat.completions.create({ ...CHAT, messages })));
  });
}

await cases.run([
  models,
  chat,
  chat_over_two_workers,
  chat_stream,
  completion,
  tools_required,
  tools_named,
  tools_stream,
  tools_run,
  structured,
  structured_stream,
  structured_cut_short,
  responses,
  responses_stream,
  responses_structured,
  error_unknown_model,
  error_no_tokens,
  error_too_many_tokens,
  retries_until_there_is_room,
  retries_in_vain,
  time_out,
  cancel_a_stream,
  cancel_by_a_signal,
  many_at_once,
]);
