// OpenAI's client for Node: node openai.mjs CASE URL. It ends with 1 if the server answers otherwise.
import assert from "node:assert/strict";
import OpenAI from "openai";

const [name, url] = process.argv.slice(2);
const client = new OpenAI({ baseURL: `${url}/v1`, apiKey: "none", maxRetries: 0 });
const messages = [{ role: "user", content: "What is it like in Oslo?" }];
const given = { model: "any", temperature: 0, max_tokens: 300 };
const written = (text) => ({ grammar: `root ::= ${JSON.stringify(text)}` });
const ANSWER = "It rains, and the train leaves at nine.";
const parameters = {
  type: "object",
  properties: { city: { type: "string", maxLength: 12 } },
  required: ["city"],
  additionalProperties: false,
};

const cases = {
  async chat() {
    const whole = await client.chat.completions.create({ ...given, messages, ...written(ANSWER) });
    assert.equal(whole.choices[0].message.content, ANSWER);
    assert.equal(whole.choices[0].finish_reason, "stop");
  },

  async stream() {
    const stream = client.chat.completions.stream({ ...given, messages, ...written(ANSWER) });
    let text = "";
    stream.on("content", (delta) => (text += delta));
    assert.equal(await stream.finalContent(), ANSWER);
    assert.equal(text, ANSWER);
  },

  async runTools() {
    // A named tool runs once, and its result is answered: the runner sends the name again, and then stops.
    const called = [];
    const tool = (name) => ({
      type: "function",
      function: { name, parameters, parse: JSON.parse, function: (args) => (called.push([name, args]), "Rain.") },
    });
    const runner = client.chat.completions.runTools({
      ...given,
      messages,
      tools: [tool("weather"), tool("train")],
      tool_choice: { type: "function", function: { name: "train" } },
    });
    await runner.done();
    assert.equal(called.length, 1);
    assert.equal(called[0][0], "train");
    assert.equal(typeof called[0][1].city, "string");
  },

  async responses() {
    const asked = { model: "any", temperature: 0, max_output_tokens: 300, input: messages[0].content };
    const whole = await client.responses.create({ ...asked, ...written(ANSWER) });
    assert.equal(whole.output_text, ANSWER);
    const stream = client.responses.stream({ ...asked, ...written(ANSWER) });
    assert.equal((await stream.finalResponse()).output_text, ANSWER);
    const tools = ["weather", "train"].map((n) => ({ type: "function", name: n, parameters, strict: true }));
    const more = { tools, tool_choice: "required", parallel_tool_calls: false };
    const called = await client.responses.create({ ...asked, ...more });
    assert.deepEqual(Object.keys(JSON.parse(called.output[0].arguments)), ["city"]);
    const result = { type: "function_call_output", call_id: called.output[0].call_id, output: "Rain." };
    const then = { ...asked, input: [result], previous_response_id: called.id, tools, tool_choice: "auto" };
    assert.equal((await client.responses.create({ ...then, ...written(ANSWER) })).output_text, ANSWER);
  },
};

await cases[name]();
