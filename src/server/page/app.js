/*
 * The page: draws, moves strengths, and shows where the bytes are. Talks to the server that it came from, by its public API and nothing
 * else. State is asked for again rather than guessed: an event says that something changed, /v1/status and /v1/list_loras say what.
 */
"use strict";

const $ = (id) => document.getElementById(id);
const state = { model: null, server: null, loras: null, status: null, isBuilding: false, isBuildHeard: false, tBuild: 0, nBuilds: 0, nBuildBytes: 0, isLost: false };
const names = new Map(); // composition digest -> what it is made of, as far as this page knows

function el(tag, attributes, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes || {})) {
    if (name === "text") node.textContent = value;
    else if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else if (value !== undefined && value !== false) node.setAttribute(name, value === true ? "" : value);
  }
  node.append(...children);
  return node;
}

/* ------------------------------------------------------------------------------------------------ words */

function sentence(text) {
  const t = String(text || "").trim();
  return t && t[0].toUpperCase() + t.slice(1) + (/[.!?…]$/.test(t) ? "" : ".");
}
function bytes(n) {
  const units = ["bytes", "KiB", "MiB", "GiB", "TiB"];
  let i = 0;
  while (n >= 1024 && i < units.length - 1) { n /= 1024; i++; }
  return (i && n < 100 ? n.toFixed(1) : Math.round(n)) + " " + units[i];
}
const percent = (x) => (x > 0 && x < 0.01 ? "less than 1" : x < 1 && x > 0.99 ? "more than 99" : Math.round(x * 100)) + " %";
const seconds = (s) => (s < 10 ? s.toFixed(2) : s.toFixed(1)) + " s";
const plural = (n, word) => n + " " + word + (n === 1 ? "" : "s");
const short = (digest) => digest.slice(0, 8);
const strengthText = (x) => String(Math.round(x * 10000) / 10000);
const compose = (list) => list.filter((l) => l.strength !== 0).map((l) => l.nickname + " " + strengthText(l.strength)).join(" + ") || "base";

function say(id, text, isBad) {
  $(id).textContent = text;
  $(id).classList.toggle("bad", Boolean(isBad));
}

/* ----------------------------------------------------------------------------------------------- server */

class ApiError extends Error {}

let keyAsked = null; // the one open question for the key, however many requests wait for it
function askKey(text) {
  if (!keyAsked) {
    keyAsked = new Promise((resolve) => {
      $("key-text").textContent = text;
      $("key").value = "";
      $("key-form").onsubmit = (event) => {
        event.preventDefault();
        if (!/^[\x21-\x7e]+$/.test($("key").value)) {
          $("key-text").textContent = "A key has letters, digits and signs, and no blanks.";
          return;
        }
        sessionStorage.setItem("pageflip-key", $("key").value);
        $("key-dialog").close();
        keyAsked = null;
        resolve();
      };
      $("key-dialog").oncancel = (event) => event.preventDefault(); // nothing works without
      $("key-dialog").showModal();
    });
  }
  return keyAsked;
}

async function call(method, path, body, extra) {
  for (;;) {
    const key = sessionStorage.getItem("pageflip-key"), headers = { ...(extra && extra.headers) };
    let reply;
    if (key) headers.Authorization = "Bearer " + key;
    if (body !== undefined) headers["Content-Type"] = "application/json";
    try {
      reply = await fetch(path, { method, headers, signal: extra && extra.signal, cache: "no-store",
        body: body === undefined ? undefined : JSON.stringify(body) });
    } catch (error) {
      throw new ApiError("The server cannot be reached.", { cause: error });
    }
    if (reply.status !== 401) return reply;
    if (key === sessionStorage.getItem("pageflip-key")) // else somebody else asked meanwhile
      await askKey(key ? "This key is not accepted. Try another one." : "This server asks for an API key. It is kept for this tab only.");
  }
}

