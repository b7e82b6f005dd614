"use strict";
// Draws the hosts from the embedded data: map, list, and a page for each host and network adapter. Adds copy buttons, tooltips and
// navigation to the rest of the report. Text from hosts is only ever inserted as text nodes.
const data = JSON.parse(document.getElementById("data").textContent);
const $ = (id) => document.getElementById(id);
const NS = "http://www.w3.org/2000/svg";
const KIND = { p: "pass", f: "fail", i: "inconclusive" };
const TONES = ["pass", "fail", "inconclusive"];
const ROWS = 25, TILES = 24, UNITS = 640, CELL = 11;
const textAt = (number) => data.texts[number] || "";
const count = (number) => String(number).replace(/\B(?=(\d{3})+$)/g, "\u202f");
const plural = (number, one) => `${count(number)} ${one}${number === 1 ? "" : "s"}`;

function fill(node, attributes, children) {
  for (const [name, value] of Object.entries(attributes || {})) {
    if (value === true) node.setAttribute(name, "");
    else if (value !== false && value !== "" && value != null) node.setAttribute(name, value);
  }
  node.append(...children.flat().filter((child) => child !== "" && child != null && child !== false));
  return node;
}
const el = (tag, attributes, ...children) => fill(document.createElement(tag), attributes, children);
const svg = (tag, attributes, ...children) => fill(document.createElementNS(NS, tag), attributes, children);
const icon = (kind) => svg("svg", { class: `icon ${kind}`, "aria-hidden": "true" }, svg("use", { href: `#i-${kind}` }));
const note = (...children) => el("span", { class: "note" }, ...children);
const spread = (runs) => runs.flatMap(([value, times]) => Array(times).fill(value));

// Columns with one entry per host.
const names = data.names, size = names.length;
const rackOf = spread(data.rack), gpusOf = spread(data.gpus), measuredOf = spread(data.measured);
const decisionOf = Uint8Array.from(data.decision, Number);
const numberOf = new Map(names.map((name, number) => [name, number]));
const searchText = names.map((name, number) => [name, data.racks[rackOf[number]], data.decisions[decisionOf[number]], textAt(data.finding[number]),
  (data.action[number] || []).map((act) => data.actions[act]).join(" "), data.serials ? data.serials[number] : ""].join("\n").toLowerCase());
const tone = (number) => TONES[decisionOf[number]];
const decisionName = (number) => data.decisions[decisionOf[number]];
const link = (number, ...children) => el("a", { href: `#host=${encodeURIComponent(names[number])}` }, ...(children.length ? children : [names[number]]));

function findings(number) {
  const [failed, open, waived] = data.counts[number] || [0, 0, 0];
  return [failed && `${count(failed)} failed`, open && `${count(open)} inconclusive`, waived && `${count(waived)} waived`].filter(Boolean).join(", ");
}

function gpuSquares(states, step = 10) {
  const across = Math.min(states.length, 8), down = Math.ceil(states.length / 8);
  const times = (letter) => [...states].filter((state) => state === letter).length;
  const shapes = [...states].map((state, at) => {
    const x = at % 8 * step + 1, y = Math.floor(at / 8) * step + 1, side = step - 3;
    const mark = state === "f" && svg("path", { d: `M${x + 1.8} ${y + 1.8}l${side - 3.6} ${side - 3.6}m0-${side - 3.6}l-${side - 3.6} ${side - 3.6}` });
    return [svg("rect", { class: KIND[state], x, y, width: side, height: side, rx: 1 }), mark];
  });
  const label = [plural(states.length, "GPU"), times("f") && `${times("f")} failed`, times("i") && `${times("i")} inconclusive`].filter(Boolean).join(", ");
  return svg("svg", { class: "gpus", width: across * step, height: down * step, role: "img", "aria-label": label }, ...shapes.flat());
}

// The map: tiles for up to TILES hosts, one line per host for up to UNITS hosts, cells for more.
const racks = data.racks.map((name) => ({ name, hosts: [] }));
rackOf.forEach((rack, number) => racks[rack].hosts.push(number));
const marks = [];

function drawMap() {
  const map = $("map");
  const layout = size <= TILES ? "tiles" : size <= UNITS ? "units" : "cells";
  map.className = `map ${layout}`;
  for (const [at, rack] of racks.entries()) {
    const accepted = rack.hosts.filter((number) => decisionOf[number] === 0).length;
    const choose = el("button", { type: "button", class: "rack-name", title: "Show this rack alone" }, rack.name, " ", note(`${accepted}/${rack.hosts.length}`));
    choose.addEventListener("click", () => { $("in").value = $("in").value === String(at) ? "" : String(at); filter(); });
    const draw = { tiles, units, cells }[layout];
    map.append(el("div", { class: "rack", role: "group", "aria-label": `Rack ${rack.name}: ${accepted} of ${rack.hosts.length} ${data.decisions[0]}` }, choose, draw(rack)));
  }
  map.hidden = false;
}

function tiles(rack) {
  return el("ul", {}, ...rack.hosts.map((number) => {
    const where = link(number, el("b", {}, names[number]), el("span", { class: "word" }, icon(tone(number)), decisionName(number)),
      gpusOf[number] && gpuSquares(gpusOf[number], 12), note(gpusOf[number] ? plural(gpusOf[number].length, "GPU") : data.mark === "REHEARSAL" ? "no GPU judged" : "no GPU reported"));
    where.className = `tile ${tone(number)}`;
    marks[number] = where;
    return el("li", {}, where);
  }));
}

