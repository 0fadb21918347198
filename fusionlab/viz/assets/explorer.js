// The explorer on screen. Python computes every picture and every text; this module draws them, pans, zooms, and reports
// what was clicked. It knows nothing about graphs. `mount(el, store)` draws it; `render` is what anywidget calls.
//
// A store has get(name), set(name, value), on(name, f), off(name, f), send(message), on_custom(f) -> function that stops it.
// `panels.js` (what stands beside the graph) and `reading.js` (what can be read at a scale) follow it in the same module.
//
// Strings enter the page as text. HTML enters only where Python made (and escaped) it: scene.svg, inspector.html, tabs[].html.

const PAN = 60; // pixels that Shift + an arrow key moves the picture by
const LEGIBLE = 1; // the scale below which a picture is cut off at first rather than shrunk
const SMALL = 0.7; // what is too wide for the pane is not shrunk below this at first
const HALF = 0.5; // of the pane, that a framed box fills at most
const LARGEST = 16; // px on screen of the smallest text of a framed box, at most
const HINTED = 5000; // ms that the hint of the wheel stays
const KEPT = 100; // selections to go back to
const SAME = 8; // px that a pane may grow or shrink by without another layout
const WAIT = 160; // ms without a key before a search is sent
const FEW_SITES = 12; // up to here the panel lists every site at once
const LIVE = "needs a live kernel: fusionlab.explore(fn, *args)";
const SUFFIXES = [".svg", ".png", ".pdf", ".dot", ".json", ".html"];
const STATES = { on: "applied", partial: "partly applied", off: "not applied", none: "nothing found" };
let views = 0; // tells the ids of several views in one document apart

// Elements -----------------------------------------------------------------------------------------------------------
function h(tag, attrs = {}, ...children) {
  const e = document.createElement(tag);
  for (const [name, value] of Object.entries(attrs)) {
    if (["checked", "indeterminate", "value"].includes(name) && tag !== "option") e[name] = value ?? e[name];
    else if (value === true) e.setAttribute(name, "");
    else if (value !== false && value !== null && value !== undefined) e.setAttribute(name, value);
  }
  e.append(...children.flat().filter((c) => c !== null && c !== false && c !== undefined && c !== ""));
  return e;
}

const focused = (node) => node.getRootNode().activeElement === node;

// Makes the children of `to` like those of `from` and keeps every element that has a counterpart, so that focus, scroll
// positions and what a reader has opened survive.
function morph(to, from) {
  const keyed = new Map([...to.children].filter((c) => c.dataset.key).map((c) => [c.dataset.key, c]));
  let here = to.firstChild;
  for (const next of [...from.childNodes]) {
    const key = next.dataset?.key;
    const old = key ? keyed.get(key) : here?.dataset?.key ? null : here;
    if (!old || old.nodeName !== next.nodeName) {
      to.insertBefore(next, here);
      continue;
    }
    if (old === here) here = here.nextSibling;
    else to.insertBefore(old, here);
    patch(old, next);
  }
  while (here) {
    const after = here.nextSibling;
    here.remove();
    here = after;
  }
}

function patch(old, next) {
  if (old.nodeType !== 1) {
    if (old.data !== next.data) old.data = next.data;
  } else if (old.namespaceURI !== document.documentElement.namespaceURI) {
    if (!old.isEqualNode(next)) old.replaceWith(next); // a plot
  } else {
    const kept = old.nodeName === "DETAILS" ? ["open"] : [];
    for (const { name } of [...old.attributes]) if (!next.hasAttribute(name) && !kept.includes(name)) old.removeAttribute(name);
    for (const { name, value } of next.attributes) {
      if (old.getAttribute(name) !== value && !kept.includes(name)) old.setAttribute(name, value);
    }
    morph(old, next);
    if (old.nodeName === "INPUT" && old.type === "checkbox") [old.checked, old.indeterminate] = [next.checked, next.indeterminate];
    else if (["INPUT", "SELECT", "PROGRESS"].includes(old.nodeName) && !focused(old)) old.value = next.value;
  }
}

const fill = (e, ...children) => morph(e, h("div", {}, ...children));

function fillHtml(e, html) {
  if (e.flHtml === html) return;
  e.flHtml = html;
  const template = document.createElement("template");
  template.innerHTML = html; // made and escaped by Python
  for (const link of template.content.querySelectorAll("[data-fl-pick]:not(button, a[href])")) {
    link.setAttribute("role", "button");
    link.setAttribute("tabindex", "0");
  }
  morph(e, template.content);
}

const button = (hook, label, message, attrs = {}) =>
  h("button", { type: "button", "data-fl": hook, "data-msg": message && JSON.stringify(message), ...attrs }, label);

