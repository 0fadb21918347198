// The top: title, sentence, search, theme, export.

const SUFFIXES = { // and what each is for
  ".svg": "the picture as on screen, for documents", ".png": "the picture as on screen, for slides and chats", ".pdf": "the picture as on screen, for papers",
  ".dot": "the picture for Graphviz, which lays it out again", ".json": "the whole state: fusionlab.load opens it again", ".html": "a page to share: needs no Python, no kernel, no installation",
};

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
  const reach = () => ui.store.get("hits")?.reach ?? allHits().length; // how many can be gone to; a page has those of the list alone
  const counted = () => {
    const { query = "", total = 0 } = ui.store.get("hits") || {}, n = reach(), shown = !!query && query === input.value.trim();
    for (const e of [count, back, on]) e.hidden = !shown;
    for (const e of [back, on]) e.disabled = !n;
    const all = total.toLocaleString();
    count.textContent = at >= 0 ? `${(at + 1).toLocaleString()} of ${n < total ? `${n} (${all})` : all}` : `${all} hit${total === 1 ? "" : "s"}`;
    count.title = n < total ? `only the first ${n} of ${all} hits can be stepped through: a longer search finds fewer` : "";
  };
  const visit = (k) => {
    if (k < 0 || k >= reach()) return;
    const hit = allHits()[k];
    at = k;
    counted();
    if (hit) return ui.frame(hit.id);
    ui.store.send({ type: "hit", index: k });
    ui.reveal = true;
  };
  const stepHit = (by) => { const n = reach(); if (n && !count.hidden) visit(at < 0 ? (by > 0 ? 0 : n - 1) : (at + by + n) % n); };
  const choose = (row) => {
    if (row.dataset.fl === "more-hits") return ui.store.send({ type: "more" });
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
    const suffix = e.target.closest("[data-fl-export]")?.dataset.flExport;
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
      const possible = can.export ?? Object.keys(SUFFIXES);
      const missing = ui.fixed() ? ui.why() : "needs the extra: pip install 'fusionlab[pdf]'";
      fill(menu.lastChild, Object.entries(SUFFIXES).map(([s, use]) => button(null, [h("b", {}, s), h("span", { class: "fl-quiet" }, possible.includes(s) ? use : `${use}; ${missing}`)], null, {
        "data-fl-export": s, disabled: !possible.includes(s), title: possible.includes(s) ? use : missing,
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
          h("span", { class: "fl-mono" }, r.label), h("span", { class: "fl-quiet" }, r.where))),
        all.length < reach() && h("button", { type: "button", "data-fl": "more-hits", "data-key": "more" }, h("b", {}, "more"), h("span", { class: "fl-quiet" }, `and ${(total - all.length).toLocaleString()} more hits`)));
      found.textContent = `${total} hits`;
      if (enter && all.length) choose(rows()[0]);
      else hits.hidden = !search.contains(ui.root.getRootNode().activeElement);
      hits.dataset.flQuery = query;
      enter = false;
    },
  };
  return { el, draw, step: stepHit, focus: () => { input.focus(); input.select(); } };
}