function units(rack) {
  return el("ul", {}, ...rack.hosts.map((number) => {
    const where = link(number, icon(tone(number)), el("span", { class: "name" }, names[number]), gpusOf[number] && gpuSquares(gpusOf[number], 8));
    where.className = `unit ${tone(number)}`;
    where.title = `${names[number]}: ${decisionName(number)}${data.counts[number] ? `, ${findings(number)}` : ""}`;
    marks[number] = where;
    return el("li", {}, where);
  }));
}

function cells(rack) {
  const across = Math.min(rack.hosts.length, 8), down = Math.ceil(rack.hosts.length / 8);
  const picture = svg("svg", { width: across * CELL, height: down * CELL, "aria-hidden": "true" });
  rack.hits = TONES.map((kind) => svg("path", { class: kind }));
  rack.picture = picture;
  picture.append(...TONES.map((kind, at) => svg("path", { class: `${kind} base`, d: hostShapes(rack, at, () => true) })), ...rack.hits);
  const hostUnder = (event) => {
    const box = picture.getBoundingClientRect();
    const column = Math.floor((event.clientX - box.left) / CELL), row = Math.floor((event.clientY - box.top) / CELL);
    return column >= 0 && column < across ? rack.hosts[row * 8 + column] : undefined;
  };
  picture.addEventListener("click", (event) => { const number = hostUnder(event); if (number !== undefined) location.hash = `host=${encodeURIComponent(names[number])}`; });
  picture.addEventListener("pointermove", (event) => showTooltip(hostUnder(event), event));
  picture.addEventListener("pointerleave", () => { $("tip").hidden = true; });
  return picture;
}

// The SVG path of the hosts that have the decision `kind` (an index in TONES) and for which `wanted` returns true. A failed host
// has a cross and an incomplete host is a diamond, so that the map is readable without color.
function hostShapes(rack, kind, wanted) {
  let path = "";
  rack.hosts.forEach((number, at) => {
    if (decisionOf[number] !== kind || !wanted(number)) return;
    const x = at % 8 * CELL, y = Math.floor(at / 8) * CELL;
    path += [`M${x + 1} ${y + 1}h9v9h-9z`, `M${x} ${y}h11v11h-11zM${x + 3} ${y + 2}l-1 1 2.5 2.5-2.5 2.5 1 1 2.5-2.5 2.5 2.5 1-1-2.5-2.5 2.5-2.5-1-1-2.5 2.5z`,
      `M${x + 5.5} ${y}l5.5 5.5-5.5 5.5-5.5-5.5z`][kind];
  });
  return path;
}

// A search fades the whole picture and draws only the matching hosts again, on top of it.
function highlightMatches(rack, shown) {
  const matching = shown ? rack.hosts.filter((number) => shown[number]).length : rack.hosts.length;
  const some = matching > 0 && matching < rack.hosts.length;
  rack.picture.setAttribute("class", some ? "some" : matching ? "" : "dim");
  rack.hits.forEach((hit, kind) => hit.setAttribute("d", some ? hostShapes(rack, kind, (number) => shown[number]) : ""));
}

function showTooltip(number, event) {
  const tip = $("tip");
  tip.hidden = number === undefined;
  if (tip.hidden) return;
  tip.replaceChildren(icon(tone(number)), el("b", {}, names[number]), " ", decisionName(number), data.counts[number] ? `, ${findings(number)}` : "");
  tip.style.left = `${Math.min(event.clientX + 14, innerWidth - 300)}px`;
  tip.style.top = `${event.clientY + 16}px`;
}

// Filter and list.
let chosen = [], drawn = 0;

function filter() {
  const terms = $("find").value.toLowerCase().split(/\s+/).filter(Boolean);
  const only = $("only").value, act = $("act").value, rack = $("in").value;
  const shown = new Uint8Array(size);
  chosen = [];
  for (let number = 0; number < size; number++) {
    if (only && (only === "not" ? decisionOf[number] === 0 : String(decisionOf[number]) !== only)) continue;
    if (rack && String(rackOf[number]) !== rack) continue;
    if (act && !(data.action[number] || []).includes(Number(act))) continue;
    if (!terms.every((term) => searchText[number].includes(term))) continue;
    shown[number] = 1;
    chosen.push(number);
  }
  const all = chosen.length === size;
  if (size > UNITS) racks.forEach((each) => highlightMatches(each, all ? null : shown));
  else marks.forEach((mark, number) => mark.classList.toggle("dim", !shown[number]));
  chosen.sort((a, b) => (decisionOf[a] === 0) - (decisionOf[b] === 0) || (decisionOf[a] === 2) - (decisionOf[b] === 2) || a - b);
  $("count").value = all ? plural(size, "host") : `${count(chosen.length)} of ${plural(size, "host")}`;
  drawList();
}

