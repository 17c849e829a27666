// The openai SDK for Node.

import OpenAI from "openai";
import { brokenOff, failures, parallel, play, porto, resultOfTool, task, thrownBy } from "./play.mjs";

const model = task.model;
const tools = task.tools.map((name) => ({ type: "function", function: { name, parameters: task.city } }));
const makeClient = (apiKey = task.key) =>
  new OpenAI({ apiKey, baseURL: task.openai_url, maxRetries: 0, timeout: 30_000 });
const client = makeClient();
const asked = (content) => [{ role: "user", content }];
const create = (content, more = {}) =>
  client.chat.completions.create({ model, messages: asked(content), ...more });
const counts = (usage) => ({ input: usage.prompt_tokens, output: usage.completion_tokens });

async function plain() {
  const answer = await create("Good morning!");
  return { text: answer.choices[0].message.content, ...counts(answer.usage) };
}

async function streamed() {
  let text = "";
  let usage;
  for await (const chunk of await create("Good morning!", { stream: true, stream_options: { include_usage: true } })) {
    text += chunk.choices[0]?.delta.content ?? "";
    usage = chunk.usage ?? usage;
  }
  return { text, ...counts(usage) };
}

async function roundTrip(complete) {
  const messages = asked(parallel);
  const { message } = (await complete(messages)).choices[0];
  const calls = message.tool_calls.map(({ function: { name, arguments: json } }) => [name, JSON.parse(json)]);
  messages.push(message);
  message.tool_calls.forEach(({ id }, at) =>
    messages.push({ role: "tool", tool_call_id: id, content: resultOfTool(...calls[at]) }),
  );
  return { calls, text: (await complete(messages)).choices[0].message.content };
}

async function runTools() {
  const calls = [];
  const runnable = tools.map(({ function: { name, parameters } }) => ({
    type: "function",
    function: {
      name,
      parameters,
      parse: JSON.parse,
      function: (given) => (calls.push([name, given]), resultOfTool(name, given)),
    },
  }));
  const runner = client.chat.completions.runTools({ model, messages: asked(parallel), tools: runnable });
  return { text: await runner.finalContent(), calls };
}

async function structured() {
  const response_format = { type: "json_schema", json_schema: { name: "city", strict: true, schema: task.schema } };
  return JSON.parse((await create(porto, { response_format })).choices[0].message.content);
}

async function seen(part) {
  return { input: (await create([{ type: "text", text: "What is this?" }, part])).usage.prompt_tokens };
}

async function left() {
  const stream = await create("slow", { stream: true });
  for await (const _ of stream) break;
}

async function* piecesOf(text) {
  for await (const chunk of await create(text, { stream: true })) yield chunk.choices[0].delta.content;
}

async function models() {
  const ids = [];
  for await (const { id } of client.models.list()) ids.push(id);
  return ids;
}

await play({
  plain,
  streamed,
  tools: () => roundTrip((messages) => client.chat.completions.create({ model, messages, tools })),
  "streamed tools": () =>
    roundTrip((messages) => client.chat.completions.stream({ model, messages, tools }).finalChatCompletion()),
  "run tools": runTools,
  structured,
  image: () => seen({ type: "image_url", image_url: { url: `data:image/png;base64,${task.image}` } }),
  PDF: () =>
    seen({ type: "file", file: { filename: "a.pdf", file_data: `data:application/pdf;base64,${task.pdf}` } }),
  "request id": async () => ({ id: (await create("Hello!"))._request_id }),
  "request id of an error": async () => ({ id: (await thrownBy(() => create("Hello!", { model: "gpt-9" }))).request_id }),
  "broken by an error": () => brokenOff(piecesOf("fault error")),
  "broken by a cut": () => brokenOff(piecesOf("fault cut")),
  left,
  models,
  "one model": async () => (await client.models.retrieve("anthropic/claude-sonnet-5-5")).id,
  ...failures((key, model, text) => makeClient(key).chat.completions.create({ model, messages: asked(text) })),
});
