// The passes: a check box per pass, group of identical sites, and site.

const FEW_SITES = 12; // up to here the panel lists every site at once
const STATES = { on: "fused", partial: "partly fused", off: "can be fused", none: "nothing found" };

function passes(ui) {
  const opened = new Map(); // what the reader opened or closed by hand
  const list = h("div", { class: "fl-list" });
  const foot = h("div", { class: "fl-foot" });
  const el = h("section", { class: "fl-passes", "aria-label": "passes" }, list, foot);
  const box = (attrs, state, label) => h("input", { type: "checkbox", title: state === "none" ? "this pass has no site that can be fused here" : ui.fixed() ? ui.why() : null, ...attrs, checked: state === "on" || state === true, // a click on a partial one gives all
    indeterminate: state === "partial", disabled: state === "none" || ui.fixed(), "aria-label": label });

  const warned = (item) => item.losing && h("span", { role: "img", "aria-label": "measured slower or worse:" }, "⚠ ");
  const site = (s, note = s.note || (s.idle && "idle")) => h("div", { class: `fl-row fl-site${s.losing ? " fl-losing" : ""}`, "data-key": s.id },
    box({ "data-fl-toggle": s.id }, s.on, `apply ${s.label}`),
    h("button", { type: "button", class: "fl-link", "data-fl-pick": s.id, title: s.id },
      h("bdi", { dir: "ltr" }, warned(s), s.label)),
    note && h("span", { class: `fl-said ${s.losing ? "fl-warn" : "fl-quiet"}${/\d/.test(note) ? " fl-measured" : ""}`, title: note }, note));
  const group = (g, few) => {
    if (g.sites.length === 1) return site(g.sites[0]);
    const open = opened.get(g.key) ?? few;
    const id = `${ui.uid}-${g.key}`.replace(/\s/g, "_");
    const note = g.sites[0].note, once = note && g.sites.every((s) => s.note === note); // said once, not beside each
    return h("div", { class: "fl-group", "data-key": g.key },
      h("div", { class: `fl-row${g.losing ? " fl-losing" : ""}` },
        h("button", { type: "button", class: "fl-twist", "data-open": g.key, "aria-expanded": String(open), "aria-controls": id, "aria-label": `sites of ${g.label}` }, open ? "▾" : "▸"),
        box({ "data-fl-group": g.key }, g.state, `apply all ${g.count} identical: ${g.label}${g.names ? ` (${g.names})` : ""}`),
        h("button", { type: "button", class: "fl-link", "data-fl-pick": g.ids[0], title: g.where || g.label }, warned(g), g.label),
        g.names && h("span", { class: "fl-said fl-quiet fl-names", title: g.names }, g.names),
        h("span", { class: "fl-count", title: "identical sites" }, `×${g.count}`)),
      h("div", { class: "fl-sites", id, hidden: !open }, open && once && h("p", { class: "fl-quiet fl-once", "data-key": "once" }, `each: ${note}`),
        open && g.sites.map((s) => site(s, once ? "" : undefined))));
  };
  const option = (pass, o) => {
    const attrs = { "data-fl-option": `${pass}.${o.name}`, title: o.doc, disabled: ui.fixed() };
    const choices = o.choices?.map((c) => h("option", { value: String(c), selected: c === o.value }, c === null ? "automatic" : String(c)));
    const control = choices ? h("select", attrs, choices) : h("input", { type: "text", ...attrs, value: String(o.value ?? "") });
    return h("label", { class: "fl-option", title: o.doc, "data-key": o.name }, h("span", { class: "fl-quiet" }, o.name), control);
  };
  const declinedOf = (name) => (ui.store.get("panel")?.declined || []).flatMap((kind) => kind.rows.filter((r) => r.id.startsWith(`${name}@`)).map(() => kind.code));
  const pass = (p, few, codes = p.sites ? [] : declinedOf(p.name)) => h("div", { class: `fl-pass fl-${p.state}`, "data-key": p.name, style: `--pass:${p.colour};--tint:${p.tint}` },
    h("div", { class: "fl-row" },
      box({ "data-fl-toggle": p.name }, p.state, `apply all of ${p.name}`),
      h("span", { class: `fl-swatch ${{ on: "applied", partial: "applied", off: "candidate" }[p.state] || (codes.length ? "declined" : "empty")}`, title: codes.length ? "declined" : STATES[p.state] }),
      h("span", { class: "fl-name", title: p.formula ? `${p.name}: ${p.formula}` : p.name }, p.name.split("_").flatMap((part, k) => (k ? ["_", h("wbr"), part] : part))),
      h("span", { class: "fl-count", title: codes.length ? "none of these can be fused" : "fused, of the sites that can be" }, p.sites || codes.length ? `${p.applied}/${p.sites || codes.length}` : "–")),
    codes.length > 0 && h("div", { class: "fl-formula", "data-key": "why" }, `declined: ${[...new Set(codes)].join(", ")}`),
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
          r.total > 0 && h("span", { class: "fl-near", title: "matched nodes" }, `${r.matched}/${r.total}`),
          h("p", {}, r.text), r.edit && h("p", { class: "fl-edit" }, r.edit))))));
  };
  const lints = (found) => found.length > 0 && h("details", { class: "fl-declined", "data-key": "lints" }, h("summary", {}, `Lints ${found.length}`),
    h("p", { class: "fl-quiet" }, "no fusion, and not measured: fusionlab.advise tries each edit"),
    found.map((r) => h("div", { class: "fl-reason", "data-key": r.id },
      h("button", { type: "button", class: "fl-link", "data-fl-pick": r.pick, title: r.id }, r.where), h("p", {}, r.text), h("p", { class: "fl-edit" }, r.edit))));

  const redraw = () => {
    const { passes: all = [], declined: kinds = [], lints: found = [] } = ui.store.get("panel") || {};
    const few = all.reduce((sum, p) => sum + p.sites, 0) <= FEW_SITES;
    const none = all.filter((p) => p.state === "none" && !declinedOf(p.name).length), some = all.filter((p) => !none.includes(p));
    fill(list, ui.head().offline && h("p", { class: "fl-note", "data-key": "offline" }, ui.head().offline),
      some.map((p) => pass(p, few)), declined(kinds), lints(found),
      none.length > 0 && h("details", { class: "fl-declined", "data-key": "none" }, h("summary", {}, `Nothing found by ${none.length} pass${none.length > 1 ? "es" : ""}`), none.map((p) => pass(p, few))));
    const act = (hook, text, message, why, title) => button(hook, text, message, { disabled: ui.fixed() || !!why, title: ui.fixed() ? ui.why() : why || title });
    const count = (name) => all.reduce((sum, p) => sum + p[name], 0), sites = count("sites"), applied = count("applied");
    fill(foot, act("all-on", "All on", { type: "all", on: true }, applied === sites && (sites ? "every site is on" : "nothing was found"), "switch every site on"),
      act("all-off", "All off", { type: "all", on: false }, !applied && "no site is on", "switch every site off"),
      act("reset", "Reset", { type: "reset" }, ui.head().can?.reset === false && "nothing has changed since it was opened", "switch on the sites that were on when it was opened"),
      act("undo", "Undo", { type: "undo" }, !ui.can("undo") && "there is no change to undo", "undo the last change (Ctrl+Z)"),
      act("redo", "Redo", { type: "redo" }, !ui.can("redo") && "there is no change to redo", "redo the change that was undone (Ctrl+Shift+Z, Ctrl+Y)"));
    const at = [...foot.children].find(focused), other = { undo: "redo", redo: "undo" }[at?.dataset.fl];
    if (at?.disabled) (foot.querySelector(`[data-fl="${other}"]:not(:disabled)`) || foot.querySelector(":not(:disabled)"))?.focus(); // keys still come to the explorer
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