function drawList() {
  const body = el("tbody", {});
  const head = ["Host", "Rack", "Decision", "GPUs", "Measured", "Findings"].map((name) => el("th", { scope: "col" }, name));
  const table = el("table", { class: "hosts" }, el("caption", { class: "hidden" }, "Hosts; those that did not pass come first"), el("thead", {}, el("tr", {}, ...head)), body);
  const more = el("button", { type: "button" });
  more.addEventListener("click", () => addRows(body, more));
  drawn = 0;
  addRows(body, more);
  $("list").replaceChildren(chosen.length ? el("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": "List of hosts" }, table)
    : el("p", { class: "empty" }, "No host matches."), more);
}

function addRows(body, more) {
  const next = chosen.slice(drawn, drawn + ROWS);
  drawn += next.length;
  body.append(...next.map((number) => el("tr", {}, el("th", { scope: "row" }, link(number)), el("td", {}, data.racks[rackOf[number]]),
    el("td", {}, el("span", { class: `verdict ${tone(number)}` }, icon(tone(number)), decisionName(number))),
    el("td", {}, gpusOf[number] && gpuSquares(gpusOf[number])), el("td", { class: "n" }, measuredOf[number]),
    el("td", { class: "why" }, data.counts[number] && el("b", {}, findings(number)), data.finding[number] !== undefined && note(textAt(data.finding[number]))))));
  more.hidden = drawn >= chosen.length;
  more.textContent = `Show ${Math.min(ROWS, chosen.length - drawn)} more of ${count(chosen.length - drawn)}`;
}

// The page of a host.
const quoted = (name) => /^[\w.@%+:,/-]+$/.test(name) ? name : `'${name.replaceAll("'", `'"'"'`)}'`;
const code = (text) => el("code", {}, text);
const tableRow = (title, ...cells) => el("tr", {}, el("th", { scope: "row" }, title), ...cells.map((cell) => el("td", {}, cell)));

function tableOf(caption, heads, rows, css) {
  return el("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": caption },
    roles(el("table", { class: css }, el("caption", {}, caption), el("thead", {}, el("tr", {}, ...heads.map((head) => el("th", { scope: "col" }, head)))), el("tbody", {}, ...rows))));
}

// On a narrow screen, CSS does not display the rows as a table. With these roles, screen readers still read a table.
function roles(table) {
  const names = { table: "table", thead: "rowgroup", tbody: "rowgroup", tr: "row", td: "cell", "thead th": "columnheader", "tbody th": "rowheader" };
  for (const [selector, role] of Object.entries(names)) for (const element of selector === "table" ? [table] : table.querySelectorAll(selector)) element.setAttribute("role", role);
  return table;
}

// A button that copies the command before it; without access to the clipboard it selects the command.
function copyButton() {
  const button = el("button", { type: "button", class: "copy" }, "Copy");
  button.addEventListener("click", async () => {
    const command = button.previousElementSibling;
    try {
      await navigator.clipboard.writeText(command.textContent);
      button.textContent = "Copied";
      $("announce").textContent = "Command copied";
    } catch { getSelection().selectAllChildren(command); }
  });
  return button;
}

function card(reason) {
  const [kind, times, ...rest] = reason;
  const [title, action, , serial, name, settings, stage, value, wanted, margin, why, criterion, source, waiver, evidence, next, command, severity, now, again, seen] = rest.map(textAt);
  const facts = [["Value", value], ["Limit", wanted], ["Margin", margin], ["Why", why], ["Seen before", seen], ["Do", now], ["If it comes back", again], ["Criterion", criterion], ["Source", source], ["Severity", severity], ["Waived", waiver], ["Evidence", evidence]];
  return el("li", { class: `card ${waiver ? "waived" : KIND[kind]}` },
    el("h4", {}, icon(waiver ? "waived" : KIND[kind]), `${title} `, serial && note("serial ", code(serial))),
    action && el("p", { class: "action" }, action),
    el("p", { class: "name" }, code(name), settings && ` ${settings}`, stage && note(` stage ${stage}`), times > 1 && note(` ${plural(times, "related check")}`)),
    el("dl", {}, ...facts.filter(([, text]) => text).map(([fact, text]) => el("div", {}, el("dt", {}, fact), el("dd", { class: fact === "Margin" && kind === "f" ? "off" : "" }, text)))),
    command && el("p", { class: "next" }, note(next)), command && el("p", { class: "command" }, code(command), copyButton()));
}

const rateText = (rate) => rate === null ? "failed" : `${rate} GB/s`;

function pairPicture(pairs) {
  const across = pairs.rails.length, step = 14;
  const shapes = pairs.bands.flatMap((row, y) => [...row].map((band, x) => band !== "-" && svg("rect",
    { class: band === "t" ? "lost" : `b${band}`, x: x * step, y: y * step, width: step - 1, height: step - 1 },
    svg("title", {}, `${pairs.partners[y]}, rail ${pairs.rails[x]}: ${rateText(pairs.rates[y][x])}`))));
  const least = pairs.rates.map((rates, y) => pairs.bands[y].includes("t") ? null : Math.min(...rates.filter((rate) => rate !== null)));
  const labels = pairs.partners.map((name, y) => svg("text", { x: across * step + 8, y: y * step + 11 }, `${name}  ${least[y] ?? "failed"}`));
  const worst = pairs.partners.map((name, y) => [name, least[y]]).sort((a, b) => (a[1] ?? -1) - (b[1] ?? -1)).slice(0, 3);
  const summary = `${plural(pairs.partners.length, "partner")} over ${plural(across, "rail")}, median ${pairs.median}; slowest ${worst.map(([name, rate]) => `${name} ${rateText(rate)}`).join(", ")}`;
  return el("figure", { class: "own-pairs" }, el("figcaption", {}, el("b", {}, "Bandwidth to other hosts"), " ", note(summary, ". One row per partner with its slowest rate, one column per rail.")),
    svg("svg", { class: "heat", width: across * step + 220, height: pairs.partners.length * step, role: "img", "aria-label": summary }, ...shapes, ...labels));
}