// Header: title, sentence, search, theme, export ---------------------------------------------------------------------
function header(ui) {
  const list = `${ui.uid}-hits`;
  const input = h("input", {
    type: "search", "data-fl": "search", placeholder: "Search: op, shape, scope, file:line, site", "aria-label": "search the program",
    "aria-controls": list, "aria-keyshortcuts": "/", autocomplete: "off", spellcheck: "false",
  });
  const hits = h("div", { "data-fl": "hits", id: list, class: "fl-hits", hidden: true });
  const found = h("span", { class: "fl-sr", role: "status", "aria-live": "polite" });
  const title = h("div", { class: "fl-title" });
  const sentence = h("p", { class: "fl-sentence", "data-fl": "sentence" });
  const theme = button("theme", "", null, { class: "fl-icon" });
  const menu = h("details", { "data-fl": "export", class: "fl-menu" }, h("summary", {}, "Export"), h("div", { class: "fl-drop" }));
  const count = h("span", { class: "fl-hit-count", "data-fl": "hit-count", hidden: true });
  const step = (hook, text, name, key) => h("button", { type: "button", class: "fl-icon", "data-fl": hook, hidden: true, title: `${name} (${key})`, "aria-label": name, "aria-keyshortcuts": key }, text);
  const back = step("previous-hit", "↑", "previous hit", "N"), on = step("next-hit", "↓", "next hit", "n");
  const search = h("div", { class: "fl-search", role: "search" }, input, count, back, on, found, hits);
  const el = h("header", { class: "fl-top" }, h("div", { class: "fl-say" }, title, sentence), h("div", { class: "fl-actions" }, search, theme, menu));
  let timer = 0, asked = "", enter = false, at = -1;

  const ask = () => {
    clearTimeout(timer);
    asked = input.value.trim();
    ui.store.send({ type: "search", text: asked });
    if (ui.store.get("hits")?.query === asked) draw.hits(ui.store.get("hits")); // what is there already does not come again
  };
  const rows = () => [...hits.querySelectorAll("button")];
  const close = () => { hits.hidden = true; };
  const allHits = () => ui.store.get("hits")?.rows || [];
  const counted = () => {
    const { query = "", total = 0 } = ui.store.get("hits") || {}, n = allHits().length, shown = !!query && query === input.value.trim();
    for (const e of [count, back, on]) e.hidden = !shown;
    for (const e of [back, on]) e.disabled = !n;
    const all = total.toLocaleString();
    count.textContent = at >= 0 ? `${at + 1} of ${n < total ? `${n} (${all})` : n}` : `${all} hit${total === 1 ? "" : "s"}`;
    count.title = n < total ? `the first ${n} of ${all} hits can be walked through: a longer text finds fewer` : "";
  };
  const visit = (k) => {
    const hit = allHits()[k];
    if (!hit) return;
    at = k;
    counted();
    ui.frame(hit.id);
  };
  const stepHit = (by) => { const n = allHits().length; if (n && !count.hidden) visit(at < 0 ? (by > 0 ? 0 : n - 1) : (at + by + n) % n); };
  const choose = (row) => {
    close();
    visit(rows().indexOf(row));
  };
  const walk = (event, step) => {
    const all = rows(), at = all.indexOf(event.target);
    (at + step < 0 ? input : all[Math.min(at + step, all.length - 1)])?.focus();
  };
  ui.on(back, "click", () => stepHit(-1));
  ui.on(on, "click", () => stepHit(1));
  ui.on(input, "input", () => { clearTimeout(timer); enter = false; counted(); timer = setTimeout(ask, WAIT); });
  ui.on(input, "focus", () => { hits.hidden = !hits.hasChildNodes() || !input.value; });
  ui.on(search, "focusout", (e) => { if (!search.contains(e.relatedTarget)) close(); });
  ui.on(hits, "click", (e) => { const row = e.target.closest("button"); if (row) choose(row); });
  ui.on(search, "keydown", (e) => {
    if (e.key === "ArrowDown" || e.key === "ArrowUp") {
      e.preventDefault();
      walk(e, e.key === "ArrowDown" ? 1 : -1);
    } else if (e.key === "Enter" && e.target === input) {
      if (asked === input.value.trim() && rows()[0]) choose(rows()[0]);
      else { enter = true; ask(); }
    } else if (e.key === "Escape") {
      e.preventDefault();
      if (e.target !== input || !hits.hidden) { close(); input.focus(); close(); } else ui.graph.focus();
    }
  });
  ui.on(menu, "keydown", (e) => {
    if (e.key !== "Escape" || !menu.open) return;
    e.preventDefault();
    menu.open = false;
    menu.querySelector("summary").focus();
  });
  ui.on(menu, "focusout", (e) => { if (e.relatedTarget && !menu.contains(e.relatedTarget)) menu.open = false; });
  ui.on(menu, "click", (e) => {
    const suffix = e.target.dataset.flExport;
    if (!suffix) return;
    menu.open = false;
    ui.expecting = true;
    ui.store.send({ type: "export", suffix });
  });
  ui.on(document, "pointerdown", (e) => { if (!menu.contains(e.target)) menu.open = false; });
  ui.on(theme, "click", () => {
    const order = ["auto", "light", "dark"];
    ui.store.set("theme", order[(order.indexOf(ui.store.get("theme")) + 1) % 3]);
  });

  const draw = {
    head({ title: text = "", sentence: said = "", device = "", can = {} }) {
      fill(title, h("strong", {}, text), device && h("span", { class: "fl-chip" }, device));
      if (sentence.textContent !== said) [sentence.textContent, sentence.title] = [said, said]; // it is cut where the whole is narrow
      const possible = can.export ?? SUFFIXES;
      const missing = ui.fixed() ? LIVE : "needs the extra: pip install 'fusionlab[png]'";
      fill(menu.lastChild, SUFFIXES.map((s) => button(null, s.slice(1).toUpperCase(), null, {
        "data-fl-export": s, disabled: !possible.includes(s), title: possible.includes(s) ? `save as ${s}` : missing,
      })));
    },
    theme(name = "auto") {
      ui.root.removeAttribute("data-theme");
      if (name !== "auto") ui.root.dataset.theme = name;
      theme.textContent = { auto: "◐", light: "☀", dark: "☾" }[name];
      theme.title = `theme: ${name}`;
      theme.setAttribute("aria-label", `theme: ${name}; press to change`);
    },
    hits({ query = "", total = 0, rows: all = [] } = {}) {
      if (query !== hits.dataset.flQuery) at = -1;
      counted();
      if (!query || query !== input.value.trim()) return close();
      fill(hits, h("p", { class: "fl-quiet" }, total > all.length ? `${all.length} of ${total.toLocaleString()} hits` : `${total} hit${total === 1 ? "" : "s"}`),
        all.map((r, i) => h("button", { type: "button", "data-fl-hit": r.id, "data-key": `${i} ${r.id}` },
          h("span", { class: "fl-mono" }, r.label), h("span", { class: "fl-quiet" }, r.where))));
      found.textContent = `${total} hits`;
      if (enter && all.length) choose(rows()[0]);
      else hits.hidden = !search.contains(ui.root.getRootNode().activeElement);
      hits.dataset.flQuery = query;
      enter = false;
    },
  };
  return { el, draw, step: stepHit, focus: () => { input.focus(); input.select(); } };
}

