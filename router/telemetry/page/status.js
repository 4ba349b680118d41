// Status page of a router: draws status.json, GetStatus' answer, every second.
// Text is set as text, never as HTML, since problems quote what executors said.

const PERIOD_MS = 1000;
const TIMEOUT_MS = 5000;
const MAX_EVENTS = 20;
const STATES = {
  GROUP_STATE_READY: ["good", "●", "ready"],
  GROUP_STATE_FORMING: ["fair", "◐", "forming"],
  GROUP_STATE_STANDBY: ["", "○", "stands by"],
  GROUP_STATE_MISMATCHED: ["bad", "✕", "mismatched"],
};
const LEVELS = { info: ["", "", "info"], warning: ["fair", "▲", "warning"], error: ["bad", "✕", "error"] };

// ---- numbers and their units

const grouped = new Intl.NumberFormat("en-US", { maximumFractionDigits: 1 });
const count = (value) => grouped.format(Number(value));
const percent = (share) => `${Math.round(100 * share)} %`;
const plural = (value, one) => `${count(value)} ${one}${Number(value) === 1 ? "" : "s"}`;
const sum = (values) => values.reduce((total, value) => total + value, 0);
const clock = (time) => new Date(time).toLocaleTimeString("en-GB");

function span(seconds) {
  if (seconds === 0) return "0 s";
  if (seconds < 0.1) return `${(seconds * 1e3).toFixed(1)} ms`;
  if (seconds < 1) return `${Math.round(seconds * 1e3)} ms`;
  if (seconds < 60) return `${seconds.toFixed(1)} s`;
  if (seconds < 3600) return `${Math.floor(seconds / 60)} min`;
  return `${(seconds / 3600).toFixed(1)} h`;
}

// ---- elements

const SVG = "http://www.w3.org/2000/svg";

function element(created, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) created.setAttribute(name, value);
  created.append(...children.flat().filter((child) => child !== null));
  return created;
}

const html = (name, attributes = {}, ...children) =>
  element(document.createElement(name), attributes, children);
const svg = (name, attributes = {}, ...children) =>
  element(document.createElementNS(SVG, name), attributes, children);

// Makes a drawn node like another and touches nothing that is so already: focus, selection and
// scrolling stay.
function patch(drawn, wanted) {
  if (drawn.nodeName !== wanted.nodeName) {
    drawn.replaceWith(wanted);
  } else if (wanted.nodeType === Node.TEXT_NODE) {
    if (drawn.data !== wanted.data) drawn.data = wanted.data;
  } else {
    for (const { name } of [...drawn.attributes]) {
      if (!wanted.hasAttribute(name)) drawn.removeAttribute(name);
    }
    for (const { name, value } of wanted.attributes) {
      if (drawn.getAttribute(name) !== value) drawn.setAttribute(name, value);
    }
    fill(drawn, ...wanted.childNodes);
  }
}

function fill(drawn, ...wanted) {
  const old = [...drawn.childNodes];
  wanted.forEach((child, i) => (i < old.length ? patch(old[i], child) : drawn.append(child)));
  old.slice(wanted.length).forEach((child) => child.remove());
}

const badge = ([kind, sign, word]) =>
  html("span", { class: `badge ${kind}` }, html("span", { "aria-hidden": "true" }, sign), ` ${word}`);

const fact = (name, value) => html("div", {}, html("dt", {}, name), html("dd", {}, value));

// Bar of shares of its width, from the left. The numbers stand beside it.
function bar(...shares) {
  let start = 0;
  const parts = shares.map((share, i) => {
    const part = svg("rect", { class: `part${i}`, x: 100 * start, width: 100 * share, height: 10 });
    start += share;
    return part;
  });
  return svg("svg", { class: "bar", viewBox: "0 0 100 10", preserveAspectRatio: "none", "aria-hidden": "true" }, parts);
}

// Line of the last minutes: one value a second, the newest at the right edge.
function chart(title, unit, values, floor = 1) {
  const now = values.at(-1) ?? 0;
  const most = Math.max(0, ...values);
  const top = Math.max(floor, most);
  const points = values.map((value, i) => `${300 - values.length + i + 1},${(58 - 56 * (value / top)).toFixed(1)}`);
  const line = points.join(" ");
  const first = 300 - values.length + 1;
  const told = `${title} over the last 5 minutes: now ${count(now)} ${unit}, at most ${count(most)} ${unit}`;
  return html(
    "figure",
    {},
    html("figcaption", {}, title),
    html("p", { class: "now" }, html("strong", {}, count(now)), ` ${unit}`),
    svg(
      "svg",
      { class: "chart", viewBox: "0 0 300 60", preserveAspectRatio: "none", role: "img", "aria-label": told },
      values.length > 1 ? svg("polygon", { points: `${first},60 ${line} 300,60` }) : null,
      values.length > 1 ? svg("polyline", { points: line }) : null,
    ),
    html(
      "p",
      { class: "scale", "aria-hidden": "true" },
      html("span", {}, "−5 min"),
      html("span", {}, values.length ? `peak ${count(most)}` : "no sample yet"),
      html("span", {}, "now"),
    ),
  );
}