// Power, temperature and clocks of the GPUs in each stage.
function overTime(number, traces) {
  const head = el("h3", {}, "Power, temperature and clocks over time");
  if (!traces.length) return [head, el("p", { class: "empty" }, "Left out because of the size of this report. To draw them, run ", code(`rackproof report ${quoted(data.run)} --host ${quoted(names[number])}`))];
  const throttled = traces.some((trace) => trace[5].some((part) => part[3].some((plot) => plot && plot[3])));
  return [head, el("p", { class: "lede" }, "The horizontal axis is the time since the stage began. The line is the mean, the shaded band reaches from the lowest to the highest value; gaps are missing data. Dashed lines: a benchmark began. ",
    throttled && "Shaded from top to bottom: clocks were throttled for a reason other than the power limit. ", "All plots of a column have the same scale."), ...traces.map(trace)];
}

// Power over one period of a pulsed load, drawn like the plots of overTime.
function overPeriod(number, waves) {
  const head = el("h3", {}, "Power under pulsed load");
  if (!waves.length) return [head, el("p", { class: "empty" }, "Left out because of the size of this report. To draw it, run ", code(`rackproof report ${quoted(data.run)} --host ${quoted(names[number])}`))];
  return [head, el("p", { class: "lede" }, "The horizontal axis is one period; there is a column for each period length. The line is the mean over all periods. The load is on from the left to the dashed line. NVML's values lag behind the load. All plots of a column have the same scale."), ...waves.map(trace)];
}

function trace([stage, ends, began, benchmarks, columns, gpus, more]) {
  const rows = gpus.map(([head, serial, lost, sparks]) => el("tr", {}, el("th", { scope: "row" }, textAt(head), textAt(serial) && note(textAt(serial)), textAt(lost) && el("span", { class: "lost" }, icon("inconclusive"), `samples lost: ${textAt(lost)}`)),
    ...sparks.map((plot, at) => el("td", {}, ...(plot ? [spark(`${textAt(columns[at][0])} of ${textAt(head)}: ${textAt(plot[0])}`, began, plot), note(textAt(plot[0]))] : [note("no data")])))));
  return el("section", { class: "trace", "aria-label": `Stage ${textAt(stage)} over time` },
    el("h4", {}, `Stage ${textAt(stage)} `, note(textAt(ends))),
    el("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": `GPUs in stage ${textAt(stage)} over time` },
      roles(el("table", {}, el("thead", {}, el("tr", {}, el("th", { scope: "col" }, "Part"), ...columns.map(([name, range]) => el("th", { scope: "col" }, textAt(name), " ", note(textAt(range)))))), el("tbody", {}, ...rows)))),
    more > 0 && el("p", { class: "note" }, `and ${plural(more, "more GPU")} in the record`),
    benchmarks.length > 0 && el("p", { class: "note" }, "Began: ", ...benchmarks.map(([at, name], index) => [index > 0 && " · ", el("b", {}, textAt(name)), ` ${textAt(at)}`])));
}

function spark(label, began, [, band, line, throttled]) {
  const thin = { "vector-effect": "non-scaling-stroke" };
  return svg("svg", { class: "spark", viewBox: "0 0 160 40", preserveAspectRatio: "none", role: "img", "aria-label": label }, svg("title", {}, label), svg("rect", { class: "base", width: 160, height: 40 }),
    throttled && svg("path", { class: "throttled", d: throttled }), began && svg("path", { class: "began", d: began, ...thin }), svg("path", { class: "spread", d: band }), svg("path", { class: "line", d: line, ...thin }));
}

// The summary of one host, for printing after the overview: its causes and its GPUs.
function briefOf(number) {
  const page = data.pages[number];
  const head = el("h3", {}, icon(tone(number)), names[number], " ", note(decisionName(number)));
  if (!page) return [head, el("p", { class: "note" }, textAt(data.finding[number]))];
  return [head, el("p", { class: "note" }, textAt(page.coverage)), page.reasons.length > 0 && el("ol", { class: "cards" }, ...page.reasons.map(card)),
    page.gpus.length > 0 && el("p", { class: "print-gpus" }, note("GPU: "), ...page.gpus.map(([state, index, , serial]) => [el("span", { class: state === "f" ? "off" : "" }, `${textAt(index)} `, code(textAt(serial))), " · "]).flat().slice(0, -1))];
}

// Network adapters: a table on the page of the host, and a page for each adapter.
const adapterLink = (number, name) => el("a", { href: `#hca=${encodeURIComponent(`${names[number]}/${name}`)}` }, name);
const verdictCell = (kind) => kind ? el("span", { class: `verdict ${KIND[kind]}` }, icon(KIND[kind]), KIND[kind]) : "";