// Passes: a check box per pass, group of identical sites, and site ----------------------------------------------------
function passes(ui) {
  const opened = new Map(); // what the reader opened or closed by hand
  const list = h("div", { class: "fl-list" });
  const foot = h("div", { class: "fl-foot" });
  const el = h("section", { class: "fl-passes", "aria-label": "passes" }, h("h3", {}, "Passes"), list, foot);
  const box = (attrs, state, label) => h("input", { type: "checkbox", ...attrs, checked: state === "on" || state === true, // a click on a partial one gives all
    indeterminate: state === "partial", disabled: state === "none" || ui.fixed(), "aria-label": label });

  const site = (s, note = s.note || (s.idle && "idle")) => h("div", { class: `fl-row fl-site${s.losing ? " fl-losing" : ""}`, "data-key": s.id },
    box({ "data-fl-toggle": s.id }, s.on, `apply ${s.label}`),
    h("button", { type: "button", class: "fl-link", "data-fl-pick": s.id, title: s.id },
      h("bdi", { dir: "ltr" }, s.losing && h("span", { role: "img", "aria-label": "measured slower:" }, "⚠ "), s.label)),
    note && h("span", { class: `fl-said ${s.losing ? "fl-warn" : "fl-quiet"}${/\d/.test(note) ? " fl-measured" : ""}`, title: note }, note));
  const group = (g, few) => {
    if (g.sites.length === 1) return site(g.sites[0]);
    const open = opened.get(g.key) ?? few;
    const id = `${ui.uid}-${g.key}`.replace(/\s/g, "_");
    const note = g.sites[0].note, once = note && g.sites.every((s) => s.note === note); // said once, not beside each
    return h("div", { class: "fl-group", "data-key": g.key },
      h("div", { class: "fl-row" },
        h("button", { type: "button", class: "fl-twist", "data-open": g.key, "aria-expanded": String(open), "aria-controls": id, "aria-label": `sites of ${g.label}` }, open ? "▾" : "▸"),
        box({ "data-fl-group": g.key }, g.state, `apply all ${g.count} identical: ${g.label}${g.names ? ` (${g.names})` : ""}`),
        h("button", { type: "button", class: "fl-link", "data-fl-pick": g.ids[0], title: g.where || g.label }, g.label),
        g.names && h("span", { class: "fl-said fl-quiet fl-names", title: g.names }, g.names),
        h("span", { class: "fl-count", title: "identical sites" }, `×${g.count}`)),
      h("div", { class: "fl-sites", id, hidden: !open }, open && once && h("p", { class: "fl-quiet fl-once", "data-key": "once" }, `each: ${note}`),
        open && g.sites.map((s) => site(s, once ? "" : undefined))));
  };
  const option = (pass, o) => {
    const attrs = { "data-fl-option": `${pass}.${o.name}`, title: o.doc, disabled: ui.fixed() };
    const choices = o.choices?.map((c) => h("option", { value: String(c), selected: c === o.value }, String(c)));
    const control = choices ? h("select", attrs, choices) : h("input", { type: "text", ...attrs, value: String(o.value ?? "") });
    return h("label", { class: "fl-option", title: o.doc, "data-key": o.name }, h("span", { class: "fl-quiet" }, o.name), control);
  };
  const pass = (p, few) => h("div", { class: `fl-pass fl-${p.state}`, "data-key": p.name, style: `--pass:${p.colour};--tint:${p.tint}` },
    h("div", { class: "fl-row" },
      box({ "data-fl-toggle": p.name }, p.state, `apply all of ${p.name}`),
      h("span", { class: `fl-swatch ${{ on: "applied", partial: "applied", off: "candidate" }[p.state] || "empty"}`, title: STATES[p.state] }),
      h("span", { class: "fl-name", title: p.formula ? `${p.name}: ${p.formula}` : p.name }, p.name),
      h("span", { class: "fl-count", title: "applied of found" }, p.sites ? `${p.applied}/${p.sites}` : "–")),
    p.sites > 0 && p.formula && h("div", { class: "fl-formula", title: p.formula }, p.formula),
    p.sites > 0 && p.options.length > 0 && h("div", { class: "fl-options" }, p.options.map((o) => option(p.name, o))),
    h("div", { class: "fl-groups" }, p.groups.map((g) => group(g, few))));
  const declined = (kinds) => {
    const n = kinds.reduce((sum, k) => sum + k.rows.length, 0);
    if (!n) return null;
    return h("details", { class: "fl-declined", "data-key": "declined" }, h("summary", {}, `Declined ${n}`),
      kinds.map((k) => h("div", { "data-key": k.code }, h("p", { class: "fl-code", title: k.doc }, h("b", {}, k.code), h("span", { class: "fl-quiet" }, ` ${k.doc}`)),
        k.rows.map((r) => h("div", { class: "fl-reason", "data-key": r.id },
          h("button", { type: "button", class: "fl-link", "data-fl-pick": r.id, title: r.id }, r.where || r.id),
          r.total > 0 && h("span", { class: "fl-near", title: "nodes that matched" }, `${r.matched}/${r.total}`),
          h("p", {}, r.text), r.edit && h("p", { class: "fl-edit" }, r.edit))))));
  };

  const redraw = () => {
    const { passes: all = [], declined: kinds = [] } = ui.store.get("panel") || {};
    const few = all.reduce((sum, p) => sum + p.sites, 0) <= FEW_SITES;
    const none = all.filter((p) => p.state === "none"), some = all.filter((p) => p.state !== "none");
    fill(list, ui.head().offline && h("p", { class: "fl-note", "data-key": "offline" }, ui.head().offline),
      some.map((p) => pass(p, few)), declined(kinds),
      none.length > 0 && h("details", { class: "fl-declined", "data-key": "none" }, h("summary", {}, `Nothing found by ${none.length} pass${none.length > 1 ? "es" : ""}`), none.map((p) => pass(p, few))));
    const act = (hook, text, message, why, title) => button(hook, text, message, { disabled: ui.fixed() || !!why, title: ui.fixed() ? LIVE : why || title });
    const count = (name) => all.reduce((sum, p) => sum + p[name], 0), sites = count("sites"), applied = count("applied");
    fill(foot, act("all-on", "All on", { type: "all", on: true }, applied === sites && (sites ? "every site is on" : "nothing was found"), "switch every site on"),
      act("all-off", "All off", { type: "all", on: false }, !applied && "no site is on", "switch every site off"),
      act("reset", "Reset", { type: "reset" }, ui.head().can?.reset === false && "all is as it was opened", "go back to what was on when it was opened"),
      act("undo", "Undo", { type: "undo" }, !ui.can("undo") && "there is no change to take back", "take back the last change"));
  };
  ui.on(el, "click", (e) => {
    const key = e.target.dataset.open;
    if (key === undefined) return;
    opened.set(key, e.target.getAttribute("aria-expanded") !== "true");
    redraw();
  });
  ui.on(el, "change", (e) => {
    const { flToggle: name, flGroup: key, flOption: asked } = e.target.dataset;
    const all = ui.store.get("panel").passes;
    if (name !== undefined) ui.store.send({ type: "toggle", name, on: e.target.checked });
    else if (key !== undefined) ui.store.send({ type: "group", ids: all.flatMap((p) => p.groups).find((g) => g.key === key).ids, on: e.target.checked });
    else if (asked !== undefined) sendOption(all, asked, e.target.value);
  });
  const sendOption = (all, asked, text) => {
    for (const p of all) for (const o of p.options) {
      if (`${p.name}.${o.name}` !== asked) continue;
      const same = o.choices?.find((c) => String(c) === text);
      const value = same ?? (typeof o.value === "number" && text.trim() !== "" && !Number.isNaN(Number(text)) ? Number(text) : text);
      ui.store.send({ type: "option", pass: p.name, name: o.name, value });
    }
  };
  return { el, draw: { panel: redraw, head: redraw, problem: redraw } }; // a change that Python refused is taken back
}

