// What cases.py is for the scripts in Python, for those of node: arguments, cases, comparisons. The arguments are the same.

import { parseArgs, isDeepStrictEqual, inspect } from "node:util";
import { setTimeout as sleep } from "node:timers/promises";

export const MODEL = "tiny";
export const GONE = "gone";

// No client needs a key here, and none starts without one.
export const KEY = "none";

// Milliseconds for an answer on a busy machine.
export const PATIENCE = 120_000;

// Milliseconds within which all must have been released after a client has left.
const REST_LIMIT = 30_000;

// Milliseconds that a client waits which gives up: an answer of LONG takes far longer.
export const IMPATIENCE = 1_000;

// Tokens of an answer that lasts until its client leaves: nearly the whole context.
export const LONG = 3900;

// Fields that differ from answer to answer, or from engine to engine.
const PASSING = new Set([
  "_request_id",
  "call_id",
  "completed_at",
  "created",
  "created_at",
  "id",
  "input_tokens_details",
  "item_id",
  "prompt_tokens_details",
  "system_fingerprint",
]);

// Series that are 0 where nothing is under way.
const GATEWAY_BUSY = ["pd_router_streams", "pd_router_prefill_charges", "pd_router_decode_charges"];
const ENGINE_BUSY = ["vllm:num_requests_running", "vllm:num_requests_waiting"];

export function readArguments() {
  const options = Object.fromEntries(
    ["gateway", "admin", "refusing", "alone"].map((name) => [name, { type: "string" }]),
  );
  options.engine = { type: "string", multiple: true };
  const { values } = parseArgs({ options });
  for (const name of Object.keys(options)) {
    if (values[name] === undefined) throw new Error(`--${name} is missing`);
  }
  return values;
}

// Runs the cases in order, says of each how it went, and sets the exit status.
export async function run(cases) {
  for (const oneCase of cases) {
    try {
      await oneCase();
      console.log(`ok ${oneCase.name}`);
    } catch (error) {
      process.exitCode = 1;
      console.log(`FAILED ${oneCase.name}: ${`${error?.name}: ${error?.message}`.replace(/\s+/g, " ")}`);
    }
  }
}

export function expect(found, wanted, what) {
  if (!isDeepStrictEqual(found, wanted)) {
    throw new Error(`${what}: ${inspect(found, { depth: 9 })} instead of ${inspect(wanted, { depth: 9 })}`);
  }
}

// The value as plain data, without what differs from answer to answer.
export function bare(value) {
  return JSON.parse(JSON.stringify(value, (key, inner) => (PASSING.has(key) ? undefined : inner)));
}

// A client of the gateway and one of the aggregated engine.
export class Pair {
  constructor(gateway, alone) {
    this.gateway = gateway;
    this.alone = alone;
  }

  // What `call` gives through the gateway, which must be what it gives past it.
  async same(call) {
    const through = await call(this.gateway);
    expect(bare(through), bare(await call(this.alone)), "through the gateway");
    return through;
  }

  // The error of this class that `call` throws on either way, with the same values in these fields.
  async failsAlike(call, kind, ...fields) {
    const through = await thrown(kind, () => call(this.gateway));
    const alone = await thrown(kind, () => call(this.alone));
    for (const field of fields) expect(through[field], alone[field], `the error's ${field}`);
    return through;
  }
}

export async function thrown(kind, call) {
  let answer;
  try {
    answer = await call();
  } catch (error) {
    if (error instanceof kind) return error;
    throw error;
  }
  throw new Error(`no ${kind.name}, but ${inspect(answer)}`);
}

export async function takesAtLeast(milliseconds, call) {
  const begun = performance.now();
  const answer = await call();
  const taken = performance.now() - begun;
  if (taken < milliseconds) throw new Error(`took ${Math.round(taken)} ms, not ${milliseconds} ms or more`);
  return answer;
}

// What the metrics of the gateway and of its engines say is under way.
export class Watch {
  constructor(admin, engines) {
    this.pages = [[`${admin}/stats/prometheus`, GATEWAY_BUSY]];
    for (const engine of engines) this.pages.push([`${engine}/metrics`, ENGINE_BUSY]);
  }

  // The series that are not 0.
  async underWay() {
    const busy = [];
    for (const [address, names] of this.pages) {
      const page = await (await fetch(address)).text();
      const lines = page.split("\n").filter((line) => names.includes(line.split(/[{ ]/)[0]));
      busy.push(...lines.filter((line) => Number(line.split(" ").at(-1)) !== 0));
    }
    return busy;
  }

  async isBusy() {
    if ((await this.underWay()).length === 0) throw new Error("nothing is under way while an answer is");
  }

  async comesToRest() {
    const deadline = performance.now() + REST_LIMIT;
    for (;;) {
      const busy = await this.underWay();
      if (busy.length === 0) return;
      if (performance.now() > deadline) {
        throw new Error(`still under way ${REST_LIMIT} ms after the client has left: ${busy.join(", ")}`);
      }
      await sleep(100);
    }
  }
}

// A bias against the tokens of white space: without it, an answer in JSON may be blanks up to its limit.
// The tokenizer writes each blank as one token of its own.
export async function withoutBlanks(alone) {
  const answer = await fetch(`${alone}/tokenize`, {
    method: "POST",
    headers: { "content-type": "application/json" },
    body: JSON.stringify({ model: MODEL, prompt: " \t\r\n", add_special_tokens: false }),
  });
  const { tokens } = await answer.json();
  return Object.fromEntries(tokens.map((token) => [token, -100]));
}
