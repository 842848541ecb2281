"use strict";

const byId = (id) => document.getElementById(id);
const NUMBERS = ["tokens_to_generate", "temperature", "top_k", "top_p", "random_seed"];
let running = null; // AbortController of the running generation

function showStatus(text, isError = false) {
  byId("status").textContent = text;
  byId("status").classList.toggle("wrong", isError);
}

function headers() {
  const token = byId("token").value;
  return token ? { Authorization: "Bearer " + token } : {};
}

async function refusal(response) {
  if (response.status === 401) {
    byId("token-field").hidden = false;
    byId("token").focus();
    return "this server needs an access token";
  }
  try {
    return (await response.json()).message;
  } catch {
    return "the server answered " + response.status;
  }
}

function body() {
  const result = { prompts: [byId("prompt").value] };
  for (const name of NUMBERS) {
    if (byId(name).value !== "") result[name] = Number(byId(name).value);
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
  length: "the requested number of tokens was generated",
  positions: "the model has no more positions",
};

async function generate() {
  if (running) return;
  running = new AbortController();
  byId("generate").disabled = true;
  byId("stop").disabled = false;
  byId("given").textContent = byId("prompt").value;
  byId("grown").textContent = "";
  showStatus("waiting");
  const started = performance.now();
  try {
    const response = await fetch("api/stream", {
      method: "POST",
      headers: { "Content-Type": "application/json", ...headers() },
      body: body(),
      signal: running.signal,
    });
    if (!response.ok) {
      showStatus(await refusal(response), true);
      return;
    }
    let ended = false;
    for await (const [name, data] of events(response.body)) {
      if (name === "waiting" && data.ahead > 0) showStatus("waiting behind " + data.ahead);
      if (name === "text") {
        byId("grown").append(data.text);
        showStatus("generating");
      }
      if (name === "failed") showStatus(data.message, true);
      if (name === "done") {
        const seconds = ((performance.now() - started) / 1000).toFixed(1);
        showStatus("done in " + seconds + " s: " + ENDINGS[data.finish_reasons[0]]);
      }
      ended = ended || name === "failed" || name === "done";
    }
    if (!ended) showStatus("the connection to the server was lost", true);
  } catch (error) {
    if (error.name === "AbortError") showStatus("stopped");
    else showStatus("the server cannot be reached", true);
  } finally {
    running = null;
    byId("generate").disabled = false;
    byId("stop").disabled = true;
  }
}

function stop() {
  if (running) running.abort();
}

async function describe() {
  try {
    const response = await fetch("info", { headers: headers() });
    if (!response.ok) {
      showStatus(await refusal(response), true);
      return;
    }
    const info = await response.json();
    const size = new Intl.NumberFormat("en", { notation: "compact", maximumSignificantDigits: 3 });
    byId("model").textContent =
      `${info.model} · ${size.format(info.parameters)} parameters · ` +
      `${info.positions} positions · ${info.dtype} on ${info.device}`;
    byId("tokens_to_generate").max = info.positions;
    if (Number(byId("tokens_to_generate").value) * 2 > info.positions) {
      byId("tokens_to_generate").value = Math.max(1, Math.floor(info.positions / 2));
    }
    showStatus("");
  } catch {
    showStatus("the server cannot be reached", true);
  }
}

byId("form").addEventListener("submit", (event) => {
  event.preventDefault();
  generate();
});
byId("stop").addEventListener("click", stop);
byId("token").addEventListener("change", describe);
document.addEventListener("keydown", (event) => {
  if (event.key === "Escape") stop();
  if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) byId("form").requestSubmit();
});
byId("prompt").focus();
describe();