// Graph: pan, zoom, minimap; one tab stop, arrow keys walk the boxes ----------------------------------------------------
function graph(ui) {
  const canvas = h("div", { class: "fl-canvas" });
  const minimap = h("div", { class: "fl-minimap", "aria-hidden": "true", hidden: true });
  const hint = h("p", { class: "fl-hint", role: "status", hidden: true });
  const legend = h("ul", { class: "fl-legend" });
  const pane = h("div", { class: "fl-graph fl-pane", "data-fl": "graph", role: "group", "data-lm-suppress-shortcuts": "true",
    "aria-label": "graph. Arrow keys walk the boxes, Enter selects, Space opens or closes a group, Shift with arrows moves the picture, plus, minus and 0 zoom, f frames what is selected" }, canvas, minimap, hint);
  const tools = h("div", { class: "fl-tools", role: "toolbar", "aria-label": "graph" });
  const el = h("section", { class: "fl-middle", "aria-label": "graph" }, tools, pane, legend);
  const place = { x: 0, y: 0, scale: 1 };
  const places = {}; // where the reader was in the other program
  let boxes = new Map(), side = null, current = null, anchor = null, drawn = "", fitted = null, size = { width: 1, height: 1 }, read = null, readAt = 0, drag = null;

  const svg = () => canvas.querySelector("svg");
  const shape = (id) => (id ? canvas.querySelector(`[id="${CSS.escape(id)}"]`) : null);
  const items = () => ui.store.get("scene")?.items || {};
  const move = (glide = false) => {
    const picture = svg();
    if (!picture) return;
    const keep = 48; // so much of the picture always stays in sight
    place.x = Math.min(pane.clientWidth - keep, Math.max(keep - size.width * place.scale, place.x));
    place.y = Math.min(pane.clientHeight - keep, Math.max(keep - size.height * place.scale, place.y));
    canvas.classList.toggle("fl-glide", glide);
    picture.style.transform = `translate(${place.x}px, ${place.y}px) scale(${place.scale})`;
    if (readAt !== place.scale) drawReadable(read, (readAt = place.scale));
    drawMap();
  };
  const zoom = (factor, x = pane.clientWidth / 2, y = pane.clientHeight / 2, glide = false) => {
    const scale = Math.min(6, Math.max(0.05, place.scale * factor));
    place.x = x - ((x - place.x) * scale) / place.scale;
    place.y = y - ((y - place.y) * scale) / place.scale;
    place.scale = scale;
    move(glide);
  };
  const fit = (whole = true, glide = true) => {
    if (!svg() || !pane.clientWidth) return;
    const margin = read ? 0 : 16; // cards have their own
    const [across, down] = [(pane.clientWidth - margin) / size.width, (pane.clientHeight - margin) / size.height];
    place.scale = Math.min(read ? 1 : 1.25, whole ? Math.min(across, down) : Math.max(Math.min(across, down), Math.min(LEGIBLE, across), SMALL));
    const solid = [...boxes].filter(([id]) => !items()[id]?.group || items()[id].closed).map(([, b]) => b); // frames are wide and mostly empty
    const first = solid.reduce((a, b) => (b.y < a.y ? b : a), { x: 0, y: Infinity, w: 0 });
    place.x = (pane.clientWidth - size.width * place.scale) / 2;
    if (read) place.x = Math.max(0, place.x);
    else if (place.x < 8) place.x = Math.min(8, Math.max(place.x * 2 - 8, pane.clientWidth / 2 - (first.x + first.w / 2) * place.scale));
    place.y = Math.max(margin / 2, (pane.clientHeight - size.height * place.scale) / 2);
    move(glide);
    fitted = { whole, at: at() };
  };
  const at = () => `${place.x} ${place.y} ${place.scale}`;
  const measure = () => { // where the boxes are in the picture itself, in its own units
    const whole = svg()?.getBoundingClientRect();
    boxes = new Map();
    if (!whole?.width) return;
    if (!read) [read, readAt] = [readPicture(svg(), size.width), 0];
    const unit = size.width / whole.width;
    for (const id of Object.keys(items())) {
      const r = (shape(id)?.querySelector(":scope > .card-body") || shape(id))?.getBoundingClientRect();
      if (r) boxes.set(id, { x: (r.left - whole.left) * unit, y: (r.top - whole.top) * unit, w: r.width * unit, h: r.height * unit });
    }
  };
  const on = (id) => { // where a box is on screen
    const b = boxes.get(id);
    return b && { x: place.x + b.x * place.scale, y: place.y + b.y * place.scale, w: b.w * place.scale, h: b.h * place.scale };
  };
  const show = (id, glide = true, margin = 28) => { // brings a box into sight, moving as little as possible
    const b = on(id);
    if (!b) return;
    const shift = (at, length, room) => {
      if (length > room - 2 * margin) return at > margin || at + length < room - margin ? margin - at : 0;
      return at < margin ? margin - at : at + length > room - margin ? room - margin - at - length : 0;
    };
    const [dx, dy] = [shift(b.x, b.w, pane.clientWidth), shift(b.y, b.h, pane.clientHeight)];
    if (!dx && !dy) return;
    place.x += dx;
    place.y += dy;
    move(glide);
  };
  // The smallest text of a box, in the picture's units.
  const smallest = (id) => Math.min(...[...shape(id).querySelectorAll("text")].map((text) => read?.sizes.get(text) ?? sizeOf(text)));
  const frame = (id) => { // half of the pane, or less; larger where its text could not be read
    const b = boxes.get(id);
    if (!b) return fit();
    const text = smallest(id), half = Math.min((HALF * pane.clientWidth) / b.w, (HALF * pane.clientHeight) / b.h);
    place.scale = Number.isFinite(text) ? Math.max(LEAST / text, Math.min(half, LARGEST / text)) : half;
    place.x = Math.max(pane.clientWidth / 2 - (b.x + b.w / 2) * place.scale, b.w * place.scale > pane.clientWidth - 16 ? 8 - b.x * place.scale : -Infinity);
    place.y = Math.max(pane.clientHeight / 2 - (b.y + b.h / 2) * place.scale, b.h * place.scale > pane.clientHeight - 16 ? 8 - b.y * place.scale : -Infinity);
    fitted ??= {};
    move(true);
  };
  const readable = (id) => { // as it stands, and whole in the pane
    const b = boxes.get(id);
    return smallest(id) * place.scale >= LEAST && b.w * place.scale < pane.clientWidth - 16 && b.h * place.scale < pane.clientHeight - 16;
  };
  const focus = (id = current) => {
    const box = shape(id) || shape(boxes.keys().next().value);
    if (!box) return;
    shape(current)?.setAttribute("tabindex", "-1");
    current = box.id;
    box.setAttribute("tabindex", "0");
    box.focus({ preventScroll: true });
    show(current);
  };
  const neighbour = (key) => {
    const a = boxes.get(current), [dx, dy] = { ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, -1], ArrowDown: [0, 1] }[key];
    let best = null, least = Infinity;
    // A frame stands at its label, its upper left corner, or its middle would lie among the boxes inside it.
    const spot = (id, b) => (items()[id]?.group && !items()[id].closed ? [b.x + 20, b.y + 6] : [b.x + b.w / 2, b.y + b.h / 2]);
    const [ax, ay] = spot(current, a);
    for (const [id, b] of boxes) {
      const [bx, by] = spot(id, b);
      const along = (bx - ax) * dx + (by - ay) * dy, across = Math.abs((bx - ax) * dy) + Math.abs((by - ay) * dx);
      if (along > 2 && along + 2 * across < least) [best, least] = [id, along + 2 * across];
    }
    return best;
  };
  const fold = (id) => {
    if (!items()[id]?.group) return ui.store.send({ type: "select", id });
    anchor = { id, ...on(id) };
    ui.store.send({ type: "fold", id });
  };

  const label = (id, item, tab) => {
    const box = shape(id);
    if (!box) return;
    box.setAttribute("tabindex", tab ? "0" : "-1");
    box.setAttribute("role", "button");
    box.setAttribute("aria-label", item.label ?? item);
    if (item.group) box.setAttribute("aria-expanded", String(!item.closed));
  };
  const draw = (scene) => {
    const had = canvas.contains(ui.root.getRootNode().activeElement);
    const turned = side !== null && side !== ui.head().shown;
    if (turned) [places[side], anchor] = [{ ...place }, { id: null }];
    side = ui.head().shown ?? null;
    if (!anchor && marked().selected?.[0]) anchor = { id: marked().selected[0], ...on(marked().selected[0]) };
    if (drawn !== scene.svg) {
      canvas.innerHTML = drawn = scene.svg || ""; // made and escaped by Python
      const picture = svg();
      size = picture ? picture.viewBox.baseVal : size;
      if (picture) Object.assign(picture.style, { width: `${size.width}px`, height: `${size.height}px` });
      picture?.setAttribute("aria-hidden", "false");
      read = null;
    }
    const all = scene.items || {};
    if (!(current in all)) current = anchor && anchor.id in all ? anchor.id : Object.keys(all)[0];
    for (const [id, item] of Object.entries(all)) label(id, item, id === current);
    for (const title of canvas.querySelectorAll("svg > title, svg > g > title")) title.remove(); // "layout" as a tooltip everywhere
    measure();
    const opened = Object.values(all).some((i) => i.group && !i.closed); // it pushes others: the picture is no longer of the pane's size
    if (!fitted || (turned && !places[side]) || (read && !opened && fitted.at === at())) fit(!!read, false); // cards stay readable at any scale
    else if (turned) [Object.assign(place, places[side]), move()];
    else stay();
    if (had) focus();
    anchor = null;
    buildMap();
    marks();
    drawTools();
  };
  const stay = () => { // the box that was opened or closed stays where it was on screen
    if (read) return move(); // cards grow from their upper left corner
    const now = anchor?.x !== undefined && on(anchor.id);
    if (now) {
      place.x += anchor.x + Math.min(anchor.w, pane.clientWidth) / 2 - now.x - Math.min(now.w, pane.clientWidth) / 2;
      place.y += Math.max(anchor.y, 0) - now.y;
      move();
      if (now.h < pane.clientHeight) show(anchor.id, false, 0);
    } else move();
  };

  const marked = () => ui.store.get("marks") || {};
  const marks = () => {
    for (const kind of ["linked", "found", "near", "selected"]) {
      for (const e of canvas.querySelectorAll(`.fl-${kind}`)) e.classList.remove(`fl-${kind}`);
      for (const id of marked()[kind] || []) shape(id)?.classList.add(`fl-${kind}`);
    }
    for (const e of canvas.querySelectorAll("[aria-current]")) e.removeAttribute("aria-current");
    for (const id of marked().selected || []) shape(id)?.setAttribute("aria-current", "true");
    const said = { near: "nearest miss", found: "search hit", linked: "same kernel or line" };
    const kinds = read ? [] : ["candidate", "applied", "declined", "fused"].filter((k) => canvas.querySelector(`.${k}`)); // cards bring their own
    const li = (css, text) => h("li", {}, h("span", { class: `fl-swatch ${css}` }), text);
    fill(legend, kinds.map((k) => li(k, { candidate: "candidate (filled)", applied: "applied (double border)", declined: "declined (dashed, matched/total)", fused: "fused op (bold)" }[k])),
      Object.entries(said).filter(([k]) => marked()[k]?.length).map(([k, text]) => li(`fl-${k}`, text)));
  };
  const reveal = () => {
    marks();
    drawTools();
    const id = marked().selected?.[0];
    if (!boxes.has(id)) return;
    if (!canvas.contains(ui.root.getRootNode().activeElement)) {
      shape(current)?.setAttribute("tabindex", "-1");
      current = id;
      shape(id).setAttribute("tabindex", "0");
    }
    show(id);
    const near = marked().near?.find((n) => boxes.has(n)); // what one came to see of a declined site
    if (near) show(near);
    if (ui.reveal) bring(id);
    ui.reveal = false;
  };
  const bring = (id) => {
    if (!readable(id)) frame(id);
    focus(id);
  };

  // A picture of the picture: rectangles only, and the part in sight.
  const buildMap = () => {
    const scale = Math.min(150 / size.width, Math.max(110, pane.clientHeight * 0.45) / size.height);
    minimap.style.width = `${Math.max(10, size.width * scale)}px`;
    minimap.style.height = `${Math.max(10, size.height * scale)}px`;
    minimap.flScale = scale;
    const dots = [...boxes].map(([id, b]) => {
      const at = `left:${b.x * scale}px;top:${b.y * scale}px;width:${Math.max(1, b.w * scale)}px;height:${Math.max(1, b.h * scale)}px`;
      const pass = shape(id).matches(".candidate, .applied, .declined, .fused") ? " fl-hot" : "";
      return h("i", { class: items()[id]?.group && !items()[id].closed ? "fl-frame" : `fl-dot${pass}`, style: at });
    });
    minimap.replaceChildren(...dots, h("b"));
    drawMap();
  };
  const drawMap = () => {
    const [w, t] = [pane.clientWidth / place.scale, pane.clientHeight / place.scale];
    const all = [...boxes.keys()].map(on).every((b) => b.x >= -1 && b.y >= -1 && b.x + b.w <= pane.clientWidth + 1 && b.y + b.h <= pane.clientHeight + 1);
    minimap.hidden = !boxes.size || all || pane.clientWidth < 340 || (!drag?.map && !corner());
    const view = minimap.lastChild;
    if (minimap.hidden || !view) return;
    const s = minimap.flScale, clip = (v, most) => Math.min(most, Math.max(0, v));
    const [left, top] = [clip(-place.x / place.scale, size.width), clip(-place.y / place.scale, size.height)];
    const [right, bottom] = [clip(-place.x / place.scale + w, size.width), clip(-place.y / place.scale + t, size.height)];
    Object.assign(view.style, { left: `${left * s}px`, top: `${top * s}px`, width: `${(right - left) * s}px`, height: `${(bottom - top) * s}px` });
  };
  // Puts the map into a corner where it lies over no box, the lower ones first; false where there is none.
  const corner = () => {
    const [w, t] = [parseFloat(minimap.style.width), parseFloat(minimap.style.height)], far = [pane.clientWidth - w - 10, pane.clientHeight - t - 10];
    const spots = [[far[0], far[1]], [10, far[1]], [far[0], 10], [10, 10]];
    const free = ([x, y]) => [...boxes.keys()].every((id) => {
      const b = on(id), high = items()[id]?.group && !items()[id].closed ? Math.min(b.h, 24 * place.scale) : b.h; // of a frame its title
      return b.x > x + w + 4 || b.x + b.w < x - 4 || b.y > y + t + 4 || b.y + high < y - 4;
    });
    const spot = spots.find(free);
    if (spot) Object.assign(minimap.style, { left: `${spot[0]}px`, top: `${spot[1]}px` });
    return !!spot;
  };
  const jump = (event) => {
    const r = minimap.getBoundingClientRect();
    place.x = pane.clientWidth / 2 - ((event.clientX - r.left) / minimap.flScale) * place.scale;
    place.y = pane.clientHeight / 2 - ((event.clientY - r.top) / minimap.flScale) * place.scale;
    move();
  };

  const drawTools = () => {
    const { shown = "before", hulls = false } = ui.head(), id = marked().selected?.[0], item = items()[id];
    const titles = { before: "the program as written", after: ui.can("after") ? "the program with the sites fused" : ui.fixed() ? "the page holds no fused program" : `only findings are known here; ${LIVE}`,
      both: ui.can("both") ? "before and after beside each other: one row is the same work" : ui.fixed() ? LIVE : `only findings are known here; ${LIVE}` };
    const side = (name) => button(name, name, { type: "shown", value: name }, { "aria-pressed": String(shown === name), disabled: name !== "before" && !ui.can(name), title: titles[name] });
    const icon = (hook, text, name, more = {}) => button(hook, text, null, { class: "fl-icon", title: name, "aria-label": name, ...more });
    const step = (hook, text, by, name, none) => icon(hook, text, ui.past.can(by) ? name : none, { disabled: !ui.past.can(by) });
    fill(tools, step("back", "◂", -1, "what was selected before (Alt+←)", "nothing was selected before"), step("forward", "▸", 1, "what was selected after it (Alt+→)", "nothing was selected after it"),
      h("h3", {}, "Graph"), h("div", { class: "fl-switch", role: "group", "aria-label": "which program" }, side("before"), side("after"), side("both")),
      button("hulls", "XLA kernels", { type: "hulls", on: !hulls }, { "aria-pressed": String(hulls), disabled: !ui.can("xla"), title: ui.can("xla") ? "say in each box which kernel of XLA's it runs in" : LIVE }),
      h("span", { class: "fl-space" }),
      button("fold", item?.group && !item.closed ? "Close" : "Open", null, { disabled: !item?.group, title: item?.group ? "open or close the selected group (Space, or a double click)" : id ? "what is selected holds nothing to open" : "select a group to open it" }),
      icon("zoom-out", "−", "zoom out"), icon("zoom-in", "+", "zoom in"), icon("frame", "⊡", "frame what is selected (f)", { disabled: !boxes.has(id), ...(!boxes.has(id) && { title: "nothing that is selected is in the picture" }) }),
      icon("fit", "⤢", "fit the whole graph (0)"));
  };
  ui.on(tools, "click", (e) => {
    const act = { fit: () => fit(), frame: () => frame(marked().selected?.[0]), back: () => ui.past.go(-1), forward: () => ui.past.go(1), "zoom-in": () => zoom(1.25, undefined, undefined, true), "zoom-out": () => zoom(0.8, undefined, undefined, true),
      fold: () => fold(marked().selected[0]) }[e.target.dataset.fl];
    act?.();
  });

  const target = (event) => {
    const box = event.target.closest?.('[role="button"]');
    return box && canvas.contains(box) ? box.id : null;
  };
  ui.on(pane, "pointerdown", (e) => {
    if (e.button) return;
    drag = { x: e.clientX - place.x, y: e.clientY - place.y, moved: false, map: minimap.contains(e.target), id: target(e) };
    if (drag.map) jump(e);
    e.preventDefault(); // no text selection
    if (drag.id) focusQuietly(drag.id);
  });
  const focusQuietly = (id) => {
    shape(current)?.setAttribute("tabindex", "-1");
    current = id;
    shape(id).setAttribute("tabindex", "0");
    shape(id).focus({ preventScroll: true });
  };
  ui.on(pane, "focusin", (e) => { // a screen reader moves the focus by itself
    const id = target(e);
    if (!id || id === current) return;
    shape(current)?.setAttribute("tabindex", "-1");
    current = id;
    shape(id).setAttribute("tabindex", "0");
    show(id);
  });
  ui.on(pane, "pointermove", (e) => {
    if (!drag) return;
    if (drag.map) return jump(e);
    const [x, y] = [e.clientX - drag.x, e.clientY - drag.y];
    if (!drag.moved && Math.hypot(x - place.x, y - place.y) < 4) return;
    if (!drag.moved) pane.setPointerCapture(e.pointerId);
    drag.moved = true;
    [place.x, place.y] = [x, y];
    move();
  });
  ui.on(pane, "pointerup", (e) => {
    const clicked = drag && !drag.moved && !drag.map && drag.id === target(e) ? drag.id : null;
    drag = null;
    const step = clicked && e.target.closest("[data-step]"); // to another one of equal parts
    if (step) ui.store.send({ type: "step", id: clicked, by: Number(step.dataset.step) });
    else if (clicked) ui.store.send({ type: "select", id: clicked });
  });
  ui.on(pane, "pointercancel", () => { drag = null; });
  ui.on(pane, "dblclick", (e) => { if (e.target.closest("[data-step]")) return; const id = target(e); if (items()[id]?.group) fold(id); });
  ui.on(pane, "wheel", (e) => { // the wheel alone scrolls the page, whatever is under it
    if (!e.ctrlKey && !e.metaKey && !e.shiftKey) return hinted();
    const box = pane.getBoundingClientRect();
    e.preventDefault();
    zoom(Math.exp(-(e.deltaY || e.deltaX) / 200), e.clientX - box.left, e.clientY - box.top); // Shift turns a wheel sideways
  }, { passive: false });
  const hinted = () => {
    const larger = size.width * place.scale > pane.clientWidth || size.height * place.scale > pane.clientHeight;
    if (document.flHinted || !larger) return;
    document.flHinted = true; // once in a document
    hint.textContent = `${/Mac/.test(navigator.platform) ? "⌘" : "Ctrl"} + scroll zooms, drag moves`;
    hint.hidden = false;
    setTimeout(() => { hint.hidden = true; }, HINTED);
  };
  ui.on(pane, "keydown", (e) => {
    const id = target(e), shift = (x, y) => () => { place.x += x; place.y += y; move(); };
    const pans = { ArrowLeft: shift(PAN, 0), ArrowRight: shift(-PAN, 0), ArrowUp: shift(0, PAN), ArrowDown: shift(0, -PAN) };
    const all = [...boxes.keys()];
    const act = e.key in pans ? (e.shiftKey || !id ? pans[e.key] : () => { const next = neighbour(e.key); if (next) focus(next); })
      : { "+": () => zoom(1.25), "=": () => zoom(1.25), "-": () => zoom(0.8), Home: () => focus(all[0]), End: () => focus(all.at(-1)),
        Escape: () => ui.leave(), Enter: () => id && (e.shiftKey ? fold(id) : ui.store.send({ type: "select", id })), " ": () => id && fold(id) }[e.key];
    if (!act || e.ctrlKey || e.metaKey || e.altKey) return;
    e.preventDefault();
    act();
  });
  ui.on(pane, "scroll", () => { // the browser brought something into sight by itself: that is a pan
    place.x -= pane.scrollLeft;
    place.y -= pane.scrollTop;
    pane.scrollTo(0, 0);
    move();
  });
  const told = { width: 0, height: 0, timer: 0 };
  const tellSize = () => { // the picture is laid out anew for the pane it has
    const [width, height] = [pane.clientWidth, pane.clientHeight];
    if (ui.abort.signal.aborted || !width || (Math.abs(width - told.width) < SAME && Math.abs(height - told.height) < SAME)) return;
    Object.assign(told, { width, height });
    ui.store.send({ type: "pane", width, height });
  };
  const resized = new ResizeObserver(() => {
    if (!pane.clientWidth) return;
    if (!boxes.size) measure();
    buildMap();
    clearTimeout(told.timer); // a panel that is dragged changes the size at every step
    told.timer = setTimeout(tellSize, told.width ? WAIT : 0);
    if (!fitted) fit(!!read, false);
    else if (fitted.at === at()) fit(fitted.whole, false); // nobody has moved it since
    else move();
  });
  resized.observe(pane);
  ui.abort.signal.addEventListener("abort", () => (clearTimeout(told.timer), resized.disconnect()));

  return { el, pane, focus: () => focus(), fit: () => fit(), tools: drawTools, frame: () => frame(marked().selected?.[0]), draw: { scene: (s) => draw(s || {}), marks: reveal, inspector: () => { if (ui.reveal) reveal(); }, head: drawTools,
    busy: ({ running }) => { pane.classList.toggle("fl-dimmed", !!running); pane.setAttribute("aria-busy", String(!!running)); } } };
}

