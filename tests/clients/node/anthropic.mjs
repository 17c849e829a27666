// Anthropic's SDK for Node.

import Anthropic from "@anthropic-ai/sdk";
import { brokenOff, failures, parallel, play, porto, resultOfTool, task, thrownBy } from "./play.mjs";

const tools = task.tools.map((name) => ({ name, input_schema: task.city }));
const makeClient = (apiKey = task.key) =>
  new Anthropic({ apiKey, baseURL: task.messages_url, maxRetries: 0, timeout: 30_000 });
const client = makeClient();
const usual = (content, more = {}) => ({
  model: task.model,
  max_tokens: 1000,
  messages: [{ role: "user", content }],
  ...more,
});
const told = ({ content, usage }) => ({
  text: content[0].text,
  input: usage.input_tokens,
  output: usage.output_tokens,
});

async function roundTrip(complete) {
  const messages = [{ role: "user", content: parallel }];
  const { content } = await complete({ messages, tools });
  const calls = content.filter(({ type }) => type === "tool_use");
  const results = calls.map(({ id, name, input }) => ({
    type: "tool_result",
    tool_use_id: id,
    content: resultOfTool(name, input),
  }));
  messages.push({ role: "assistant", content }, { role: "user", content: results });
  const answer = await complete({ messages, tools });
  return { calls: calls.map(({ name, input }) => [name, input]), text: answer.content[0].text };
}

async function structured() {
  const output_config = { format: { type: "json_schema", schema: task.schema } };
  return JSON.parse((await client.messages.create(usual(porto, { output_config }))).content[0].text);
}

async function seen(type, media_type, data) {
  const content = [{ type: "text", text: "What is this?" }, { type, source: { type: "base64", media_type, data } }];
  return { input: (await client.messages.create(usual(content))).usage.input_tokens };
}

async function left() {
  const stream = await client.messages.create(usual("slow", { stream: true }));
  for await (const event of stream) if (event.type === "content_block_delta") break;
}

async function* piecesOf(text) {
  for await (const event of await client.messages.create(usual(text, { stream: true }))) yield event.delta?.text;
}

async function models() {
  const ids = [];
  for await (const { id } of client.models.list({ limit: 1 })) ids.push(id);
  return ids;
}

await play({
  plain: async () => told(await client.messages.create(usual("Good morning!"))),
  streamed: async () => told(await client.messages.stream(usual("Good morning!")).finalMessage()),
  tools: () => roundTrip((more) => client.messages.create(usual("", more))),
  "streamed tools": () => roundTrip((more) => client.messages.stream(usual("", more)).finalMessage()),
  structured,
  image: () => seen("image", "image/png", task.image),
  PDF: () => seen("document", "application/pdf", task.pdf),
  "request id": async () => ({ id: (await client.messages.create(usual("Hello!")))._request_id }),
  "request id of an error": async () => ({
    id: (await thrownBy(() => client.messages.create(usual("Hello!", { model: "gpt-9" })))).request_id,
  }),
  "broken by an error": () => brokenOff(piecesOf("fault error")),
  "broken by a cut": () => brokenOff(piecesOf("fault cut")),
  left,
  models,
  "one model": async () => (await client.models.retrieve("anthropic/claude-sonnet-5-5")).id,
  tokens: async () =>
    (await client.messages.countTokens({ model: task.model, messages: [{ role: "user", content: "Hello!" }] }))
      .input_tokens,
  ...failures((key, model, text) => makeClient(key).messages.create(usual(text, { model }))),
});