/* The document of a reply; an error becomes an ApiError whose message is a sentence. */
async function api(method, path, body, extra) {
  const reply = await call(method, path, body, extra);
  let doc = null;
  try { doc = await reply.json(); } catch (error) {
    if (reply.ok) throw new ApiError("The server was lost while it answered.", { cause: error });
  }
  if (reply.ok) return doc;
  const wait = reply.headers.get("Retry-After");
  let text = sentence((doc && doc.error && doc.error.message) || "the server answered with status " + reply.status);
  text = text.replace(/; the classes are .*/s, ". The field suggests all of them."); // the message ends with the whole list
  if (wait) text += " Try again in " + plural(Number(wait), "second") + ".";
  throw new ApiError(text);
}

/* ------------------------------------------------------------------------------------------- refreshing */

/* Runs fn now, or once more after the run that goes on; at most every `ms`. */
function throttled(fn, ms) {
  let timer = 0, isRunning = false, isWanted = false;
  const go = async () => {
    timer = 0;
    isRunning = true;
    isWanted = false;
    try { await fn(); } catch (error) { if (!(error instanceof ApiError)) throw error; }
    isRunning = false;
    if (isWanted) timer = setTimeout(go, ms);
  };
  return () => {
    isWanted = true;
    if (!timer && !isRunning) timer = setTimeout(go, state.status ? ms : 0);
  };
}

async function refreshStatus() {
  state.status = await api("GET", "/v1/status");
  if (state.isLost) return;
  showBuild(state.status.build);
  showLayers(state.status.layers);
  showMemory(state.status);
  showLink();
}

async function refreshLoras() {
  const before = state.status && state.status.composition;
  state.loras = await api("GET", "/v1/list_loras");
  await refreshStatus();
  const components = Object.values(state.loras.active);
  if (before === state.status.composition && components.length < 2) // nobody changed it in between
    names.set(before, compose((components[0] || []).filter((l) => l.merged)));
  showAdapters();
}

const statusSoon = throttled(refreshStatus, 200);
const lorasSoon = throttled(refreshLoras, 50);

async function refreshAll() {
  [state.model, state.server] = await Promise.all([api("GET", "/model_info"), api("GET", "/server_info")]);
  const m = state.model;
  $("model").textContent = `${m.model_id}: ${m.width} × ${m.height} pixels, ${plural(m.layers, "layer")}, ${bytes(m.bytes)}`;
  $("classes").replaceChildren(...m.classes.map((c) => el("option", { value: c.replaceAll("_", " ") })));
  $("bundled").replaceChildren(...state.server.bundled_adapters.map((b) => el("option", { value: b })));
  if (!$("prompt").wasEdited && !m.classes.some((c) => $("prompt").value.includes(c))) $("prompt").value = m.classes[0].replaceAll("_", " ");
  $("steps").placeholder = m.default_steps;
  $("guidance").placeholder = m.default_guidance;
  await refreshStatus();
  state.nBuilds = state.status.cache.builds;
  await refreshLoras();
}

/* ------------------------------------------------------------------------------------------- connection */

function showLink() {
  const isDraining = state.status && state.status.draining;
  const text = state.isLost ? "Not connected" : isDraining ? "Shutting down" : "Connected";
  if ($("link").textContent !== text) $("link").textContent = text;
  $("link").classList.toggle("off", state.isLost || Boolean(isDraining));
  document.body.classList.toggle("lost", state.isLost);
}

function setLost(isLost, why) {
  if (isLost && !state.isLost) {
    $("lost-text").textContent = why + " What is shown is as it was last seen. Trying again every few seconds.";
    note("The server was lost.");
  } else if (!isLost && state.isLost) {
    note("The server is back.");
    for (const id of ["draw-say", "adapters-say"]) say(id, "");
  }
  state.isLost = isLost;
  $("lost").hidden = !isLost;
  showLink();
}

let retryNow = () => {};
const pause = (ms) => new Promise((resolve) => {
  const timer = setTimeout(resolve, ms);
  retryNow = () => { clearTimeout(timer); resolve(); };
});

/* Hands over each event of the stream; returns when the server ends it, throws when it is lost. */
async function readEvents(reader, alive) {
  const decoder = new TextDecoder();
  let text = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    alive();
    text += decoder.decode(value, { stream: true });
    for (let end; (end = text.indexOf("\n\n")) >= 0; text = text.slice(end + 2)) {
      const fields = Object.fromEntries(text.slice(0, end).split("\n").filter((l) => l[0] !== ":").map((l) => {
        const colon = l.indexOf(":");
        return [l.slice(0, colon), l.slice(colon + 1).trimStart()];
      }));
      if (fields.data) onEvent(fields.event, JSON.parse(fields.data));
    }
  }
}

