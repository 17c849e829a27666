// Plays the cases of one client and prints what came of each, one JSON object a line. The counterpart of
// ../scripts/play.py: the task on standard input is the same, and so is what is printed.

import { readFileSync } from "node:fs";

export const task = JSON.parse(readFileSync(0, "utf8"));
export const parallel = "Ask in parallel about Lisbon.";
export const porto = "Tell me about Porto.";

/** Plays every case, whatever becomes of the others. */
export async function play(cases) {
  for (const [name, play] of Object.entries(cases)) {
    const told = await Promise.resolve()
      .then(play)
      .then(
        (result = null) => ({ result }),
        (error) => ({ broken: String(error?.stack ?? error) }),
      );
    console.log(JSON.stringify({ case: name, ...told }));
  }
}

/** A case for each failure of the task: `ask(key, model, text)` has to throw. */
export function failures(ask) {
  const cases = Object.entries(task.failures).map(([name, { key, model, text }]) => [
    name,
    () => thrownBy(() => ask(key, model, text)),
  ]);
  return Object.fromEntries(cases);
}

/** What a call throws: class, status and request id where it has them, and words. */
export async function thrownBy(call) {
  try {
    await call();
  } catch (error) {
    return {
      raised: error.constructor.name,
      status: error.status ?? error.statusCode ?? null,
      request_id: error.requestID ?? null,
      message: error.message,
    };
  }
  return { raised: null };
}

/** What a stream that breaks throws, and how many pieces of text came before. */
export async function brokenOff(stream) {
  let pieces = 0;
  const thrown = await thrownBy(async () => {
    for await (const piece of stream) pieces += piece ? 1 : 0;
  });
  return { ...thrown, pieces };
}

export const resultOfTool = (name, { city }) => `${name} of ${city}: fine`;