// Inspector ------------------------------------------------------------------------------------------------------------
function inspector(ui) {
  const title = h("h3", {}), body = h("div", { class: "fl-html" });
  const el = h("aside", { class: "fl-inspector", "data-fl": "inspector", tabindex: "0", "aria-label": "inspector", "aria-live": "polite" }, title, body);
  return { el, draw: { inspector(shown) {
    const text = shown?.title || "Inspector";
    if (title.textContent !== text) { title.textContent = text; el.scrollTop = 0; }
    ui.panels?.say("right", shown?.title || "");
    fillHtml(body, shown?.html || '<p class="quiet">Select a box: click it, or walk there with the arrow keys and press Enter. Space or a double click opens a group.</p>');
  } } };
}

// Tabs, progress and status ----------------------------------------------------------------------------------------------
function tabs(ui) {
  const list = h("div", { class: "fl-tablist", role: "tablist", "aria-label": "evidence" });
  const panels = h("div", { class: "fl-panels" });
  const status = h("span", { "data-fl": "status", role: "status", class: "fl-status" });
  const progress = h("progress", { "data-fl": "progress", hidden: true, "aria-label": "measuring" });
  const measure = button("measure", "Measure", { type: "measure" }, { class: "fl-go" }), cancel = button("cancel", "Cancel", { type: "cancel" }, { hidden: true });
  const run = h("div", { class: "fl-run" }, progress, status, measure, cancel), bar = h("div", { class: "fl-tabbar" }, list, run);
  const el = h("section", { class: "fl-evidence", "aria-label": "evidence" }, bar, panels);
  let active = null;
  const all = () => ui.store.get("tabs") || [];
  const id = (kind, name) => `${ui.uid}-${kind}-${name.replace(/\W/g, "_")}`;
  const redraw = () => {
    if (!all().some((t) => t.name === active)) active = all()[0]?.name;
    fill(list, all().map((t) => h("button", { type: "button", role: "tab", "data-fl-tab": t.name, "data-key": t.name, id: id("tab", t.name), "aria-controls": id("panel", t.name),
      "aria-selected": String(t.name === active), tabindex: t.name === active ? "0" : "-1" }, t.name)));
    const names = new Set(all().map((t) => t.name));
    for (const p of [...panels.children]) if (!names.has(p.dataset.key)) p.remove();
    for (const t of all()) {
      let p = [...panels.children].find((e) => e.dataset.key === t.name);
      if (!p) panels.append((p = h("div", { role: "tabpanel", class: "fl-html", "data-key": t.name, id: id("panel", t.name), "aria-labelledby": id("tab", t.name), tabindex: "0" })));
      p.hidden = t.name !== active;
      fillHtml(p, t.html);
    }
  };
  const choose = (name) => {
    active = name;
    redraw();
    list.querySelector('[aria-selected="true"]')?.focus();
  };
  ui.on(list, "click", (e) => { if (e.target.dataset.flTab) choose(e.target.dataset.flTab); });
  ui.on(list, "keydown", (e) => {
    const names = all().map((t) => t.name), at = names.indexOf(active), n = names.length;
    const to = { ArrowRight: (at + 1) % n, ArrowLeft: (at + n - 1) % n, Home: 0, End: n - 1 }[e.key];
    if (to === undefined) return;
    e.preventDefault();
    choose(names[to]);
  });
  return { el, bar, draw: { tabs: redraw,
    head() {
      const { counts, can = {} } = ui.head();
      const why = !can.measure ? `nothing to measure with: only a graph is known here; ${LIVE}` : counts?.applied === 0 ? "no site is on: before and after are the same program" : "";
      run.hidden = ui.fixed();
      [measure.disabled, measure.title] = [!!why, why || "measure before and after with these sites"];
    },
    busy({ running = false, what = "", done = 0, total = 0, status: said = "" }) {
      const text = running ? `${what}${total ? ` ${done}/${total}` : ""}` : said;
      if (status.textContent !== text) [status.textContent, status.title] = [text, text];
      progress.hidden = !running;
      if (total) [progress.max, progress.value] = [total, done];
      else progress.removeAttribute("value");
      if (!running && focused(cancel)) measure.focus();
      cancel.hidden = !running;
    } } };
}