function adapterTable(number, adapters) {
  if (!adapters.length) return [el("h3", {}, "Network adapters"), el("p", { class: "empty" }, "Left out because of the size of this report. To write them, run ", code(`rackproof report ${quoted(data.run)} --host ${quoted(names[number])}`))];
  return [tableOf("Network adapters", ["Adapter", "Verdict", "PCI address", "Summary"], adapters.map(([name, kind, summary, slot]) =>
    el("tr", {}, el("th", { scope: "row" }, adapterLink(number, textAt(name))), el("td", {}, verdictCell(kind)), el("td", {}, textAt(slot) ? code(textAt(slot)) : "\u2013"), el("td", {}, textAt(summary)))), "readings")];
}

function adapterPage(number, at, id) {
  const page = data.pages[number], [name, kind, summary, slot, causes, sections, figures] = page.adapters[at];
  const parts = [el("h2", { id }, kind && icon(KIND[kind]), `${textAt(name)} `, el("span", { class: `word ${KIND[kind] || ""}` }, { p: "no finding", f: "failed", i: "inconclusive" }[kind] || "not judged")),
    el("p", { class: "lede" }, "Network adapter of ", link(number), textAt(slot) && [", PCI address ", code(textAt(slot))], textAt(summary) && `. ${textAt(summary)}`)];
  if (causes.length) parts.push(el("h3", {}, "Causes"), el("ol", { class: "cards" }, ...causes.map((cause) => card(page.reasons[cause]))));
  for (const section of sections) parts.push(...adapterSection(section));
  if (figures.length) parts.push(tableOf("RDMA figures", ["Figure", "Settings", "Partners", "Value", "Worst partner", "Limit", "Verdict"], figures.map(([figure, settings, partners, value, worst, ...judged]) =>
    tableRow(textAt(figure), textAt(settings), textAt(partners), textAt(value), textAt(worst), ...judgedCells(judged))), "readings"));
  return parts;
}

const judgedCells = ([limit, criterion, kind]) => [[textAt(limit), kind && note(" ", textAt(criterion))].filter(Boolean), verdictCell(kind)].map((cell) => el("span", {}, ...[cell].flat()));

function adapterSection([title, rows, zeros, absent, columns, lanes, pictures]) {
  const name = textAt(title), parts = [el("h3", {}, name)];
  if (rows.length) parts.push(tableOf(`Readings: ${name}`, ["Reading", "Value", "Rise in the run", "Before the run", "Limit", "Verdict"], rows.map(([reading, value, rise, rate, ...judged]) =>
    tableRow(textAt(reading), textAt(value), textAt(rise), textAt(rate), ...judgedCells(judged))), "readings"));
  if (pictures.length) parts.push(el("div", { class: "light" }, ...pictures.map((picture) => lanePicture(name, picture))));
  if (lanes.length) parts.push(tableOf(`Lanes: ${name}`, ["Lane", ...columns.map(textAt), "Verdict"], lanes.map(([lane, cells, kind]) => tableRow(textAt(lane), ...cells.map(textAt), verdictCell(kind))), "readings"));
  if (zeros.length) parts.push(el("details", { class: "data" }, el("summary", {}, `${plural(zeros.length, "counter")} at 0`), el("p", { class: "note" }, zeros.map(textAt).join("; "))));
  if (absent.length) parts.push(el("details", { class: "data" }, el("summary", {}, "Without a value"), el("dl", {}, ...absent.map(([what, why]) => el("div", {}, el("dt", {}, textAt(why)), el("dd", { class: "note" }, textAt(what)))))));
  return parts;
}

// Optical power of each lane in dBm, with the alarm and warning limits that the module reports. A lane that fails is a cross; a
// lane without light is a cross at the bottom.
function lanePicture(port, [title, limits, lanes]) {
  const known = [...limits, ...lanes.map(([, power]) => power)].filter((value) => value !== null);
  const low = Math.min(...known, 0) - 1, high = Math.max(...known, 0) + 1, height = 130, left = 44, step = 24;
  const y = (power) => (high - power) / (high - low) * height, width = left + Math.max(lanes.length, 6) * step;
  const band = (bottom, top, css) => bottom !== null && top !== null && svg("rect", { class: css, x: left, y: y(top), width: width - left, height: y(bottom) - y(top) });
  const dbm = (power) => power === null ? "no light" : `${String(power).replace("-", "\u2212")} dBm`;
  const lines = limits.map((limit, at) => limit !== null && [svg("path", { class: at % 3 ? "warn" : "limit", d: `M${left} ${y(limit)}H${width}` }), at % 3 === 0 && svg("text", { x: left - 4, y: y(limit) + 4, "text-anchor": "end" }, String(limit).replace("-", "\u2212"))]);
  const points = lanes.map(([lane, power, kind], at) => {
    const x = left + (at + 0.5) * step, bad = kind === "f" || power === null, top = power === null ? height - 4 : y(power);
    const shape = bad ? svg("path", { class: "point fail", d: `M${x - 4} ${top - 4}l8 8m0-8l-8 8` }, svg("title", {}, `lane ${textAt(lane)}: ${dbm(power)}`))
      : svg("circle", { class: "point", cx: x, cy: top, r: 4 }, svg("title", {}, `lane ${textAt(lane)}: ${dbm(power)}`));
    return [shape, svg("text", { x, y: height + 16, "text-anchor": "middle" }, textAt(lane))];
  });
  const range = limits[0] !== null && limits[3] !== null ? `; alarm limits ${dbm(limits[0])} and ${dbm(limits[3])}` : "; the module does not report both alarm limits";
  const summary = `${textAt(title)} of ${port} by lane: ${lanes.map(([lane, power]) => `${textAt(lane)} ${dbm(power)}`).join(", ")}${range}`;
  return el("figure", {}, el("figcaption", {}, el("b", {}, textAt(title)), " ", note(`dBm by lane${range}`)),
    svg("svg", { width, height: height + 22, role: "img", "aria-label": summary }, band(limits[0], limits[3], "range"), band(limits[1], limits[2], "inner"), ...[...lines, ...points].flat().filter(Boolean)));
}