const SILENCE_MS = 45000; // the server says something every 15 s

async function listenOnce() {
  const abort = new AbortController();
  let timer = 0;
  const alive = () => {
    clearTimeout(timer);
    timer = setTimeout(() => abort.abort(), SILENCE_MS);
  };
  try {
    alive();
    const reply = await call("GET", "/v1/events", undefined, { signal: abort.signal });
    if (reply.ok) {
      const reader = reply.body.getReader();
      await refreshAll();
      setLost(false);
      await readEvents(reader, alive);
    } else if (reply.status !== 429) { // 429: too many listen; asking now and then does too
      throw new ApiError(`The server does not answer as it should (status ${reply.status}).`);
    } else {
      await refreshAll();
      setLost(false);
      await pause(3000);
      return;
    }
  } finally {
    clearTimeout(timer);
    abort.abort();
  }
  throw new ApiError("The server has ended the connection.");
}

async function listen() {
  for (let wait = 500; ; wait = Math.min(wait * 1.6, 4000)) {
    try {
      await listenOnce();
      wait = 500;
    } catch (error) {
      if (!state.isLost) wait = 500;
      setLost(true, error instanceof ApiError ? error.message : "The connection to the server was lost.");
      await pause(wait);
    }
  }
}

function onEvent(name, data) {
  if (name === "build") onBuild(data);
  else if (name === "view") onView(data);
  else if (name === "step" || name === "job") onJob(name, data);
  else if (name === "lost") lorasSoon();
}

/* ---------------------------------------------------------------------------------------------- changes */

function note(text) {
  const now = new Date();
  $("no-log").hidden = true;
  $("log").prepend(el("li", {}, el("time", { datetime: now.toISOString(), text: now.toLocaleTimeString("en-GB") }), el("span", { text })));
  while ($("log").children.length > 200) $("log").lastChild.remove();
}

const ways = { base: "read from the base", stream: "computed while read", overlay: "read from the overlay", inplace: "held in private copies" };
const kinds = { set: "Set", merge: "Merged", unmerge: "Unmerged", deactivate: "Deactivated" };

function called(digest) {
  return names.has(digest) ? `${names.get(digest)} (${short(digest)})` : short(digest);
}

async function onView(data) {
  if (data.kind === "placement") {
    note(`Composition ${called(data.composition)} is read from its overlay from now on.`);
    lorasSoon();
    return;
  }
  try { await refreshLoras(); } catch { lorasSoon(); }
  note(`${kinds[data.kind] || data.kind}: ${called(data.composition)}; ${plural(data.layers_changed, "layer")} changed, ${ways[data.way] || data.way}, ` +
    `in effect after ${data.effect_ms.toFixed(1)} ms.`);
}

async function onBuild(data) {
  const was = state.isBuilding || state.isBuildHeard; // /v1/status may have told of the end first
  state.isBuildHeard = data.is_building;
  showBuild(data);
  statusSoon();
  if (!was || data.is_building) return;
  const took = state.tBuild ? ` in ${seconds((performance.now() - state.tBuild) / 1000)}` : "", n = state.nBuildBytes;
  try { await refreshStatus(); } catch { return; }
  if (state.status.cache.builds > state.nBuilds) note(`An overlay of ${bytes(n)} was built${took}.`);
  else note(data.note ? `The overlay was not built: ${sentence(data.note)}` : "A build of an overlay was given up: its composition was replaced.");
  state.nBuilds = state.status.cache.builds;
}

function showBuild(b) {
  if (b.is_building && !state.isBuilding) state.tBuild = b.built_bytes < b.total_bytes / 20 ? performance.now() : 0; // 0: it began before we looked
  state.isBuilding = b.is_building;
  $("build").hidden = !b.is_building;
  if (!b.is_building) return;
  state.nBuildBytes = b.total_bytes;
  const part = b.total_bytes ? b.built_bytes / b.total_bytes : 0;
  $("build-bar").value = part;
  $("build-label").textContent = `Building the overlay: ${bytes(b.built_bytes)} of ${bytes(b.total_bytes)} (${percent(part)})`;
}