// What went wrong in Python --------------------------------------------------------------------------------------------
function problem(ui) {
  const el = h("div", { class: "fl-problem", "data-fl": "problem", role: "alert", hidden: true });
  return { el, draw: { problem(p) {
    el.hidden = !p;
    fill(el, p && h("b", {}, p.code), p && h("span", {}, p.sentence), p && button("dismiss", "✕", { type: "dismiss" }, { "aria-label": "dismiss", class: "fl-icon" }));
  } } };
}

function download({ name, mime, text, base64 }) {
  const part = base64 === undefined ? text : Uint8Array.from(atob(base64), (c) => c.charCodeAt(0));
  const url = URL.createObjectURL(new Blob([part], { type: mime }));
  h("a", { href: url, download: name }).click();
  setTimeout(() => URL.revokeObjectURL(url), 10000);
}

// What was selected, to go back to it: names as Python gives them, each with the program it was selected in ----------------
function history(ui) {
  const names = [];
  let at = -1, awaited = null;
  const can = (by) => at + by >= 0 && at + by < names.length;
  const same = (a, b) => a?.name === b?.name && a?.shown === b?.shown;
  return { can,
    go(by) {
      if (!can(by)) return;
      at += by;
      const { name, shown } = (awaited = names[at]);
      if (shown !== ui.head().shown) ui.store.send({ type: "shown", value: shown });
      ui.store.send({ type: "pick", name });
    },
    draw: {
      inspector(inspected) {
        const now = { name: inspected?.name || "", shown: ui.head().shown };
        if (!now.name || (awaited && !same(now, awaited))) return ui.graph?.tools();
        if (!awaited && !same(now, names[at])) {
          names.splice(at + 1, Infinity, now);
          if (names.length > KEPT) names.shift();
          at = names.length - 1;
        }
        awaited = null;
        ui.graph?.tools();
      },
      problem(p) { if (p) awaited = null; },
    } };
}