function pageOf(number, id = "") {
  const page = data.pages[number];
  const states = gpusOf[number];
  const top = [el("h2", { id }, icon(tone(number)), names[number], " ", el("span", { class: `word ${tone(number)}` }, decisionName(number))),
    el("p", { class: "lede" }, `${data.racks[rackOf[number]]}. `, page ? textAt(page.coverage) : `${measuredOf[number].replace("/", " of ")} expected observations measured.`)];
  if (!page) {
    return [...top, states && el("p", {}, gpuSquares(states, 14)), data.serials && data.serials[number] && el("p", {}, note("Serials "), code(data.serials[number])),
      el("p", { class: "left-out" }, "The figures of this host are left out because of the size of this report. To write them, run", el("br", {}),
        code(`rackproof report ${quoted(data.run)} --host ${quoted(names[number])}`))];
  }
  const parts = [...top];
  if (page.reasons.length) parts.push(el("h3", {}, "Causes ", note(findings(number))), el("ol", { class: "cards" }, ...page.reasons.map(card)));
  else if (page.verdicts.length) parts.push(el("p", { class: "verdict pass" }, icon("pass"), `All ${plural(page.counts[2], "check")} passed.`));
  if (page.events.length) parts.push(el("h3", {}, "Events"), el("ul", { class: "events" }, ...page.events.map((event) => el("li", {}, icon("inconclusive"), textAt(event)))));
  parts.push(page.gpus.length ? tableOf("GPUs", ["Index", "Verdict", "Name", "Serial", "UUID", "PCI address"], page.gpus.map(([state, index, ...rest]) =>
    tableRow(textAt(index), el("span", { class: `verdict ${KIND[state]}` }, icon(KIND[state]), KIND[state]), textAt(rest[0]), ...rest.slice(1).map((text) => textAt(text) ? code(textAt(text)) : "–"))), "parts")
    : el("p", { class: "empty" }, textAt(page.no_gpu)));
  if (page.adapters) parts.push(...adapterTable(number, page.adapters));
  if (page.pairs.partners) parts.push(pairPicture(page.pairs));
  if (page.traces) parts.push(...overTime(number, page.traces));
  if (page.waves) parts.push(...overPeriod(number, page.waves));
  if (page.former) parts.push(...formerRuns(number, page.former));
  if (page.verdicts.length) parts.push(...verdictTables(page));
  else parts.push(el("p", { class: "empty" }, "No verdict was reached on this host."));
  if (page.more) parts.push(note(`and ${count(page.more)} more in report.json`));
  parts.push(...launches(page));
  if (page.software.length) parts.push(el("h3", {}, "Versions"), el("dl", { class: "software" }, ...page.software.map(([name, version]) => el("div", {}, el("dt", {}, textAt(name)), el("dd", {}, code(textAt(version)))))));
  parts.push(el("p", { class: "note" }, page.records.length > 1 ? "Records: " : "Record: ", ...page.records.flatMap((path, index) => [index ? ", " : "", code(`${data.run}/${textAt(path)}`)])));
  return parts;
}

// For each figure of a part: its percentile among accepted parts in former runs, and a plot of its values over the runs.
function formerRuns(number, rows) {
  if (!rows.length) return [el("p", { class: "empty" }, "The comparison with former runs is left out because of the size of this report. To write it, run ", code(`rackproof report ${quoted(data.run)} --host ${quoted(names[number])} --history DIRECTORY`))];
  const cells = rows.map(([name, settings, part, place, trend, line]) => el("tr", {}, el("th", { scope: "row" }, code(textAt(name)), textAt(settings) && el("i", {}, textAt(settings))), el("td", {}, textAt(part)), el("td", {}, textAt(place) || "–"),
    el("td", {}, ...(line ? [spark(`${textAt(name)} of ${textAt(part)}: ${textAt(trend)}`, "", [0, "", line, ""]), note(textAt(trend))] : ["–"]))));
  return [el("details", { class: "data" }, el("summary", {}, `Compared with former runs: ${plural(rows.length, "figure")}`), tableOf("Place among accepted parts of the same model, driver, stage and settings; values of the last runs", ["Observation", "Part", "Place", "Last runs"], cells, "verdicts"))];
}

