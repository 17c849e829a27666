// The AI SDK, on its provider for OpenAI's format or on that for the Messages format as the argument says.

import { createAnthropic } from "@ai-sdk/anthropic";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { generateText, jsonSchema, Output, stepCountIs, streamText, tool } from "ai";
import { brokenOff, failures, parallel, play, porto, resultOfTool, task } from "./play.mjs";

const makers = {
  openai: (apiKey) =>
    createOpenAICompatible({
      name: "ezat",
      apiKey,
      baseURL: task.openai_url,
      includeUsage: true,
      supportsStructuredOutputs: true,
    }),
  messages: (apiKey) => createAnthropic({ apiKey, baseURL: `${task.messages_url}/v1` }),
};
const provider = makers[process.argv[2]];
const usual = (prompt, more = {}) => ({
  model: provider(task.key)(task.model),
  messages: [{ role: "user", content: prompt }],
  maxRetries: 0,
  onError: () => {}, // it would print them
  ...more,
});

async function told({ text, usage }) {
  const { inputTokens: input, outputTokens: output } = await usage;
  return { text: await text, input, output };
}

async function roundTrip(generate) {
  const calls = [];
  const tools = Object.fromEntries(
    task.tools.map((name) => [
      name,
      tool({
        inputSchema: jsonSchema(task.city),
        execute: (given) => (calls.push([name, given]), resultOfTool(name, given)),
      }),
    ]),
  );
  const text = await generate(usual(parallel, { tools, stopWhen: stepCountIs(2) }));
  return { text, calls };
}

async function structured(generate) {
  return generate(usual(porto, { output: Output.object({ schema: jsonSchema(task.schema) }) }));
}

async function seen(part) {
  const { usage } = await generateText(usual([{ type: "text", text: "What is this?" }, part]));
  return { input: usage.inputTokens };
}

async function left() {
  const stopper = new AbortController();
  for await (const _ of streamText(usual("slow", { abortSignal: stopper.signal })).textStream) {
    stopper.abort();
    break;
  }
}

async function* piecesOf(prompt) {
  for await (const part of streamText(usual(prompt)).fullStream) {
    if (part.type === "error") throw asError(part.error);
    yield part.type === "text-delta" && part.text;
  }
}

const asError = (error) => (error instanceof Error ? error : Object.assign(new Error(error.message), { status: null }));

await play({
  plain: async () => told(await generateText(usual("Good morning!"))),
  streamed: () => told(streamText(usual("Good morning!"))),
  tools: () => roundTrip(async (asked) => (await generateText(asked)).text),
  "streamed tools": () => roundTrip((asked) => streamText(asked).text),
  structured: () => structured(async (asked) => (await generateText(asked)).output),
  "streamed and structured": () => structured((asked) => streamText(asked).output),
  image: () => seen({ type: "image", image: task.image, mediaType: "image/png" }),
  PDF: () => seen({ type: "file", data: task.pdf, mediaType: "application/pdf", filename: "a.pdf" }),
  "request id": async () => {
    const { response } = await generateText(usual("Hello!"));
    return { id: response.headers["request-id"] };
  },
  "broken by an error": () => brokenOff(piecesOf("fault error")),
  "broken by a cut": () => brokenOff(piecesOf("fault cut")),
  left,
  ...failures((key, model, text) => generateText(usual(text, { model: provider(key)(model) }))),
});