/* --------------------------------------------------------------------------------------------- adapters */

/* One row of controls. `onchange(value)` is called when the person has moved it. */
function strengthRow(prefix, nickname, what, onchange) {
  const id = `${prefix}-${nickname}`;
  const range = el("input", { type: "range", id, min: "0", max: "2", step: "0.05", value: "0", "aria-describedby": id + "-note" });
  const number = el("input", { type: "number", step: "any", value: "0", inputmode: "decimal", "aria-label": `${what} of ${nickname}, exact` });
  const row = el("li", { "data-nickname": nickname }, el("label", { for: id, text: nickname }), range, number);
  row.append(el("span", { class: "note", id: id + "-note", hidden: true }));
  const set = (x) => { range.value = x; number.value = strengthText(x); range.setAttribute("aria-valuetext", strengthText(x)); row.strength = x; };
  range.addEventListener("input", () => { set(Number(range.value)); onchange(row); });
  number.addEventListener("change", () => {
    if (number.value === "" || !Number.isFinite(Number(number.value))) { set(row.strength); return; }
    set(Number(number.value));
    onchange(row);
  });
  row.set = set;
  set(0);
  return row;
}

/* Rows of a list, one per loaded adapter; those that are there keep their place, focus and what is being typed. */
function syncRows(list, make) {
  const have = new Map([...list.children].map((row) => [row.dataset.nickname, row]));
  const wanted = state.loras.loaded_adapters.map((a) => a.nickname).sort();
  for (const [nickname, row] of have) if (!wanted.includes(nickname)) row.remove();
  wanted.forEach((nickname, i) => {
    const row = have.get(nickname) || make(nickname);
    if (list.children[i] !== row) list.insertBefore(row, list.children[i] || null);
  });
  return [...list.children];
}

function activeOf(nickname) {
  return Object.entries(state.loras.active).flatMap(([component, list]) =>
    list.filter((l) => l.nickname === nickname).map((l) => ({ component, ...l })));
}

function showAdapters() {
  for (const row of syncRows($("rows"), makeRow)) {
    const active = activeOf(row.dataset.nickname), text = [];
    if (!row.isMoving && !nPending) row.set(active.length ? active[0].strength : 0);
    if (active.some((a) => a.strength !== active[0].strength))
      text.push(active.map((a) => `${a.component} ${strengthText(a.strength)}`).join(", ") + ": moving the slider sets all of them.");
    else if (active.length && active.length < state.server.targets.length) text.push("On " + active.map((a) => a.component).join(", ") + ".");
    if (active.length && !active[0].merged) text.push("Remembered, not applied.");
    const note = row.querySelector(".note");
    note.textContent = text.join(" ");
    note.hidden = !text.length;
  }
  syncRows($("own-list"), (nickname) => strengthRow("own", nickname, "Strength for the next picture", () => {}));
  $("no-rows").hidden = $("rows").children.length > 0;
  const digest = state.status.composition, way = wayNow();
  $("composition").replaceChildren("The server applies ", el("strong", { text: names.get(digest) || "a composition" }), ", ", el("code", { text: short(digest), title: digest }),
    `, ${way}.`);
}

function wayNow() {
  const n = {};
  for (const l of state.status.layers) if (l.merged_bytes) n[l.place] = (n[l.place] || 0) + 1;
  const most = Object.keys(n).sort((a, b) => n[b] - n[a])[0];
  return ways[most === "resident" ? "inplace" : most || "base"];
}

function makeRow(nickname) {
  const row = strengthRow("s", nickname, "Strength", (moved) => { moved.isMoving = true; setSoon(); });
  const unload = el("button", { type: "button", class: "small", text: "Unload", "aria-label": "Unload " + nickname, onclick: () => unloadAdapter(nickname) });
  row.insertBefore(unload, row.querySelector(".note"));
  return row;
}

