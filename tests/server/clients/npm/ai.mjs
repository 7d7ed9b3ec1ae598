// The AI SDK for Node: node ai.mjs CASE URL. It ends with 1 if the server answers otherwise.
import assert from "node:assert/strict";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { generateText, stepCountIs, streamText, tool } from "ai";
import { z } from "zod";

const [name, url] = process.argv.slice(2);
const model = createOpenAICompatible({ name: "local", baseURL: `${url}/v1` })("any");
const given = { model, temperature: 0, maxOutputTokens: 300, maxRetries: 0, prompt: "What is it like in Oslo?" };
const inputSchema = z.object({ city: z.string().max(12) });
const providerOptions = { local: { parallel_tool_calls: false } }; // the demo model may never stop calling
const called = [];
const tools = Object.fromEntries(
  ["weather", "train"].map((n) => [
    n,
    tool({ description: `Looks up the ${n}.`, inputSchema, execute: async () => (called.push(n), "Rain.") }),
  ]),
);

const cases = {
  async streamText() {
    const result = streamText({ ...given, maxOutputTokens: 16 });
    let text = "";
    for await (const part of result.textStream) text += part;
    assert.notEqual(text, "");
    assert.equal(text, (await generateText({ ...given, maxOutputTokens: 16 })).text);
  },

  async namedInTwoSteps() {
    // The second step sends the call and its result back.
    const result = await generateText({
      ...given,
      tools,
      toolChoice: { type: "tool", toolName: "train" },
      stopWhen: stepCountIs(2),
    });
    assert.equal(result.steps.length, 2);
    assert.deepEqual([...new Set(called)], ["train"]);
    assert.ok(result.steps.every((step) => step.toolCalls.length === 1));
  },

  async required() {
    const result = await generateText({ ...given, tools, toolChoice: "required", providerOptions });
    assert.ok(result.toolCalls.length === 1);
    assert.ok(result.toolCalls.every((call) => call.toolName in tools && typeof call.input.city === "string"));
  },

  async requiredStream() {
    const result = streamText({ ...given, tools, toolChoice: "required", providerOptions });
    const calls = await result.toolCalls;
    assert.ok(calls.length === 1 && calls.every((call) => typeof call.input.city === "string"));
    assert.equal(await result.finishReason, "tool-calls");
  },
};

await cases[name]();