// Failed and inconclusive checks are listed in full; passed checks are in a closed section.
function verdictTables(page) {
  const heads = ["Observation", "Part", "Value", "Limit", "Margin", "Verdict", "Source"];
  const [failed, open, passed] = page.counts;
  const others = page.verdicts.filter((row) => row[0] !== "p"), passes = page.verdicts.filter((row) => row[0] === "p");
  return [others.length && tableOf(`Checks: ${failed} failed, ${open} inconclusive`, heads, others.flatMap(verdictRow), "verdicts"),
    passes.length && el("details", { class: "data" }, el("summary", {}, `${plural(passed, "check")} passed`), tableOf("Passed checks", heads, passes.flatMap(verdictRow), "verdicts"))].filter(Boolean);
}

function verdictRow([kind, ...rest]) {
  const [name, settings, part, measured, wanted, margin, origin, criterion, why] = rest.map(textAt);
  const plain = measured === "\u2013" && wanted === "\u2013";
  const values = plain ? [el("td", { colspan: "3", class: "said" }, why)] : [el("td", { class: "n" }, measured), el("td", { class: "n" }, wanted), el("td", { class: "n" }, margin)];
  const first = el("tr", { class: kind === "p" ? "" : KIND[kind] }, el("th", { scope: "row" }, code(name), settings && el("i", {}, settings)), el("td", {}, part), ...values,
    el("td", {}, el("span", { class: `verdict ${KIND[kind]}` }, icon(KIND[kind]), KIND[kind])),
    el("td", { class: "note" }, criterion !== "plan" && [code(criterion), " "], origin));
  return kind !== "p" && why && !plain ? [first, el("tr", { class: "why" }, el("td", { colspan: "7" }, why))] : [first];
}

function launches(page) {
  if (!page.launches.length) return [el("p", { class: "empty" }, "No stage was started on this host.")];
  const rows = page.launches.map(([ok, stage, outcome, members, began, took, deadline, reason]) =>
    tableRow(textAt(stage), el("span", { class: `verdict ${ok ? "pass" : "inconclusive"}` }, icon(ok ? "pass" : "inconclusive"), textAt(outcome)), textAt(members), textAt(began), textAt(took), textAt(deadline), textAt(reason)));
  const logs = page.launches.filter((launch) => launch[8].length).map((launch) => el("details", { class: "data" }, el("summary", {}, `Last lines of stage ${textAt(launch[1])}`),
    ...launch[8].flatMap(([who, tail]) => [el("h4", {}, textAt(who)), el("pre", { tabindex: "0" }, textAt(tail))])));
  return [tableOf("Launches", ["Stage", "Outcome", "Members", "Began", "Took", "Deadline", "Reason"], rows), ...logs];
}

// The URL fragment selects the page of a host or adapter, a search, a rack, or a section of the overview.
const title = document.title;
let overviewScroll = 0;

function nextNotAccepted(number, step) {
  for (let next = number + step; next >= 0 && next < size; next += step) if (decisionOf[next] !== 0) return next;
  return -1;
}

function show(number) {
  const previous = nextNotAccepted(number, -1), next = nextNotAccepted(number, 1);
  const links = [el("a", { href: "#hosts" }, "← All hosts"), previous >= 0 && link(previous, `‹ ${names[previous]}`), next >= 0 && link(next, `${names[next]} ›`)];
  openPage("Hosts that did not pass", links, pageOf(number, "host-name"), names[number]);
  $("announce").textContent = `Page of host ${names[number]}, ${decisionName(number)}`;
}

function showAdapter(number, at) {
  const adapters = data.pages[number].adapters.map(([name]) => textAt(name)), name = adapters[at];
  const links = [link(number, `← ${names[number]}`), at > 0 && adapterLink(number, adapters[at - 1]), at + 1 < adapters.length && adapterLink(number, adapters[at + 1])];
  openPage("Network adapters of the host", links, adapterPage(number, at, "host-name"), `${name} of ${names[number]}`);
  $("announce").textContent = `Page of adapter ${name} of host ${names[number]}`;
}

function openPage(label, links, content, heading) {
  const page = $("host-page");
  if (page.hidden) overviewScroll = scrollY;
  page.replaceChildren(el("nav", { class: "host-nav", "aria-label": label }, ...links), ...content.filter(Boolean));
  $("overview").hidden = true;
  document.body.classList.add("on-host");
  page.hidden = false;
  page.setAttribute("aria-labelledby", "host-name");
  document.title = `${heading} – ${title}`;
  scrollTo(0, 0);
  page.focus({ preventScroll: true });
}

function overview(target) {
  const page = $("host-page"), was = !page.hidden;
  page.hidden = true;
  $("overview").hidden = false;
  document.body.classList.remove("on-host");
  document.title = title;
  if (!was) return;
  const section = target && $(target);
  if (section && target !== "hosts") section.scrollIntoView();
  else scrollTo(0, overviewScroll);
  $("announce").textContent = "Report of the whole fleet";
}

// The sentence that is shown if the URL fragment names a host or rack that the report does not have.
const notice = el("p", { class: "empty" });
$("list").before(notice);

