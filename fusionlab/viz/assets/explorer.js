// The explorer on screen. Python computes every picture and every text; this module draws them, pans, zooms, and reports
// what was clicked. It knows nothing about graphs. `mount(el, store)` draws it; `render` is what anywidget calls.
//
// A store has get(name), set(name, value), on(name, f), off(name, f), send(message), on_custom(f) -> function that stops it.
// The other files follow it in the same module: `header.js`, `passes.js`, `outline.js`, `graph.js` with `tools.js`, `trail.js`,
// `minimap.js` and `reading.js`, `panels.js`, which lays them beside each other, `copy.js`, and for where there is no kernel `record.js` and `gone.js`.
//
// Strings enter the page as text. HTML enters only where Python made (and escaped) it: scene.svg, inspector.html, tabs[].html.

const KEPT = 100; // selections to go back to
const WAIT = 160; // ms without a key before a search is sent
const LIVE = "needs a live kernel: fusionlab.explore(fn, *args)";
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
  for (const row of template.content.querySelectorAll(ALONE)) row.setAttribute("tabindex", "0"); // to be copied by keyboard
  morph(e, template.content);
}

const button = (hook, label, message, attrs = {}) =>
  h("button", { type: "button", "data-fl": hook, "data-msg": message && JSON.stringify(message), ...attrs }, label);

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

// Tabs -------------------------------------------------------------------------------------------------------------------
function tabs(ui) {
  const list = h("div", { class: "fl-tablist", role: "tablist", "aria-label": "evidence" });
  const panels = h("div", { class: "fl-panels" });
  const run = measuring(ui), bar = h("div", { class: "fl-tabbar" }, list, run.el);
  const el = h("section", { class: "fl-evidence", "aria-label": "evidence" }, bar, panels);
  let active = null;
  const all = () => ui.store.get("tabs") || [];
  const id = (kind, name) => `${ui.uid}-${kind}-${name.replace(/\W/g, "_")}`;
  const redraw = () => {
    if (!all().some((t) => t.name === active)) active = (all().find((t) => !ui.fixed() || !t.empty) || all()[0])?.name; // a record opens on what it has
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
  return { el, bar, draw: { ...run.draw, tabs() { redraw(); run.draw.tabs(); } } };
}

// What went wrong in Python --------------------------------------------------------------------------------------------
function problem(ui) {
  const el = h("div", { class: "fl-problem", "data-fl": "problem", role: "alert", hidden: true });
  return { el, draw: { problem(p) {
    el.hidden = !p;
    fill(el, p && h("b", {}, p.code), p && h("span", {}, [p.sentence, ...(p.near || []).flatMap((name, k) => [k ? ", " : " ", h("button", { type: "button", class: "fl-link", "data-fl-pick": name }, name)])]), p && button("dismiss", "✕", { type: "dismiss" }, { "aria-label": "dismiss", class: "fl-icon" }));
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
    why: () => (ui.head().gone ? ui.head().offline : LIVE), // what needs Python says this where there is none
    leave: () => ui.panels.focus("right") };
  // Selects what a search found, brings it into sight at a readable size and gives it the focus.
  ui.frame = (name) => {
    store.send({ type: "pick", name });
    ui.reveal = true;
  };
  // Selects a line of the outline or a step of the path, and brings it into sight, the whole for the program; the focus stays.
  ui.visit = (id) => {
    store.send({ type: "select", id, reveal: true });
    ui.reveal = id && "look";
    if (!id) ui.graph.fit();
  };
  // Selects nothing, whatever has the focus keeps it; whether anything was selected.
  ui.deselect = () => {
    const any = !!store.get("inspector")?.name;
    if (any) store.send({ type: "pick", name: "" });
    return any;
  };
  // A press elsewhere takes the focus along, to a cell's prompt too: a notebook leaves it to what holds it, and its keys did nothing.
  ui.on(document, "pointerdown", (e) => {
    if (root.contains(document.activeElement) && !root.contains(e.target)) document.activeElement.blur();
  }, { capture: true });
  ui.copying = copying(ui);
  ui.past = history(ui);
  const parts = [header(ui), problem(ui), passes(ui), outline(ui), graph(ui), inspector(ui), tabs(ui), gone(ui), ui.past];
  const [top, alert, list, tree, middle, about, below, left] = parts;
  const side = sidePanel(ui, { passes: { el: list.el, why: () => "" }, outline: tree });
  parts.push(side);
  ui.graph = middle;
  ui.panels = panels(ui, middle.el, { left: { el: side.el, name: "passes and outline" }, right: { el: about.el, name: "inspector" } });
  root.append(top.el, left.el, alert.el, ui.panels.el, below.el);
  el.append(root);
  ui.panels.place();
  room(ui, top.el, below.bar);

  // Traits that change together are drawn together, in this order, once.
  const names = ["theme", "head", "problem", "panel", "scene", "outline", "trail", "marks", "inspector", "tabs", "hits", "busy"];
  const waiting = new Set();
  const flush = () => {
    const now = names.filter((name) => waiting.delete(name));
    if (!abort.signal.aborted) for (const name of now) for (const part of parts) part.draw[name]?.(store.get(name) ?? undefined);
    for (const b of root.querySelectorAll(".fl-html button[data-msg]")) { // what Python's own HTML asks of Python
      const off = store.answers?.(JSON.parse(b.dataset.msg).type) === false;
      if (off !== !!b.flOff) [b.flOff, b.disabled, b.title] = [off, off, off ? ui.why() : ""];
    }
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
    const change = (e.ctrlKey || e.metaKey) && !e.altKey && !typing && { z: e.shiftKey ? "redo" : "undo", y: "redo" }[e.key.toLowerCase()];
    if (change) return e.preventDefault(), e.stopPropagation(), ui.can(change) && store.send({ type: change });
    if (e.ctrlKey || e.metaKey || e.altKey) return;
    e.stopPropagation(); // a notebook would take letters and arrows as commands of its own
    const act = !typing && { "/": top.focus, f: middle.frame, 0: middle.fit, n: () => top.step(1), N: () => top.step(-1), ",": () => middle.step(-1), ".": () => middle.step(1), "[": () => ui.panels.toggle("left"), "]": () => ui.panels.toggle("right"), c: ui.copying.key }[e.key];
    if (act) [e.preventDefault(), act()];
    else if (pick && (e.key === "Enter" || e.key === " ")) [e.preventDefault(), pick.click()];
    else if (e.key === "Escape" && !e.defaultPrevented && !ui.deselect()) root.closest(".jp-Notebook")?.focus(); // back to the notebook and its keys
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

export default { render: renderWidget };