// All of it ----------------------------------------------------------------------------------------------------------------
export function mount(el, store) {
  const abort = new AbortController();
  const root = h("div", { class: "fl fl-explorer" });
  const ui = { store, root, abort, uid: `fl-view${++views}`, expecting: false, reveal: false,
    on: (target, type, f, options = {}) => target.addEventListener(type, f, { signal: abort.signal, ...options }),
    head: () => store.get("head") || {}, can: (what) => !!ui.head().can?.[what], fixed: () => !!ui.head().offline,
    leave: () => ui.panels.focus("right") };
  // Selects what a search found, brings it into sight at a readable size and gives it the focus.
  ui.frame = (name) => {
    store.send({ type: "pick", name });
    ui.reveal = true;
  };
  ui.past = history(ui);
  const parts = [header(ui), problem(ui), passes(ui), graph(ui), inspector(ui), tabs(ui), ui.past];
  const [top, alert, side, middle, about, below] = parts;
  ui.graph = middle;
  ui.panels = panels(ui, middle.el, { left: { el: side.el, name: "passes" }, right: { el: about.el, name: "inspector" } });
  root.append(top.el, alert.el, ui.panels.el, below.el);
  el.append(root);
  ui.panels.place();
  room(ui, top.el, below.bar);

  // Traits that change together are drawn together, in this order, once.
  const names = ["theme", "head", "problem", "panel", "scene", "marks", "inspector", "tabs", "hits", "busy"];
  const waiting = new Set();
  const flush = () => {
    const now = names.filter((name) => waiting.delete(name));
    if (!abort.signal.aborted) for (const name of now) for (const part of parts) part.draw[name]?.(store.get(name) ?? undefined);
  };
  const watch = Object.fromEntries(names.map((name) => [name, () => {
    if (!waiting.size) queueMicrotask(flush);
    waiting.add(name);
  }]));
  for (const name of names) store.on(name, watch[name]);
  const quiet = store.on_custom?.((message) => {
    if (message?.type !== "download" || !ui.expecting) return; // another view of the same explorer asked for it
    ui.expecting = false;
    download(message);
  });

  for (const own of ["input", "keydown", "pointerdown"]) { // who has gone on since is not taken back to what was chosen before
    ui.on(root, own, () => { ui.reveal = false; }, { capture: true });
  }
  ui.on(root, "click", (e) => {
    const pick = e.target.closest("[data-fl-pick]"), message = e.target.closest("[data-msg]");
    if (pick) store.send({ type: "pick", name: pick.dataset.flPick });
    else if (message) store.send(JSON.parse(message.dataset.msg));
  });
  ui.on(root, "keydown", (e) => {
    const typing = e.target.closest("input:not([type=checkbox]), select, textarea");
    const pick = e.target.closest("[data-fl-pick]:not(button)");
    const steps = { ArrowLeft: -1, ArrowRight: 1 }[e.key];
    if (e.altKey && !e.ctrlKey && !e.metaKey && steps && !typing) return e.preventDefault(), e.stopPropagation(), ui.past.go(steps);
    if (e.ctrlKey || e.metaKey || e.altKey) return;
    e.stopPropagation(); // a notebook would take letters and arrows as commands of its own
    const act = !typing && { "/": top.focus, f: middle.frame, 0: middle.fit, n: () => top.step(1), N: () => top.step(-1), "[": () => ui.panels.toggle("left"), "]": () => ui.panels.toggle("right") }[e.key];
    if (act) [e.preventDefault(), act()];
    else if (pick && (e.key === "Enter" || e.key === " ")) [e.preventDefault(), pick.click()];
    else if (e.key === "Escape" && !e.defaultPrevented) root.closest(".jp-Notebook")?.focus(); // back to the notebook and its keys
  });
  for (const name of names) waiting.add(name);
  flush();
  return () => {
    abort.abort();
    for (const name of names) store.off(name, watch[name]);
    quiet?.();
    root.remove();
  };
}

function widgetStore(model) {
  return {
    get: (name) => model.get(name),
    set: (name, value) => { model.set(name, value); model.save_changes(); },
    on: (name, f) => model.on(`change:${name}`, f),
    off: (name, f) => model.off(`change:${name}`, f),
    send: (message) => model.send(message),
    on_custom: (f) => { model.on("msg:custom", f); return () => model.off("msg:custom", f); },
  };
}

export default { render: ({ model, el }) => mount(el, widgetStore(model)) };