/* What others set beside strengths stays: alpha, precision, and with several components those that an adapter is on; one that goes to 0 is
 * named, so that it leaves them. */
function setBody() {
  const isMany = state.server.targets.length > 1;
  const list = [...$("rows").children].map((row) => ({ nickname: row.dataset.nickname, strength: row.strength, on: activeOf(row.dataset.nickname) }))
    .filter((l) => l.strength !== 0 || (isMany && l.on.length));
  if (!list.length || list.every((l) => l.strength === 0)) return null;
  const body = { lora_nickname: list.map((l) => l.nickname), strength: list.map((l) => l.strength) };
  const alphas = list.map((l) => (state.status.adapters.find((a) => a.nickname === l.nickname && a.alpha !== null) || { alpha: null }).alpha);
  if (alphas.some((a) => a !== null)) body.lora_alpha = alphas;
  if (state.status.adapters.length) body.merge_dtype = state.status.merge_dtype;
  if (isMany) body.target = list.map((l) => (l.on.length ? l.on.map((a) => a.component).join(",") : "all"));
  return body;
}

let setTimer = 0, nSets = 0, nPending = 0, tSet = 0;
function setSoon() {
  clearTimeout(setTimer);
  setTimer = setTimeout(applySet, 150);
}

/* One change at a time, and what was moved meanwhile goes with the next: unless one waits for its overlay, which the next then ends. */
async function applySet() {
  if (nPending && performance.now() - tSet < 1000) { setSoon(); return; }
  const body = setBody(), i = ++nSets;
  nPending++;
  tSet = performance.now();
  for (const row of $("rows").children) row.isMoving = false;
  try {
    const r = body ? await api("POST", "/v1/set_lora", body) : await api("POST", "/v1/deactivate_lora_weights", {});
    if (!body) names.set(r.composition, "base");
    else if (!body.target) names.set(r.composition, compose(body.lora_nickname.map((nickname, k) => ({ nickname, strength: body.strength[k] }))));
    if (i === nSets) say("adapters-say", [r.warning, r.note].filter(Boolean).map(sentence).join(" "));
  } catch (error) {
    if (i === nSets) fail("adapters-say", error, "The strengths are as they were.");
  }
  nPending--;
  lorasSoon();
}

function fail(id, error, more) {
  if (!(error instanceof ApiError)) throw error;
  say(id, error.message + (more ? " " + more : ""), true);
}

async function change(path, body, done) {
  try {
    const r = await api("POST", path, body);
    say("adapters-say", [done, r.warning, r.note].filter(Boolean).map(sentence).join(" "));
  } catch (error) {
    fail("adapters-say", error);
  }
  lorasSoon();
}

const unloadAdapter = (nickname) => change("/v1/unload_lora", { lora_nickname: nickname }, `'${nickname}' is no longer loaded`);

$("unmerge").addEventListener("click", () => change("/v1/unmerge_lora_weights", {}, "The server draws with the base; the strengths are remembered"));
$("deactivate").addEventListener("click", () => change("/v1/deactivate_lora_weights", {}, "The server draws with the base"));
$("merge").addEventListener("click", () => {
  const factor = Number($("factor").value);
  if ($("factor").value === "" || !Number.isFinite(factor)) say("adapters-say", "The factor is a number, like 1 or 0.5.", true);
  else change("/v1/merge_lora_weights", { strength: factor }, "What was remembered is applied");
});
$("load").addEventListener("submit", async (event) => {
  event.preventDefault();
  const path = $("load-path").value.trim(), nickname = $("load-name").value.trim() || path.split("/").filter(Boolean).pop();
  if (!path) { say("adapters-say", "Say which adapter: a file, a directory, or one of the bundled names.", true); return; }
  await change("/v1/load_lora", { lora_nickname: nickname, lora_path: path }, `'${nickname}' is loaded; its slider is at 0`);
});

/* ---------------------------------------------------------------------------------------------- drawing */

const jobs = new Map(); // id -> its placeholder

function onJob(name, data) {
  const job = jobs.get(data.id);
  if (job && name === "step") job.tell(`Step ${data.step} of ${data.steps}`, data.step / data.steps);
  else if (job && data.state === "running") job.tell("Drawing …", 0);
  if (name === "job" && !["queued", "running"].includes(data.state)) statusSoon();
}

