"use strict";

const at = (id) => document.getElementById(id);
const NUMBERS = ["tokens_to_generate", "temperature", "top_k", "top_p", "random_seed"];
let running = null; // AbortController of the generation under way

function say(text, wrong = false) {
  at("status").textContent = text;
  at("status").classList.toggle("wrong", wrong);
}

function headers() {
  const token = at("token").value;
  return token ? { Authorization: "Bearer " + token } : {};
}

async function refusal(response) {
  if (response.status === 401) {
    at("token-field").hidden = false;
    at("token").focus();
    return "this server needs its access token";
  }
  try {
    return (await response.json()).message;
  } catch {
    return "the server answered " + response.status;
  }
}

function body() {
  const result = { prompts: [at("prompt").value] };
  for (const name of NUMBERS) {
    if (at(name).value !== "") result[name] = Number(at(name).value);
  }
  return JSON.stringify(result);
}

// Yields [name, data] of each server-sent event.
async function* events(stream) {
  const reader = stream.pipeThrough(new TextDecoderStream()).getReader();
  let buffer = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    buffer += value;
    let end;
    while ((end = buffer.indexOf("\n\n")) >= 0) {
      const lines = buffer.slice(0, end).split("\n");
      buffer = buffer.slice(end + 2);
      const name = lines.find((line) => line.startsWith("event: "));
      const data = lines.find((line) => line.startsWith("data: "));
      if (name && data) yield [name.slice(7), JSON.parse(data.slice(6))];
    }
  }
}

const ENDINGS = {
  stop: "the document ended",
  length: "as many tokens as asked for",
  positions: "the model has no more positions",
};

async function generate() {
  if (running) return;
  running = new AbortController();
  at("generate").disabled = true;
  at("stop").disabled = false;
  at("given").textContent = at("prompt").value;
  at("grown").textContent = "";
  say("waiting");
  const started = performance.now();
  try {
    const response = await fetch("api/stream", {
      method: "POST",
      headers: { "Content-Type": "application/json", ...headers() },
      body: body(),
      signal: running.signal,
    });
    if (!response.ok) {
      say(await refusal(response), true);
      return;
    }
    let ended = false;
    for await (const [name, data] of events(response.body)) {
      if (name === "waiting" && data.ahead > 0) say("waiting behind " + data.ahead);
      if (name === "text") {
        at("grown").append(data.text);
        say("generating");
      }
      if (name === "failed") say(data.message, true);
      if (name === "done") {
        const seconds = ((performance.now() - started) / 1000).toFixed(1);
        say("done in " + seconds + " s: " + ENDINGS[data.finish_reasons[0]]);
      }
      ended = ended || name === "failed" || name === "done";
    }
    if (!ended) say("the server went away", true);
  } catch (error) {
    if (error.name === "AbortError") say("stopped");
    else say("the server cannot be reached", true);
  } finally {
    running = null;
    at("generate").disabled = false;
    at("stop").disabled = true;
  }
}

function stop() {
  if (running) running.abort();
}

async function describe() {
  try {
    const response = await fetch("info", { headers: headers() });
    if (!response.ok) {
      say(await refusal(response), true);
      return;
    }
    const info = await response.json();
    const size = new Intl.NumberFormat("en", { notation: "compact", maximumSignificantDigits: 3 });
    at("model").textContent =
      `${info.model} · ${size.format(info.parameters)} parameters · ` +
      `${info.positions} positions · ${info.dtype} on ${info.device}`;
    at("tokens_to_generate").max = info.positions;
    if (Number(at("tokens_to_generate").value) * 2 > info.positions) {
      at("tokens_to_generate").value = Math.max(1, Math.floor(info.positions / 2));
    }
    say("");
  } catch {
    say("the server cannot be reached", true);
  }
}

at("form").addEventListener("submit", (event) => {
  event.preventDefault();
  generate();
});
at("stop").addEventListener("click", stop);
at("token").addEventListener("change", describe);
document.addEventListener("keydown", (event) => {
  if (event.key === "Escape") stop();
  if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) at("form").requestSubmit();
});
at("prompt").focus();
describe();