// Table that scrolls by itself where it is too wide, also with the keyboard.
function table(name, headers, rows) {
  const cells = headers.map(([text, attributes = {}]) => html("th", { scope: "col", ...attributes }, text));
  return html(
    "div",
    { class: "scroll", role: "region", tabindex: "0", "aria-label": name },
    html("table", {}, html("thead", {}, html("tr", {}, cells)), html("tbody", {}, rows)),
  );
}

const cell = (text) => html("td", { class: "number" }, text);

// ---- what is drawn

function rankRow(rank, mostTokens, maxSequences, hasAddresses) {
  const { num_used_blocks: used, num_cached_blocks: cached, num_free_blocks: free } = rank;
  const blocks = Math.max(1, used + cached + free);
  const time = rank.last_step_duration;
  return html(
    "tr",
    {},
    html("th", { scope: "row" }, count(rank.dp_rank)),
    hasAddresses ? html("td", {}, html("code", {}, rank.address)) : null,
    cell(`${count(rank.num_running)} of ${count(maxSequences)}`),
    cell(count(rank.last_step_tokens)),
    html("td", {}, bar(rank.last_step_tokens / mostTokens)),
    cell(time === undefined ? "–" : span(parseFloat(time))),
    cell(percent(used / blocks)),
    cell(percent(cached / blocks)),
    html("td", {}, bar(used / blocks, cached / blocks)),
    cell(percent(rank.prefix_hit_rate)),
    cell(count(rank.num_preemptions)),
  );
}

function ranks(group) {
  if (!group.ranks.length) return html("p", { class: "empty" }, "No ranks: the group has not formed.");
  const most = Math.max(1, ...group.ranks.map((rank) => rank.last_step_tokens));
  const hasAddresses = group.ranks.some((rank) => rank.address);
  const number = { class: "number" };
  const headers = [
    ["Rank"],
    ...(hasAddresses ? [["Executor"]] : []),
    ["Sequences", number],
    ["Tokens in the last step", { colspan: 2 }],
    ["Step time", number],
    ["KV used and cached", { colspan: 3 }],
    ["Prefix hits", number],
    ["Preempted", number],
  ];
  const rows = group.ranks.map((rank) => rankRow(rank, most, group.max_num_seqs, hasAddresses));
  return table(`Ranks of group ${group.group}`, headers, rows);
}

function flows(group) {
  if (!group.flows.length) return null;
  const number = { class: "number" };
  const headers = [["Flow"], ["Waiting", number], ["Running", number], ["Share of 10 s", number], ["Tokens in all", number]];
  const rows = [...group.flows]
    .sort((a, b) => b.served_share - a.served_share || b.num_running - a.num_running || b.num_waiting - a.num_waiting)
    .map((flow) =>
      html(
        "tr",
        {},
        html("th", { scope: "row" }, flow.flow || "-"),
        cell(count(flow.num_waiting)),
        cell(count(flow.num_running)),
        cell(percent(flow.served_share)),
        cell(count(flow.num_served_tokens)),
      ),
    );
  return table(`Flows of group ${group.group}`, headers, rows);
}

function drafts({ algorithm, state, tokens_per_step: gain, num_drafts, num_accepted_drafts }) {
  const parts = [algorithm, state.replace("SPECULATION_STATE_", "").toLowerCase()];
  if (gain !== undefined) {
    const accepted = percent(num_accepted_drafts / Math.max(1, num_drafts));
    parts.push(`${gain.toFixed(2)} tokens per step`, `${accepted} of drafts accepted`);
  }
  return parts.filter(Boolean).join(", ");
}

function stepCost(cost) {
  if (!cost.is_known) return `${plural(cost.num_steps, "step")} seen, too few to predict`;
  return (
    `predicted within ${(100 * cost.mean_error).toFixed(1)} % on average: ${span(cost.base_s)} a step, ` +
    `${(1e6 * (cost.row_s + cost.mean_s)).toFixed(1)} µs a token on every rank`
  );
}

function runners(graphs) {
  const counts = new Map();
  for (const { runner, miss, num_steps } of graphs) {
    const name = miss ? `${runner} (${miss.replaceAll("_", " ")})` : runner;
    counts.set(name, (counts.get(name) ?? 0) + Number(num_steps));
  }
  return [...counts].map(([name, steps]) => `${name} ${count(steps)}`).join(", ");
}