function waitingFigure(id, prompt) {
  const text = el("span", { text: "Waiting …" }), bar = el("progress", { max: "1", value: "0", "aria-label": `Progress of ${prompt}` });
  const cancel = el("button", { type: "button", class: "small", text: "Cancel", "aria-label": `Cancel ${prompt}`, onclick: async () => {
    try { await api("DELETE", "/v1/jobs/" + id); } catch (error) { fail("draw-say", error); }
  } });
  const figure = el("figure", {}, el("div", { class: "wait" }, text, bar, cancel), el("figcaption", {}, el("span", { text: prompt })));
  figure.tell = (what, part) => { text.textContent = what; bar.value = part; };
  return figure;
}

function numberOf(id, isWhole, what) {
  const field = $(id), value = field.value === "" && !field.validity.badInput ? undefined : Number(field.value);
  const isBad = field.validity.badInput || (value !== undefined && (!Number.isFinite(value) || value < Number(field.min) || value > Number(field.max) || (isWhole && !Number.isInteger(value))));
  field.setAttribute("aria-invalid", String(isBad));
  if (!isBad) return value;
  field.focus();
  throw new ApiError(`${what} is ${isWhole ? "a whole number" : "a number"} from ${field.min} to ${Number(field.max).toLocaleString("en")}.`);
}

/* Only what was said; the server knows the rest. The seed is chosen here, so that a picture can be drawn again. */
function drawBody() {
  const body = { prompt: $("prompt").value.trim(), n: numberOf("count", true, "The number of pictures") || 1 };
  const steps = numberOf("steps", true, "The number of steps"), guidance = numberOf("guidance", false, "The guidance"), seed = numberOf("seed", true, "The seed");
  if (!body.prompt) { $("prompt").focus(); throw new ApiError("Say what to draw: " + state.model.classes.slice(0, 3).map((c) => c.replaceAll("_", " ")).join(", ") + ", …"); }
  if (steps !== undefined) body.num_inference_steps = steps;
  if (guidance === 0) { $("guidance").focus(); throw new ApiError("The guidance is more than 0; 1 draws without."); }
  if (guidance !== undefined) body.guidance_scale = guidance;
  body.seed = seed === undefined ? Math.floor(Math.random() * 1e6) : seed;
  if ($("own").checked) {
    const precision = state.status.adapters.length ? { merge_dtype: state.status.merge_dtype } : {};
    body.loras = [...$("own-list").children].filter((row) => row.strength !== 0).map((row) => ({ nickname: row.dataset.nickname, strength: row.strength, ...precision }));
  }
  return body;
}

function showPictures(figure, body, r) {
  const made = r.data.map((picture, i) => {
    const what = (picture.revised_prompt || body.prompt).replaceAll("_", " "), number = r.data.length > 1 ? `, ${i + 1} of ${r.data.length}` : "";
    const how = called(r.composition);
    return el("figure", {},
      el("img", { src: "data:image/png;base64," + picture.b64_json, width: state.model.width, height: state.model.height, alt: `${what}${number}, drawn with ${how}, seed ${body.seed}` }),
      el("figcaption", {}, el("span", { text: `${what}, ${seconds(r.inference_time_s)}` }), el("span", { text: names.get(r.composition) || "" }),
        el("span", {}, el("code", { text: short(r.composition), title: r.composition }), `, seed ${body.seed}${number}`)));
  });
  figure.replaceWith(...made);
  while ($("pictures").children.length > 96) $("pictures").lastChild.remove();
}

async function draw() {
  const body = drawBody(), id = "page-" + crypto.getRandomValues(new Uint32Array(2)).join("-"), figure = waitingFigure(id, body.prompt);
  say("draw-say", "");
  $("no-pictures").hidden = true;
  $("pictures").prepend(figure);
  jobs.set(id, figure);
  try {
    const r = await api("POST", "/v1/images/generations", body, { headers: { "X-Request-Id": id } });
    if (body.loras) names.set(r.composition, compose(body.loras));
    showPictures(figure, body, r);
    say("draw-say", `Drawn: ${body.prompt}, in ${seconds(r.inference_time_s)}.`);
  } catch (error) {
    figure.remove();
    $("no-pictures").hidden = $("pictures").children.length > 0;
    throw error;
  } finally {
    jobs.delete(id);
  }
}