function route() {
  let fragment = location.hash.slice(1);
  try { fragment = decodeURIComponent(fragment); } catch { /* malformed percent-encoding: use the fragment as it is */ }
  const [, kind, rest] = /^(host|hca|find|rack)=([^]*)$/.exec(fragment) || [];
  if (kind === "host" && numberOf.has(rest)) return show(numberOf.get(rest));
  if (kind === "hca") {
    const [host, ...name] = rest.split("/"), number = numberOf.get(host), adapters = (data.pages[number] || {}).adapters || [];
    const at = adapters.findIndex(([other]) => textAt(other) === name.join("/"));
    if (at >= 0) return showAdapter(number, at);
    if (number !== undefined) return show(number);
  }
  overview(fragment);
  const rack = data.racks.indexOf(rest);
  const missing = kind === "host" ? `host ${rest}` : kind === "hca" ? `host ${rest.split("/")[0]}` : kind === "rack" && rack < 0 ? `rack ${rest}` : "";
  notice.textContent = missing && `This report has no ${missing}.`;
  notice.hidden = !missing;
  if (missing) $("announce").textContent = notice.textContent;
  if (kind === "find" || kind === "rack") {
    if (kind === "find") $("find").value = rest;
    else $("in").value = rack < 0 ? "" : String(rack);
    filter();
    $("hosts").scrollIntoView();
  }
}

// Plots are reachable by keyboard: arrow keys move over their values, whose titles appear as tooltips.
function describePlots() {
  const tip = $("tip");
  const showTitle = (plot, at) => {
    const values = [...plot.querySelectorAll(".at")];
    values.forEach((value) => value.classList.remove("at"));
    tip.hidden = at < 0;
    if (tip.hidden) return;
    const title = plot.querySelectorAll(":scope title")[at], box = title.parentElement.getBoundingClientRect();
    if (title.parentElement !== plot) title.parentElement.classList.add("at");
    tip.textContent = title.textContent;
    $("announce").textContent = title.textContent;
    tip.style.left = `${Math.max(8, Math.min(box.right + 8, innerWidth - 300))}px`;
    tip.style.top = `${box.bottom + 8}px`;
  };
  for (const plot of document.querySelectorAll(".plot > svg, svg.chart, svg.spark, .time svg")) {
    const size = plot.querySelectorAll(":scope title").length;
    if (!size) continue;
    let at = 0;
    plot.setAttribute("tabindex", "0");
    plot.addEventListener("focus", () => showTitle(plot, at));
    plot.addEventListener("blur", () => showTitle(plot, -1));
    plot.addEventListener("keydown", (event) => {
      const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
      if (!step) return;
      event.preventDefault();
      at = (at + step + size) % size;
      showTitle(plot, at);
    });
  }
}

// The navigation marks the last section whose top edge is in or above the upper third of the window.
function markSections() {
  const links = [...document.querySelectorAll(".contents a")];
  const sections = links.map((each) => $(each.hash.slice(1)));
  let current = null, waiting = false;
  const mark = () => {
    waiting = false;
    let at = -1;
    sections.forEach((section, number) => { if (section && section.getClientRects().length && section.getBoundingClientRect().top <= innerHeight / 3) at = number; });
    const next = at >= 0 ? links[at] : null;
    if (next === current) return;
    if (current) current.removeAttribute("aria-current");
    if (next) {
      next.setAttribute("aria-current", "true");
      const list = next.closest("ul");
      list.scrollTo({ left: next.offsetLeft - list.clientWidth / 2 });
    }
    current = next;
  };
  addEventListener("scroll", () => { if (!waiting) { waiting = true; requestAnimationFrame(mark); } }, { passive: true });
  mark();
}

function start() {
  for (const [decision, name] of data.decisions.entries()) $("only").append(el("option", { value: String(decision) }, name));
  const acts = new Set(Object.values(data.action).flat());
  for (const [number, name] of data.actions.entries()) if (acts.has(number)) $("act").append(el("option", { value: String(number) }, name));
  for (const [number, name] of data.racks.entries()) $("in").append(el("option", { value: String(number) }, name));
  $("tools").hidden = size < 2;
  $("tools").addEventListener("input", filter);
  $("tools").addEventListener("submit", (event) => event.preventDefault());
  if (size > 1) drawMap();
  filter();
  addEventListener("hashchange", route);
  addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    const typing = event.target.matches && event.target.matches("input, select, textarea");
    if (event.key === "/" && !typing && !$("tools").hidden) { event.preventDefault(); if (!$("host-page").hidden) location.hash = "hosts"; overview("hosts"); $("find").focus(); }
    if (event.key === "Escape" && !$("host-page").hidden) location.hash = "hosts";
  });
  for (const command of document.querySelectorAll(".command")) command.append(copyButton());
  markSections();
  describePlots();
  // If the overview is printed, summaries of hosts follow it: of all hosts if there are at most four, otherwise of the first 40
  // hosts that are not accepted. If the page of a host is printed, nothing follows it.
  let opened = [];
  addEventListener("beforeprint", () => {
    opened = [...document.querySelectorAll("details.rest:not([open])")];
    opened.forEach((rest) => { rest.open = true; });
    if (!$("host-page").hidden) return;
    const wanted = names.map((_, number) => number).filter((number) => size <= 4 || decisionOf[number] !== 0).slice(0, 40);
    $("host-prints").replaceChildren(el("h2", {}, size <= 4 ? "Each host" : "Hosts that did not pass"), ...wanted.map((number) => el("section", { class: "print-host" }, ...briefOf(number).filter(Boolean))));
  });
  addEventListener("afterprint", () => {
    opened.forEach((rest) => { rest.open = false; });
    $("host-prints").replaceChildren();
  });
  route();
}
start();