function groupSection(group) {
  const id = `group-${group.group}`;
  const { history } = group;
  const blocks = sum(group.ranks.map((r) => r.num_used_blocks + r.num_cached_blocks + r.num_free_blocks));
  const usage = history.num_used_blocks.map((used) => (blocks ? Math.min(100, (100 * used) / blocks) : 0));
  const facts = [
    fact("Epoch", count(group.epoch)),
    fact("Steps", `${count(group.step)}, now ${count(history.steps_per_s.at(-1) ?? 0)}/s`),
    fact("Prompts and output", `${count(history.total_tokens_per_s.at(-1) ?? 0)} tokens/s`),
    fact("Last step", group.last_step_age === undefined ? "none yet" : `${span(parseFloat(group.last_step_age))} ago`),
    fact("Waiting", `${plural(group.num_waiting, "sequence")}, ${plural(group.num_waiting_tokens, "token")}`),
  ];
  const more = [];
  if (group.speculation !== undefined) more.push(fact("Drafts", drafts(group.speculation)));
  if (Number(group.step_cost.num_steps)) more.push(fact("Step times", stepCost(group.step_cost)));
  if (group.graphs.length) more.push(fact("Steps ran by", runners(group.graphs)));
  return html(
    "section",
    { "aria-labelledby": id },
    html("h2", { id }, `Group ${group.group} `, badge(STATES[group.state] ?? ["bad", "?", "unknown"])),
    group.problem ? html("p", { class: "problem" }, group.problem) : null,
    html("dl", { class: "facts" }, facts),
    html(
      "div",
      { class: "charts" },
      chart("Output", "tokens/s", history.output_tokens_per_s),
      chart("Running", "sequences", history.num_running),
      chart("Waiting", "sequences", history.num_waiting),
      chart("KV used", "%", usage, 100),
    ),
    ranks(group),
    flows(group),
    more.length ? html("dl", { class: "facts more" }, more) : null,
  );
}

function eventItem(event) {
  const epoch = Number(event.epoch) ? `, epoch ${count(event.epoch)}` : "";
  const of = event.group === undefined ? "router" : `group ${event.group}${epoch}`;
  return html(
    "li",
    {},
    html("time", { datetime: event.time }, clock(event.time)),
    html("span", { class: "quiet" }, `${span(Math.round(parseFloat(event.age)) || 0).replace(".0 ", " ")} ago`),
    badge(LEVELS[event.level] ?? ["", "", event.level]),
    html("strong", {}, event.name.replaceAll("_", " ")),
    html("span", { class: "quiet" }, of),
    html("p", { class: "told" }, [event.problem, event.details].filter(Boolean).join(" · ")),
  );
}

function events(list) {
  return html(
    "section",
    { "aria-labelledby": "events" },
    html("h2", { id: "events" }, "Last events"),
    list.length
      ? html("ol", {}, list.slice(0, MAX_EVENTS).map(eventItem))
      : html("p", { class: "empty" }, "Nothing has happened yet."),
  );
}

function routerState(status) {
  if (status.is_draining) return ["fair", "◆", "draining"];
  return status.is_ready ? ["good", "●", "ready"] : ["bad", "✕", "not ready"];
}

function notice(status, silence) {
  if (silence) {
    const seen = status ? `What is below is from ${clock(silence.since)}.` : "";
    return `The router does not answer: ${silence.why}. ${seen}`;
  }
  if (status.is_draining) return "This router was told to stop: what runs may finish, and new requests go to others.";
  if (!status.is_ready) return "This router takes no requests now: no group can step.";
  return "";
}

function draw(status, silence) {
  const state = silence ? ["bad", "✕", "no answer"] : routerState(status);
  document.title = `${state[1]} ${state[2]} · Lockstep router`;
  document.body.className = silence ? "stale" : "";
  fill(document.getElementById("state"), badge(state));
  const said = notice(status, silence);
  fill(document.getElementById("notice"), ...(said ? [html("p", { class: state[0] }, said)] : []));
  if (!status) return;
  fill(
    document.getElementById("facts"),
    fact("Model", status.model || "none yet"),
    fact("Live requests", count(status.num_live_requests)),
    fact("Resumed so far", count(status.num_resumed_requests)),
    fact("Version", status.version),
  );
  const groups = status.groups.length
    ? status.groups.map(groupSection)
    : [html("p", { class: "empty" }, "This router has no groups.")];
  fill(document.getElementById("main"), ...groups, events(status.events));
}

// ---- the loop

let drawn = null; // the last answer that could be drawn
let drawnTime = Date.now();

async function ask() {
  const answer = await fetch("status.json", { cache: "no-store", signal: AbortSignal.timeout(TIMEOUT_MS) });
  if (answer.status === 401) throw new Error("it asks for a token; reload this page to give one");
  if (!answer.ok) throw new Error(`it cannot tell its numbers (HTTP ${answer.status})`);
  return answer.json();
}

async function renew() {
  try {
    const status = await ask();
    draw(status, null);
    [drawn, drawnTime] = [status, Date.now()];
  } catch (error) {
    const why = error.name === "TimeoutError" ? `no answer for ${TIMEOUT_MS / 1000} s` : error.message;
    draw(drawn, { since: drawnTime, why });
  }
}

async function run() {
  for (;;) {
    await renew();
    await new Promise((resolve) => setTimeout(resolve, PERIOD_MS));
    if (document.hidden) {
      await new Promise((resolve) => document.addEventListener("visibilitychange", resolve, { once: true }));
    }
  }
}

run();