$("draw").addEventListener("submit", async (event) => {
  event.preventDefault();
  if (!state.model) { say("draw-say", "The server has not answered yet.", true); return; }
  try { await draw(); } catch (error) { fail("draw-say", error); }
});
$("prompt").addEventListener("input", () => { $("prompt").wasEdited = true; });
$("own").addEventListener("change", () => {
  $("own-rows").hidden = !$("own").checked;
  if ($("own").checked) // begins with what the server applies
    for (const row of $("own-list").children) row.set([...$("rows").children].find((r) => r.dataset.nickname === row.dataset.nickname).strength);
});

/* ------------------------------------------------------------------------------------------------ layers */

const letters = { base: "B", stream: "S", overlay: "O", resident: "R" };
const places = { base: "read from the base file", stream: "computed while read", overlay: "read from the overlay", resident: "a private copy" };
const residencies = { kept: "kept in memory when it fits", mapped: "dropped behind the reader", resident: "cannot be dropped" };

/* Of the page cache the kernel does not tell everybody; a private copy is in memory by its nature. */
const isKnown = (l) => l.place === "resident" || l.cached !== "unknown";
const inMemory = (l) => (l.place === "resident" ? 1 : l.cached_fraction);

function cachedText(l) {
  if (l.place === "resident") return "all";
  if (l.cached === "unknown") return "not known";
  return l.cached === "yes" ? "all" : l.cached === "no" ? "nothing" : percent(l.cached_fraction);
}
function builtText(l) {
  if (!l.merged_bytes) return "not needed";
  if (l.place === "overlay") return `${bytes(l.merged_bytes)}, in use`;
  if (!l.built_bytes) return "not written";
  return l.built_bytes < l.merged_bytes ? `${percent(l.built_bytes / l.merged_bytes)} written` : "written, not in use yet";
}
function layerText(l) {
  const memory = isKnown(l) ? `${cachedText(l)} of it in memory` : "whether it is in memory is not known";
  return `${l.name}, ${bytes(l.bytes)}: ${places[l.place]}; ${memory}; ${residencies[l.residency]}; merged file: ${builtText(l)}`;
}

let cells = []; // in the order of status.layers
let shape = "";
let chosen = -1;

function buildMap(layers) {
  const groups = new Map();
  for (const l of layers) groups.set(l.component, [...(groups.get(l.component) || []), l]);
  cells = layers.map(() => null);
  chosen = -1;
  const made = [...groups].map(([component, list]) => {
    const box = el("div", { class: "cells", role: "listbox", "aria-orientation": "horizontal", "aria-label": `Layers of ${component}` });
    for (const l of list) {
      const i = layers.indexOf(l), cell = el("div", { class: "cell", role: "option", tabindex: box.children.length ? "-1" : "0", "aria-selected": "false" });
      cells[i] = cell;
      cell.addEventListener("focus", () => choose(i));
      cell.addEventListener("pointerenter", () => choose(i));
      cell.addEventListener("click", () => cell.focus());
      box.append(cell);
    }
    box.addEventListener("keydown", moveCell);
    return el("div", { class: "component" }, el("h3", { text: component, hidden: groups.size === 1 }), box);
  });
  $("map").replaceChildren(...made);
  $("table").tBodies[0].replaceChildren(...layers.map(() => el("tr", {}, el("th", { scope: "row" }), ...Array.from({ length: 5 }, () => el("td")))));
}

function moveCell(event) {
  const list = [...event.currentTarget.children], i = list.indexOf(document.activeElement);
  const perRow = list.filter((c) => c.offsetTop === list[0].offsetTop).length;
  const to = { ArrowLeft: i - 1, ArrowRight: i + 1, ArrowUp: i - perRow, ArrowDown: i + perRow, Home: 0, End: list.length - 1 }[event.key];
  if (to === undefined || i < 0) return;
  event.preventDefault();
  if (to < 0 || to >= list.length) return;
  list[i].tabIndex = -1;
  list[to].tabIndex = 0;
  list[to].focus();
}

function choose(i) {
  chosen = i;
  cells.forEach((cell, k) => cell.setAttribute("aria-selected", String(k === i)));
  $("cell-text").textContent = layerText(state.status.layers[i]) + ".";
}

function showCell(cell, l) {
  const kind = `cell ${l.place}${isKnown(l) ? "" : " unknown"}`, text = layerText(l);
  if (cell.className !== kind) cell.className = kind;
  if (cell.dataset.letter !== letters[l.place]) cell.dataset.letter = letters[l.place];
  if (cell.getAttribute("aria-label") !== text) cell.setAttribute("aria-label", text);
  cell.style.setProperty("--fill", isKnown(l) ? inMemory(l) : 1);
  cell.style.setProperty("--done", l.merged_bytes ? l.built_bytes / l.merged_bytes : 0);
}

function showLayers(layers) {
  const now = layers.map((l) => l.component + "/" + l.name).join("\n");
  if (now !== shape) { shape = now; buildMap(layers); }
  const n = {};
  layers.forEach((l, i) => {
    const row = $("table").tBodies[0].rows[i].cells;
    showCell(cells[i], l);
    [l.name, bytes(l.bytes), places[l.place], cachedText(l), l.residency, builtText(l)].forEach((text, k) => { if (row[k].textContent !== text) row[k].textContent = text; });
    n[l.place] = (n[l.place] || 0) + 1;
  });
  $("layers-summary").textContent = `${plural(layers.length, "layer")}: ` + Object.keys(places).filter((p) => n[p]).map((p) => `${n[p]} ${places[p]}`).join(", ") + ".";
  if (chosen >= 0) { const text = layerText(layers[chosen]) + "."; if ($("cell-text").textContent !== text) $("cell-text").textContent = text; }
}

/* ------------------------------------------------------------------------------------------------ memory */

function part(bar, name, n, of) {
  bar.querySelector("." + name).style.setProperty("--part", of > 0 ? Math.min(1, n / of) : 0);
}

function showMemory(s) {
  const m = s.memory, c = s.cache, q = s.queue, limit = m.available_bytes;
  part($("memory-bar"), "own", m.anon_bytes, limit);
  part($("memory-bar"), "kept", m.kept_bytes, limit);
  const text = `${bytes(m.anon_bytes)} of its own` + (m.resident_bytes ? ` (${bytes(m.resident_bytes)} of that are private copies of layers)` : "") +
    ` and ${bytes(m.kept_bytes)} of weights that stay in the page cache, of ${bytes(limit)} that the memory plan allows.`;
  $("memory-text").textContent = text;
  $("memory-bar").setAttribute("aria-label", "Memory: " + text);
  $("plan-text").textContent = sentence(m.plan);
  part($("cache-bar"), "disk", c.bytes, c.budget_bytes);
  const cache = (c.dir ? `${bytes(c.bytes)} of ${bytes(c.budget_bytes)} in ${c.dir}; ${plural(c.builds, "overlay")} built, ${c.adoptions} adopted.` : "There is no cache: adapters are always computed while the weights are read.") +
    (c.note ? " " + sentence(c.note) : "");
  $("cache-text").textContent = cache;
  $("cache-bar").setAttribute("aria-label", "Cache: " + cache);
  $("queue-text").textContent = `${q.running ? plural(q.running, "generation") + " running" : "Nothing is being drawn"}, ${q.waiting} of at most ${q.max} waiting` +
    (q.seconds_per_image ? `; a picture took ${seconds(q.seconds_per_image)} of late.` : ".");
}

/* ------------------------------------------------------------------------------------------------- start */

$("lost-now").addEventListener("click", () => retryNow());
addEventListener("online", () => retryNow());
document.addEventListener("visibilitychange", () => { if (!document.hidden) { retryNow(); if (!state.isLost && state.status) statusSoon(); } });
setInterval(() => { if (!document.hidden && !state.isLost && state.status) statusSoon(); }, 5000); // what the page cache holds changes without an event
listen();
